"""The operators around DeepSeek-V4's fused insert, in the interpreter, and what they share of their texts."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepseek_v4_siblings as siblings
import pytest
import torch
from deepseek_v4 import UNTOUCHED
from deepseek_v4 import Case as Problem
from deepseek_v4_siblings import FULL_BF16, FULL_FP8, GATHER, GUARD, KV, PADDED, Case, Inputs, make, run

import tilewright
from tilewright import interpret, ops, vendors
from tilewright.applications import deepseek_v4 as applications
from tilewright.errors import ContractError
from tilewright.language import HELPERS
from tilewright.launch import OPERATORS
from tilewright.ops.deepseek_v4_reference import FNUZ_MAX, e4m3, quantise

IN_PLACE = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
BF16, FP16 = torch.bfloat16, torch.float16
PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic", "nvidia-a100", "amd-mi300x")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Lanes that a mask leaves undefined hold garbage, as they may on a GPU."""
    with interpret.poison():
        yield


def on(profile: str, case: Case) -> Case:
    """The case with the codes of a profile."""
    return siblings.profile_case(case, vendors.load(profile).lowering["e4m3_format"] == "fnuz")


def check(case: Case, profile: str, **options: Any) -> None:
    run(make(on(profile, case)), repeats=1, profile=profile, **options)
    launch = tilewright.last_launch()
    if case.problem.rows or case.has_q and case.problem.tokens:
        assert (launch.operator, launch.profile) == (case.operator, profile)


# The operators over their sizes, flags and caches

# tokens, heads, padded heads, block size, rows not inserted, dtype, slots, strided, flags, profile. Flags: mx rows,
# norm, rotation, interleaved. Every two values of any two columns meet, and every combination of flags is there.
GRID = [
    (0, 1, 8, 64, 0, BF16, "skipped", False, "-n-i", "generic"),
    (0, 3, 0, 16, 0, BF16, "ordered", False, "-nri", "hygon-bw1000"),
    (0, 3, 0, 16, 0, FP16, "permuted", True, "mn--", "nvidia-h200"),
    (0, 3, 0, 16, 0, BF16, "skipping", True, "mnr-", "metax-c550"),
    (0, 3, 3, 48, 0, FP16, "skipped", True, "-nr-", "amd-mi300x"),
    (0, 5, 7, 48, 0, BF16, "ordered", False, "---i", "nvidia-a100"),
    (0, 8, 8, 64, 0, FP16, "skipping", False, "m--i", "amd-mi300x"),
    (0, 8, 16, 48, 0, BF16, "permuted", True, "m---", "amd-mi300x"),
    (1, 1, 8, 48, 1, BF16, "permuted", True, "mnri", "nvidia-h200"),
    (1, 1, 8, 48, 0, BF16, "ordered", True, "mn--", "nvidia-a100"),
    (1, 3, 0, 64, 0, FP16, "skipping", True, "mnri", "amd-mi300x"),
    (1, 3, 3, 64, 1, BF16, "skipping", True, "--ri", "generic"),
    (1, 5, 7, 64, 1, FP16, "skipping", True, "m-ri", "nvidia-h200"),
    (1, 8, 8, 64, 0, FP16, "ordered", False, "-nri", "hygon-bw1000"),
    (1, 8, 16, 16, 1, FP16, "skipped", False, "m-ri", "metax-c550"),
    (4, 1, 8, 64, 1, BF16, "skipping", True, "m-r-", "hygon-bw1000"),
    (4, 3, 0, 48, 4, BF16, "skipped", False, "-n-i", "hygon-bw1000"),
    (4, 3, 3, 48, 4, FP16, "ordered", True, "m---", "hygon-bw1000"),
    (4, 5, 7, 64, 1, FP16, "ordered", False, "mnr-", "amd-mi300x"),
    (4, 8, 8, 64, 0, FP16, "permuted", True, "--r-", "metax-c550"),
    (4, 8, 8, 16, 1, FP16, "ordered", True, "mn-i", "nvidia-h200"),
    (4, 8, 16, 16, 1, BF16, "permuted", True, "-nr-", "nvidia-a100"),
    (4, 8, 16, 48, 1, FP16, "ordered", True, "--r-", "generic"),
    (9, 1, 8, 48, 5, FP16, "skipping", False, "-n-i", "amd-mi300x"),
    (9, 1, 8, 64, 1, BF16, "permuted", True, "mnr-", "metax-c550"),
    (9, 3, 0, 64, 5, FP16, "permuted", False, "-nr-", "generic"),
    (9, 3, 3, 16, 0, FP16, "skipping", True, "mn-i", "nvidia-a100"),
    (9, 5, 7, 48, 1, BF16, "ordered", True, "m--i", "metax-c550"),
    (9, 8, 8, 16, 5, FP16, "permuted", True, "m-r-", "nvidia-a100"),
    (9, 8, 16, 64, 0, BF16, "skipped", False, "---i", "nvidia-h200"),
    (9, 8, 16, 64, 0, BF16, "skipping", False, "-n-i", "hygon-bw1000"),
    (17, 1, 8, 16, 0, BF16, "ordered", True, "----", "amd-mi300x"),
    (17, 3, 0, 64, 1, BF16, "skipped", False, "m-ri", "nvidia-a100"),
    (17, 3, 3, 64, 5, FP16, "permuted", False, "m---", "nvidia-h200"),
    (17, 3, 3, 64, 5, FP16, "skipping", True, "-n-i", "metax-c550"),
    (17, 5, 7, 16, 1, FP16, "skipped", True, "-n--", "generic"),
    (17, 5, 7, 64, 0, FP16, "permuted", False, "-nr-", "hygon-bw1000"),
    (17, 8, 8, 48, 0, BF16, "skipped", False, "mn--", "generic"),
    (17, 8, 16, 48, 1, BF16, "ordered", True, "mn-i", "generic"),
]

