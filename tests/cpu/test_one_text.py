"""One text for every tiling: what the three rooms may say, and twenty tilings of the DeepSeek operator."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from deepseek_v4 import Case, make, run

import tilewright
from tilewright import interpret, ops, vendors
from tilewright.kernel import Branch, Kernel, forced
from tilewright.launch import OPERATORS
from tilewright.module import module_text
from tilewright.rules import Rule, Rules

NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
ROOT = Path(__file__).parents[2]
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")


def texts(folder: str) -> list[Any]:
    files = sorted((ROOT / folder).glob("*.py"))
    assert len(files) > 1
    return [pytest.param(file.read_text(), id=f"{folder}/{file.name}") for file in files]


# An application chooses by flags alone


def choices(text: str) -> list[str]:
    """Each place of an application's text that chooses by something else than parameters annotated `bool`."""

    def asks_flags(test: ast.AST, flags: set[str]) -> bool:
        if isinstance(test, ast.BoolOp):
            return all(asks_flags(value, flags) for value in test.values)
        return isinstance(test, ast.Name) and test.id in flags

    found = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        flags = {a.arg for a in arguments if a.annotation and ast.unparse(a.annotation) == "bool"}
        for node in ast.walk(function):
            if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
                tests = [node.test]
            elif isinstance(node, ast.comprehension):
                tests = node.ifs
            elif isinstance(node, ast.Match | ast.BoolOp | ast.Try):
                tests = [node]
            else:
                continue
            found += [
                f"{function.name}: {ast.unparse(test).splitlines()[0]}"
                for test in tests
                if not asks_flags(test, flags)
            ]
    return found


@pytest.mark.parametrize("text", texts("applications"))
def test_no_if_tests_a_tile_or_a_size(text: str) -> None:
    assert choices(text) == []


def test_an_if_on_a_size_is_seen() -> None:
    text = """
def f(x: Tile, heads: int, rotate: bool):
    if rotate:
        x = x + 1
    if heads > 1:
        x = x * 2
    y = x if x.shape[0] == 1 else -x
    return [z for z in (x, y) if z and rotate]
"""
    assert choices(text) == ["f: heads > 1", "f: x.shape[0] == 1", "f: z and rotate", "f: z and rotate"]


# Import rules

ALWAYS = {"__future__", "typing", "collections.abc"}
ALLOWED = {
    "arrangements": {"tilewright.tensor", "tilewright.arrange", "tilewright.expr", "tilewright.arrangements"},
    "applications": {"tilewright.language", "tilewright.applications"},
}


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module or ""


def strangers(text: str, allowed: set[str]) -> list[str]:
    """Imported modules that are not among `allowed`, nor within one of them."""
    return [
        name
        for name in imported(text)
        if name not in ALWAYS and not any(name == known or name.startswith(f"{known}.") for known in allowed)
    ]


@pytest.mark.parametrize("text", texts("arrangements"))
def test_arrangements_import_the_tensor_words_alone(text: str) -> None:
    assert strangers(text, ALLOWED["arrangements"]) == []


@pytest.mark.parametrize("text", texts("applications"))
def test_applications_import_the_language_alone(text: str) -> None:
    assert strangers(text, ALLOWED["applications"]) == []


def test_a_wrong_import_is_seen() -> None:
    text = "import torch\nfrom tilewright.applications.rope import rotate\nfrom tilewright.tensor import Tensor"
    assert strangers(text, ALLOWED["arrangements"]) == ["torch", "tilewright.applications.rope"]
    assert strangers(text, ALLOWED["applications"]) == ["torch", "tilewright.tensor"]


# Words that belong to the engine, to generated text or to a device

VENDORS = {
    word
    for profile in map(vendors.load, vendors.names())
    for word in (profile.name, profile.vendor, *profile.aliases)
    if word != "generic"  # no vendor
}
TRITON = re.compile(r"\btl\.|\btriton\b|\bprogram_id\b|\bpid\b")
POINTER = re.compile(r"(?i)pointer|(^|_)ptrs?(_|$)")


