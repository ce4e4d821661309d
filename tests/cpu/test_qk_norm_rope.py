"""fused_qk_norm_rope in the interpreter, and its reference."""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from compare import round_once
from qk_norm_rope import CONTENTS, FORCED, GUARD, Case, Inputs, make, reference, run, run_far, unfused
from qk_norm_rope_grid import cases, config

import tilewright
from tilewright import interpret, ops, vendors
from tilewright.errors import ContractError
from tilewright.launch import OPERATORS
from tilewright.ops.qk_norm_rope_reference import exact_heads

NAME = "fused_qk_norm_rope"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
PAIRINGS = pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])


def operator(*arguments: Any, **options: Any) -> None:
    return ops.fused_qk_norm_rope(*arguments, **options)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Lanes that a mask leaves undefined hold garbage, as they may on a GPU."""
    with interpret.poison():
        yield


WIDE = config(8, 4, 4)  # few programs for a long test


# The operator over its sizes


def grid_cases() -> Iterator[Any]:
    for case, options, name in cases(max_position=300):
        yield pytest.param(case, options, id=name)


@pytest.mark.parametrize(("case", "options"), list(grid_cases()))
def test_grid(case: Case, options: dict[str, Any]) -> None:
    run(operator, make(case), repeats=1, **options)


TOKENS = itertools.cycle([1, 7, 8, 9, 17])
HEADS = itertools.cycle([(4, 2, 2), (3, 1, 1), (0, 2, 1), (5, 0, 0), (6, 2, 3), (1, 1, 1), (7, 3, 0)])
TABLES = itertools.cycle([FP32, BF16, FP16])
POSITIONS = itertools.cycle([(torch.int64, False), (torch.int32, True), (torch.int64, True), (torch.int32, False)])
AROUND = itertools.cycle([(0, 0), (0, 0), (8, 24), (1, 2), (0, 64)])
FULL = [
    Case(
        next(TOKENS), next(HEADS), dim, 2 * max(1, dim * sixteenths // 32), neox, dtype, next(TABLES), *next(POSITIONS),
        next(AROUND), max_position=300,
    )
    for dim in (64, 128, 256, 16, 48, 80, 96, 112, 192, 512)
    for sixteenths in (16, 8, 4, 12, 9, 10, 0)
    for neox in (True, False)
    for dtype in (BF16, FP16)
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_grid(case: Case) -> None:
    run(operator, make(case))


NOTHING = [
    Case(0),
    Case(0, (3, 1, 0), 80, 36, neox=False, dtype=FP16, position_dtype=torch.int32, strided=True, around=(8, 8)),
    Case(5, (0, 0, 3)),
]


@pytest.mark.parametrize("case", NOTHING, ids=str)
@pytest.mark.parametrize("forced", [-1, 8])
def test_nothing_to_do(case: Case, forced: int) -> None:
    """No token, or no head of q or k: nothing is launched, and nothing fails."""
    run(operator, make(case), forced_token_heads_per_warp=forced)


SMALL = [
    Case(9, (8, 8, 4), 64, 36, max_position=300),
    Case(17, (3, 1, 2), 128, neox=False, dtype=FP16, cache_dtype=BF16, max_position=300),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("thresholds", [None, 0], ids=["by_size", "first_rule"])
@pytest.mark.parametrize("profile", vendors.names())
def test_profile(profile: str, thresholds: int | None, case: Case) -> None:
    """Each profile's text and tilings, the one for large problems too, at small sizes."""
    run(operator, make(case), profile=profile, thresholds=thresholds)
    launch = tilewright.last_launch()
    assert (launch.operator, launch.profile) == (NAME, profile)
    if thresholds == 0:
        assert launch.rule == 0


def configurations() -> Iterator[Any]:
    """Every configuration in the rules of the profiles that modules are built for."""
    for profile in SHIPPED:
        for number, rule in enumerate(OPERATORS[NAME].kernel.rules(profile).rules):
            yield pytest.param(profile, dict(rule.config), id=f"{profile}-rule{number}")


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize(("profile", "forced"), list(configurations()))
def test_configuration_of_a_profile(profile: str, forced: dict[str, int], case: Case) -> None:
    run(operator, make(case), profile=profile, config=forced)
    launch = tilewright.last_launch()
    assert (launch.profile, dict(launch.config)) == (profile, forced)