# tokens, cache, block size, rows not inserted, dtype, slots, strided, profile. As above.
KV_GRID = [
    (0, "e4m3", 48, 0, BF16, "skipped", True, "nvidia-h200"),
    (0, "e4m3", 64, 0, BF16, "skipped", False, "nvidia-a100"),
    (1, "e4m3", 48, 1, FP16, "skipped", False, "metax-c550"),
    (1, "e4m3", 64, 0, FP16, "ordered", True, "hygon-bw1000"),
    (4, "e4m3", 48, 1, BF16, "ordered", True, "generic"),
    (4, "e4m3", 48, 4, BF16, "permuted", False, "nvidia-a100"),
    (9, "e4m3", 64, 1, BF16, "skipping", True, "hygon-bw1000"),
    (9, "e4m3", 48, 0, BF16, "ordered", True, "nvidia-h200"),
    (17, "e4m3", 16, 5, FP16, "ordered", True, "amd-mi300x"),
    (17, "e4m3", 64, 0, BF16, "permuted", False, "metax-c550"),
    (0, "mx", 16, 0, BF16, "permuted", True, "hygon-bw1000"),
    (1, "mx", 16, 1, FP16, "permuted", False, "nvidia-h200"),
    (1, "mx", 48, 1, BF16, "skipped", False, "generic"),
    (1, "mx", 16, 0, BF16, "ordered", True, "amd-mi300x"),
    (4, "mx", 64, 1, BF16, "skipped", False, "amd-mi300x"),
    (4, "mx", 64, 4, FP16, "ordered", False, "metax-c550"),
    (9, "mx", 48, 0, BF16, "ordered", True, "metax-c550"),
    (17, "mx", 48, 5, FP16, "skipping", True, "nvidia-a100"),
    (0, "packed", 48, 0, FP16, "ordered", False, "metax-c550"),
    (0, "packed", 16, 0, FP16, "skipping", True, "amd-mi300x"),
    (1, "packed", 64, 0, FP16, "ordered", True, "nvidia-a100"),
    (4, "packed", 16, 0, FP16, "skipping", False, "generic"),
    (9, "packed", 64, 5, BF16, "permuted", True, "generic"),
    (17, "packed", 48, 5, FP16, "skipped", False, "hygon-bw1000"),
    (17, "packed", 48, 1, FP16, "skipping", True, "nvidia-h200"),
    (0, "rows", 64, 0, BF16, "ordered", False, "nvidia-h200"),
    (0, "rows", 64, 0, BF16, "ordered", True, "generic"),
    (1, "rows", 16, 1, BF16, "skipping", True, "metax-c550"),
    (4, "rows", 48, 1, FP16, "ordered", True, "hygon-bw1000"),
    (4, "rows", 64, 1, BF16, "skipping", False, "nvidia-h200"),
    (9, "rows", 16, 1, BF16, "skipped", False, "nvidia-a100"),
    (9, "rows", 48, 0, FP16, "permuted", True, "amd-mi300x"),
    (17, "rows", 48, 1, FP16, "ordered", True, "generic"),
]

# tokens, heads, cache, norm, block size, rows not inserted, dtype, slots, profile. As above.
FULL_GRID = [
    (0, 3, "e4m3", True, 16, 0, BF16, "permuted", "metax-c550"),
    (1, 8, "e4m3", True, 16, 1, FP16, "skipped", "nvidia-a100"),
    (1, 17, "e4m3", True, 16, 0, BF16, "permuted", "metax-c550"),
    (1, 3, "e4m3", True, 16, 0, FP16, "skipping", "nvidia-h200"),
    (1, 17, "e4m3", True, 48, 1, BF16, "skipping", "hygon-bw1000"),
    (4, 17, "e4m3", True, 48, 0, FP16, "permuted", "nvidia-h200"),
    (4, 3, "e4m3", True, 48, 1, BF16, "skipped", "generic"),
    (4, 1, "e4m3", True, 16, 4, BF16, "skipping", "hygon-bw1000"),
    (9, 1, "e4m3", True, 16, 5, FP16, "skipping", "generic"),
    (9, 3, "e4m3", False, 48, 1, BF16, "permuted", "hygon-bw1000"),
    (17, 3, "e4m3", False, 48, 5, FP16, "skipping", "amd-mi300x"),
    (17, 17, "e4m3", False, 16, 0, BF16, "skipping", "generic"),
    (17, 17, "e4m3", False, 16, 0, BF16, "skipped", "metax-c550"),
    (17, 17, "e4m3", False, 48, 5, BF16, "permuted", "nvidia-h200"),
    (0, 3, "rows", False, 16, 0, BF16, "skipping", "nvidia-h200"),
    (0, 17, "rows", True, 48, 0, FP16, "skipped", "hygon-bw1000"),
    (0, 1, "rows", False, 48, 0, BF16, "skipped", "nvidia-h200"),
    (0, 8, "rows", True, 48, 0, FP16, "skipped", "amd-mi300x"),
    (0, 1, "rows", True, 48, 0, FP16, "permuted", "generic"),
    (0, 3, "rows", True, 16, 0, FP16, "skipped", "nvidia-a100"),
    (1, 8, "rows", False, 48, 1, BF16, "permuted", "generic"),
    (1, 1, "rows", True, 16, 0, FP16, "skipping", "amd-mi300x"),
    (4, 17, "rows", False, 16, 1, BF16, "permuted", "amd-mi300x"),
    (4, 8, "rows", True, 16, 4, FP16, "skipping", "metax-c550"),
    (4, 3, "rows", True, 48, 4, FP16, "skipping", "nvidia-a100"),
    (9, 1, "rows", False, 48, 1, BF16, "skipped", "metax-c550"),
    (9, 17, "rows", True, 48, 0, FP16, "skipping", "nvidia-a100"),
    (9, 8, "rows", False, 16, 0, FP16, "skipped", "nvidia-h200"),
    (9, 1, "rows", False, 48, 5, BF16, "permuted", "amd-mi300x"),
    (17, 8, "rows", False, 16, 0, FP16, "skipped", "hygon-bw1000"),
    (17, 1, "rows", False, 48, 0, BF16, "permuted", "nvidia-a100"),
    (17, 1, "rows", True, 16, 1, FP16, "skipping", "hygon-bw1000"),
]


def problem(
    tokens: int, heads: int, block_size: int, short: int, dtype: torch.dtype, slots: str, strided: bool = False
) -> Problem:
    inserted = tokens - short if short else None
    return Problem(tokens, heads, block_size, inserted=inserted, dtype=dtype, slots=slots, strided=strided)


