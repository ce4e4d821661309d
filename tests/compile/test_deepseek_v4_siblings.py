"""Every text of the operators around DeepSeek-V4's fused insert, compiled for devices that are not there.

The last lines of a run list what was compiled: registers, shared memory, and the bytes of each kind of access.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import deepseek_v4_siblings as siblings
import pytest
import torch
from compiled import LANES, Binary, Launched, compiled, launched, module_of
from deepseek_v4 import Case as Problem
from deepseek_v4_siblings import FULL_BF16, FULL_FP8, GATHER, KV, PADDED, Case, make

from tilewright import ops, vendors
from tilewright.expr import const
from tilewright.launch import OPERATORS
from tilewright.tensor import Tensor

# Whose text a target gets: its own profile's, else one of the same lanes and capabilities.
TEXTS = {
    "sm_80": "nvidia-a100",
    "sm_89": "nvidia-h200",
    "sm_90": "nvidia-h200",
    "sm_100": "nvidia-h200",
    "sm_120": "nvidia-h200",
    "gfx90a": "hygon-bw1000",
    "gfx942": "amd-mi300x",
    "gfx950": "hygon-bw1000",
}
RECORDED = ("sm_90", "gfx942")  # in the table that ends a run
# Tilings of the profiles' rules that give each lane 16 bytes and more.
Q = {
    32: {"tokens": 1, "heads": 2, "kv_tokens": 1, "num_warps": 1},
    64: {"tokens": 8, "heads": 1, "kv_tokens": 8, "num_warps": 4},
}
ROWS = {32: {"kv_tokens": 2, "num_warps": 1}, 64: {"kv_tokens": 8, "num_warps": 4}}
SHARED = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376}  # 65536 on AMD's
ROWS_OF = ("x", "turning", "out", "tail", "codes", "cos", "sin")  # what has many lanes; the rest are single numbers


@functools.cache
def module(profile: str, operator: str, config: tuple[tuple[str, int], ...] | None) -> Any:
    source = OPERATORS[operator].source(profile, None if config is None else dict(config))
    return module_of(source, f"compiled_{profile.replace('-', '_')}_{operator}")


def launch(profile: str, case: Case, config: dict[str, int] | None) -> Launched:
    """The one launch of a call."""
    key = None if config is None else tuple(config.items())
    loaded = module(profile, case.operator, key)
    inputs = make(siblings.profile_case(case, vendors.load(profile).lowering["e4m3_format"] == "fnuz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, case.operator, getattr(loaded, case.operator))
        (only,) = launched(loaded, inputs.call)
    return only


def gather(profile: str, cache: str, config: dict[str, int]) -> Launched:
    loaded = module(profile, GATHER, tuple(config.items()))
    inputs = make(Case(PADDED, Problem(17, 1), cache, 0))
    out = torch.zeros((17, 512), dtype=torch.bfloat16)
    slots = inputs.made.slot_mapping
    call = functools.partial(getattr(loaded, GATHER), out, inputs.k_cache, slots, 64, cache == "mx")
    (only,) = launched(loaded, call)
    return only


def config_of(operator: str, lanes: int) -> dict[str, int]:
    return {**(ROWS if operator in (KV, GATHER) else Q)[lanes], "num_stages": 1}


@functools.cache
def tiles(operator: str, config: tuple[tuple[str, int], ...]) -> dict[tuple[str, str], int]:
    """Bytes of a program's tiles by device function and parameter."""
    kernel, sizes = OPERATORS[operator].kernel, dict(config)
    found = {}
    for branch in kernel.branches:
        flags = [kernel.all_flags[name] for name in branch.flags]
        given = {tile: const(sizes[tile]) for tile in branch.tiles}
        keywords = inspect.signature(branch.arrange).parameters
        for values in itertools.product(*(flag.values for flag in flags)):
            name = branch.name + "".join(flag.word(value) for flag, value in zip(flags, values, strict=True))
            chosen = {f.name: v for f, v in zip(flags, values, strict=True) if f.name in keywords}
            for parameter, tensor in branch.arrange(**given, **chosen).items():
                if isinstance(tensor, Tensor):
                    item = {"uint8": 1, "float32": 4}.get(tensor.source.dtype, 2)
                    lanes = math.prod(1 << (axis.size.value - 1).bit_length() for axis in tensor.levels[1])
                    found[name, parameter] = lanes * item
    return found


