"""fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert in the interpreter, and its reference."""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
import torch
from deepseek_v4 import (
    CONTENTS,
    GUARD,
    UNTOUCHED,
    Case,
    Inputs,
    make,
    reference,
    run,
    run_far,
    threshold_exponents,
)

import tilewright
from tilewright import interpret, ops, vendors
from tilewright.errors import ContractError
from tilewright.launch import OPERATORS
from tilewright.ops.deepseek_v4_reference import PLAIN, cache_rows

NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
BF16, FP16 = torch.bfloat16, torch.float16


def operator(*arguments: Any, **options: Any) -> None:
    return ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*arguments, **options)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Lanes that a mask leaves undefined hold garbage, as they may on a GPU."""
    with interpret.poison():
        yield


def config(tokens: int, heads: int, kv_tokens: int, num_warps: int) -> dict[str, int]:
    sizes = {"tokens": tokens, "heads": heads, "kv_tokens": kv_tokens}
    return {**sizes, "num_warps": num_warps, "num_stages": 1}


def tiling_id(tiling: tuple[int, ...]) -> str:
    return ".".join(map(str, tiling))


WIDE = config(8, 1, 8, 4)  # the tiling for 64-lane warps, and few programs for a long test


# The operator over its sizes

# tokens, heads, block size, rows not inserted, tight blocks, dtype, slots, strided, forced tiling.
# Every two values of any two columns meet. Where no tiling is forced the profile's rules choose.
GRID = [
    (0, 1, 64, 0, False, BF16, "permuted", False, None),
    (0, 3, 16, 0, True, BF16, "skipped", True, None),
    (0, 8, 48, 0, False, FP16, "skipping", False, None),
    (0, 64, 48, 0, False, FP16, "ordered", True, None),
    (1, 1, 64, 0, False, BF16, "skipped", True, None),
    (1, 3, 48, 1, True, BF16, "skipping", True, None),
    (1, 8, 16, 1, False, BF16, "permuted", True, None),
    (1, 64, 64, 0, False, FP16, "ordered", False, None),
    (4, 1, 48, 1, True, FP16, "ordered", True, None),
    (4, 3, 64, 1, False, FP16, "permuted", False, None),
    (4, 8, 64, 0, False, FP16, "skipping", True, None),
    (4, 64, 16, 0, True, BF16, "skipped", False, (4, 8, 4, 4)),
    (7, 1, 64, 1, True, BF16, "skipped", True, None),
    (7, 3, 16, 5, False, FP16, "ordered", False, None),
    (7, 8, 48, 0, False, FP16, "skipping", False, None),
    (7, 64, 64, 0, True, FP16, "permuted", True, (2, 16, 8, 4)),
    (8, 1, 64, 5, True, FP16, "skipping", True, None),
    (8, 3, 48, 0, True, BF16, "skipped", False, None),
    (8, 8, 64, 0, False, BF16, "ordered", False, None),
    (8, 64, 16, 1, False, FP16, "permuted", True, (1, 32, 2, 4)),
    (9, 1, 48, 1, True, BF16, "permuted", True, None),
    (9, 3, 16, 0, False, FP16, "skipping", False, None),
    (9, 8, 64, 5, True, BF16, "skipped", False, None),
    (9, 64, 48, 0, False, FP16, "ordered", True, (8, 8, 8, 8)),
    (17, 1, 48, 0, True, FP16, "permuted", True, None),
    (17, 3, 64, 5, False, FP16, "skipped", True, None),
    (17, 8, 16, 5, True, BF16, "ordered", True, (1, 2, 1, 1)),
    (17, 64, 16, 1, False, BF16, "skipping", False, (2, 16, 8, 4)),
    (64, 1, 16, 0, False, FP16, "skipped", True, None),
    (64, 3, 48, 1, False, FP16, "ordered", False, (8, 1, 8, 4)),
    (64, 8, 64, 0, True, BF16, "skipping", False, (8, 1, 8, 4)),
    (64, 64, 48, 5, True, BF16, "permuted", False, (4, 8, 4, 4)),
]


def grid_cases() -> Iterator[Any]:
    for tokens, heads, block_size, short, tight, dtype, slots, strided, tiling in GRID:
        case = Case(
            tokens,
            heads,
            block_size,
            inserted=tokens - short if short else None,
            block_stride=block_size * 584 if tight else None,
            dtype=dtype,
            slots=slots,
            strided=strided,
        )
        name = str(case) if tiling is None else f"{case}-tile{tiling_id(tiling)}"
        yield pytest.param(case, tiling and config(*tiling), id=name)


@pytest.mark.parametrize(("case", "forced"), list(grid_cases()))
def test_grid(case: Case, forced: dict[str, int] | None) -> None:
    run(operator, make(case), repeats=1, config=forced)


SLOTS = itertools.cycle(["permuted", "skipping", "ordered"])
FULL = [
    Case(tokens, heads, block_size, dtype=dtype, slots=next(SLOTS))
    for tokens in (0, 1, 4, 7, 8, 9, 17, 64)
    for heads in (1, 3, 8, 64)
    for block_size in (16, 48, 64)
    for dtype in (BF16, FP16)
]


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=str)
def test_full_grid(case: Case) -> None:
    run(operator, make(case))


SMALL = [Case(9, 8, 16, slots="skipping"), Case(17, 3, 48, inserted=12, dtype=FP16)]


SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")


@pytest.mark.parametrize("case", SMALL, ids=str)
@pytest.mark.parametrize("thresholds", [None, 0], ids=["by_size", "first_rule"])
@pytest.mark.parametrize("profile", vendors.names())
def test_profile(profile: str, thresholds: int | None, case: Case) -> None:
    """Each profile's text and tilings, the one for large problems too, at small sizes."""
    case = replace(case, fnuz=vendors.load(profile).lowering["e4m3_format"] == "fnuz")
    run(operator, make(case), profile=profile, thresholds=thresholds)
    launch = tilewright.last_launch()
    assert (launch.operator, launch.profile) == (NAME, profile)
    if thresholds == 0 and case.heads == 8:  # every tile of heads divides 8
        assert launch.rule == 0