def grid() -> Iterator[Any]:
    for tokens, heads, padded, block_size, short, dtype, slots, strided, flags, profile in GRID:
        case = Case(
            PADDED,
            problem(tokens, heads, block_size, short, dtype, slots, strided),
            "mx" if flags[0] == "m" else "packed",
            padded,
            normed=flags[1] == "n",
            rotated=flags[2] == "r",
            interleaved=flags[3] == "i",
        )
        yield pytest.param(case, profile, id=f"{case}-{profile}")
    for tokens, cache, block_size, short, dtype, slots, strided, profile in KV_GRID:
        case = Case(KV, problem(tokens, 1, block_size, short, dtype, slots, strided), cache)
        yield pytest.param(case, profile, id=f"{case}-{profile}")
    for tokens, heads, cache, normed, block_size, short, dtype, slots, profile in FULL_GRID:
        operator = FULL_BF16 if cache == "rows" else FULL_FP8
        case = Case(operator, problem(tokens, heads, block_size, short, dtype, slots), cache, normed=normed)
        yield pytest.param(case, profile, id=f"{case}-{profile}")


@pytest.mark.parametrize(("case", "profile"), list(grid()))
def test_grid(case: Case, profile: str) -> None:
    check(case, profile)


def test_the_grid_has_every_combination_of_flags() -> None:
    assert {row[8] for row in GRID} == {
        "".join(letter if is_set else "-" for letter, is_set in zip("mnri", bits, strict=True))
        for bits in itertools.product((True, False), repeat=4)
    }


def full_grid() -> Iterator[Any]:
    flags = itertools.product((True, False), repeat=4)
    for (mx, normed, rotated, interleaved), (heads, padded), profile in itertools.product(
        list(flags), ((1, 8), (5, 7), (8, 8), (3, 0)), PROFILES
    ):
        made = problem(9, heads, 16, 2, FP16 if mx else BF16, "skipping")
        case = Case(PADDED, made, "mx" if mx else "packed", padded, normed, rotated, interleaved)
        yield pytest.param(case, profile, id=f"{case}-{profile}")
    for (operator, cache), normed, profile in itertools.product(siblings.cases(), (True, False), PROFILES):
        case = Case(operator, problem(17, 3, 16, 2, BF16, "permuted"), cache, normed=normed)
        yield pytest.param(case, profile, id=f"{case}-{profile}")


@pytest.mark.full
@pytest.mark.parametrize(("case", "profile"), list(full_grid()))
def test_full_grid(case: Case, profile: str) -> None:
    check(case, profile)


def configurations() -> Iterator[Any]:
    """Every rule of every profile, the one for large problems too, at small sizes."""
    for operator, cache in {operator: cache for operator, cache in siblings.cases()}.items():
        for profile in PROFILES:
            for number, rule in enumerate(OPERATORS[operator].kernel.rules(profile).rules):
                yield pytest.param(operator, cache, profile, dict(rule.config), id=f"{operator}-{profile}-rule{number}")


@pytest.mark.parametrize(("operator", "cache", "profile", "forced"), list(configurations()))
def test_configuration_of_a_profile(operator: str, cache: str, profile: str, forced: dict[str, int]) -> None:
    made = Problem(5, 4, 16, inserted=4, slots="skipping")
    check(Case(operator, made, cache, padded=8 if operator == PADDED else None), profile, config=forced)
    launch = tilewright.last_launch()
    assert (launch.rule, dict(launch.config)) == (None, forced)


def test_flags_of_a_launch_can_be_asked_for() -> None:
    run(make(Case(PADDED, Problem(4, 3, 16), "mx", 8, rotated=False)))
    assert tilewright.last_launch().flags == {
        "apply_q_norm": True, "kv_mxfp8": True, "apply_q_rope": False, "is_q_interleaved": False, "has_q": True,
        "has_pads": True,
    }  # fmt: skip


# What the operators' names and arguments promise


@pytest.mark.parametrize("content", ["zeros", "not finite", "thresholds", "every value"])
@pytest.mark.parametrize(("operator", "cache"), list(siblings.cases()))
def test_contents(operator: str, cache: str, content: str) -> None:
    """Bits of lanes that do not rotate, codes of NaN and infinities, and scales at their thresholds."""
    tokens = {"thresholds": 41, "every value": 146}.get(content, 9)
    config = {"kv_tokens": 8, "num_warps": 4, "num_stages": 1}
    config |= {} if operator == KV else {"tokens": 8, "heads": 1}
    for profile in ("nvidia-h200", "amd-mi300x"):
        for dtype in (BF16, FP16):
            made = Problem(tokens, 2 if tokens < 20 else 1, 16, dtype=dtype, content=content, spread=2)
            case = Case(operator, made, cache, normed=False, scale=1.0, q_scale=1.0)
            run(make(on(profile, case)), profile=profile, config=config)


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("cache", ["mx", "e4m3"])
def test_odd_strides_of_a_cache_of_bytes(cache: str, profile: str) -> None:
    """Nothing of 2 bytes is stored in it."""
    inputs = make(Case(KV, Problem(9, 1, 16), cache))
    inputs.call(profile=profile)
    even = inputs.k_cache.view(torch.uint8)
    blocks, rows, width = even.shape
    stride = width + (cache == "e4m3")  # mx rows have no gaps
    memory = torch.full((blocks * (rows * stride + 1),), UNTOUCHED, dtype=torch.uint8)
    odd = memory.as_strided(even.shape, (rows * stride + 1, stride, 1))
    inputs.k_cache = odd.view(inputs.k_cache.dtype)
    inputs.call(profile=profile)
    assert torch.equal(odd, even)


def test_kv_alone_returns_an_empty_tensor() -> None:
    inputs = make(Case(PADDED, Problem(4, 3, 16), padded=0))
    returned = inputs.call()
    assert returned is not None and returned.shape == (0,) and returned.dtype == BF16
    siblings.check(inputs, returned)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("padded", [0, 5])