TILINGS = [(1, 1, 1), (1, 8, 4), (2, 4, 1), (4, 2, 1), (2, 2, 2), (8, 1, 4), (16, 16, 8)]


@pytest.mark.parametrize("tiling", TILINGS, ids=lambda tiling: ".".join(map(str, tiling)))
def test_forced_config_is_the_one_that_runs(tiling: tuple[int, int, int]) -> None:
    run(operator, make(SMALL[0]), config=config(*tiling))
    assert dict(tilewright.last_launch().config) == config(*tiling)


# forced_token_heads_per_warp


def forced_bits(case: Case, forced: int) -> torch.Tensor:
    """All the memory after a call that is right."""
    inputs = make(case)
    run(operator, inputs, forced_token_heads_per_warp=forced)
    return inputs.memory.view(torch.int16)


@pytest.mark.parametrize(
    "case",
    [
        Case(4, (16, 4, 4), 128, 64),  # partial NeoX: every head after the first of a chunk was wrong, NaN at 8
        Case(3, (96, 8, 8), 128, 64, spread=0),
        Case(4, (16, 4, 4)),
        Case(4, (5, 3, 1), 128, 96),
        Case(4, (16, 4, 4), 64, 36, neox=False, cache_dtype=BF16),
        Case(3, (7, 2, 3), 512, 80, dtype=FP16, cache_dtype=FP16),
    ],
    ids=str,
)
def test_forced_values_agree(case: Case) -> None:
    """In the interpreter to the bit: a head is summed in the same order whatever its company."""
    first = forced_bits(case, 1)
    for forced in (*FORCED[1:], -1):
        assert torch.equal(forced_bits(case, forced), first)


@pytest.mark.parametrize("forced", FORCED)
def test_forced_value_is_the_heads_of_a_warp(forced: int) -> None:
    run(operator, make(SMALL[0]), forced_token_heads_per_warp=forced)
    used = tilewright.last_launch().config
    assert used["tokens"] * used["heads"] == forced * used["num_warps"]
    assert tilewright.last_launch().rule is None


@pytest.mark.parametrize("forced", [0, -1, -7])
def test_at_most_zero_leaves_it_to_the_rules(forced: int) -> None:
    run(operator, make(SMALL[0]), profile="nvidia-h200", forced_token_heads_per_warp=forced)
    by_rule = tilewright.last_launch()
    run(operator, make(SMALL[0]), profile="nvidia-h200")
    assert by_rule.rule is not None and by_rule == tilewright.last_launch()


@pytest.mark.parametrize("forced", [3, 5, 6, 7, 9, 16, 32, 1 << 40])
def test_other_forced_values_are_an_error_that_says_so(forced: int) -> None:
    message = refused(make(SMALL[0]), {"forced_token_heads_per_warp": forced})
    assert f"forced_token_heads_per_warp is {forced}, 1, 2, 4, 8 or at most 0 is needed" in message


# Faults that implementations of this operator have had


@pytest.mark.parametrize("forced", [None, WIDE], ids=["by_size", "wide"])
@pytest.mark.parametrize("case", [Case(3), Case(3, (3, 1, 0), 80, 36, neox=False)], ids=str)
def test_rows_past_2_31_elements_are_addressed_in_64_bits(case: Case, forced: dict[str, int] | None) -> None:
    run_far(operator, make(case), config=forced)


def test_partial_neox_over_many_heads() -> None:
    """512 tokens of 16 + 4 heads: from 10240 heads on they were done several to a warp, all but the first wrong."""
    case = Case(512, (16, 4, 4), 128, 64)
    run(operator, make(case), config=WIDE)
    run(operator, make(case), thresholds=0, profile="nvidia-h200")


@pytest.mark.parametrize("profile", SHIPPED)
def test_all_loads_come_before_the_first_store(profile: str) -> None:
    """In place, a load after a store of the same head may see either value; that is no race one can see in here."""
    functions = re.split(r"^@triton\.jit.*$", OPERATORS[NAME].source(profile), flags=re.M)
    heads = [text for text in functions if "tl.store(" in text]
    assert len(heads) >= 4  # both pairings, whole and in part
    for text in heads:
        assert text.rindex("tl.load(") < text.index("tl.store(")