def configurations() -> Iterator[Any]:
    """Every configuration in the rules of the profiles that modules are built for."""
    for profile in SHIPPED:
        for number, rule in enumerate(OPERATORS[NAME].kernel.rules(profile).rules):
            yield pytest.param(profile, dict(rule.config), id=f"{profile}-rule{number}")


@pytest.mark.parametrize(("profile", "forced"), list(configurations()))
def test_configuration_of_a_profile(profile: str, forced: dict[str, int]) -> None:
    run(operator, make(SMALL[0]), profile=profile, config=forced)
    launch = tilewright.last_launch()
    assert (launch.profile, dict(launch.config)) == (profile, forced)


TILINGS = [(1, 1, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1), (2, 2, 2, 2), (8, 1, 8, 4), (1, 8, 4, 2)]


@pytest.mark.parametrize("tiling", TILINGS, ids=tiling_id)
def test_forced_config_is_the_one_that_runs(tiling: tuple[int, int, int, int]) -> None:
    run(operator, make(Case(9, 8, 16, inserted=7)), config=config(*tiling))
    launched = tilewright.last_launch().config
    assert {key: launched[key] for key in config(*tiling)} == config(*tiling)


# Faults that implementations of this operator have had


@pytest.mark.parametrize("forced", [None, WIDE], ids=["by_size", "wide"])
def test_blocks_past_2_gib_are_addressed_in_64_bits(forced: dict[str, int] | None) -> None:
    run_far(operator, make(Case(17, 1, 16)), config=forced)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_rotated_tail_of_identical_rows_is_stored_once(dtype: torch.dtype) -> None:
    """A copy of the whole row, then of its rotated tail, would let either win."""
    inputs = make(Case(33, 1, content="identical", dtype=dtype))
    inputs.position_ids.fill_(1234)
    run(operator, inputs, repeats=2, config=WIDE)
    rows = stored(inputs)
    assert torch.equal(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize("thresholds", [None, 0], ids=["by_size", "first_rule"])
def test_every_address_has_one_writer(profile: str, thresholds: int | None) -> None:
    """As many bytes are stored as there are to write: two stores of one byte have no order."""
    inputs = make(Case(9, 2, 16, inserted=7, slots="skipping"))
    with interpret.counting() as counts:
        operator(*inputs.arguments(), profile=profile, thresholds=thresholds)
    rows = int((inputs.slot_mapping >= 0).sum())
    assert counts.bytes_stored == 9 * 2 * 1024 + rows * 584


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_exponent_where_amax_is_448_times_a_power_of_two(dtype: torch.dtype, profile: str) -> None:
    """log2 and division by approximation, or frexp, would be one off here."""
    inputs = make(Case(41, 1, dtype=dtype, content="thresholds"))
    run(operator, inputs, config=WIDE, profile=profile)
    exponents = threshold_exponents(dtype)
    codes, scales, _ = parts(inputs)
    exact, above = slice(len(exponents)), slice(len(exponents), 2 * len(exponents))
    assert scales[exact].tolist() == [127 + k for k in exponents]
    assert scales[above].tolist() == [128 + k for k in exponents]
    assert codes[exact, 17].tolist() == [0x7E] * len(exponents)
    assert codes[above, 17].tolist() == [0x76] * len(exponents)  # 224 of 448


def test_exponent_of_1_75_and_of_the_value_after_it() -> None:
    inputs = make(Case(2, 1, content="zeros"))
    inputs.kv[0, 5], inputs.kv[0, 70], inputs.kv[1, 5] = 1.75, -0.875, 1.7578125
    run(operator, inputs)
    _, scales, _ = parts(inputs)
    assert scales.view(2, 7)[:, :2].tolist() == [[119, 118], [120, 105]]


def test_no_amax_of_a_binade_is_clipped() -> None:
    """Every bfloat16 from 448 to 892: a scale chosen by floor saturates all but the first."""
    inputs = make(Case(19, 1, content="binade"))
    run(operator, inputs, config=WIDE)
    codes, scales, _ = parts(inputs)
    largest = torch.cat((torch.arange(448, 512, 2), torch.arange(512, 896, 4))).double()
    scale = (scales[: len(largest)].double() - 127).exp2()
    decoded = codes[: len(largest), 0].view(torch.float8_e4m3fn).double() * scale
    assert bool(((decoded + largest).abs() <= largest / 16).all())


def test_amax_is_of_the_values_as_given() -> None:
    """448.25 is no bfloat16; rounded to one first it would be 448 and lose its exponent."""
    inputs = make(Case(1, 1, dtype=FP16, content="zeros"))
    inputs.kv[0, 3] = 448.25
    run(operator, inputs)
    assert int(parts(inputs)[1][0]) == 128


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_nan_and_infinity_stay_in_their_block(dtype: torch.dtype, profile: str) -> None:
    inputs = make(Case(9, 2, dtype=dtype, content="not finite", spread=0))
    run(operator, inputs, profile=profile)
    codes, scales, tail = parts(inputs)
    codes, scales = codes.view(9, 7, 64), scales.view(9, 7)
    kv = inputs.kv[:, :PLAIN].view(9, 7, 64)

    # NaN: -448, and amax is that of the other values of its block.
    assert codes[0, 0, 5] == 0xFE
    assert scales[0, 0] == exponent_byte(kv[0, 0][~kv[0, 0].isnan()])
    # Infinity: -448 whatever its sign, the others zeros of theirs, in this block alone.
    for row, block, lane in ((1, 1, 6), (2, 2, 2)):
        others = torch.arange(64) != lane
        assert scales[row, block] == 255 and codes[row, block, lane] == 0xFE
        zeros = torch.where(kv[row, block] < 0, 0x80, 0x00)
        assert torch.equal(codes[row, block, others].long(), zeros[others])
        assert int((scales[row] == 255).sum()) == 1
    assert scales[3, 3] == 255 and codes[3, 3, [8, 11]].tolist() == [0xFE, 0xFE]
    # Nothing but NaN: the least scale.
    assert scales[6, 1] == 105 and bool((codes[6, 1] == 0xFE).all())
    # In a tail they stay in their pair; the codes before them do not change.
    assert tail[4].isnan().nonzero().flatten().tolist() == [2, 3]
    assert bool(tail[5, 12:14].isfinite().logical_not().all())
    assert bool(tail[5, :12].isfinite().all()) and bool(tail[5, 14:].isfinite().all())

    nan_heads = inputs.q.isnan().all(-1)
    assert torch.equal(nan_heads, inputs.q.isnan().any(-1))
    assert nan_heads.nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_zero_rows(dtype: torch.dtype) -> None:
    """No 0 / 0: scale byte 105, zeros that keep their sign, finite q."""
    inputs = make(Case(1, 3, dtype=dtype, content="zeros"))
    run(operator, inputs)
    codes, scales, tail = parts(inputs)
    assert scales.tolist() == [105] * 7
    assert codes.view(-1, 2).unique(dim=0).tolist() == [[0x00, 0x80]]
    assert bool((tail == 0).all()) and bool((inputs.q == 0).all())


def test_negative_slot_writes_nothing() -> None:
    """-1 // 16 and -1 % 16 name the last row of the block before the cache."""
    inputs = make(Case(2, 1, 16))
    inputs.slot_mapping.copy_(torch.tensor([-1, 0]))
    run(operator, inputs)
    changed = (inputs.cache_memory != UNTOUCHED).nonzero().flatten() - GUARD
    data = changed < 16 * 576
    assert int(changed[data].min()) >= 0 and int(changed[data].max()) < 576
    assert changed[~data].tolist() == list(range(16 * 576, 16 * 576 + 8))
    assert len(changed) > 500


def test_every_slot_negative_leaves_the_cache_as_it_is() -> None:
    inputs = make(Case(9, 3, 16, slots="skipped"))
    run(operator, inputs)
    assert bool((inputs.cache_memory == UNTOUCHED).all())


@pytest.mark.parametrize("forced", [None, WIDE], ids=["by_size", "wide"])
def test_rows_past_the_slots_are_normalised_and_not_inserted(forced: dict[str, int] | None) -> None:
    inputs = make(Case(8, 3, 16, inserted=5))
    before = inputs.q.clone()
    run(operator, inputs, config=forced)
    assert not bool((inputs.q[5:] == before[5:]).all(-1).any())
    data, _ = cache_rows(inputs.k_cache, 16)
    assert int((data != UNTOUCHED).any(-1).sum()) == 5


def test_no_rows_to_insert() -> None:
    run(operator, make(Case(4, 3, inserted=0)))


ENCODERS = [("nvidia-h200", "cast"), ("generic", "int_rne")]


@pytest.mark.parametrize(("profile", "encoder"), ENCODERS, ids=[e for _, e in ENCODERS])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_has_the_same_bytes_with_and_without_an_fp8_type(
    dtype: torch.dtype, profile: str, encoder: str
) -> None:
    inputs = make(Case(146, 1, dtype=dtype, content="every value"))
    run(operator, inputs, profile=profile, config=WIDE)
    assert tilewright.last_launch().lowerings["e4m3_encode"] == encoder


def test_strided_slots_and_positions_are_not_misread() -> None:
    inputs = make(Case(9, 3, 16, strided=True))
    assert inputs.slot_mapping.stride(0) == inputs.position_ids.stride(0) == 2
    run(operator, inputs)


def test_q_of_many_sizes_and_eps() -> None:
    """eps lies inside the root: it is what a head of small values is divided by."""
    for eps in (1e-6, 1e-2, 4.0):
        run(operator, make(Case(4, 3, spread=12, eps=eps, seed=3)))


# What a call refuses, before it launches or writes anything

Arguments = dict[str, Any]
BAD: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "q float32": ("q", lambda a: a["q"].float()),
    "q of rank 2": ("q", lambda a: a["q"][:, 0]),
    "q heads of 256": ("q", lambda a: a["q"][..., :256].contiguous()),
    "q not contiguous": ("q", lambda a: a["q"].transpose(0, 1).contiguous().transpose(0, 1)),
    "kv of another dtype": ("kv", lambda a: a["kv"].half()),
    "kv of rank 1": ("kv", lambda a: a["kv"][0]),
    "kv rows of 448": ("kv", lambda a: a["kv"][:, :448].contiguous()),
    "kv fewer rows than q": ("kv", lambda a: a["kv"][:-1]),
    "kv not contiguous": ("kv", lambda a: a["kv"].repeat_interleave(2, 0)[::2]),
    "kv on another device": ("kv", lambda a: a["kv"].to("meta")),
    "k_cache int8": ("k_cache", lambda a: a["k_cache"].view(torch.int8)),
    "k_cache on another device": ("k_cache", lambda a: a["k_cache"].to("meta")),
    "k_cache stride too small": ("k_cache", lambda a: strided_cache(16 * 584 - 16)),
    "k_cache stride odd": ("k_cache", lambda a: strided_cache(16 * 584 + 1)),
    "k_cache bytes apart": ("k_cache", lambda a: torch.zeros((3, 2 * 9344)).byte()[:, ::2]),
    "slot_mapping int32": ("slot_mapping", lambda a: a["slot_mapping"].int()),
    "slot_mapping of rank 2": ("slot_mapping", lambda a: a["slot_mapping"][:, None]),
    "more slots than tokens": ("slot_mapping", lambda a: torch.arange(6)),
    "position_ids int32": ("position_ids", lambda a: a["position_ids"].int()),
    "position_ids of rank 2": ("position_ids", lambda a: a["position_ids"][:, None]),
    "fewer positions than tokens": ("position_ids", lambda a: a["position_ids"][:-1]),
    "cos_sin_cache bfloat16": ("cos_sin_cache", lambda a: a["cos_sin_cache"].bfloat16()),
    "cos_sin_cache of rank 1": ("cos_sin_cache", lambda a: a["cos_sin_cache"][0]),
    "cos_sin_cache of 32": ("cos_sin_cache", lambda a: a["cos_sin_cache"][:, :32].contiguous()),
}
PARAMETERS = (
    *("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache"),
    *("eps", "cache_block_size"),
)


