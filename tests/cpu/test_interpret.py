"""The interpreter against torch: every cast and operation that generated kernels use, and what surrounds a launch."""

from __future__ import annotations

import linecache
import math
import threading
import traceback
import types

import pytest
import torch

pytest.importorskip("triton", reason="the interpreter runs Triton kernels")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilewright import interpret
from tilewright.errors import DeviceError, GenerationError

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TRITON = {
    BF16: tl.bfloat16,
    F16: tl.float16,
    F32: tl.float32,
    F64: tl.float64,
    E4M3: tl.float8e4nv,
    E5M2: tl.float8e5,
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
}

HEAD = """
import torch
import triton
import triton.language as tl
"""

_count = 0


def module(text: str) -> types.ModuleType:
    """Loads kernels under a name and a file of their own."""
    global _count
    _count += 1
    return interpret.load(HEAD + text, f"case_{_count}", f"<interpreted case {_count}>")


def elementwise(expression: str, *inputs: torch.Tensor, out: torch.dtype, setup: str = "") -> torch.Tensor:
    """`expression` over a, b, c ..., blocks loaded from `inputs` of one size, a power of two, stored as `out`."""
    size = inputs[0].numel()
    letters = "abcdef"[: len(inputs)]
    loads = "\n    ".join(f"{letter} = tl.load({letter}_ptr + lane)" for letter in letters)
    kernel = module(f"""
@triton.jit
def kernel({", ".join(f"{letter}_ptr" for letter in letters)}, out_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    {loads}
    {setup}
    tl.store(out_ptr + lane, {expression})
""").kernel
    result = poisoned(size, dtype=out)
    kernel[(1,)](*inputs, result, SIZE=size)
    return result


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, 0xA5, dtype=torch.uint8).repeat_interleave(dtype.itemsize, -1).view(dtype)


def assert_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, except that any NaN equals any other."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if got.dtype.is_floating_point:
        nan = torch.isnan(expected.float())
        assert torch.equal(torch.isnan(got.float()), nan)
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
        got, expected = (torch.where(nan, 0, value.contiguous().view(integer)) for value in (got, expected))
    wrong = (got != expected).nonzero()
    assert not len(wrong), f"{len(wrong)} differ, first at {wrong[0].tolist()}"


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)


def every_fp8(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)


def dense_float32() -> torch.Tensor:
    """Every bf16 with low mantissas on, beside and between the ties of bf16, fp16 and fp8."""
    high = every_bf16().view(torch.int16).to(torch.int64)[:, None] << 16
    random = torch.randint(0, 1 << 16, (1 << 16, 1), generator=torch.Generator().manual_seed(0))
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xEFFF, 0xF000, 0xFFFF])
    low = torch.cat([low.expand(1 << 16, -1), random, random.flip(0), random ^ 0x8000], dim=1)
    return (high + low).to(torch.int32).view(F32).flatten()


def to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's cast, saturating for fp8 whatever the version of torch."""
    if dtype in (E4M3, E5M2) and values.dtype not in (E4M3, E5M2):
        limit = torch.finfo(dtype).max
        values = values.float().clamp(-limit, limit)
    return values.to(F32).to(dtype) if values.dtype in (E4M3, E5M2) else values.to(dtype)


def cast(values: torch.Tensor, dtype: torch.dtype, options: str = "") -> torch.Tensor:
    kernel = module(f"""
@triton.jit
def kernel(x_ptr, out_ptr, SIZE: tl.constexpr, TYPE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane).to(TYPE{options}))
""").kernel
    out = poisoned(values.numel(), dtype=dtype)
    size = min(values.numel(), 1 << 16)
    kernel[(values.numel() // size,)](values, out, SIZE=size, TYPE=TRITON[dtype])
    return out


# Casts


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, E5M2, F64], ids=str)
def test_cast_from_every_kind_of_float32(dtype: torch.dtype) -> None:
    values = dense_float32()
    assert_bits(cast(values, dtype), to(values, dtype))


@pytest.mark.parametrize("dtype", [F32, F16, E4M3, E5M2, F64], ids=str)
def test_cast_from_every_bf16(dtype: torch.dtype) -> None:
    assert_bits(cast(every_bf16(), dtype), to(every_bf16(), dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, E4M3, E5M2, F64], ids=str)
def test_cast_from_every_fp16(dtype: torch.dtype) -> None:
    values = every_bf16().view(F16)
    assert_bits(cast(values, dtype), to(values, dtype))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("source", [E4M3, E5M2], ids=str)
def test_cast_from_every_fp8(source: torch.dtype, dtype: torch.dtype) -> None:
    assert_bits(cast(every_fp8(source), dtype), to(every_fp8(source), dtype))


def test_cast_to_e4m3_saturates_as_a_gpu_does() -> None:
    values = torch.tensor([448.0, 463.9, 464.0, 465.0, 1e30, math.inf, -449.0, -math.inf])
    assert cast(values, E4M3).view(torch.uint8).tolist() == [0x7E] * 6 + [0xFE] * 2
    nans = cast(torch.tensor([math.nan, -math.nan]), E4M3).view(torch.uint8)
    assert {value & 0x7F for value in nans.tolist()} == {0x7F}


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_cast_toward_zero(dtype: torch.dtype) -> None:
    values = dense_float32()
    got = cast(values, dtype, ', fp_downcast_rounding="rtz"').double()
    exact, kept = values.double(), ~values.isnan()
    step = torch.nextafter(got.to(dtype), torch.full_like(got, math.inf, dtype=dtype) * got.sign().to(dtype)).double()
    assert (got.abs() <= exact.abs())[kept].all()
    inside = kept & (got != 0) & (exact.abs() < torch.finfo(dtype).max)
    assert (step.abs() > exact.abs())[inside].all()
    assert got[kept].isinf().equal(values[kept].isinf())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("source", [F32, BF16, F16], ids=str)