def test_q_without_heads(padded: int, interleaved: bool) -> None:
    """All that is returned are pad heads; kv rows are inserted."""
    siblings.run(make(Case(PADDED, Problem(4, 0, 16), padded=padded, interleaved=interleaved)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_pad_heads_are_positive_zeros(eps: float, interleaved: bool) -> None:
    """Computed from zeros they would be -0.0 where a cosine is negative, and NaN where eps is 0."""
    inputs = make(Case(PADDED, Problem(5, 2, 16, eps=eps), padded=5, interleaved=interleaved))
    inputs.made.cos_sin_cache.neg_()
    returned = inputs.call()
    heads = siblings.deinterleave(returned) if interleaved else returned
    assert not bool(heads[:, 2:].contiguous().view(torch.int16).any())


def test_interleaved_is_a_permutation_to_the_bit() -> None:
    made = Problem(5, 3, 16)
    plain, interleaved = (make(Case(PADDED, made, padded=8, interleaved=value)) for value in (False, True))
    assert torch.equal(siblings.deinterleave(interleaved.call()), plain.call())


def test_without_norm_an_infinity_stays_where_it_is() -> None:
    inputs = make(Case(PADDED, Problem(2, 1, 16, spread=0), padded=1, normed=False))
    inputs.q[0, 0, 8], inputs.q[1, 0, 11] = torch.inf, torch.nan
    returned = inputs.call()
    assert returned.isfinite().logical_not().nonzero().tolist() == [[0, 0, 8], [1, 0, 11]]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
def test_with_norm_an_infinity_is_a_nan_where_it_is(profile: str, interleaved: bool) -> None:
    """inf * rsqrt(inf) is NaN; the rest of its head becomes 0, its pair only where it rotates."""
    inputs = make(Case(PADDED, Problem(3, 2, 16, spread=0), padded=2, interleaved=interleaved))
    heads = siblings.deinterleave(inputs.q) if interleaved else inputs.q.clone()
    heads[0, 0, 8], heads[1, 1, 11], heads[2, 0, 451] = torch.inf, -torch.inf, torch.inf
    inputs.q = siblings.interleave(heads) if interleaved else heads
    returned = inputs.call(profile=profile)
    returned = siblings.deinterleave(returned) if interleaved else returned
    assert returned.isnan().nonzero().tolist() == [[0, 0, 8], [1, 1, 11], [2, 0, 450], [2, 0, 451]]
    assert not returned[[0, 1, 2], [0, 1, 0]].nan_to_num().any()


def test_with_norm_an_infinity_makes_no_code_of_its_neighbour() -> None:
    inputs = make(Case(FULL_FP8, Problem(2, 1, 16, spread=0), "e4m3"))
    inputs.q[0, 0, 8] = torch.inf
    inputs.call()
    codes = inputs.q_fp8.view(torch.uint8)[0, 0]
    assert (codes & 0x7F).nonzero().tolist() == [[8]] and codes[8] == 0xFE


def test_a_copy_keeps_the_bits_of_a_nan() -> None:
    inputs = make(Case(PADDED, Problem(1, 1, 16, spread=0), padded=1, normed=False, rotated=False))
    bits = torch.tensor([0x7FC0, 0x7F81, 0xFFC0 - 0x10000, 0x7F80], dtype=torch.int16)
    inputs.q.view(torch.int16)[0, 0, :4] = bits
    assert torch.equal(inputs.call().view(torch.int16)[0, 0, :4], bits)


@pytest.mark.parametrize("operator", [KV, FULL_BF16])
def test_a_cache_whose_rows_hold_its_blocks(operator: str) -> None:
    inputs, other = (make(Case(operator, Problem(3, 1, 4), "rows")) for _ in range(2))
    blocks, rows, dim = inputs.k_cache.shape
    turned = torch.full((rows, blocks, dim), 7.0, dtype=BF16)
    other.k_cache = turned.transpose(0, 1)
    filled = torch.full((blocks, rows, dim), 7.0, dtype=BF16)
    inputs.k_cache = filled
    inputs.call()
    other.call()
    assert torch.equal(other.k_cache, inputs.k_cache) and not bool((filled == 7.0).all())


def test_a_row_cache_keeps_the_bits_of_lanes_that_do_not_rotate() -> None:
    inputs = make(Case(KV, Problem(3, 1, 16, content="zeros"), "rows"))
    inputs.call()
    rows = siblings.cache_rows(inputs.case, inputs.cache_memory)
    slots = inputs.made.slot_mapping
    stored = rows[slots // 16, slots % 16].view(torch.int16)
    assert stored[:, :448].unflatten(1, (-1, 2)).unique(dim=0)[..., 0].unique().tolist() == [0]
    assert stored[:, 1:448:2].unique().tolist() == [-32768]


def test_the_reciprocal_of_the_scale_is_what_multiplies() -> None:
    """1 / 0.3 in float32, then one product: dividing by 0.3 would round otherwise."""
    for profile in ("nvidia-h200", "generic"):
        made = Problem(146, 1, 16, content="every value", dtype=FP16)
        config = {"kv_tokens": 8, "num_warps": 4, "num_stages": 1}
        run(make(Case(KV, made, "e4m3", scale=0.3)), profile=profile, config=config)


@pytest.mark.parametrize(("operator", "cache"), list(siblings.cases()))
def test_every_address_has_one_writer(operator: str, cache: str) -> None:
    """As many bytes are stored as there are to write."""
    made = Problem(9, 2, 16, inserted=7, slots="skipping")
    inputs = make(Case(operator, made, cache, padded=5 if operator == PADDED else None))
    with interpret.counting() as counts:
        inputs.call(profile="nvidia-h200")
    rows = int((inputs.made.slot_mapping >= 0).sum())
    row = {"packed": 584, "mx": 528, "rows": 1024, "e4m3": 512}[cache]
    heads = {PADDED: 5 * 1024, KV: 0, FULL_BF16: 2 * 1024, FULL_FP8: 2 * 512}[operator]
    assert counts.bytes_stored == 9 * heads + rows * row


# Faults that implementations of these operators have had


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("operator", [KV, PADDED])
def test_positions_of_skipped_rows_are_not_read(operator: str, profile: str) -> None:
    """The interpreter refuses an address outside the table."""
    made = Problem(512, 1, 64, inserted=509, max_position=4096)
    for cache in ("packed", "mx"):
        inputs = make(on(profile, Case(operator, made, cache, padded=0 if operator == PADDED else None)))
        inputs.made.slot_mapping[3] = -1
        inputs.made.position_ids[3] = 10**9
        inputs.made.position_ids[509:] = -(10**9)
        config = {"kv_tokens": 8, "num_warps": 4, "num_stages": 1}
        config |= {} if operator == KV else {"tokens": 8, "heads": 1}
        run(inputs, profile=profile, config=config)


@pytest.mark.parametrize(("operator", "cache"), list(siblings.cases()))
def test_blocks_past_2_gib_are_addressed_in_64_bits(operator: str, cache: str) -> None:
    siblings.run_far(make(Case(operator, Problem(17, 1, 16), cache)))


@pytest.mark.parametrize("rotated", [True, False])
def test_only_a_rotation_reads_the_positions_of_q(rotated: bool) -> None:
    inputs = make(Case(PADDED, Problem(4, 2, 16, slots="skipped"), padded=2, rotated=rotated))
    inputs.made.position_ids.fill_(10**9)
    if rotated:
        with pytest.raises(IndexError):
            inputs.call()
    else:
        siblings.check(inputs, inputs.call())


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operators as a process has them that starts with TILEWRIGHT_CHECK_SLOTS=1."""
    monkeypatch.setenv("TILEWRIGHT_CHECK_SLOTS", "1")
    for operator in OPERATORS.values():
        monkeypatch.setattr(operator, "_modules", {})
    yield


SLOTTED = [*((operator, cache) for operator, cache in siblings.cases()), (IN_PLACE, "packed"), (GATHER, "packed")]


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize(("operator", "cache"), SLOTTED)
def test_checked_slots(operator: str, cache: str) -> None:
    """The first slot past the cache's end is named, and nothing is written."""
    inputs = make(Case(PADDED if operator in (IN_PLACE, GATHER) else operator, Problem(7, 1, 16), cache))
    call, capacity = calling(operator, inputs), inputs.case.problem.blocks * 16
    call()
    inputs.reset()
    before = inputs.written(None)
    inputs.made.slot_mapping[3], inputs.made.slot_mapping[5] = capacity, 999
    with pytest.raises(ContractError) as error:
        call()
    assert str(error.value) == f"{operator}: slot_mapping[3] is {capacity}, the cache has {capacity} slots"
    assert inputs.written(None) == before


def calling(operator: str, inputs: Inputs) -> Callable[[], Any]:
    if operator == IN_PLACE:
        return lambda: getattr(ops, IN_PLACE)(*inputs.made.arguments())
    if operator == GATHER:
        out = torch.zeros((7, 512), dtype=BF16)
        return lambda: getattr(ops, GATHER)(out, inputs.k_cache, inputs.made.slot_mapping, 16)
    return inputs.call


def test_slots_are_not_checked_unless_asked_for() -> None:
    module = OPERATORS[KV].module("generic", interpreted=True)
    assert module.CHECK_SLOTS is False


@pytest.mark.parametrize("cache", ["packed", "mx"])
def test_fnuz_codes_are_those_of_half_the_values(cache: str) -> None:
    """e4m3fnuz is scaled to 224: the same bytes under a scale twice as large, but no code for -0.0."""
    ocp, fnuz = (make(on(p, Case(KV, Problem(9, 1, 16), cache))) for p in ("nvidia-h200", "amd-mi300x"))
    ocp.call(profile="nvidia-h200")
    fnuz.call(profile="amd-mi300x")
    assert tilewright.last_launch().lowerings["e4m3_format"] == "fnuz"
    one, other = (i.cache_memory[GUARD:-GUARD] for i in (ocp, fnuz))
    differ = one != other
    pairs = set(zip(one[differ].tolist(), other[differ].tolist(), strict=True))
    assert all(b == a + 1 or (a, b) == (0x80, 0x00) for a, b in pairs) and len(pairs) > 2


# The way back


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("cache", ["packed", "mx"])
def test_round_trip(cache: str, dtype: torch.dtype, profile: str) -> None:
    inputs = make(on(profile, Case(PADDED, Problem(17, 1, 16, dtype=dtype, slots="skipping"), cache, padded=0)))
    inputs.call(profile=profile)
    slots = inputs.made.slot_mapping
    for wanted in (slots, slots.flip(0), torch.stack((slots, slots), dim=1)[:, 0], slots[:0]):
        siblings.check_gathered(inputs, wanted, profile=profile)


@pytest.mark.parametrize("cache", ["packed", "mx"])
def test_round_trip_of_a_user(cache: str) -> None:
    """Within half a step of e4m3's 3 bits, of the group's largest value below the normal numbers."""
    inputs = make(Case(PADDED, Problem(17, 1, 16, spread=0), cache, padded=0))
    inputs.call()
    out = torch.empty((17, 512), dtype=BF16)
    ops.dequantize_and_gather_k_cache(out, inputs.k_cache, inputs.made.slot_mapping, 16, cache == "mx")
    kv = inputs.made.kv[:, :448].double()
    largest = kv.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True).repeat_interleave(32, -1).flatten(1)
    if cache == "packed":
        largest = kv.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True).repeat_interleave(64, -1).flatten(1)
    error = (out[:, :448].double() - kv).abs()
    assert bool((error <= torch.maximum(kv.abs() / 16, largest / 2**15)).all())


# Helpers, code by code


def helper(name: str) -> Callable[..., torch.Tensor]:
    """A helper of the generated text over a tensor of a power of two elements."""
    kind = "uint8" if "value" not in name else "float32"
    text = (
        "import torch\nimport triton\nimport triton.language as tl\n\n\n" + HELPERS[name] + "\n\n@triton.jit\n"
        "def kernel(x, out, size: tl.constexpr):\n    lane = tl.arange(0, size)\n"
        f"    tl.store(out + lane, {name}(tl.load(x + lane)).to(tl.{kind}))\n"
    )
    module = interpret.load(text, f"helper_{name}", f"<helper {name}>")

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=getattr(torch, kind))
        module.kernel[(1,)](x, out, size=x.numel())
        return out

    return call


