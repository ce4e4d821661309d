"""Reference of `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`: float64, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.rounding import round_once

HEAD, PLAIN, BLOCK = 512, 448, 64  # a head; its lanes that do not rotate; the lanes of one scale
DATA, SCALES = 576, 8  # bytes a token: 448 fp8 and 64 two-byte values; 7 scales and a zero
# The largest value that e4m3 codes are scaled to: OCP's, and that of gfx942's fnuz, which could hold 240.
E4M3_MAX, FNUZ_MAX = 448.0, 224.0


def reference(
    q: Tensor,
    kv: Tensor,
    k_cache: Tensor,
    slot_mapping: Tensor,
    position_ids: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    cache_block_size: int,
    fnuz: bool = False,
) -> None:
    """q = rotate(q * rsqrt(mean(q^2) + eps)) in place; kv, rotated and quantised, into the cache.

    Everything is float64 with one rounding of what is stored; codes and scale bytes are exact.

    Args:
        q: [tokens, heads, 512], bfloat16 or float16; overwritten.
        kv: [tokens, 512], q's dtype.
        k_cache: [blocks, bytes], uint8, `stride(0)` bytes from block to block. A block of B
            tokens holds B times 576 bytes of data (448 e4m3 codes, 64 rotated values in q's
            dtype), then B times 8 bytes (7 scale exponents, a zero).
        slot_mapping: [inserted <= tokens], int64. A negative slot writes nothing.
        position_ids: [tokens], int64.
        cos_sin_cache: [positions, 64], float32: 32 cosines, 32 sines.
        eps: Added to the mean square, as float32.
        cache_block_size: Tokens of one block.
        fnuz: Codes are those of e4m3fnuz.
    """
    q.copy_(round_once(exact_q(q, position_ids, cos_sin_cache, eps), q.dtype))
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    codes, scales, tail = exact_kv(kv[rows], position_ids[rows], cos_sin_cache, fnuz)
    tail = round_once(tail, kv.dtype)
    insert(k_cache, cache_block_size, slot_mapping[rows], codes, scales, tail)


def exact_q(q: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, eps: float) -> Tensor:
    """[tokens, heads, 512], float64: normalised, lanes 448 to 511 rotated in pairs."""
    values = q.double()
    mean_square = values.square().mean(-1, keepdim=True)
    values *= (mean_square + float(torch.tensor(eps, dtype=torch.float32))).rsqrt_()
    values[..., PLAIN:] = rotate(values[..., PLAIN:], cos_sin_cache[position_ids].unsqueeze(1))
    return values


def exact_kv(
    kv: Tensor, position_ids: Tensor, cos_sin_cache: Tensor, fnuz: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, 448] and scale bytes [rows, 8], uint8; the tail [rows, 64], float64."""
    codes, scales = quantise(kv[:, :PLAIN], fnuz=fnuz)
    tail = rotate(kv[:, PLAIN:].double(), cos_sin_cache[position_ids])
    return codes, torch.nn.functional.pad(scales, (0, 1)), tail


def rotate(values: Tensor, cos_sin: Tensor) -> Tensor:
    """Pairs (even, odd) -> (even * cos - odd * sin, even * sin + odd * cos), in float64."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    even, odd = values[..., 0::2], values[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def quantise(values: Tensor, lanes: int = BLOCK, fnuz: bool = False) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x * 2^-e, and e + 127 as a byte for every `lanes` lanes.

    e is the least integer with amax <= 448 * 2^e, where amax is at least 1e-4; 224 for fnuz. NaN
    counts for nothing in amax and becomes -448. A block that holds an infinity has byte 255 and the scale
    2^-inf = 0: its finite values become a zero of their sign, its infinities NaN and so -448.
    """
    blocks = values.double().unflatten(-1, (-1, lanes))
    largest = blocks.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(-1, keepdim=True)
    # amax = m * 2^k with 1 <= m < 2 and 448 = 1.75 * 2^8, so e = k - 8 + (m > 1.75), exactly.
    bits = largest.clamp_(min=1e-4).view(torch.int64)
    exponent = (bits >> 52) - 1023 - 8 + ((bits & ((1 << 52) - 1)) > (3 << 50)).long() + fnuz
    scale = ((1023 - exponent) << 52).view(torch.float64).masked_fill_(largest.isinf(), 0.0)
    # x * 2^-e is exact, also in float32 unless it is a zero to e4m3: the cast rounds alone.
    codes = e4m3(blocks * scale, fnuz)
    return codes.flatten(-2), (exponent + 127).clamp_(0, 255).squeeze(-1).to(torch.uint8)


def e4m3(values: Tensor, fnuz: bool = False) -> Tensor:
    """Codes of float64 values that are float32 too, saturating; NaN becomes the least value."""
    most, dtype = (FNUZ_MAX, torch.float8_e4m3fnuz) if fnuz else (E4M3_MAX, torch.float8_e4m3fn)
    return values.nan_to_num(nan=-most).clamp_(-most, most).float().to(dtype).view(torch.uint8)


def cache_rows(k_cache: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of the cache: data [blocks, block_size, 576], scales [blocks, block_size, 8]."""
    blocks, stride, start = k_cache.shape[0], k_cache.stride(0), k_cache.storage_offset()
    data = k_cache.as_strided((blocks, block_size, DATA), (stride, DATA, 1), start)
    start += block_size * DATA
    return data, k_cache.as_strided((blocks, block_size, SCALES), (stride, SCALES, 1), start)


def insert(
    k_cache: Tensor, block_size: int, slots: Tensor, codes: Tensor, scales: Tensor, tail: Tensor
) -> None:
    """Write rows at `slots`, none of them negative."""
    data, scale_rows = cache_rows(k_cache, block_size)
    block, row = slots // block_size, slots % block_size
    data[block, row] = torch.cat((codes, tail.contiguous().view(torch.uint8)), dim=1)
    scale_rows[block, row] = scales


def example() -> tuple[Tensor | float | int, ...]:
    """Arguments of a small call on the CPU, a skipped slot and fewer slots than tokens among them."""
    made = torch.Generator().manual_seed(0)
    tokens, heads, block_size = 7, 4, 16

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).bfloat16()

    angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(32) / 32)
    cache = torch.full((2, block_size * (DATA + SCALES)), 0xAB, dtype=torch.uint8)
    slots, positions = torch.tensor([3, -1, 17, 0, 31]), torch.randint(64, (tokens,), generator=made)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return normal(tokens, heads, HEAD), normal(tokens, HEAD), cache, slots, positions, table, 1e-6, block_size


def written(q: Tensor, kv: Tensor, k_cache: Tensor, *others: Tensor | float | int) -> dict[str, Tensor]:
    """What a call wrote, each part in its own dtype."""
    block_size = others[-1]
    assert isinstance(block_size, int)
    data, scales = cache_rows(k_cache, block_size)
    tail = data[..., PLAIN:].contiguous().view(kv.dtype)
    return {"q": q, "codes": data[..., :PLAIN], "rotated lanes": tail, "scales": scales}