def forbidden(text: str) -> list[str]:
    """Triton's words and vendors' names anywhere, comments included, and pointers among the names."""
    found = [match[0] for match in TRITON.finditer(text)]
    found += [name for name in sorted(VENDORS) if re.search(rf"(?i)(?<![\w-]){re.escape(name)}(?![\w-])", text)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and POINTER.search(token.string):
            found.append(token.string)
    return found


@pytest.mark.parametrize("text", [*texts("arrangements"), *texts("applications"), *texts("ops")])
def test_words_of_the_engine_and_of_devices_do_not_occur(text: str) -> None:
    assert forbidden(text) == []


def test_forbidden_words_are_seen() -> None:
    assert forbidden("x_ptrs = tl.load(y)  # on an H200, not on metax") == ["tl.", "h200", "metax", "x_ptrs"]
    assert forbidden("number = program_id(0)\nbase = x.data_ptr()") == ["program_id", "data_ptr"]
    assert forbidden('"""No pointer here; tell it; the generic rule; hyphen-amd-hyphen."""') == []


# Twenty tilings that no configuration file has

TILINGS = [  # tokens, heads, kv_tokens, num_warps
    (1, 1, 1, 4), (1, 1, 2, 1), (1, 2, 4, 2), (1, 4, 1, 8), (1, 8, 8, 4),
    (1, 16, 2, 4), (2, 1, 1, 2), (2, 2, 2, 1), (2, 4, 8, 4), (2, 8, 1, 4),
    (4, 1, 4, 2), (4, 2, 1, 8), (4, 4, 4, 8), (4, 8, 2, 4), (8, 1, 1, 4),
    (8, 2, 4, 8), (8, 4, 8, 8), (8, 8, 1, 16), (16, 1, 16, 8), (16, 2, 2, 16),
]  # fmt: skip
CASES = [Case(5, 4, 16, slots="skipping"), Case(9, 3, 16, inserted=7)]  # every tile divides, or does not, somewhere


def config(tiling: Sequence[int]) -> dict[str, int]:
    names = ("tokens", "heads", "kv_tokens", "num_warps", "num_stages")
    return dict(zip(names, (*tiling, 1), strict=True))


def name_of(tiling: Sequence[int]) -> str:
    return ".".join(map(str, tiling))


def kernel() -> Kernel:
    return OPERATORS[NAME].kernel


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with interpret.poison():
        yield


def test_tilings_stand_in_no_configuration_file() -> None:
    shipped = [dict(rule.config) for profile in vendors.names() for rule in kernel().rules(profile).rules]
    assert len({name_of(t) for t in TILINGS}) == 20
    assert [t for t in TILINGS if config(t) in shipped] == []


@pytest.mark.parametrize("tiling", TILINGS, ids=name_of)
def test_tiling_is_right(tiling: tuple[int, ...]) -> None:
    for case in CASES:
        run(operator, make(case), config=config(tiling))
        launch = tilewright.last_launch()
        assert launch is not None and dict(launch.config) == config(tiling)


def operator(*arguments: Any, **options: Any) -> Any:
    return getattr(ops, NAME)(*arguments, **options)


def header(text: str, field: str) -> str:
    (found,) = re.findall(rf"^# {field} +(.*)$", text, re.M)
    return found


def test_tilings_share_application_and_arrangement() -> None:
    made = [OPERATORS[NAME].source("nvidia-h200", config(tiling)) for tiling in TILINGS]
    assert len(set(made)) == len(TILINGS)
    assert {header(text, "applications") for text in made} == {kernel().application_hash()}
    for text, tiling in zip(made, TILINGS, strict=True):
        tiles = dict(part.split(" = ") for part in header(text, "tile sizes").split(", "))
        assert {name: int(size) for name, size in tiles.items()} == {k: config(tiling)[k] for k in kernel().tiles}


def test_hashes_follow_the_texts() -> None:
    """They are of the text, and of the functions it reaches."""
    kv, q = kernel().branches
    other = Kernel(NAME, kernel().arguments, (kv, Branch("q_head", q.arrange, kv.application)))
    assert other.application_hash() != kernel().application_hash()
    assert other.arrangement_hash() == kernel().arrangement_hash()
    other = Kernel(NAME, kernel().arguments, (kv, Branch("q_head", kv.arrange, q.application)))
    assert other.application_hash() == kernel().application_hash()
    assert other.arrangement_hash() != kernel().arrangement_hash()


@pytest.fixture(scope="module")
def one_module() -> dict[str, Any]:
    """Modules in which every tile size is a parameter: rules that agree in none leave none a literal."""
    rules = Rules(tuple(forced(config(t)).rules[0] for t in ((1, 1, 1, 1), (2, 2, 2, 2))), "a test")
    rules = Rules((Rule({"tokens": 100}, rules.rules[0].config, "stated", "a test"), rules.rules[1]), rules.status)
    made = {}
    for profile in SHIPPED:
        text = module_text(kernel(), OPERATORS[NAME].public, vendors.load(profile), rules)
        made[profile] = interpret.load(text, f"one_text_{profile.replace('-', '_')}", f"<one text {profile}>")
    return made


@pytest.mark.parametrize("tiling", TILINGS, ids=name_of)
def test_one_module_serves_every_tiling(tiling: tuple[int, ...], one_module: dict[str, Any]) -> None:
    """The same text, to the byte: the tiling is what the call passes."""
    profile = SHIPPED[TILINGS.index(tiling) % len(SHIPPED)]
    module = one_module[profile]
    assert module.FIXED == {}
    for case in CASES:
        run(getattr(module, NAME), make(case), config=config(tiling))
        rule, launched, name, *_ = module.last_launch
        assert (rule, launched) == (None, config(tiling))
        divides = case.heads % tiling[1] == 0
        assert name == f"{NAME}_kernel" + ("" if divides else "_masked")


def test_both_variants_and_every_profile_meet() -> None:
    met = {
        (SHIPPED[i % len(SHIPPED)], case.heads % tiling[1] == 0)
        for (i, tiling), case in itertools.product(enumerate(TILINGS), CASES)
    }
    assert met == set(itertools.product(SHIPPED, (True, False)))