def strided_cache(stride: int) -> torch.Tensor:
    """Three blocks of 16 rows, `stride` bytes apart."""
    memory = torch.zeros(2 * stride + 16 * 584, dtype=torch.uint8)
    return memory.as_strided((3, min(stride, 16 * 584)), (stride, 1))


def refused(inputs: Inputs, arguments: Arguments) -> str:
    """The message of a call that must fail and write nothing."""
    before = inputs.written()
    with pytest.raises(ContractError) as error:
        operator(*(arguments[name] for name in PARAMETERS))
    assert inputs.written() == before
    assert NAME in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("problem", BAD, ids=lambda problem: problem.replace(" ", "_"))
def test_refuses(problem: str) -> None:
    name, change = BAD[problem]
    inputs = make(Case(5, 3, 16))
    arguments = dict(zip(PARAMETERS, inputs.arguments(), strict=True))
    arguments[name] = change(arguments)
    assert name in refused(inputs, arguments)


def test_refuses_everything_at_once() -> None:
    inputs = make(Case(5, 3, 16))
    arguments = dict(zip(PARAMETERS, inputs.arguments(), strict=True))
    problems = ["kv rows of 448", "k_cache int8", "more slots than tokens", "position_ids int32"]
    for name, change in [BAD[problem] for problem in problems]:
        arguments[name] = change(arguments)
    message = refused(inputs, arguments)
    assert [name for name in PARAMETERS[1:5] if name not in message] == []


