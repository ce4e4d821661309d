"""Which profile, rule, configuration and kernel a call uses, and what can be asked about it afterwards."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import Launched, compiled, launched
from deepseek_v4 import Case, make, run

import tilewright
from tilewright import Launch, interpret, vendors
from tilewright.errors import ContractError, GenerationError, ProfileError
from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator

NAME = operator.__name__
PARAMETERS = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "eps", "cache_block_size")
SMALL = Case(3, 2, 16)


def config(tokens: int, heads: int, kv_tokens: int, num_warps: int) -> dict[str, int]:
    sizes = {"tokens": tokens, "heads": heads, "kv_tokens": kv_tokens}
    return {**sizes, "num_warps": num_warps, "num_stages": 1}


ONE = config(1, 1, 1, 1)
WIDE = config(8, 1, 8, 4)
PAIR = config(1, 2, 1, 1)
FOUR = config(1, 4, 1, 2)

# profile, tokens, heads, and the rule and configuration that such a problem gets
CHOICES = [
    ("nvidia-h200", 1, 64, 2, PAIR),
    ("nvidia-h200", 63, 8, 2, PAIR),
    ("nvidia-h200", 64, 8, 1, FOUR),
    ("nvidia-h200", 1023, 1, 1, FOUR),
    ("nvidia-h200", 1024, 1, 0, PAIR),
    ("nvidia-h200", 4000, 1, 0, PAIR),
    ("hygon-bw1000", 1, 64, 1, ONE),
    ("hygon-bw1000", 5461, 2, 1, ONE),  # 16383 programs
    ("hygon-bw1000", 8192, 1, 0, WIDE),  # 16384
    ("hygon-bw1000", 256, 63, 0, WIDE),
    ("metax-c550", 1, 64, 1, ONE),
    ("metax-c550", 511, 3, 1, ONE),
    ("metax-c550", 512, 1, 0, WIDE),
    ("generic", 1, 64, 0, ONE),
    ("generic", 2000, 1, 0, ONE),
]


def last() -> Launch:
    launch = tilewright.last_launch()
    assert launch is not None
    return launch


def recorded(case: Case, profile: str = "generic", **options: Any) -> list[Launched]:
    """The launches of a call, none of which runs."""
    forced = options.get("config")
    module = OPERATORS[NAME].module(profile, True, forced)
    return launched(module, lambda: operator(*make(case).arguments(), profile=profile, **options))


def programs(case: Case, tiles: dict[str, int]) -> int:
    def ceil(size: int, tile: str) -> int:
        return -(-size // tiles[tile])

    return ceil(case.rows, "kv_tokens") + ceil(case.tokens, "tokens") * ceil(case.heads, "heads")


# Rules


@pytest.mark.parametrize(("profile", "tokens", "heads", "rule", "chosen"), CHOICES)
def test_rule_of_a_problem(profile: str, tokens: int, heads: int, rule: int, chosen: dict[str, int]) -> None:
    case = Case(tokens, heads)
    (launch,) = recorded(case, profile)
    assert last() == Launch(
        operator=NAME,
        profile=profile,
        rule=rule,
        config=chosen,
        kernel=f"{NAME}_kernel" + ("" if heads % chosen["heads"] == 0 else "_masked"),
        lowerings=dict(vendors.load(profile).lowering),
        compiled=False,
        flags={},
    )
    assert launch.grid == (programs(case, chosen),)
    assert launch.kernel.__name__ == last().kernel
    assert {name: launch.keywords[name] for name in ("num_warps", "num_stages", "enable_fp_fusion")} == {
        "num_warps": chosen["num_warps"],
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def test_every_rule_is_met_above() -> None:
    met = {(profile, rule, tuple(chosen.items())) for profile, _, _, rule, chosen in CHOICES}
    shipped = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
    rules = {profile: OPERATORS[NAME].kernel.rules(profile).rules for profile in shipped}
    written = {
        (profile, number, tuple((key, rule.config[key]) for key in ONE))
        for profile, listed in rules.items()
        for number, rule in enumerate(listed)
    }
    assert met == written


@pytest.mark.parametrize("profile", ["nvidia-h200", "hygon-bw1000", "metax-c550", "generic"])
def test_thresholds(profile: str) -> None:
    """0 brings every rule within reach of any problem, so the first counts; a huge one leaves the last."""
    rules = OPERATORS[NAME].kernel.rules(profile).rules
    run(operator, make(SMALL), profile=profile, thresholds=0)
    assert (last().rule, last().config) == (0, dict(rules[0].config))
    run(operator, make(SMALL), profile=profile, thresholds=1 << 60)
    assert (last().rule, last().config) == (len(rules) - 1, dict(rules[-1].config))


def test_thresholds_between() -> None:
    for tokens, rule in ((4, 2), (5, 0), (6, 0)):
        recorded(Case(tokens, 2), "nvidia-h200", thresholds=5)
        assert last().rule == rule


# Forced configurations


@pytest.mark.parametrize("profile", ["nvidia-h200", "metax-c550", "generic"])
def test_forced_config(profile: str) -> None:
    forced = config(2, 4, 1, 2)
    run(operator, make(Case(5, 4, 16)), profile=profile, config=forced)
    assert (last().profile, last().rule, last().config) == (profile, None, forced)
    assert last().kernel == f"{NAME}_kernel"
    run(operator, make(Case(5, 6, 16)), profile=profile, config=forced)
    assert (last().config, last().kernel) == (forced, f"{NAME}_kernel_masked")


def test_forced_config_of_the_rules_needs_no_module_of_its_own() -> None:
    made = OPERATORS[NAME]
    assert made.module("nvidia-h200", True, FOUR) is made.module("nvidia-h200", True)
    assert made.module("nvidia-h200", True, config(1, 8, 1, 4)) is made.module("nvidia-h200", True)
    assert made.module("nvidia-h200", True, WIDE) is not made.module("nvidia-h200", True)
    assert made.module("nvidia-h200", True, WIDE) is made.module("nvidia-h200", True, dict(WIDE))


def test_forced_config_that_is_none() -> None:
    inputs = make(SMALL)
    before = inputs.written()
    bad = {"tokens": 3, "heads": 1, "kv_tokens": 1, "num_warps": 1, "stages": 1}
    with pytest.raises(GenerationError) as caught:
        operator(*inputs.arguments(), config=bad)
    assert str(caught.value) == (
        f"{NAME}: configuration {bad}: num_stages is missing; stages is unknown; tokens = 3 is no power of two"
    )
    assert inputs.written() == before


def test_config_that_a_standalone_module_does_not_have() -> None:
    module = OPERATORS[NAME].module("metax-c550", True)
    with pytest.raises(ContractError) as caught:
        forced = {**config(3, 2, 1, 1), "lanes": 1, "num_stages": 0, "num_warps": "4"}
        getattr(module, NAME)(*make(SMALL).arguments(), config=forced)
    assert str(caught.value) == (
        f"{NAME}: config: lanes is unknown; num_stages = 0 is no whole number above 0; "
        "num_warps = '4' is no power of two; tokens = 3 is no power of two; heads = 2, this module has 1"
    )


# Programs and launches


@pytest.mark.parametrize(
    ("case", "tiling"),
    [
        (Case(7, 6, 16), (2, 4, 2, 1)),
        (Case(9, 3, 16, inserted=5), (4, 1, 8, 2)),
        (Case(5, 8, 16, inserted=0), (1, 8, 1, 1)),
        (Case(1, 1, 16), (16, 16, 16, 4)),
    ],
    ids=str,
)
def test_number_of_programs(case: Case, tiling: tuple[int, int, int, int]) -> None:
    with interpret.counting() as counts:
        operator(*make(case).arguments(), config=config(*tiling), profile="nvidia-h200")
    assert counts.programs == programs(case, config(*tiling))


def test_grid_of_one_launch_or_of_chunks() -> None:
    """Generic starts no more than 65535 programs at once; a device that takes more gets one launch."""
    case = Case(40000, 1)
    (only,) = recorded(case, "nvidia-h200", config=ONE)
    assert only.grid == (80000,)
    first, second = recorded(case, "generic")
    assert (first.grid, second.grid) == ((65535,), (14465,))
    where = first.kernel.arg_names.index("first_program")
    assert (first.arguments[where], second.arguments[where]) == (0, 65535)


def test_chunks_together_do_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above with chunks of 5 programs, run."""
    text = OPERATORS[NAME].source("generic")
    assert text.count("65535") == 2
    module = interpret.load(text.replace("65535", "5"), "small_chunks", "<small chunks>")
    with interpret.counting() as counts:
        run(getattr(module, NAME), make(Case(7, 3, 16, inserted=6)))
    assert counts.programs == 6 + 7 * 3