def test_cast_float_to_integer_truncates(source: torch.dtype, dtype: torch.dtype) -> None:
    low = 0 if dtype == torch.uint8 else -128
    values = torch.linspace(low, 127.9, 512).to(source)
    assert_bits(cast(values, dtype), values.to(dtype))


def test_cast_float_to_integer_outside_saturates() -> None:
    values = torch.tensor([3e9, -3e9, math.inf, -math.inf, math.nan, 2.0**31, -(2.0**31), 2.0**31 - 128])
    largest, least = 2**31 - 1, -(2**31)
    assert cast(values, torch.int32).tolist() == [largest, least, largest, least, 0, largest, least, 2**31 - 128]
    values = torch.tensor([1e19, -1e19, 2.0**63, -(2.0**63), 2.0**62, math.nan, 1.5, -1.5])
    expected = [2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 2**62, 0, 1, -1]
    assert cast(values, torch.int64).tolist() == expected


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("source", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_cast_integer_to_float(source: torch.dtype, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**11), 2**11).to(source)
    assert_bits(cast(values, dtype), values.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("source", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_cast_between_integers_wraps(source: torch.dtype, dtype: torch.dtype) -> None:
    values = (torch.arange(-(2**9), 2**9) * 12345).to(source)
    assert_bits(cast(values, dtype), values.to(dtype))


@pytest.mark.parametrize("source, dtype", [(F32, torch.int32), (BF16, torch.int16), (E4M3, torch.uint8)], ids=str)
def test_bitcast_both_ways(source: torch.dtype, dtype: torch.dtype) -> None:
    bits = torch.arange(-128, 128).to(dtype) * 8191
    assert torch.equal(cast(bits.view(source), dtype, ", bitcast=True"), bits)
    assert torch.equal(cast(bits, source, ", bitcast=True").view(dtype), bits)


def test_bitcast_to_uint8_is_unsigned_after() -> None:
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = elementwise("a.to(tl.uint8, bitcast=True).to(tl.int32) // 2", bits.view(E4M3), out=torch.int32)
    assert torch.equal(got, bits.int() // 2)


def test_constants_take_the_type_of_the_block() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert_bits(elementwise("a * 1.001 + 0.3", x, out=BF16), (x * torch.tensor(1.001, dtype=BF16) + 0.3))
    assert_bits(elementwise("tl.full([SIZE], 1.001, tl.bfloat16)", x, out=BF16), torch.full((64,), 1.001, dtype=BF16))


def test_float_argument_is_float32() -> None:
    mod = module("""
@triton.jit
def kernel(x_ptr, out_ptr, eps, typed: tl.float64, LANES: tl.constexpr):
    tl.static_assert(eps.dtype == tl.float32)
    x = tl.load(x_ptr + tl.arange(0, LANES)) + eps
    tl.static_assert(x.dtype == tl.float32)
    tl.store(out_ptr + tl.arange(0, LANES), x)
""")
    x, out = torch.ones(4, dtype=BF16), torch.zeros(4)
    mod.kernel[(1,)](x, out, 1e-6, 0.5, LANES=4)
    assert_bits(out, torch.ones(4) + 1e-6)


# Arithmetic


def bf16_pair() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    special = torch.tensor([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 3e38, 1e-40]).to(BF16)
    pairs = torch.cartesian_prod(special.float(), special.float()).to(BF16)
    a, b = (torch.cat([torch.randn(4032, generator=random).to(BF16), pairs[:, side]]) for side in (0, 1))
    return a, b


@pytest.mark.parametrize("operator", ["+", "-", "*"])
def test_bf16_arithmetic_rounds_once(operator: str) -> None:
    a, b = bf16_pair()
    expected = eval(f"a.float() {operator} b.float()").to(BF16)
    assert_bits(elementwise(f"a {operator} b", a, b, out=BF16), expected)


def test_bf16_division_is_float32() -> None:
    a, b = bf16_pair()
    assert_bits(elementwise("a / b", a, b, out=F32), a.float() / b.float())


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "==", "!="])
def test_bf16_comparisons(operator: str) -> None:
    a, b = bf16_pair()
    b[:512] = a[:512]
    assert torch.equal(elementwise(f"a {operator} b", a, b, out=torch.bool), eval(f"a {operator} b"))


def test_bf16_negation_absolute_value_and_choice() -> None:
    a, b = bf16_pair()
    assert_bits(elementwise("0 - a", a, out=BF16), 0 - a)
    assert_bits(elementwise("tl.abs(a)", a, out=BF16), a.abs())
    assert_bits(elementwise("tl.where(a > b, a, b)", a, b, out=BF16), torch.where(a > b, a, b))


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_extremes_ignore_nan_as_on_nvidia(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, math.nan, 2.0, math.nan], dtype=dtype)
    b = torch.tensor([3.0, 5.0, math.nan, math.nan], dtype=dtype)
    assert_bits(elementwise("tl.maximum(a, b)", a, b, out=dtype), torch.fmax(a, b))
    assert_bits(elementwise("tl.minimum(a, b)", a, b, out=dtype), torch.fmin(a, b))
    every = ", propagate_nan=tl.PropagateNan.ALL"
    assert_bits(elementwise(f"tl.maximum(a, b{every})", a, b, out=dtype), torch.maximum(a, b))
    assert_bits(elementwise(f"tl.minimum(a, b{every})", a, b, out=dtype), torch.minimum(a, b))
    clamped = elementwise("tl.clamp(a, 1.5, 4.0)", a, out=dtype)
    assert_bits(clamped, torch.tensor([1.5, 1.5, 2.0, 1.5], dtype=dtype))