def share(operator: str, name: str, config: dict[str, int], target: str) -> int:
    """Bytes that each lane has to load or store of a tile, one element at least."""
    function, _, parameter = name.split()
    if operator == FULL_BF16 and parameter == "x":  # q in place: one pointer
        parameter = "out"
    size = tiles(operator, tuple(config.items()))[function, parameter]
    return max(4 if parameter in ("cos", "sin") else 2, size // (config["num_warps"] * LANES[target]))


def main_widths(binary: Binary) -> dict[str, list[int]]:
    """Those of whole rows and tables; a slot, a position or a scale is one number."""
    return {name: widths for name, widths in binary.widths.items() if name.split()[2:] and name.split()[2] in ROWS_OF}


def row(binary: Binary, title: str) -> str:
    """A line of the table that ends a run."""
    widths = [
        f"{branch}.{what} {kind} " + "+".join(f"{sizes.count(s)}x{s}" for s in sorted(set(sizes), reverse=True))
        for (branch, kind, what), sizes in ((name.split(), sizes) for name, sizes in main_widths(binary).items())
        if what not in ("cos", "sin")
    ]
    use = f"{binary.resources['registers']:>3} registers {binary.shared:>5} bytes shared"
    return f"{title} {binary.target:<6} {use}  {', '.join(widths)}"


FLAGS = list(itertools.product((True, False), repeat=3))  # norm, rotation, interleaved


def padded_cases(caches: Callable[[int], tuple[str, ...]]) -> Iterator[Case]:
    for number, (normed, rotated, interleaved) in enumerate(FLAGS):
        for cache in caches(number):
            yield Case(PADDED, Problem(17, 64), cache, 128, normed, rotated, interleaved)


def every_case() -> Iterator[Case]:
    """Each device function once, in a call that needs no mask for a tile that does not divide."""
    yield from padded_cases(lambda number: ("packed",) if number % 2 else ("mx",))
    yield Case(PADDED, Problem(17, 64), "packed", 0)
    for cache in ("packed", "mx", "rows", "e4m3"):
        yield Case(KV, Problem(17, 1), cache)
    for operator, cache in ((FULL_BF16, "rows"), (FULL_FP8, "e4m3")):
        for normed in (True, False):
            yield Case(operator, Problem(17, 64), cache, normed=normed)


def check(binary: Binary, operator: str, config: dict[str, int]) -> None:
    assert binary.code.startswith(b"\x7fELF")
    assert binary.resources["spilled"] == 0
    assert binary.shared <= SHARED.get(binary.target, 65536)
    widths = main_widths(binary)
    assert widths
    for name, sizes in widths.items():
        part = share(operator, name, config, binary.target)
        assert (name, sizes) == (name, [min(16, part)] * max(1, part // 16))
        if name.split()[2] in ("x", "out", "codes"):
            assert (name, set(sizes)) == (name, {16})


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_compiles(case: Case, target: str, record_property: Callable[[str, object], None]) -> None:
    config = config_of(case.operator, LANES[target])
    recorded = launch(TEXTS[target], case, config)
    assert recorded.kernel.__name__ == f"{case.operator}_kernel"
    assert recorded.keywords["enable_fp_fusion"] is True
    binary = compiled(recorded, target)
    if target in RECORDED:
        record_property("row", row(binary, f"{case!s:<70}"))
    check(binary, case.operator, config)


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("cache", ["packed", "mx"])
def test_compiles_the_way_back(cache: str, target: str, record_property: Callable[[str, object], None]) -> None:
    config = config_of(GATHER, LANES[target])
    binary = compiled(gather(TEXTS[target], cache, config), target)
    if target in RECORDED:
        record_property("row", row(binary, f"{f'{GATHER} {cache}':<70}"))
    check(binary, GATHER, config)


@pytest.mark.full
@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("case", list(padded_cases(lambda number: ("packed", "mx"))), ids=str)
def test_compiles_every_combination_of_flags(case: Case, target: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        config = config_of(PADDED, LANES[target])
        problem = Problem(17, 64, dtype=dtype)
        recorded = launch(TEXTS[target], replace(case, problem=problem), config)
        check(compiled(recorded, target), PADDED, config)


@pytest.mark.parametrize(("operator", "cache"), [(PADDED, "packed"), (FULL_BF16, "rows"), (FULL_FP8, "e4m3")])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiles_where_a_tile_does_not_divide(operator: str, cache: str, target: str) -> None:
    config = {"tokens": 1, "heads": 4, "kv_tokens": 1, "num_warps": 1, "num_stages": 1}
    recorded = launch(TEXTS[target], Case(operator, Problem(17, 3), cache, 5 if operator == PADDED else None), config)
    assert recorded.kernel.__name__ == f"{operator}_kernel_masked"
    binary = compiled(recorded, target)
    wide = {size for name, sizes in main_widths(binary).items() if name.startswith("q_head") for size in sizes}
    assert wide == {16}
    assert binary.resources["spilled"] == 0


# Where the two sides of a pair are an axis of the tile, a lane gets pairs: 4 bytes, and 2 of codes.
ADDRESSED = {
    "kv_row load x": 4,
    "kv_row store codes": 2,
    "q_head_interleaved load x": 4,
    "q_head_interleaved store out": 4,
}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_widths_where_pairs_are_addressed(target: str, record_property: Callable[[str, object], None]) -> None:
    """The generic text; recorded, not wanted."""
    for interleaved in (False, True):
        case = Case(PADDED, Problem(17, 64), padded=128, interleaved=interleaved)
        binary = compiled(launch("generic", case, None), target)
        record_property("row", row(binary, f"{'generic':<70}"))
        widths = {name: set(sizes) for name, sizes in main_widths(binary).items()}
        assert {name: widths[name] for name in ADDRESSED if name in widths} == {
            name: {size} for name, size in ADDRESSED.items() if name in widths
        }
        assert binary.resources["spilled"] == 0


def test_only_a_cast_needs_the_fp8_type() -> None:
    """The A100's text has neither cast; its codes are the same bytes."""
    for operator in (PADDED, KV, FULL_FP8, GATHER):
        assert "float8" not in OPERATORS[operator].source("nvidia-a100").split("def _name(")[0]
        assert "tl.float8e4nv" in OPERATORS[operator].source("nvidia-h200")


def test_the_reciprocal_is_a_word_of_the_device() -> None:
    assert "tl.div_rn(1.0, scale)" in OPERATORS[KV].source("nvidia-h200")
    assert "reciprocal(scale)" in OPERATORS[KV].source("generic")
    case = Case(KV, Problem(17, 1), "e4m3")
    assert "div.rn.f32" in compiled(launch("nvidia-h200", case, config_of(KV, 32)), "sm_90").text