@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize("thresholds", [None, 0], ids=["by_size", "first_rule"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_address_has_one_writer_and_v_none(profile: str, thresholds: int | None, case: Case) -> None:
    """As many bytes are stored as there are to write, and each head is read once."""
    inputs = make(case)
    with interpret.counting() as counts:
        operator(*inputs.arguments(), profile=profile, thresholds=thresholds)
    heads = case.tokens * case.normed * case.head_dim * 2
    assert counts.bytes_stored == heads
    table = case.tokens * case.rotating * case.cache_dtype.itemsize
    assert counts.bytes_loaded >= heads + table


def test_all_of_a_head_is_loaded_before_any_of_it_is_stored() -> None:
    run(operator, make(Case(8, (64, 8, 8))), repeats=3, config=config(1, 8, 8))


@PAIRINGS
def test_rotary_size_is_the_tables(neox: bool) -> None:
    """128 lanes, 64 of which rotate; NaN lies behind the table, and lanes past it are only normalised."""
    case = Case(5, (2, 1, 1), 128, 64, neox=neox)
    inputs = make(case)
    inputs.position_ids[-1] = case.max_position - 1
    run(operator, inputs)
    still = make(case)
    still.cos_sin_cache[:, :32], still.cos_sin_cache[:, 32:] = 1.0, 0.0
    run(operator, still)
    after, unrotated = (i.qkv[:, : 3 * 128].view(5, 3, 128) for i in (inputs, still))
    assert torch.equal(after[..., 64:].view(torch.int16), unrotated[..., 64:].view(torch.int16))
    assert not bool((after[..., :64] == unrotated[..., :64]).all(-1).any())


@PAIRINGS
def test_each_row_has_its_own_angles(neox: bool) -> None:
    """Positions 0 to 3 with 64 of 128 lanes rotating: the table's row stride is 64, not 128."""
    inputs = make(Case(4, (2, 1, 1), 128, 64, neox=neox))
    inputs.position_ids.copy_(torch.arange(4))
    run(operator, inputs)


@pytest.mark.parametrize("name", ["q_weight", "k_weight"])
@pytest.mark.parametrize(("dtype", "other"), [(BF16, FP32), (BF16, FP16), (FP16, FP32), (FP16, BF16)], ids=str)
def test_weights_of_another_dtype_are_an_error_that_says_so(name: str, dtype: torch.dtype, other: torch.dtype) -> None:
    inputs = make(Case(5, dtype=dtype))
    message = refused(inputs, {name: getattr(inputs, name).to(other)})
    names = [str(d).removeprefix("torch.") for d in (other, dtype)]
    assert f"{name} is {names[0]}, qkv is {names[1]}: they must agree" in message


@PAIRINGS
@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 1e-2), (FP16, 2e-3)], ids=["bf16", "fp16"])
def test_near_the_formula_that_rounds_more_often(dim: int, dtype: torch.dtype, tolerance: float, neox: bool) -> None:
    """Norm, weight and rotation rounded one by one differ by an ulp or two; this operator rounds once.

    Of the formula with more roundings itself up to 1 element in 1000 is more than the tolerance off.
    """
    inputs = make(Case(8, (8, 4, 2), dim, neox=neox, dtype=dtype, spread=0))
    for seed, weight in enumerate((inputs.q_weight, inputs.k_weight)):
        weight.normal_(1.0, 0.1, generator=torch.Generator().manual_seed(seed))
    others = unfused(inputs).double()
    exact = exact_of(inputs)
    run(operator, inputs)
    ours = inputs.qkv[:, : 12 * dim].unflatten(1, (12, dim)).double()
    error, allowed = (ours - others).abs(), tolerance * (1 + others.abs())
    assert bool((error <= 2 * allowed).all()) and int((error > allowed).sum()) <= error.numel() / 1000
    assert bool((error.square().mean(-1) <= (tolerance * others.square().mean(-1).sqrt()).square()).all())
    assert (ours - exact).square().mean() < 0.5 * (others - exact).square().mean()


MANY = [(64, 4, 257), (64, 4, 256), (12, 1, 1024), (12, 1, 1025)]


