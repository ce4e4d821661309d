"""Every kernel of fused_qk_norm_rope, compiled for devices that are not there.

The last lines of a run list what was compiled: registers, shared memory, and the bytes of each kind of access.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from compiled import LANES, Binary, Launched, compiled, launched, module_of
from qk_norm_rope import FORCED, Case, Inputs, make

from tilewright import vendors
from tilewright.launch import OPERATORS
from tilewright.ops import fused_qk_norm_rope as operator

NAME = operator.__name__
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
H200_SHARED = 232448  # bytes of shared memory of a program
HEADS = {"exact": (16, 8, 8), "masked": (3, 1, 1)}  # every tile of heads divides the first, none but 1 the others
TABLE = ("cos", "sin")


@functools.cache
def module(profile: str) -> Any:
    return module_of(OPERATORS[NAME].source(profile), f"compiled_{profile.replace('-', '_')}")


def configs(profile: str) -> Iterator[dict[str, int]]:
    """The configurations of a profile's rules, each once."""
    seen = []
    for rule in OPERATORS[NAME].kernel.rules(profile).rules:
        if dict(rule.config) not in seen:
            seen.append(dict(rule.config))
            yield seen[-1]


def name_of(config: Mapping[str, int]) -> str:
    return ".".join(str(config[key]) for key in ("tokens", "heads", "num_warps"))


def launch(profile: str, inputs: Inputs, **options: Any) -> Launched:
    """The one launch of a call."""
    call = functools.partial(getattr(module(profile), NAME), *inputs.arguments(), **options)
    (only,) = launched(module(profile), call)
    return only


def main_widths(binary: Binary) -> dict[str, list[int]]:
    """Of the heads and the table, as `load x_first`; a weight is read once a program, a position is one number."""
    out = {}
    for name, sizes in binary.widths.items():
        _, kind, what = (*name.split(), "")[:3]
        if what.startswith("x") or what in TABLE:
            out[f"{kind} {what}"] = sizes
    return out