DECODERS = [
    ("e4m3_value_cast", torch.float8_e4m3fn),
    ("e4m3_value_bits_to_fp16", torch.float8_e4m3fn),
    ("e4m3fnuz_value_bits_to_fp16", torch.float8_e4m3fnuz),
]


@pytest.mark.parametrize(("name", "dtype"), DECODERS, ids=[name for name, _ in DECODERS])
def test_every_code_is_decoded(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    expected, actual = codes.view(dtype).float(), helper(name)(codes)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def test_every_bfloat16_has_its_fnuz_code() -> None:
    values = torch.arange(1 << 16).to(torch.int16).view(BF16).float()
    assert torch.equal(helper("e4m3fnuz_int_rne")(values), e4m3(values.double(), fnuz=True))


def test_fnuz_codes_round_to_nearest_even() -> None:
    """The middles between codes and their neighbours, by scalar arithmetic."""
    positive = [m / 1024 if e == 0 else (8 + m) * 2.0 ** (e - 11) for e in range(16) for m in range(8)][:-1]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(positive)]
    assert positive[-1] == FNUZ_MAX
    values, codes = [], []
    for index, middle in enumerate(middles):
        around = torch.tensor([middle], dtype=torch.float32)
        values += [middle, float(torch.nextafter(around, around * 2)), float(torch.nextafter(around, around * 0))]
        codes += [index + index % 2, index + 1, index]
    assert codes == [max(i, 0) for i in codes] and bisect.bisect_left(positive, FNUZ_MAX) == 126
    values += [0.0] * (512 - len(values))
    codes += [0] * (512 - len(codes))
    both = torch.tensor(values + [-x for x in values])
    expected = codes + [code | 0x80 if code else 0 for code in codes]
    assert helper("e4m3fnuz_int_rne")(both).tolist() == expected