@pytest.mark.parametrize(("hq", "hk", "tokens"), MANY)
def test_position_of_a_row_among_many(hq: int, hk: int, tokens: int) -> None:
    """Positions in no order: a kernel that keeps one from row to row, or takes a neighbour's, shows."""
    run(operator, make(Case(tokens, (hq, hk, 1), 64, position_dtype=torch.int32)), config=config(16, 4, 4))


@pytest.mark.parametrize("rotary", [128, 96, 80, 64, 2])
@PAIRINGS
def test_the_paired_lane_has_its_own_weight(rotary: int, neox: bool) -> None:
    """Right with unequal weights in every pair; the formula with one weight for both lanes is seen."""
    case = Case(3, (3, 2, 1), 128, rotary, neox=neox)
    inputs = make(case)
    for weight in (inputs.q_weight, inputs.k_weight):
        first, second = pairs(weight[:rotary], neox)
        assert not bool((first == second).any())
    run(operator, inputs)
    with pytest.raises(AssertionError, match=r"qkv\[token="):
        run(formula(shared_weight=True), make(case))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_zero_heads_stay_zero(dtype: torch.dtype) -> None:
    """eps lies inside the root: no 0 / 0."""
    inputs = make(Case(2, (3, 1, 1), dtype=dtype, content="zeros"))
    run(operator, inputs)
    assert bool((inputs.qkv[:, : 4 * 128] == 0).all())


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_nan_and_infinity_stay_in_their_head(dtype: torch.dtype, profile: str) -> None:
    inputs = make(Case(5, (2, 1, 1), dtype=dtype, content="not finite"))
    run(operator, inputs, profile=profile, config=WIDE)
    heads = inputs.qkv[:, : 3 * 128].unflatten(1, (3, 128))
    assert heads.isnan().any(-1).nonzero().tolist() == [[0, 0], [1, 1], [2, 0]]
    assert bool(heads[0, 0].isnan().all())


@PAIRINGS
def test_infinity_in_a_lane_that_does_not_rotate(neox: bool) -> None:
    """It alone becomes NaN, as inf * rsqrt(inf) is; the rest of its head becomes 0, the lane passed with it too."""
    inputs = make(Case(5, (2, 1, 1), 128, 64, neox=neox, content="not finite"))
    operator(*inputs.arguments(), config=WIDE)
    heads = inputs.qkv[:, : 3 * 128].unflatten(1, (3, 128))
    assert heads.isnan().any(-1).nonzero().tolist() == [[0, 0], [1, 1], [2, 0]]
    assert int(heads[2, 0].isnan().sum()) == 1 and bool((heads[2, 0].nan_to_num() == 0).all())


def test_heads_of_many_sizes_and_eps() -> None:
    for eps in (1e-6, 1e-2, 4.0):
        run(operator, make(Case(4, (3, 1, 1), spread=12, eps=eps, seed=3)))


# What a call refuses, before it launches or writes anything