@pytest.mark.parametrize("slots", ["permuted", "skipped"])
def test_no_tokens_no_launch(slots: str) -> None:
    operator(*make(SMALL).arguments(), config=PAIR)
    before = last()
    with interpret.counting() as counts:
        operator(*make(Case(0, 3, 16, slots=slots)).arguments())
    assert counts.programs == 0
    assert last() == before


# Profiles


def test_cpu_tensors_get_generic_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_DEVICE", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(operator, make(SMALL))
    assert (last().profile, last().compiled) == ("generic", False)


def test_variable_names_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, profile in (("metax", "metax-c550"), ("nvidia-h200", "nvidia-h200"), ("", "generic")):
        monkeypatch.setenv("TILEWRIGHT_DEVICE", name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(operator, make(SMALL))
        assert (last().profile, last().lowerings) == (profile, dict(vendors.load(profile).lowering))


def test_argument_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_DEVICE", "metax-c550")
    run(operator, make(SMALL), profile="h200")
    assert last().profile == "nvidia-h200"
    run(operator, make(SMALL))
    assert last().profile == "metax-c550"


def test_unknown_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(SMALL)
    before = inputs.written()
    with pytest.raises(ProfileError, match="h300"):
        operator(*inputs.arguments(), profile="h300")
    monkeypatch.setenv("TILEWRIGHT_DEVICE", "h400")
    with pytest.raises(ProfileError, match="TILEWRIGHT_DEVICE: .*h400"):
        operator(*inputs.arguments())
    assert inputs.written() == before


# Asking


def test_before_any_call_there_is_no_last_launch() -> None:
    text = "import tilewright; assert tilewright.last_launch() is None"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_last_launch_outlives_a_call_that_fails() -> None:
    operator(*make(SMALL).arguments(), config=PAIR)
    before = last()
    with pytest.raises(ContractError):
        operator(*make(SMALL).arguments()[:-1], 0)
    with pytest.raises(TypeError):
        operator(*make(SMALL).arguments()[:-1])
    assert last() == before


def test_last_launch_is_a_copy() -> None:
    operator(*make(SMALL).arguments())
    last().config["heads"] = 77  # type: ignore[index]
    last().lowerings["pair"] = "none"  # type: ignore[index]
    assert last().config["heads"] == 1 and last().lowerings["pair"] == "pair_address"


# Calling


def test_arguments_by_name() -> None:
    def call(*arguments: Any) -> None:
        operator(**dict(zip(PARAMETERS, arguments, strict=True)))

    run(call, make(SMALL))

    def mixed(*arguments: Any) -> None:
        operator(*arguments[:2], **dict(zip(PARAMETERS[2:], arguments[2:], strict=True)), profile="metax")

    run(mixed, make(SMALL))
    assert last().profile == "metax-c550"


def test_signature() -> None:
    assert tuple(inspect.signature(operator).parameters) == (*PARAMETERS, "config", "thresholds", "profile")
    assert inspect.getdoc(operator) == inspect.getdoc(OPERATORS[NAME].public)


# CPU calls and compiled kernels in one process


@pytest.fixture
def no_interpreter_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.usefixtures("no_interpreter_variable")
def test_cpu_calls_between_compilations() -> None:
    """Each leaves the other alone: the CPU's results stay right to the bit, the binaries are the same."""
    made, arguments = OPERATORS[NAME], make(Case(17, 64)).arguments()
    results, binaries = [], []
    for profile, target in itertools.product(("nvidia-h200", "metax-c550"), ("sm_90", "gfx942")):
        inputs = make(SMALL)
        run(operator, inputs, profile=profile)
        assert not last().compiled
        results.append(inputs.written())
        module = made.module(profile, interpreted=False)
        assert module is not made.module(profile, interpreted=True)
        (launch,) = launched(module, lambda module=module: getattr(module, NAME)(*arguments))
        binaries.append(compiled(launch, target).code)
        assert binaries[-1].startswith(b"\x7fELF")
    assert all(result == results[0] for result in results)
    run(operator, make(SMALL), profile="nvidia-h200", repeats=1)
    (launch,) = launched(module, lambda: getattr(module, NAME)(*arguments))
    assert compiled(launch, "gfx942").code == binaries[-1]


def test_a_stock_interpreter_variable_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run(operator, make(Case(3, 2, 16, dtype=torch.float16)))
    assert not last().compiled