@pytest.mark.parametrize("off", [-2, -1, 0, 1, 2])
def test_reciprocal_mends_a_quotient_that_is_off(off: int) -> None:
    """By the ulps that a device's division may be off."""
    x = torch.rand(4096, generator=torch.Generator().manual_seed(off + 2)) * 1000 + 1e-3
    x[0], x[1], x[2] = 1.0, 0.5, 3.0
    exact = (1.0 / x.double()).float()
    quotient = (exact.view(torch.int32) + off).view(torch.float32)
    text = HELPERS["reciprocal"].replace("quotient = 1.0 / x", "quotient = tl.load(given + tl.arange(0, 4096))")
    text = text.replace("def reciprocal(x)", "def reciprocal(x, given)")
    module = interpret.load(
        "import torch\nimport triton\nimport triton.language as tl\n\n\n" + text + "\n\n@triton.jit\n"
        "def kernel(x, given, out):\n    lane = tl.arange(0, 4096)\n"
        "    tl.store(out + lane, reciprocal(tl.load(x + lane), given))\n",
        f"reciprocal_{off + 2}", f"<reciprocal {off}>",
    )  # fmt: skip
    out = torch.empty(4096)
    module.kernel[(1,)](x, quotient, out)
    assert torch.equal(out, exact)


def test_every_scale_is_decoded() -> None:
    codes = torch.arange(256).to(torch.uint8)
    expected = torch.exp2(codes.double() - 127).float()
    assert torch.equal(helper("ue8m0_value")(codes), expected)


@pytest.mark.parametrize("fnuz", [False, True])
def test_reference_of_groups_of_32(fnuz: bool) -> None:
    """The least power of two that brings the largest of a group to 448 or 224, searched for."""
    values = torch.randn((7, 64), generator=torch.Generator().manual_seed(1)).to(BF16) * 3
    values[0, :32], values[1, 40] = 0.0, 1.75
    codes, scales = quantise(values, 32, fnuz)
    most, dtype = (224, torch.float8_e4m3fnuz) if fnuz else (448, torch.float8_e4m3fn)
    for row, group in itertools.product(range(7), range(2)):
        lanes = values[row, 32 * group : 32 * group + 32].double()
        e = next(e for e in range(-40, 40) if max(float(lanes.abs().max()), 1e-4) <= most * 2.0**e)
        assert int(scales[row, group]) == e + 127
        own = codes[row, 32 * group : 32 * group + 32].view(dtype).double() * 2.0**e
        assert bool(((own - lanes).abs() <= torch.maximum(lanes.abs() / 16, torch.tensor(2.0 ** (e - 10)))).all())


# Which texts the siblings are made of

TEXTS = {
    IN_PLACE: {"kv_row": ["kv_row"], "q_head": ["q_head"]},
    PADDED: {"kv_row": ["kv_row", "kv_row_mx"], "q_head": ["q_head"], "zero_heads": ["zero_heads"]},
    KV: {"kv_row": ["kv_row", "kv_row_mx", "q_head", "head_e4m3"]},
    FULL_BF16: {"kv_row": ["q_head"], "q_head": ["q_head"]},
    FULL_FP8: {"kv_row": ["head_e4m3"], "q_head": ["head_e4m3"]},
    GATHER: {"stored_row": ["stored_row", "stored_row_mx"]},
}
NEW = {"zero_heads", "kv_row_mx", "head_e4m3", "stored_row", "stored_row_mx"}  # not of the operator in place


@pytest.mark.parametrize("operator", TEXTS)
def test_applications_of_a_sibling(operator: str) -> None:
    branches = OPERATORS[operator].kernel.branches
    assert {b.name: [a.__name__ for a in b.applications] for b in branches} == TEXTS[operator]
    for branch in branches:
        assert all(a is getattr(applications, a.__name__) for a in branch.applications)


def test_siblings_that_differ_in_placement_have_no_text_of_their_own() -> None:
    used = {name for branches in TEXTS.values() for names in branches.values() for name in names}
    assert used - {"q_head", "kv_row"} == NEW
    assert TEXTS[FULL_BF16] == {"kv_row": ["q_head"], "q_head": ["q_head"]}


def test_the_documented_table_is_this_one() -> None:
    """docs/design-notes.md names the texts of every operator, and why each new one is there."""
    text = (Path(__file__).parents[2] / "docs" / "design-notes.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    documented = {}
    for row in rows:
        if row[0].strip("`") in TEXTS:
            documented.setdefault(row[0].strip("`"), set()).update(name.strip("` ") for name in row[2].split(","))
    expected = {
        operator: {name for names in branches.values() for name in names} for operator, branches in TEXTS.items()
    }
    assert documented == expected
    reasons = {row[0].strip("`") for row in rows if len(row) == 2}
    assert NEW <= reasons


# What a call refuses, before it launches or writes anything

Arguments = dict[str, Any]
NAMES = {
    PADDED: ("q_in", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "q_head_padded", "eps",
             "cache_block_size", "apply_q_norm", "kv_mxfp8", "apply_q_rope", "is_q_interleaved"),
    KV: ("kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "cache_block_size", "fp8_scale",
         "kv_mxfp8"),
    FULL_BF16: ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "eps", "cache_block_size",
                "apply_q_norm"),
    FULL_FP8: ("q", "kv", "q_fp8", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "fp8_scale",
               "q_fp8_scale_inv", "eps", "cache_block_size", "apply_q_norm"),
    GATHER: ("out", "k_cache", "slot_mapping", "cache_block_size", "kv_mxfp8"),
}  # fmt: skip