PARAMETERS = (
    *("qkv", "num_heads_q", "num_heads_k", "num_heads_v", "head_dim", "eps", "q_weight", "k_weight"),
    *("cos_sin_cache", "is_neox", "position_ids"),
)
Arguments = dict[str, Any]
BAD: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "qkv float32": ("qkv", lambda a: a["qkv"].float()),
    "qkv of rank 3": ("qkv", lambda a: a["qkv"].unflatten(1, (-1, 128))),
    "qkv of a column less": ("qkv", lambda a: a["qkv"][:, :-1]),
    "qkv of a head more": ("qkv", lambda a: torch.cat((a["qkv"], a["qkv"][:, :128]), dim=1)),
    "qkv columns apart": ("qkv", lambda a: a["qkv"].repeat_interleave(2, 1)[:, ::2]),
    "qkv no tensor": ("qkv", lambda a: None),
    "q heads negative": ("num_heads_q", lambda a: -1),
    "q heads float": ("num_heads_q", lambda a: 4.0),
    "k heads negative": ("num_heads_k", lambda a: -2),
    "v heads negative": ("num_heads_v", lambda a: -1),
    "head_dim of 120": ("head_dim", lambda a: 120),
    "head_dim of 0": ("head_dim", lambda a: 0),
    "head_dim of 1024": ("head_dim", lambda a: 1024),
    "eps text": ("eps", lambda a: "1e-6"),
    "q_weight of 64": ("q_weight", lambda a: a["q_weight"][:64]),
    "q_weight of rank 2": ("q_weight", lambda a: a["q_weight"][None]),
    "q_weight not contiguous": ("q_weight", lambda a: a["q_weight"].repeat_interleave(2)[::2]),
    "k_weight of 64": ("k_weight", lambda a: a["k_weight"][:64]),
    "k_weight on another device": ("k_weight", lambda a: a["k_weight"].to("meta")),
    "cos_sin_cache float64": ("cos_sin_cache", lambda a: a["cos_sin_cache"].double()),
    "cos_sin_cache of rank 1": ("cos_sin_cache", lambda a: a["cos_sin_cache"][0]),
    "cos_sin_cache odd": ("cos_sin_cache", lambda a: a["cos_sin_cache"][:, :63].contiguous()),
    "cos_sin_cache wider than a head": ("cos_sin_cache", lambda a: torch.zeros(4096, 130)),
    "cos_sin_cache without lanes": ("cos_sin_cache", lambda a: torch.zeros(4096, 0)),
    "cos_sin_cache not contiguous": ("cos_sin_cache", lambda a: a["cos_sin_cache"][:, :64]),
    "cos_sin_cache on another device": ("cos_sin_cache", lambda a: a["cos_sin_cache"].to("meta")),
    "is_neox int": ("is_neox", lambda a: 1),
    "position_ids int16": ("position_ids", lambda a: a["position_ids"].short()),
    "position_ids float32": ("position_ids", lambda a: a["position_ids"].float()),
    "position_ids of rank 2": ("position_ids", lambda a: a["position_ids"][None]),
    "fewer positions than tokens": ("position_ids", lambda a: a["position_ids"][:-1]),
    "position_ids on another device": ("position_ids", lambda a: a["position_ids"].to("meta")),
}


def refused(inputs: Inputs, changed: Arguments) -> str:
    """The message of a call that must fail and write nothing."""
    before = inputs.written()
    with pytest.raises(ContractError) as error:
        operator(**{**dict(zip(PARAMETERS, inputs.arguments(), strict=True)), **changed})
    assert inputs.written() == before
    assert NAME in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("problem", BAD, ids=lambda problem: problem.replace(" ", "_"))
def test_refuses(problem: str) -> None:
    name, change = BAD[problem]
    inputs = make(Case(5))
    arguments = dict(zip(PARAMETERS, inputs.arguments(), strict=True))
    assert name in refused(inputs, {name: change(arguments)})


def test_refuses_everything_at_once() -> None:
    inputs = make(Case(5))
    arguments = dict(zip(PARAMETERS, inputs.arguments(), strict=True))
    problems = ["qkv of a column less", "q_weight of 64", "cos_sin_cache odd", "position_ids int16"]
    changed = {name: change(arguments) for name, change in (BAD[problem] for problem in problems)}
    message = refused(inputs, {**changed, "forced_token_heads_per_warp": 3})
    assert [name for name in (*changed, "forced_token_heads_per_warp") if name not in message] == []


# The reference against scalar arithmetic that shares no code with it


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    significand, least = (8, -126) if dtype == BF16 else (11, -14)
    exponent = least
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - significand + 1)
    return float(round(value / step) * step)


def scalar_head(head: list[float], weight: list[float], cos_sin: list[float], case: Case) -> list[float]:
    eps = Fraction(struct.unpack("f", struct.pack("f", case.eps))[0])
    mean = sum(Fraction(x) ** 2 for x in head) / len(head) + eps
    with localcontext() as context:
        context.prec = 60
        root = Fraction((Decimal(mean.numerator) / Decimal(mean.denominator)).sqrt())
    y = [Fraction(x) / root * Fraction(w) for x, w in zip(head, weight, strict=True)]
    half = len(cos_sin) // 2
    for i in range(half):
        a, b = (i, i + half) if case.neox else (2 * i, 2 * i + 1)
        cos, sin = Fraction(cos_sin[i]), Fraction(cos_sin[half + i])
        y[a], y[b] = y[a] * cos - y[b] * sin, y[b] * cos + y[a] * sin
    return [rounded(x, case.dtype) for x in y]