# The reference against scalar arithmetic that shares no code with it


def stored(inputs: Inputs) -> torch.Tensor:
    """[rows, 584]: what the cache holds for each kv row; no slot may be negative."""
    data, scales = cache_rows(inputs.k_cache, inputs.case.block_size)
    block = inputs.slot_mapping // inputs.case.block_size
    row = inputs.slot_mapping % inputs.case.block_size
    return torch.cat((data[block, row], scales[block, row]), dim=1)


def parts(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [blocks of 64, 64] and scale bytes [blocks of 64] in order; tails [rows, 64]."""
    rows = stored(inputs)
    tail = rows[:, PLAIN:576].contiguous().view(inputs.case.dtype)
    return rows[:, :PLAIN].reshape(-1, 64), rows[:, 576:583].reshape(-1), tail


E4M3 = [m / 512 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1]
MIDDLES = [(a + b) / 2 for a, b in itertools.pairwise(E4M3)]


def exponent_byte(values: Any) -> int:
    largest = max(max(abs(float(x)) for x in values), 1e-4)
    e = -30
    while largest > 448 * 2.0**e:
        e += 1
    return e + 127


def e4m3_code(value: float) -> int:
    sign, value = (0x80 if struct.pack(">d", value)[0] & 0x80 else 0), abs(value)
    code = bisect.bisect_left(MIDDLES, value)
    if code < len(MIDDLES) and MIDDLES[code] == value and code % 2:
        code += 1
    return sign | code


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    significand, least = (8, -126) if dtype == BF16 else (11, -14)
    exponent = least
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - significand + 1)
    return float(round(value / step) * step)


def rotated(values: list[Fraction], cos_sin: list[float]) -> list[Fraction]:
    out = []
    for i in range(32):
        even, odd = values[2 * i : 2 * i + 2]
        cos, sin = Fraction(cos_sin[i]), Fraction(cos_sin[32 + i])
        out += [even * cos - odd * sin, even * sin + odd * cos]
    return out


def scalar_q(
    head: list[float], cos_sin: list[float], eps: float, dtype: torch.dtype
) -> list[float]:
    eps32 = Fraction(struct.unpack("f", struct.pack("f", eps))[0])
    mean = sum(Fraction(x) ** 2 for x in head) / 512 + eps32
    with localcontext() as context:
        context.prec = 60
        root = Fraction((Decimal(mean.numerator) / Decimal(mean.denominator)).sqrt())
    values = [Fraction(x) / root for x in head]
    return [rounded(x, dtype) for x in values[:448] + rotated(values[448:], cos_sin)]


def scalar_cache(inputs: Inputs) -> bytes:
    """The cache's memory after a call, written byte by byte."""
    case, memory = inputs.case, bytearray(inputs.cache_memory.tolist())
    pack = {BF16: lambda x: struct.pack(">f", x)[1::-1], FP16: lambda x: struct.pack("<e", x)}
    table, kv = inputs.cos_sin_cache.tolist(), inputs.kv.double().tolist()
    for token, slot in enumerate(inputs.slot_mapping.tolist()):
        if slot < 0:
            continue
        row, base = kv[token], GUARD + (slot // case.block_size) * case.stride
        data = base + (slot % case.block_size) * 576
        scales = base + case.block_size * 576 + (slot % case.block_size) * 8
        for block in range(7):
            lanes = row[block * 64 : block * 64 + 64]
            byte = exponent_byte(lanes)
            memory[scales + block] = byte
            for lane, x in enumerate(lanes):
                memory[data + block * 64 + lane] = e4m3_code(x * 2.0 ** (127 - byte))
        memory[scales + 7] = 0
        tail = rotated([Fraction(x) for x in row[448:]], table[int(inputs.position_ids[token])])
        for lane, value in enumerate(tail):
            start = data + 448 + 2 * lane
            memory[start : start + 2] = pack[case.dtype](rounded(value, case.dtype))
    return bytes(memory)


SCALAR = [
    Case(3, 2, 16),
    Case(3, 2, 16, dtype=FP16, spread=10),
    Case(5, 1, 48, inserted=4, slots="skipping", strided=True, block_stride=48 * 584 + 16),
    Case(41, 1, 16, content="thresholds"),
    Case(9, 1, 16, content="thresholds", dtype=FP16),
    Case(19, 1, 16, content="binade"),
    Case(1, 1, 16, content="zeros"),
    Case(146, 1, 64, content="every value"),
]


@pytest.mark.parametrize("case", SCALAR, ids=str)
def test_reference_is_scalar_arithmetic(case: Case) -> None:
    inputs = make(case)
    heads, table = inputs.q[:3].double().tolist(), inputs.cos_sin_cache.tolist()
    expected_q = [
        [scalar_q(head, table[int(position)], case.eps, case.dtype) for head in token]
        for token, position in zip(heads, inputs.position_ids, strict=False)
    ]
    expected_cache = scalar_cache(inputs)
    reference(*inputs.arguments())
    off = inputs.q[:3].double() != torch.tensor(expected_q, dtype=torch.float64)
    assert int(off.sum()) == 0
    # A tail zero may carry either sign: 0 * cos - x * 0. Everything else is equal to the bit.
    actual = torch.tensor(list(expected_cache), dtype=torch.uint8)
    differ = (actual != inputs.cache_memory).nonzero().flatten().tolist()
    assert all({int(actual[i]), int(inputs.cache_memory[i])} == {0x00, 0x80} for i in differ)
    data, _ = cache_rows(inputs.k_cache, case.block_size)
    assert len(differ) <= int((data[..., PLAIN:] == 0x80).sum())


def test_reference_on_nan_and_infinity() -> None:
    """The bytes that the contract names, given here by hand."""
    inputs = make(Case(7, 1, content="not finite"))
    reference(*inputs.arguments())
    codes, scales, tail = parts(inputs)
    codes, scales = codes.view(7, 7, 64), scales.view(7, 7)
    assert codes[0, 0, 5] == codes[1, 1, 6] == codes[2, 2, 2] == 0xFE
    assert scales[1, 1] == scales[2, 2] == scales[3, 3] == 255
    assert sorted(codes[1, 1].unique().tolist()) == [0x00, 0x80, 0xFE]
    assert scales[6, 1] == 105 and bool((codes[6, 1] == 0xFE).all())
    assert bool(inputs.q[0, 0].isnan().all()) and not bool(inputs.q[1:].isnan().any())
    assert tail.isfinite().logical_not().nonzero().tolist() == [[4, 2], [4, 3], [5, 12], [5, 13]]


@pytest.mark.parametrize("content", CONTENTS)
def test_checks_accept_the_reference(content: str) -> None:
    run(reference, make(Case(147, 1, 48, inserted=146, content=content)), repeats=1)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_slices_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepseek_v4

    monkeypatch.setattr(deepseek_v4, "SLICE", 3 * 2 * 512)
    case = Case(17, 2, 16, inserted=16, slots="skipping", dtype=dtype)
    assert len(list(deepseek_v4.q_slices(case))) == 6
    run(reference, make(case), repeats=1)


# The checks can fail: each of these is a reference with one thing wrong


def broken(change: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
    def call(inputs: Inputs) -> None:
        def wrong(*arguments: Any) -> None:
            reference(*arguments)
            change(inputs)

        run(wrong, inputs)

    return call


def add_ulps(tensor: torch.Tensor, steps: int) -> None:
    tensor.view(torch.int16).add_(steps)


def unrotate(inputs: Inputs) -> None:
    data, _ = cache_rows(inputs.k_cache, 16)
    slot = inputs.slot_mapping[3]
    data[slot // 16, slot % 16, PLAIN:] = inputs.kv[3, PLAIN:].view(torch.uint8)


BROKEN: dict[str, tuple[Callable[[Inputs], None], str]] = {
    "q 3 ulp off": (lambda i: add_ulps(i.q[4, 1, 17:18], 3), r"q\[token=4, head=1, lane=17\]"),
    "q often 1 ulp off": (lambda i: add_ulps(i.q[4, 1, :40], 1), "not the correctly rounded"),
    "q row not written": (lambda i: i.q[8].copy_(i.q[7]), r"q\[token=8, "),
    "before q": (lambda i: i.q_memory[GUARD - 1].fill_(0), "memory before q: byte 8190"),
    "after q": (lambda i: i.q_memory[-GUARD].fill_(0), "memory after q: byte 0"),
    "tail not rotated": (unrotate, r"rotated tail\[kv_row=3, lane="),
    "code": (lambda i: i.cache_memory[GUARD + 576 * 2 + 9].add_(1), r"row=2 .*code of lane=9"),
    "scale": (lambda i: i.cache_memory[GUARD + 576 * 16 + 12].add_(1), r"row=1 .*scale=4"),
    "zero byte": (lambda i: i.cache_memory[GUARD + 576 * 16 + 7].add_(1), r"row=0 .*scale=7"),
    "padding": (lambda i: i.cache_memory[GUARD + 584 * 16].fill_(0), "byte 0 of its padding"),
    "before the cache": (lambda i: i.cache_memory[GUARD - 1].fill_(0), "byte -1 from its start"),
    "after the cache": (lambda i: i.cache_memory[-1].fill_(0), "outside it"),
    "kv written": (lambda i: i.kv[0, 0].add_(1), "the call changed kv"),
    "positions written": (lambda i: i.position_ids[-1].add_(1), "the call changed position_ids"),
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.replace(" ", "_"))
def test_checks_see(fault: str) -> None:
    change, message = BROKEN[fault]
    with pytest.raises(AssertionError, match=message):
        broken(change)(make(Case(9, 2, 16, slots="ordered")))


def test_checks_see_a_result_that_varies() -> None:
    calls = itertools.count()

    def varying(*arguments: Any) -> None:
        reference(*arguments)
        if next(calls):
            add_ulps(arguments[0][0, 0, :1], 1)

    with pytest.raises(AssertionError, match="repeat 1 on equal inputs changed q"):
        run(varying, make(Case(4, 2)), repeats=1)


def test_checks_see_a_32_bit_offset() -> None:
    """The far cache: 32-bit offsets of its last block land before its start."""

    def wrapping(q: Any, kv: Any, k_cache: torch.Tensor, slots: Any, *rest: Any) -> None:
        reference(q, kv, k_cache, torch.where(slots < 32, slots, -1), *rest)
        wrapped = k_cache.storage_offset() + 2 * k_cache.stride(0) - 2**32
        block = k_cache.as_strided((1, k_cache.shape[1]), (1, 1), wrapped)
        reference(q.clone(), kv, block, torch.where(slots < 32, -1, slots - 32), *rest)

    with pytest.raises(AssertionError, match=r"rotated tail\[kv_row="):
        run_far(wrapping, make(Case(17, 1, 16)))