def arguments(operator: str, cache: str) -> tuple[Inputs, Arguments]:
    """A right call: 5 tokens of 3 heads, 2 blocks of 16 rows."""
    inputs = make(Case(PADDED if operator == GATHER else operator, Problem(5, 3, 16), cache))
    made = inputs.made
    given = {name: getattr(made, name) for name in ("kv", "slot_mapping", "position_ids", "cos_sin_cache")}
    given |= {"k_cache": inputs.k_cache, "q": inputs.q, "q_in": inputs.q, "out": torch.zeros((5, 512), dtype=BF16)}
    given |= {"q_fp8": inputs.q_fp8.view(torch.float8_e4m3fn), "eps": 1e-6, "cache_block_size": 16, "q_head_padded": 3}
    given |= {"apply_q_norm": True, "apply_q_rope": True, "is_q_interleaved": False, "kv_mxfp8": cache == "mx"}
    given |= inputs.scales
    if operator == KV and cache != "e4m3":
        given["fp8_scale"] = None
    return inputs, {name: given[name] for name in NAMES[operator]}


def refused(operator: str, cache: str, changes: Arguments) -> str:
    """The first line of the message of a call that must fail and write nothing, without the operator's name."""
    inputs, given = arguments(operator, cache)
    before = inputs.written(None)
    with pytest.raises(ContractError) as error:
        getattr(ops, operator)(**{**given, **changes})
    assert inputs.written(None) == before
    name, _, text = str(error.value).partition(": ")
    assert name == operator
    problems = [line for line in text.splitlines() if not line.startswith("  ")]
    return "\n".join(problems)


def strided(width: int, stride: int) -> torch.Tensor:
    return torch.zeros(4 * stride, dtype=torch.uint8).as_strided((2, width), (stride, 1))


BAD: list[tuple[str, str, Arguments, str]] = [
    (PADDED, "packed", {"q_head_padded": 2}, "q_head_padded is 2, 0 or 3 heads of q_in to 16384 is needed"),
    (PADDED, "packed", {"q_head_padded": 3.0}, "q_head_padded is of type float, an int is needed"),
    (PADDED, "packed", {"q_head_padded": -1}, "q_head_padded is -1, 0 or 3 heads of q_in to 16384 is needed"),
    (PADDED, "packed", {"kv_mxfp8": 1}, "kv_mxfp8 is of type int, a bool is needed"),
    (PADDED, "packed", {"apply_q_norm": None}, "apply_q_norm is of type NoneType, a bool is needed"),
    (PADDED, "packed", {"slot_mapping": torch.arange(6)}, "slot_mapping has 6 slots, q_in has only 5 tokens"),
    (PADDED, "packed", {"k_cache": strided(9344, 9345)},
     "k_cache has a block stride of 9345 bytes, an even one is needed for its 2-byte lanes"),
    (PADDED, "packed", {"k_cache": strided(8448, 8448)}, "k_cache has a block stride of 8448 bytes, 16 rows need 9344"),
    (PADDED, "mx", {"k_cache": strided(8000, 8000)}, "k_cache has a block stride of 8000 bytes, 16 rows need 8448"),
    (PADDED, "packed", {"cache_block_size": 0}, "cache_block_size is 0, at least 1 is needed"),
    (KV, "packed", {"kv": torch.zeros((5, 512))}, "kv is float32, bfloat16 or float16 is needed"),
    (KV, "packed", {"cache_block_size": 8}, "k_cache has rows=16, cache_block_size is 8"),
    (KV, "packed", {"kv_mxfp8": True}, "k_cache has rows of 584 bytes, 584 apart, 528 is needed"),
    (KV, "rows", {"kv_mxfp8": True}, "kv_mxfp8 is True, k_cache is bfloat16, uint8 is needed"),
    (KV, "rows", {"k_cache": torch.zeros((2, 16, 512), dtype=FP16)},
     "k_cache is float16, kv is bfloat16: they must agree"),
    (KV, "rows", {"k_cache": torch.zeros((2, 16, 448), dtype=BF16)}, "k_cache has width=448, 512 is needed"),
    (KV, "rows", {"k_cache": torch.zeros((2, 16, 512))},
     "k_cache is float32, uint8 or bfloat16 or float16 or float8_e4m3fn is needed"),
    (KV, "e4m3", {"fp8_scale": None}, "fp8_scale is None, k_cache is float8_e4m3fn, which needs one"),
    (KV, "e4m3", {"fp8_scale": 0.5}, "fp8_scale is of type float, a tensor is needed"),
    (KV, "e4m3", {"fp8_scale": torch.ones(2)}, "fp8_scale has one=2, 1 is needed"),
    (KV, "e4m3", {"fp8_scale": torch.ones(1).double()}, "fp8_scale is float64, float32 is needed"),
    (FULL_BF16, "rows", {"k_cache": torch.zeros((2, 16, 512), dtype=FP16)},
     "k_cache is float16, q is bfloat16: they must agree"),
    (FULL_BF16, "rows", {"cache_block_size": 17}, "k_cache has rows=16, cache_block_size is 17"),
    (FULL_BF16, "rows", {"position_ids": torch.arange(4)}, "position_ids has tokens=4, q has 5"),
    (FULL_FP8, "e4m3", {"q_fp8": torch.zeros((5, 3, 512), dtype=torch.uint8)},
     "q_fp8 is uint8, float8_e4m3fn is needed"),
    (FULL_FP8, "e4m3", {"q_fp8": torch.zeros((5, 4, 512)).to(torch.float8_e4m3fn)}, "q_fp8 has heads=4, q has 3"),
    *(
        (operator, "rows", {"k_cache": torch.zeros(20000, dtype=BF16).as_strided((2, 16, 512), strides)}, message)
        for operator in (KV, FULL_BF16)
        for strides, message in (
            ((8192, 256, 1), "k_cache has rows of 512 elements 256 apart: they overlap"),
            ((0, 512, 1), "k_cache has blocks of 8192 elements 0 apart: they overlap"),
        )
    ),
    (FULL_FP8, "e4m3", {"fp8_scale": torch.ones(())}, "fp8_scale has rank 0, 1 is needed: [one]"),
    (GATHER, "packed", {"out": torch.zeros((4, 512), dtype=BF16)}, "slot_mapping has tokens=5, out has 4"),
    (GATHER, "packed", {"out": torch.zeros((5, 512))}, "out is float32, bfloat16 or float16 is needed"),
    (GATHER, "mx", {"cache_block_size": 17}, "k_cache has a block stride of 8512 bytes, 17 rows need 8976"),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "cache", "changes", "message"), BAD, ids=[f"{b[0]}-{b[3][:40]}" for b in BAD])