SCALAR = [
    Case(3, (2, 1, 1), 64),
    Case(3, (2, 1, 1), 64, neox=False, dtype=FP16),
    Case(3, (1, 2, 0), 64, 36, dtype=FP16, cache_dtype=BF16, strided=True, position_dtype=torch.int32),
    Case(2, (0, 3, 2), 48, 26, neox=False, cache_dtype=FP16, around=(8, 3)),
    Case(2, (3, 0, 1), 16, 2, spread=10, eps=1e-2),
    Case(1, (1, 1, 0), 128, 96),
]


@pytest.mark.parametrize("case", SCALAR, ids=str)
def test_reference_is_scalar_arithmetic(case: Case) -> None:
    inputs, dim = make(case), case.head_dim
    table, before = inputs.cos_sin_cache.double().tolist(), inputs.qkv.double().tolist()
    kinds = [inputs.q_weight.double().tolist()] * case.heads[0] + [inputs.k_weight.double().tolist()] * case.heads[1]
    expected = [
        [scalar_head(row[h * dim : h * dim + dim], w, table[int(p)], case) for h, w in enumerate(kinds)]
        for row, p in zip(before, inputs.position_ids, strict=True)
    ]
    run(reference, inputs)
    actual = inputs.qkv[:, : case.normed * dim].unflatten(1, (case.normed, dim))
    assert torch.equal(actual.double(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("content", CONTENTS)
def test_checks_accept_the_reference(content: str) -> None:
    run(reference, make(Case(17, (3, 1, 2), 80, 36, content=content, around=(1, 2))), repeats=1)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_slices_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    import qk_norm_rope

    case = Case(17, (2, 1, 1), 64, dtype=dtype, around=(8, 8))
    monkeypatch.setattr(qk_norm_rope, "SLICE", 3 * case.stride)
    assert len(list(qk_norm_rope.row_slices(case))) == 6
    run(reference, make(case), repeats=1)


# The checks can fail: each of these is a reference with one thing wrong


def pairs(values: torch.Tensor, neox: bool) -> tuple[torch.Tensor, ...]:
    return values.chunk(2, dim=-1) if neox else (values[..., 0::2], values[..., 1::2])


def weights_of(inputs_or_arguments: Any) -> torch.Tensor:
    _, hq, hk, _, _, _, q_weight, k_weight, *_ = inputs_or_arguments
    return torch.cat((q_weight.expand(hq, -1), k_weight.expand(hk, -1)))


def exact_of(inputs: Inputs) -> torch.Tensor:
    case = inputs.case
    heads = inputs.qkv[:, : case.normed * case.head_dim].unflatten(1, (case.normed, case.head_dim))
    cos_sin = inputs.cos_sin_cache[inputs.position_ids.long()]
    return exact_heads(heads, weights_of(inputs.arguments()), cos_sin, case.neox, case.eps)


def formula(
    *,
    shared_weight: bool = False,
    weights: Callable[[torch.Tensor], torch.Tensor] = lambda w: w,
    angles: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda table, positions: table[positions],
    gptj: bool = False,
    offset: int | None = None,
    eps: Callable[[torch.Tensor, float], torch.Tensor] = lambda mean, eps: (mean + eps).rsqrt(),
    rounding: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = lambda y, dtype: y,
) -> Callable[..., None]:
    """The operator with something else in the place of a part of its formula.

    Args:
        shared_weight: The second lane of a pair, where the first needs it, has the first's weight, and the reverse.
        weights: Of the weights of q's and k's heads [heads, dim].
        angles: Rows of the table for the positions.
        gptj: The other pairing.
        offset: From a lane to the lane that it rotates with.
        eps: The scale of a head.
        rounding: Of the normalised head, before it is rotated.
    """

    def call(*arguments: Any) -> None:
        qkv, hq, hk, _, dim, epsilon, _, _, table, neox, positions, *_ = arguments
        x = qkv[:, : (hq + hk) * dim].unflatten(1, (hq + hk, dim))
        y = x.double()
        y = y * eps(y.square().mean(-1, keepdim=True), epsilon)
        w = weights(weights_of(arguments).double()).expand_as(y)
        cos, sin = angles(table.double(), positions.long()).unsqueeze(1).chunk(2, dim=-1)
        half = cos.shape[-1]
        lane = torch.arange(half)
        neighbours = neox == gptj
        first = 2 * lane if neighbours else lane
        second = first + 1 if neighbours else first + (half if offset is None else offset)
        a, b = y[..., first], y[..., second]
        wa, wb = w[..., first], w[..., second]
        pa, pb = (wb, wa) if shared_weight else (wa, wb)
        a_own, b_own, a_paired, b_paired = (rounding(v, x.dtype) for v in (a * wa, b * wb, a * pa, b * pb))
        out = rounding(y * w, x.dtype).clone()
        out[..., first], out[..., second] = a_own * cos - b_paired * sin, b_own * cos + a_paired * sin
        x.copy_(round_once(out, x.dtype))

    return call


def flat_rows(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows as if they were 128 elements apart, of a table of 64 columns."""
    return torch.nn.functional.pad(table.flatten(), (0, table.numel())).view(-1, 128)[positions, :64]


WRONG: dict[str, tuple[Case, Callable[..., None]]] = {
    "weight of the current lane for both": (Case(5, (1, 1, 1)), formula(shared_weight=True)),
    "weight of the current lane for both, in part": (Case(5, (1, 1, 1), 128, 36), formula(shared_weight=True)),
    "weight of the other kind": (Case(5, (1, 1, 1)), formula(weights=lambda w: w.flip(0))),
    "no weight": (Case(5, (1, 1, 1)), formula(weights=torch.ones_like)),
    "row stride of the table from head_dim": (Case(5, (1, 1, 1), 128, 64), formula(angles=flat_rows)),
    "angles of the row before": (Case(5, (1, 1, 1)), formula(angles=lambda t, p: t[p.roll(1)])),
    "angles of one row for two": (Case(5, (1, 1, 1)), formula(angles=lambda t, p: t[p[torch.tensor([0, 0, 2, 2, 4])]])),
    "table in qkv's dtype": (Case(5, (1, 1, 1), dtype=FP16), formula(angles=lambda t, p: t[p].half().double())),
    "no rotation": (Case(5, (1, 1, 1)), formula(angles=lambda t, p: (torch.arange(128) < 64).double().expand(5, -1))),
    "neighbours for halves": (Case(5, (1, 1, 1)), formula(gptj=True)),
    "halves for neighbours": (Case(5, (1, 1, 1), neox=False), formula(gptj=True)),
    "half a head for half of what rotates": (Case(5, (1, 1, 1), 128, 96), formula(offset=64)),
    "a warp's shuffle distance": (Case(5, (1, 1, 1), 128, 96), formula(offset=16)),
    "eps outside the root": (
        Case(5, (1, 1, 1), eps=1e-2, spread=0), formula(eps=lambda mean, eps: 1 / (mean.sqrt() + eps)),
    ),
    "no eps": (Case(5, (1, 1, 1), eps=1e-2, spread=0), formula(eps=lambda mean, eps: mean.rsqrt())),
    "rounded before the rotation": (Case(5, (1, 1, 1)), formula(rounding=lambda y, dtype: y.to(dtype).double())),
}


@PAIRINGS
@pytest.mark.parametrize("rotary", [128, 36])
def test_the_formula_is_right_as_it_stands(rotary: int, neox: bool) -> None:
    run(formula(), make(Case(5, (1, 1, 1), 128, rotary, neox=neox)))


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: fault.replace(" ", "_"))
def test_checks_see_a_wrong_formula(fault: str) -> None:
    case, wrong = WRONG[fault]
    with pytest.raises(AssertionError, match=r"qkv(\[token=|: \d+ of \d+ elements are not the correctly rounded)"):
        run(wrong, make(case))


def add_ulps(tensor: torch.Tensor, steps: int | torch.Tensor) -> None:
    tensor.view(torch.int16).add_(steps)


def off_by_one(i: Inputs) -> None:
    """The other neighbour of the exact value, which is less than 1 ulp off, in one lane of each head."""
    before = make(i.case)
    exact = exact_of(before)[..., 3]
    stored = i.qkv[:, : 3 * 64].unflatten(1, (3, 64))[..., 3]
    add_ulps(stored, torch.where((exact.abs() > stored.double().abs()), 1, -1).to(torch.int16))


def v_normed(i: Inputs) -> None:
    i.qkv[2, 3 * 64 : 4 * 64] = 1.0


BROKEN: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "2 ulp off": (lambda i: add_ulps(i.qkv[4, 81:82], 2), r"qkv\[token=4, head=1, lane=17\]"),
    "often 1 ulp off": (off_by_one, "27 of 1728 elements are not the correctly rounded value, at most 4 may be"),
    "row not written": (lambda i: i.qkv[8].copy_(i.qkv[7]), r"qkv\[token=8, "),
    "head not written": (lambda i: i.qkv[3, 64:128].copy_(i.qkv[3, :64]), r"qkv\[token=3, head=1, "),
    "v written": (v_normed, r"qkv: token=2, v_head=0, lane="),
    "a bit of v": (lambda i: i.qkv[6, -1:].view(torch.int16).bitwise_xor_(1), r"qkv: token=6, v_head=1, lane=63"),
    "before a row": (lambda i: i.memory[GUARD + 7].fill_(0), "qkv: token=0, column -1 of its row, outside it"),
    "after a row": (lambda i: i.memory[GUARD + 8 + 320].fill_(0), "qkv: token=0, column 320 of its row, outside it"),
    "before qkv": (lambda i: i.memory[GUARD - 1].fill_(0), "memory before qkv: byte 8190"),
    "after qkv": (lambda i: i.memory[-GUARD].fill_(0), "memory after qkv: byte 0"),
    "q_weight written": (lambda i: i.q_weight[0].add_(1), "the call changed q_weight"),
    "k_weight written": (lambda i: i.k_weight[-1].add_(1), "the call changed k_weight"),
    "table written": (lambda i: i.cos_sin_cache[5, 3].add_(1), "the call changed cos_sin_cache"),
    "behind the table": (lambda i: i.fixed_memory["cos_sin_cache"][-16].fill_(0), "the call changed cos_sin_cache"),
    "positions written": (lambda i: i.position_ids[-1].add_(1), "the call changed position_ids"),
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.replace(" ", "_"))
def test_checks_see(fault: str) -> None:
    change, message = BROKEN[fault]
    inputs = make(Case(9, (2, 1, 2), 64, around=(8, 24)))

    def wrong(*arguments: Any) -> None:
        reference(*arguments)
        change(inputs)

    with pytest.raises(AssertionError, match=message):
        run(wrong, inputs)


def test_checks_see_a_copy_returned() -> None:
    with pytest.raises(AssertionError, match="returned Tensor; it works in place"):
        run(lambda *arguments: arguments[0].clone(), make(Case(2)))


def test_checks_see_a_result_that_varies() -> None:
    calls = itertools.count()

    def varying(*arguments: Any) -> None:
        reference(*arguments)
        if next(calls):
            add_ulps(arguments[0][0, :1], 1)

    with pytest.raises(AssertionError, match="repeat 1 on equal inputs changed qkv"):
        run(varying, make(Case(4)), repeats=1)


def test_checks_see_a_32_bit_offset() -> None:
    """The far row: its 32-bit offset lands before the first one."""

    def wrapping(qkv: torch.Tensor, *rest: Any) -> None:
        *first, table, neox, positions = rest
        reference(qkv[:2], *first, table, neox, positions[:2])
        wrapped = qkv.storage_offset() + 2 * qkv.stride(0) - 2**32
        row = qkv.as_strided((1, qkv.shape[1]), (1, 1), wrapped)
        reference(row, *first, table, neox, positions[2:])

    with pytest.raises(AssertionError, match=r"qkv\[token=2, "):
        run_far(wrapping, make(Case(3)))


def test_checks_see_a_write_between_far_rows() -> None:
    def beside(qkv: torch.Tensor, *rest: Any) -> None:
        reference(qkv, *rest)
        qkv.as_strided((1,), (1,), qkv.storage_offset() - 5).fill_(0)

    with pytest.raises(AssertionError, match="element -5 from its start written"):
        run_far(beside, make(Case(3)))