def test_max_of_a_block_ignores_nan() -> None:
    x = torch.tensor([1.0, math.nan, 4.0, 2.0])
    assert elementwise("tl.max(a, 0) + tl.zeros([SIZE], tl.float32)", x, out=F32).tolist() == [4.0] * 4
    assert elementwise("tl.min(a, 0) + tl.zeros([SIZE], tl.float32)", x, out=F32).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "expression, reference",
    [
        ("tl.rsqrt(a)", torch.rsqrt),
        ("tl.sqrt(a)", torch.sqrt),
        ("tl.sqrt_rn(a)", torch.sqrt),
        ("tl.exp(a)", torch.exp),
        ("tl.exp2(a)", torch.exp2),
        ("tl.log(a)", torch.log),
        ("tl.log2(a)", torch.log2),
        ("tl.sin(a)", torch.sin),
        ("tl.cos(a)", torch.cos),
        ("tl.erf(a)", torch.erf),
        ("tl.floor(a)", torch.floor),
        ("tl.ceil(a)", torch.ceil),
        ("tl.sigmoid(a)", torch.sigmoid),
        ("tl.abs(a - 8)", lambda x: (x - 8).abs()),
        ("-a", torch.neg),
        ("(a - 8) % 3", lambda x: torch.fmod(x - 8, 3)),
        ("tl.fdiv(a, 3.0)", lambda x: x / 3),
        ("tl.div_rn(a, a + 1)", lambda x: x / (x + 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_float32_functions(expression: str, reference) -> None:
    x = torch.rand(256, generator=torch.Generator().manual_seed(3)) * 16 + 1e-3
    torch.testing.assert_close(elementwise(expression, x, out=F32), reference(x), rtol=1e-6, atol=1e-7)


def test_fma_rounds_once() -> None:
    random = torch.Generator().manual_seed(4)
    a, b, c = (torch.randn(4096, generator=random) for _ in range(3))
    c = torch.where(torch.arange(4096) % 2 == 0, c, -(a * b))  # the rounding error of the product is what remains
    expected = (a.double() * b.double() + c.double()).float()
    assert_bits(elementwise("tl.fma(a, b, c)", a, b, c, out=F32), expected)
    # Just below the tie above z, by 2**-60: a float64 sum is the tie itself, and would round up to the even 1 + 2**-22.
    x, y, z = torch.tensor([1 + 2.0**-18]), torch.tensor([(1 - 2.0**-18) * 2.0**-24]), torch.tensor([1 + 2.0**-23])
    assert elementwise("tl.fma(a, b, c)", x, y, z, out=F32).item() == 1 + 2.0**-23


def test_integers_wrap_and_divide_toward_zero() -> None:
    a = torch.tensor([7, -7, 7, -7, 2**31 - 1, -(2**31), 100, 0], dtype=torch.int32)
    b = torch.tensor([2, 2, -2, -2, 1, 3, 7, 5], dtype=torch.int32)
    assert torch.equal(elementwise("a // b", a, b, out=torch.int32), torch.div(a, b, rounding_mode="trunc"))
    assert torch.equal(elementwise("a % b", a, b, out=torch.int32), torch.fmod(a, b))
    assert torch.equal(elementwise("a + a", a, out=torch.int32), a + a)
    assert torch.equal(elementwise("a * 65537", a, out=torch.int32), a * 65537)
    assert torch.equal(elementwise("a >> 3", a, out=torch.int32), a >> 3)
    assert elementwise("tl.cdiv(a, 4)", b.abs(), out=torch.int32).tolist() == [1, 1, 1, 1, 1, 1, 2, 2]


def test_int64_arithmetic_does_not_wrap_at_32_bits() -> None:
    a = torch.tensor([1, 70_000, -70_000, 2**31 - 1], dtype=torch.int32)
    assert torch.equal(elementwise("a.to(tl.int64) * 10240", a, out=torch.int64), a.long() * 10240)
    assert torch.equal(elementwise("(a * 100000).to(tl.int64)", a, out=torch.int64), (a * 100000).long())
    assert torch.equal(elementwise("a + tl.cast(1, tl.int64) * 4294967296", a, out=torch.int64), a.long() + 2**32)


def test_unsigned_arithmetic() -> None:
    a = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    wide = a.int()
    assert torch.equal(elementwise("a // 3", a, out=torch.uint8).int(), wide // 3)
    assert torch.equal(elementwise("a % 7", a, out=torch.uint8).int(), wide % 7)
    assert torch.equal(elementwise("a >> 3", a, out=torch.uint8).int(), wide >> 3)
    assert torch.equal(elementwise("a > 200", a, out=torch.bool), wide > 200)
    assert torch.equal(elementwise("tl.maximum(a, 128)", a, out=torch.uint8).int(), wide.clamp(min=128))
    assert torch.equal(elementwise("a.to(tl.float32)", a, out=F32), wide.float())
    assert torch.equal(elementwise("a * 3", a, out=torch.uint8).int(), wide * 3 % 256)
    words = (torch.arange(256) * 0x01010101).to(torch.int32)
    unsigned = words.long() & 0xFFFFFFFF
    typed = "a.to(tl.uint32, bitcast=True)"
    assert torch.equal(elementwise(f"({typed} >> 7).to(tl.int64)", words, out=torch.int64), unsigned >> 7)
    assert torch.equal(elementwise(f"({typed} // 10).to(tl.int64)", words, out=torch.int64), unsigned // 10)
    assert torch.equal(elementwise(f"{typed} < 2147483648", words, out=torch.bool), unsigned < 2**31)
    high = elementwise(f"tl.umulhi({typed}, {typed}).to(tl.int64)", words, out=torch.int64)
    assert high.tolist() == [value * value >> 32 for value in unsigned.tolist()]


def test_booleans() -> None:
    a = torch.tensor([True, True, False, False])
    b = torch.tensor([True, False, True, False])
    assert torch.equal(elementwise("a & b", a, b, out=torch.bool), a & b)
    assert torch.equal(elementwise("a | b", a, b, out=torch.bool), a | b)
    assert torch.equal(elementwise("a ^ b", a, b, out=torch.bool), a ^ b)
    assert torch.equal(elementwise("~a", a, out=torch.bool), ~a)
    assert torch.equal(elementwise("a.to(tl.int32) + b", a, b, out=torch.int32), a.int() + b.int())


# Reductions, scans, products


REDUCE = """
@triton.jit
def kernel(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offset = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + offset)
    {body}
"""


def reduced(expression: str, x: torch.Tensor, axis: int, out: torch.dtype) -> torch.Tensor:
    result = poisoned(x.shape[1 - axis], dtype=out)
    body = f"tl.store(out_ptr + tl.arange(0, {x.shape[1 - axis]}), {expression})"
    module(REDUCE.format(body=body)).kernel[(1,)](x, result, ROWS=x.shape[0], COLUMNS=x.shape[1])
    return result


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_reductions_of_floats(dtype: torch.dtype, axis: int) -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    total = reduced(f"tl.sum(x, axis={axis})", x, axis, dtype)
    if dtype == F32:
        torch.testing.assert_close(total, x.sum(axis), rtol=1e-6, atol=1e-6)
    else:
        exact = x.double().sum(axis)
        assert ((total.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps / 2 * 1.01).all()
    assert_bits(reduced(f"tl.max(x, axis={axis})", x, axis, dtype), x.amax(axis))
    assert_bits(reduced(f"tl.min(x, axis={axis})", x, axis, dtype), x.amin(axis))
    assert torch.equal(reduced(f"tl.argmax(x, axis={axis})", x, axis, torch.int32), x.argmax(axis).int())
    assert torch.equal(reduced(f"tl.argmin(x, axis={axis})", x, axis, torch.int32), x.argmin(axis).int())


def test_reductions_of_integers() -> None:
    x = torch.randint(-100, 100, (8, 16), generator=torch.Generator().manual_seed(6)).to(torch.int8)
    assert torch.equal(reduced("tl.sum(x, axis=1)", x, 1, torch.int32), x.int().sum(1).int())
    assert torch.equal(reduced("tl.max(x, axis=0)", x, 0, torch.int32), x.amax(0).int())
    unsigned = x.view(torch.uint8)
    assert torch.equal(reduced("tl.sum(x, axis=1)", unsigned, 1, torch.int32), unsigned.int().sum(1).int())
    assert torch.equal(reduced("tl.max(x, axis=1)", unsigned, 1, torch.int32), unsigned.amax(1).int())
    words = x.int()
    got = reduced("tl.xor_sum(x, axis=1)", words, 1, torch.int32).tolist()
    assert got == [int(torch.tensor(0).new_tensor(_xor(row))) for row in words.tolist()]


def _xor(values: list[int]) -> int:
    total = 0
    for value in values:
        total ^= value
    return total


def test_reduction_of_everything_and_kept_dimensions() -> None:
    mod = module(
        REDUCE.format(
            body="""
    tl.store(out_ptr, tl.sum(x))
    tl.store(out_ptr + 1, tl.max(x, axis=None))
    centred = x - tl.sum(x, axis=1, keep_dims=True) / COLUMNS
    tl.store(out_ptr + 2, tl.sum(tl.abs(tl.sum(centred, axis=1))))
    best, where = tl.max(x, axis=1, return_indices=True)
    tl.store(out_ptr + 4 + tl.arange(0, ROWS), best)
    tl.store(out_ptr + 4 + ROWS + tl.arange(0, ROWS), where)
    tl.store(out_ptr + 3, x.sum().to(tl.float32))
"""
        )
    )
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(7))
    out = torch.empty(20)
    mod.kernel[(1,)](x, out, ROWS=8, COLUMNS=32)
    expected = torch.stack([x.sum(), x.max(), torch.tensor(0.0), x.sum()])
    torch.testing.assert_close(out[:4], expected, atol=1e-5, rtol=1e-6)
    assert torch.equal(out[4:12], x.amax(1)) and torch.equal(out[12:], x.argmax(1).float())


def test_reduction_and_scan_with_a_combine_function_of_the_module() -> None:
    mod = module("""
@triton.jit
def multiply(a, b):
    return a * b

@triton.jit
def multiply_add(a, b, c, d):
    return a * c, c * b + d

@triton.jit
def kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + lane), tl.load(b_ptr + lane)
    scale, offset = tl.reduce((a, b), 0, multiply_add)
    tl.store(out_ptr, a.reduce(0, multiply))
    tl.store(out_ptr + 1, offset)
    tl.device_assert(tl.abs(scale / a.reduce(0, multiply) - 1) < 1e-12)
    scales, offsets = tl.associative_scan((a, b), 0, multiply_add)
    tl.store(out_ptr + 2 + lane, offsets)
""")
    a, b = torch.rand(16, dtype=F64) + 0.5, torch.rand(16, dtype=F64)
    out = torch.empty(18, dtype=F64)
    mod.kernel[(1,)](a, b, out, SIZE=16)
    scale, offset, offsets = 1.0, 0.0, []
    for left, right in zip(a.tolist(), b.tolist(), strict=True):
        scale, offset = scale * left, offset * left + right
        offsets.append(offset)
    torch.testing.assert_close(out, torch.tensor([scale, offset, *offsets], dtype=F64))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int32], ids=str)
def test_cumsum(dtype: torch.dtype) -> None:
    x = torch.randint(-8, 8, (64,), generator=torch.Generator().manual_seed(8)).to(dtype)
    out = torch.int32 if dtype == torch.int32 else F32
    expected = x.to(out).cumsum(0).to(out)
    assert torch.equal(elementwise("tl.cumsum(a, 0)", x, out=out), expected)
    backwards = elementwise("tl.cumsum(a, 0, reverse=True)", x, out=out)
    assert torch.equal(backwards, x.to(out).flip(0).cumsum(0).flip(0).to(out))


def test_library_functions_written_in_triton() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(elementwise("tl.softmax(a)", x, out=F32), x.softmax(0))
    assert torch.equal(elementwise("tl.sort(a)", x, out=F32), x.sort().values)
    assert torch.equal(elementwise("tl.flip(a, 0)", x, out=F32), x.flip(0))
    noise = elementwise("tl.rand(7, tl.arange(0, SIZE))", x, out=F32)
    assert 0 <= noise.min() < noise.max() < 1 and noise.unique().numel() == 64


DOT = """
@triton.jit
def kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr):
    row, column, step = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + row[:, None] * K + step[None, :])
    b = tl.load(b_ptr + step[:, None] * N + column[None, :])
    acc = tl.zeros([M, N], dtype=OUT)
    acc = tl.dot(a, b, acc, out_dtype=OUT)
    acc += tl.dot(a, b, out_dtype=OUT)
    tl.store(out_ptr + row[:, None] * N + column[None, :], acc)
"""


@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2], ids=str)
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(10)
    a, b = torch.randn(16, 64, generator=random).to(dtype), torch.randn(64, 32, generator=random).to(dtype)
    out = torch.empty(16, 32)
    module(DOT).kernel[(1,)](a, b, out, M=16, N=32, K=64, OUT=tl.float32)
    torch.testing.assert_close(out, (2 * (a.double() @ b.double())).float(), rtol=1e-5, atol=1e-5)


def test_dot_of_int8_and_of_trees() -> None:
    a = torch.full((16, 64), -128, dtype=torch.int8)
    out = torch.empty(16, 16, dtype=torch.int32)
    module(DOT).kernel[(1,)](a, a.view(64, 16), out, M=16, N=16, K=64, OUT=tl.int32)
    assert (out == 2 * 64 * 128 * 128).all()


# Shapes


def test_split_join_interleave_permute_and_broadcast() -> None:
    mod = module("""
@triton.jit
def kernel(x_ptr, out_ptr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    x = tl.load(x_ptr + lane)
    even, odd = tl.split(x.reshape([LANES // 2, 2]))
    tl.store(out_ptr + lane, tl.join(odd, even).reshape(LANES))
    tl.store(out_ptr + LANES + lane, tl.interleave(even, odd))
    square = x.reshape(4, LANES // 4)
    tl.store(out_ptr + 2 * LANES + lane, tl.trans(square).reshape([LANES]))
    tl.store(out_ptr + 3 * LANES + lane, tl.permute(square, 1, 0).reshape([LANES]))
    tl.store(out_ptr + 4 * LANES + lane, square.T.reshape([LANES]))
    row = tl.load(x_ptr + tl.arange(0, LANES // 4))
    tl.store(out_ptr + 5 * LANES + lane, tl.broadcast_to(row[None, :], [4, LANES // 4]).reshape([LANES]))
    cube = x.reshape([2, 2, LANES // 4]).permute((2, 0, 1))
    tl.store(out_ptr + 6 * LANES + lane, cube.reshape(LANES))
    tl.store(out_ptr + 7 * LANES + lane, tl.expand_dims(x, 0).reshape(LANES))
    tl.static_assert(x.shape[0] == LANES)
    tl.static_assert(len(cube.shape) == 3)
    tl.static_assert(cube.shape[0] * 4 == LANES)
""")
    x = torch.arange(32, dtype=F32)
    out = torch.empty(8, 32)
    mod.kernel[(1,)](x, out, LANES=32)
    pairs, square = x.view(16, 2), x.view(4, 8)
    assert torch.equal(out[0], pairs.flip(1).flatten())
    assert torch.equal(out[1], x)
    for row in (2, 3, 4):
        assert torch.equal(out[row], square.T.flatten())
    assert torch.equal(out[5], x[:8].repeat(4))
    assert torch.equal(out[6], x.view(2, 2, 8).permute(2, 0, 1).flatten())
    assert torch.equal(out[7], x)


def test_gather_and_histogram() -> None:
    index = torch.tensor([3, 0, 2, 1, 3, 3, 7, 5], dtype=torch.int32)
    values = torch.randn(8)
    assert torch.equal(elementwise("tl.gather(a, b, 0)", values, index, out=F32), values[index.long()])
    counted = elementwise("tl.histogram(a, 8)", index, out=torch.int32)
    assert torch.equal(counted, torch.bincount(index, minlength=8).int())
    masked = elementwise("tl.histogram(a, 8, mask=a != 3)", index, out=torch.int32)
    assert masked.tolist() == [1, 1, 1, 0, 0, 1, 0, 1]


# Memory


def test_pointers_to_another_type() -> None:
    mod = module("""
@triton.jit
def kernel(bytes_ptr, out_ptr, offset, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    values = (bytes_ptr + offset).to(tl.pointer_type(tl.bfloat16))
    tl.store(out_ptr + lane, tl.load(values + lane))
    again = (bytes_ptr + offset).to(tl.pointer_type(tl.bfloat16), bitcast=True)
    tl.store(again + lane, tl.load(again + lane) * 2)
    tl.store(bytes_ptr.to(tl.pointer_type(tl.float8e4nv)) + lane, tl.load(values + lane).to(tl.float8e4nv))
""")
    values = torch.randn(16).to(BF16)
    memory = torch.cat([torch.zeros(64, dtype=torch.uint8), values.view(torch.uint8)])
    out = torch.empty(16, dtype=BF16)
    mod.kernel[(1,)](memory, out, 64, LANES=16)
    assert torch.equal(out, values)
    assert torch.equal(memory[64:].view(BF16), values * 2)
    assert_bits(memory[:16].view(E4M3), to(values * 2, E4M3))


MASKED = """
@triton.jit
def kernel(x_ptr, out_ptr, size, SIZE: tl.constexpr, ZERO: tl.constexpr = 0):
    lane = tl.arange(0, SIZE)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=lane < size))
    tl.store(out_ptr + SIZE + lane, tl.load(x_ptr + lane, mask=lane < size, other=ZERO))

@triton.jit
def scalar(x_ptr, out_ptr, size):
    tl.store(out_ptr, tl.load(x_ptr, mask=size > 1))
    tl.store(out_ptr + 1, tl.load(x_ptr, mask=size > 1, other=0))
"""


@pytest.mark.parametrize("dtype", [F32, BF16, F16, E4M3], ids=str)
def test_poison_of_floats(dtype: torch.dtype) -> None:
    kernel = module(MASKED).kernel
    x = torch.ones(3).to(dtype)
    for enabled in (False, True):
        out = poisoned(8, dtype=dtype)
        with interpret.poison(enabled):
            kernel[(1,)](x, out, 3, SIZE=4, ZERO=0.0)
        assert out.float()[[0, 1, 2, 4, 5, 6, 7]].tolist() == [1, 1, 1, 1, 1, 1, 0]
        assert bool(out.float()[3].isnan()) is enabled
        assert enabled or out.float()[3] == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_poison_of_integers(dtype: torch.dtype) -> None:
    out = torch.zeros(8, dtype=dtype)
    with interpret.poison():
        module(MASKED).kernel[(1,)](torch.ones(3, dtype=dtype), out, 3, SIZE=4)
    largest = torch.iinfo(torch.int8 if dtype == torch.uint8 else dtype).max
    assert out.tolist() == [1, 1, 1, largest, 1, 1, 1, 0]


def test_poison_of_scalars_and_its_default() -> None:
    kernel = module(MASKED).scalar
    x, out = torch.ones(1), torch.empty(2)
    kernel[(1,)](x, out, 1)
    assert out.tolist() == [0, 0]
    interpret.set_poison_default(True)
    try:
        kernel[(1,)](x, out, 1)
        assert out[0].isnan() and out[1] == 0
        with interpret.poison(False):
            kernel[(1,)](x, out, 1)
        assert out.tolist() == [0, 0]
    finally:
        interpret.set_poison_default(False)


def test_counting() -> None:
    kernel = module(MASKED).kernel
    x, out = torch.ones(3, dtype=BF16), torch.empty(8, dtype=BF16)
    with interpret.counting() as outer:
        kernel[(1,)](x, out, 3, SIZE=4)
        with interpret.counting() as inner:
            kernel[(2, 3)](x, out, 1, SIZE=4)
    kernel[(1,)](x, out, 3, SIZE=4)
    assert (inner.bytes_loaded, inner.bytes_stored, inner.programs) == (6 * 2 * 2, 6 * 8 * 2, 6)
    assert (outer.bytes_loaded, outer.bytes_stored, outer.programs) == (6 * 2 * 2 + 2 * 3 * 2, 7 * 8 * 2, 7)


def test_access_outside_the_tensors_is_an_error() -> None:
    kernel = module(MASKED).kernel
    x, out = torch.ones(3, dtype=BF16), torch.empty(8, dtype=BF16)
    with pytest.raises(IndexError, match=r"kernel, program \(0, 0, 0\): reads 2 bytes at byte 6 of x_ptr, whose"):
        kernel[(1,)](x, out, 4, SIZE=4)
    with pytest.raises(IndexError, match="writes 2 bytes at byte 14 of out_ptr, whose storage has 14"):
        kernel[(1,)](x, torch.empty(7, dtype=BF16), 3, SIZE=4)


def test_atomics() -> None:
    mod = module("""
@triton.jit
def kernel(total_ptr, largest_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.atomic_add(total_ptr + lane % 2, 1.5, mask=lane < 6)
    tl.atomic_max(largest_ptr, tl.program_id(0))
    tl.atomic_add(largest_ptr + 1, 1)
""")
    total, largest = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    mod.kernel[(5,)](total, largest, SIZE=8)
    assert total.tolist() == [22.5, 22.5] and largest.tolist() == [4, 5]


# Control flow and launches


def test_control_flow() -> None:
    mod = module("""
@triton.jit
def leaf(x, FACTOR: tl.constexpr):
    return x * FACTOR

@triton.jit
def middle(x, FACTOR: tl.constexpr, TWICE: tl.constexpr = False):
    if TWICE:
        x = leaf(x, FACTOR)
    return leaf(x, FACTOR)

@triton.jit
def branch(out_ptr, pid, K: tl.constexpr):
    total, first = 0, 0
    for k in range(first.to(tl.int32), K):
        total += k.to(tl.int64) * pid
    tl.store(out_ptr + pid, middle(total, 2))

@triton.jit
def kernel(out_ptr, n, stride, flag, missing, K: tl.constexpr, NAME: tl.constexpr):
    pid = tl.program_id(0)
    if pid >= n:
        return
    if pid < 2 and flag:
        branch(out_ptr, pid, K)
    elif not flag or pid == 2:
        tl.store(out_ptr + pid, middle(pid, 3, TWICE=True))
    else:
        value = pid
        while value < 100:
            value = value * 2
        value += 1 if pid > 3 else -1
        for k in tl.static_range(2):
            value += k
        for step in tl.range(n - 1, 0, -2, num_stages=2):
            value = max(value, step) + stride
        tl.store(out_ptr + pid, value)
    if missing is None and NAME == "x":
        tl.store(out_ptr + n, tl.num_programs(0))
    assert pid < n, "never"
""")
    out = torch.full((8,), -1)
    mod.kernel[(7,)](out, 6, 1, True, None, K=5, NAME="x")

    def walk(value: int, last: int) -> int:
        while value < 100:
            value *= 2
        return value + last + 1 + 3

    assert out.tolist() == [0, 20, 18, walk(3, -1), walk(4, 1), walk(5, 1), 7, -1]


def test_blocks_are_no_conditions() -> None:
    mod = module("""
@triton.jit
def kernel(out_ptr):
    lane = tl.arange(0, 4)
    if lane < 2:
        tl.store(out_ptr + lane, lane)
""")
    with pytest.raises(TypeError, match=r"a condition must be a scalar, this one is a block of \(4,\)"):
        mod.kernel[(1,)](torch.empty(4))


def test_chained_comparisons_are_refused_as_the_compiler_does() -> None:
    with pytest.raises(GenerationError, match="line 8: Triton compares two values at a time: 0 < n < 4"):
        module("""
@triton.jit
def kernel(n):
    if 0 < n < 4:
        tl.device_assert(n == 0)
""")


def test_assertions() -> None:
    mod = module("""
@triton.jit
def static(N: tl.constexpr):
    tl.static_assert(N % 4 == 0, "N must divide")

@triton.jit
def device(n):
    tl.device_assert(tl.arange(0, 4) < n, "too small")
""")
    mod.static[(1,)](8)
    mod.device[(1,)](4)
    with pytest.raises(AssertionError, match="N must divide"):
        mod.static[(1,)](7)
    with pytest.raises(AssertionError, match="too small"):
        mod.device[(1,)](3)


@pytest.mark.parametrize("annotation", ["tl.constexpr", "triton.language.constexpr", '"tl.constexpr"', "constexpr"])
def test_spellings_of_constexpr(annotation: str) -> None:
    mod = module(f"""
from triton.language import constexpr

@triton.jit
def inner(N: {annotation}):
    half: {annotation} = N // 2
    return tl.arange(0, half)

@triton.jit(do_not_specialize=["n"])
def kernel(out_ptr, n, N: {annotation}):
    tl.store(out_ptr + inner(N), n)
""")
    out = torch.zeros(8)
    mod.kernel[lambda meta: (meta["N"] // 8,)](out, 3, N=8)
    assert out.tolist() == [3] * 4 + [0] * 4


def test_integer_arguments_have_the_type_of_a_launch() -> None:
    mod = module("""
@triton.jit
def kernel(out_ptr, small, large, flag):
    tl.static_assert(small.dtype == tl.int32)
    tl.static_assert(large.dtype == tl.int64)
    tl.static_assert(flag.dtype == tl.int1)
    tl.store(out_ptr, small + large)
""")
    out = torch.zeros(1, dtype=torch.int64)
    mod.kernel[(1,)](out, 2**31 - 1, 2**31, False)
    assert out.item() == 2**32 - 1


COPY = """
@triton.jit
def copy(x_ptr, out_ptr, size, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + lane, tl.load(x_ptr + lane, mask=lane < size, other=0.0), mask=lane < size)

def launch(x):
    out = torch.empty_like(x)
    copy[(triton.cdiv(x.numel(), 16),)](
        x, out, x.numel(), SIZE=16, num_warps=4, num_stages=3, enable_fp_fusion=True, pipeline="basic"
    )
    return out
"""


def test_launch_function_of_the_module_and_its_options() -> None:
    x = torch.randn(77)
    mod = module(COPY)
    assert torch.equal(mod.launch(x), x)
    assert mod.__name__ == f"case_{_count}" and mod.__file__ == f"<interpreted case {_count}>"
    with pytest.raises(TypeError, match="missing a required argument: 'size'"):
        mod.copy[(1,)](x, x, SIZE=16)
    with pytest.raises(RuntimeError, match="runs only within a launch"):
        mod.copy(x, x, 1, 16)


def test_tensors_must_be_on_the_cpu() -> None:
    x = torch.empty(16, device="meta")
    with pytest.raises(DeviceError, match="x_ptr is on meta; an interpreted kernel takes tensors on the CPU"):
        module(COPY).launch(x)


def test_errors_point_at_the_generated_line_and_program() -> None:
    mod = module("""
@triton.jit
def kernel(out_ptr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, 1.0)
""")
    with pytest.raises(IndexError) as caught:
        mod.kernel[(9,)](torch.empty(5))
    text = "".join(traceback.format_exception(caught.value))
    assert "tl.store(out_ptr + pid, 1.0)" in text and "in program (5, 0, 0) of kernel" in text
    assert f'File "<interpreted case {_count}>", line 9, in kernel' in text
    assert linecache.getline(mod.__file__, 8).strip() == "pid = tl.program_id(0)"


# Beside compiled functions


def jit_function() -> JITFunction:
    """The copy kernel from plain exec of the text, as for a device."""
    text, filename = HEAD + COPY, "<compiled copy>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    names: dict[str, object] = {"__name__": "compiled"}
    exec(compile(text, filename, "exec"), names)
    kernel = names["copy"]
    assert type(kernel) is JITFunction
    return kernel


def compiled() -> str:
    """That kernel's PTX for sm_90."""
    signature = {"x_ptr": "*bf16", "out_ptr": "*bf16", "size": "i32", "SIZE": "constexpr"}
    source = ASTSource(jit_function(), signature, {"SIZE": 256})
    options = {"num_warps": 2, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def stock(x: torch.Tensor) -> list[float]:
    """What that kernel copies in Triton's own interpreter."""
    out = torch.empty_like(x)
    InterpretedFunction(jit_function().fn)[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), SIZE=16)
    return out.tolist()


def language() -> dict[tuple[str, str], int]:
    """What a patch of Triton's language would change."""
    owners = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]
    return {(owner.__name__, name): id(value) for owner in owners for name, value in vars(owner).items()}


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set: triton.jit compiles nothing")
def test_compiled_and_interpreted_functions_from_one_text(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    before = language()
    first = compiled()
    x = torch.randn(40).to(BF16)
    assert torch.equal(module(COPY).launch(x), x)
    assert language() == before
    assert compiled() == first

    # In the middle of an interpreted program, too: nothing of Triton's language is patched.
    mod = module(COPY + "\n@triton.jit\ndef outer(x_ptr, out_ptr):\n    probe()\n    copy(x_ptr, out_ptr, 16, 16)\n")
    seen = []
    mod.probe = lambda: seen.extend([compiled(), language(), stock(x)])
    out = torch.zeros(16, dtype=BF16)
    mod.outer[(1,)](x, out)
    assert seen == [first, before, x.tolist()] and torch.equal(out, x[:16])


def test_two_threads() -> None:
    text = """
@triton.jit
def inner(x):
    meet()
    return tl.sum(x * x, axis=0)

@triton.jit
def kernel(x_ptr, out_ptr, size, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    pid = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    x = tl.load(x_ptr + pid * SIZE + lane, mask=lane < size)
    total = inner(tl.where(lane < size, x, 0.0)) + tl.min(x, axis=0) * 0
    tl.store(out_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), total)
"""
    failures: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=30)

    def work(index: int) -> None:
        try:
            mod = interpret.load(HEAD + text, "shared", "<interpreted in threads>")
            mod.meet = barrier.wait  # both threads are in the middle of a program, each in another one
            x, out = torch.randn(24, 32), torch.empty(24)
            with interpret.poison(index == 0), interpret.counting() as counts:
                mod.kernel[((24,), (4, 6))[index]](x, out, 31 - index, SIZE=32)
            torch.testing.assert_close(out, x[:, : 31 - index].square().sum(1))
            assert counts == interpret.Counts(24 * (31 - index) * 4, 24 * 4, 24)
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