def share(name: str, case: Case, config: Mapping[str, int], target: str) -> int:
    """Bytes that each lane has to load or store of a tile, one element at least."""
    what = name.split()[1]
    tokens, heads = config["tokens"], config["heads"]
    half = case.head_dim // 2
    elements = {"x": tokens * heads * half * 2, "cos": tokens * half, "sin": tokens * half}
    size = case.cache_dtype.itemsize if what in TABLE else 2
    return max(size, elements.get(what, tokens * heads * half) * size // (config["num_warps"] * LANES[target]))


def row(binary: Binary, *titles: str) -> str:
    """A line of the table that ends a run."""
    widths = [
        f"{name} " + "+".join(f"{sizes.count(size)}x{size}" for size in sorted(set(sizes), reverse=True))
        for name, sizes in main_widths(binary).items()
        if name.split()[1] not in TABLE
    ]
    use = f"{binary.resources['registers']:>3} registers {binary.shared:>5} bytes shared"
    return f"{' '.join(titles)} {binary.target:<6} {use}  {', '.join(widths)}"


def variants() -> Iterator[Any]:
    for profile in SHIPPED:
        for config in configs(profile):
            for kernel in ("exact",) if config["heads"] == 1 else ("exact", "masked"):
                for neox in (True, False):
                    for rotary in (128, 96):
                        for target in ("sm_90", "gfx942"):
                            pairing, part = "neox" if neox else "gptj", "whole" if rotary == 128 else "part"
                            name = "-".join((profile, name_of(config), kernel, pairing, part, target))
                            yield pytest.param(profile, config, kernel, neox, rotary, target, id=name)


def check(binary: Binary, profile: str, case: Case, config: Mapping[str, int]) -> None:
    """No spills, little shared memory, and accesses of heads as wide as a lane's share lets them be, all of it.

    Those of the table are at least that wide: where it has fewer elements than lanes, several read the same.
    """
    assert binary.code.startswith(b"\x7fELF")
    assert binary.resources["spilled"] == 0
    scratch = vendors.load(profile).scratch_bytes
    assert binary.shared <= min(scratch or H200_SHARED, H200_SHARED)
    widths = main_widths(binary)
    split = vendors.load(profile).lowering["pair"] == "reshape_split_join"
    sides = ("x_first", "x_second") if case.neox else ("x",)
    names = {f"{kind} {side}" for kind in ("load", "store") for side in sides}
    assert widths.keys() == names | {"load cos", "load sin"}
    for name, sizes in widths.items():
        part = share(name, case, config, binary.target)
        if name not in names:
            assert min(sizes) >= min(16, part)
        elif case.neox or split:
            assert sizes == [min(16, part)] * max(1, part // 16)
        else:  # the two sides of a pair are an axis of the tile: a lane gets pairs, 4 bytes
            assert set(sizes) == {4}


@pytest.mark.parametrize(("profile", "config", "kernel", "neox", "rotary", "target"), list(variants()))
def test_compiles(
    profile: str, config: dict[str, int], kernel: str, neox: bool, rotary: int, target: str,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    case = Case(17, HEADS[kernel], 128, rotary, neox=neox)
    recorded = launch(profile, make(case), config=config)
    binary = compiled(recorded, target)
    titles = f"{profile:<12} {name_of(config):<7} {kernel:<6}", "neox" if neox else "gptj", f"{rotary:>3}"
    record_property("row", row(binary, *titles))
    assert recorded.kernel.__name__ == f"{NAME}_kernel" + ("_masked" if kernel == "masked" else "")
    assert recorded.keywords["enable_fp_fusion"] is True
    assert recorded.keywords["num_warps"] == config["num_warps"]
    check(binary, profile, case, config)


H200_RULES = list(configs("nvidia-h200"))


@pytest.mark.parametrize("config", H200_RULES, ids=name_of)
@pytest.mark.parametrize(
    "case",
    [
        Case(17, HEADS["exact"], 128, dtype=torch.float16, cache_dtype=torch.float16),
        Case(17, HEADS["exact"], 128, 64, cache_dtype=torch.bfloat16),
        Case(17, HEADS["exact"], 128, 64, neox=False, position_dtype=torch.int32, strided=True),
        Case(17, HEADS["exact"], 64),
        Case(17, HEADS["exact"], 256),
        Case(17, HEADS["exact"], 256, neox=False),
        Case(17, HEADS["exact"], 128, around=(64, 192)),
    ],
    ids=str,
)
def test_other_problems_are_as_wide(case: Case, config: dict[str, int]) -> None:
    check(compiled(launch("nvidia-h200", make(case), config=config), "sm_90"), "nvidia-h200", case, config)


@pytest.mark.parametrize("dim", [16, 48, 80, 96, 112, 192, 512])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_other_heads_do_not_spill(dim: int, neox: bool) -> None:
    """Sizes that no rule was measured for, at the rules' tilings."""
    for config, heads in zip(H200_RULES, itertools.cycle(HEADS.values()), strict=False):
        binary = compiled(launch("nvidia-h200", make(Case(17, heads, dim, neox=neox)), config=config), "sm_90")
        assert binary.resources["spilled"] == 0
        assert binary.shared <= H200_SHARED


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("forced", FORCED)
def test_forced_values_do_not_spill(forced: int, target: str) -> None:
    for case in (Case(17, HEADS["exact"], 128, 96), Case(17, HEADS["exact"], 256), Case(17, HEADS["masked"])):
        for profile in ("nvidia-h200", "generic"):
            options = {"forced_token_heads_per_warp": forced}
            source = OPERATORS[NAME].kernel.forces[1][forced]
            if any(source[tile] != value for tile, value in module(profile).FIXED.items()):
                continue  # a module of its own, which the rules' modules say nothing of
            binary = compiled(launch(profile, make(case), **options), target)
            assert binary.resources["spilled"] == 0


# Masks, each condition once

TOKEN, HEAD = "token < num_tokens", "head < (num_heads_k + num_heads_q)"
PAIR, LANE, TURNING = "pair < half_head", "lane < (half_head * 2)", "pair < half_rotary"


def masks(**options: Any) -> dict[str, set[str]]:
    """What the loads and stores of each parameter ask, by its name."""
    branch = OPERATORS[NAME].kernel.branch(0, vendors.load("nvidia-h200").lowering, **options)
    out: dict[str, set[str]] = {}
    for mask in branch.masks:
        assert len(set(mask.texts)) == len(mask.texts)
        known = out.setdefault(f"{mask.kind} {mask.parameter}", set(mask.texts))
        assert known == set(mask.texts)  # both sides of a pair alike
    return out


def expected(tokens: set[str], heads: set[str], lanes: set[str], turning: set[str]) -> dict[str, set[str]]:
    return {
        "load x": tokens | heads | lanes,
        "store x": tokens | heads | lanes,
        "load weight": heads | lanes,
        "load cos": tokens | turning,
        "load sin": tokens | turning,
        "index position_ids": tokens,
    }


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotation", ["whole", "partial", "uneven"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "masked"])
@pytest.mark.parametrize("bound", [{}, {"tokens": 1}], ids=["tokens", "one_token"])
def test_masks(neox: bool, rotation: str, exact: bool, bound: dict[str, int]) -> None:
    """`token < num_tokens` alone where the tile divides the q and the k heads; nothing for one token.

    A head whose half is no power of two masks its lanes too. A table shorter than a head reads 1 and 0 past its end.
    """
    found = masks(bound=bound, exact=exact, flags={"is_neox": neox, "rotation": rotation})
    lanes = {PAIR if neox else LANE} if rotation == "uneven" else set()
    tokens, heads = set() if bound else {TOKEN}, set() if exact else {HEAD}
    assert found == expected(tokens, heads, lanes, set() if rotation == "whole" else {TURNING})


@pytest.mark.parametrize("bound", [{"heads": 1}, {"heads": 1, "tokens": 1}], ids=["one_head", "one_of_each"])
def test_one_head_is_not_masked(bound: dict[str, int]) -> None:
    assert masks(bound=bound) == expected(set() if "tokens" in bound else {TOKEN}, set(), set(), set())


def test_one_weight_is_loaded_where_the_tile_divides_the_heads() -> None:
    """One pointer for the program; else both weights, and each lane takes its own."""
    kernel, lowering = OPERATORS[NAME].kernel, vendors.load("nvidia-h200").lowering
    whole, mixed = (kernel.branch(0, lowering, exact=exact).source for exact in (True, False))
    assert whole.count("tl.load(weight_") == 2 and "q_weight_first" not in whole
    assert sum(mixed.count(f"tl.load({name}_weight_") for name in "qk") == 4


# The helpers see what they are asked to find


def test_an_unaligned_row_is_seen() -> None:
    """qkv 2 bytes off, rows 6 bytes apart from a multiple of 16."""
    binary = compiled(launch("nvidia-h200", make(Case(17, HEADS["exact"], around=(1, 2))), thresholds=0), "sm_90")
    widths = main_widths(binary)
    assert {size for name, sizes in widths.items() if "x" in name for size in sizes} == {2}
    assert set(widths["load cos"]) == {16}