def test_refuses(operator: str, cache: str, changes: Arguments, message: str) -> None:
    assert refused(operator, cache, changes) == message


def test_refuses_everything_at_once() -> None:
    changes = {"kv_mxfp8": 1, "q_head_padded": 2, "slot_mapping": torch.arange(6), "cache_block_size": 0}
    assert refused(PADDED, "packed", changes).splitlines() == [
        "kv_mxfp8 is of type int, a bool is needed",
        "slot_mapping has 6 slots, q_in has only 5 tokens",
        "q_head_padded is 2, 0 or 3 heads of q_in to 16384 is needed",
        "cache_block_size is 0, at least 1 is needed",
    ]


def test_a_fnuz_device_wants_its_own_dtype() -> None:
    inputs, given = arguments(FULL_FP8, "e4m3")
    with pytest.raises(ContractError, match="q_fp8 is float8_e4m3fn, float8_e4m3fnuz is needed"):
        getattr(ops, FULL_FP8)(**given, profile="amd-mi300x")


# The checks can fail


def broken(case: Case, change: Callable[[Inputs, torch.Tensor | None], None]) -> None:
    inputs = make(case)
    returned = inputs.call()
    change(inputs, returned)
    siblings.check(inputs, returned)


def add(offset: int, amount: int = 1) -> Callable[[Inputs, torch.Tensor | None], None]:
    return lambda inputs, returned: inputs.cache_memory[GUARD + offset].add_(amount)


ORDERED = Problem(9, 2, 16, slots="ordered")
BROKEN: dict[str, tuple[Case, Callable[[Inputs, Any], Any], str]] = {
    "pad head": (Case(PADDED, ORDERED, padded=3), lambda i, q: q[4, 2, 7:8].fill_(-0.0), "pad heads"),
    "copied q": (Case(PADDED, ORDERED, normed=False, rotated=False), lambda i, q: q[0, 0, 5:6].neg_(), "do not rotate"),
    "q 3 ulp off": (Case(PADDED, ORDERED), lambda i, q: q.view(torch.int16)[4, 1, 17].add_(3), r"q\[token=4, head=1"),
    "interleaved": (Case(PADDED, ORDERED, interleaved=True), lambda i, q: q.copy_(siblings.deinterleave(q)), r"q\[to"),
    "mx code": (Case(KV, ORDERED, "mx"), add(528 * 2 + 9), "codes, groups that do not rotate"),
    "mx rotated code": (Case(KV, ORDERED, "mx"), add(528 * 2 + 460, 2), r"codes of rotated groups\[kv_row=2, lane=12"),
    "mx scale": (Case(KV, ORDERED, "mx"), add(528 + 512 + 3), "scales, groups that do not rotate"),
    "mx rotated scale": (Case(KV, ORDERED, "mx"), add(528 + 512 + 15), r"scales of rotated groups\[kv_row=1, group=1"),
    "padding": (Case(KV, ORDERED, "mx"), add(528 * 16), "k_cache: byte 8448 from its start"),
    "between rows": (Case(KV, ORDERED, "rows"), add(1024), "k_cache: byte 1024 from its start"),
    "row": (Case(KV, ORDERED, "rows"), add(3), "row, lanes that do not rotate"),
    "rotated row": (Case(KV, ORDERED, "rows"), add(2 * 470 + 1, 64), r"rotated tail\[kv_row=0, lane=22"),
    "e4m3 row": (Case(KV, ORDERED, "e4m3"), add(3), "row, lanes that do not rotate"),
    "e4m3 rotated": (Case(KV, ORDERED, "e4m3"), add(500), r"row\[kv_row=0, lane=52"),
    "q_fp8": (Case(FULL_FP8, ORDERED, "e4m3"), lambda i, _: i.q_fp8[3, 1, 8].add_(1), r"q_fp8\[token=3, head=1, la"),
    "after q_fp8": (Case(FULL_FP8, ORDERED, "e4m3"), lambda i, _: i.q_fp8_memory[-GUARD].add_(1), "memory after q_fp8"),
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.replace(" ", "_"))
def test_checks_see(fault: str) -> None:
    case, change, message = BROKEN[fault]
    with pytest.raises(AssertionError, match=message):
        broken(case, change)


def test_checks_see_a_row_that_was_not_written() -> None:
    inputs = make(Case(KV, ORDERED, "rows"))
    inputs.call()
    inputs.cache_memory.fill_(UNTOUCHED)
    with pytest.raises(AssertionError, match="row, lanes that do not rotate"):
        siblings.check(inputs, None)


def test_codes_next_to_the_formula_are_right_at_an_edge_alone() -> None:
    edge = torch.tensor([[17.0, 16.9]], dtype=torch.float64)  # 17 lies between 16 and 18
    floor, first = torch.full((1, 1), 1e-5, dtype=torch.float64), torch.arange(1)
    codes = e4m3(edge)
    assert siblings.check_codes("x", codes, edge, floor, 1.0, False, "row lane", first) == 0
    codes[0, 0] += 1
    assert siblings.check_codes("x", codes, edge, floor, 1.0, False, "row lane", first) == 1
    codes[0, 1] += 1
    with pytest.raises(AssertionError, match=r"x\[row=0, lane=1\]"):
        siblings.check_codes("x", codes, edge, floor, 1.0, False, "row lane", first)


def test_profile_cases_scale_what_saturates() -> None:
    case = Case(FULL_FP8, ORDERED, "e4m3")
    assert siblings.profile_case(case, True).q_scale == case.q_scale / 2
    assert siblings.profile_case(case, False) == replace(case)
