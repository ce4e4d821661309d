"""DeepSeek-V4: query norm and rotation, and the insert of the rotated, quantised key-value row, in one launch."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import kv_row, q_head
from tilewright.arrangements import deepseek_v4
from tilewright.arrangements.deepseek_v4 import GROUP, HEAD, PASSED, ROW_BYTES, packed_cache, packed_rows
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Kernel, Requirement, Scalar
from tilewright.launch import operator
from tilewright.ops.deepseek_v4 import (
    BLOCK_SIZE,
    INDICES,
    SLOTS,
    block_size,
    block_stride,
    cos_sin_cache,
    even_cache,
    fewer_slots_than,
    num_blocks,
    num_heads,
    num_tokens,
    position_ids,
    slot_mapping,
    tail_block_stride,
)
from tilewright.tensor import Tensor

q = Tensor("q", "tokens heads dim", (num_tokens, num_heads, HEAD), "bfloat16|float16")
kv = Tensor("kv", "tokens dim", (num_tokens, HEAD), "like:q")
k_cache = Tensor("k_cache", "blocks bytes", (num_blocks, Size("block_bytes")), "uint8", (block_stride, 1))
cache = packed_cache(k_cache, num_blocks, block_size, block_stride, tail_block_stride, "kv")


def arrange_kv(kv_tokens: Expr) -> dict[str, Any]:
    """A program takes `kv_tokens` rows of kv to the rows of the cache that their slots name."""
    tiles = packed_rows(kv, cache, cos_sin_cache, slot_mapping, position_ids, block_size, kv_tokens)
    return {**tiles, "quantised": PASSED // GROUP}


def arrange_q(tokens: Expr, heads: Expr) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` heads of q, in place."""
    tiles = deepseek_v4.heads(q, q, cos_sin_cache, position_ids, tokens, heads)
    return {**tiles, "dim": HEAD, "eps": "eps", "normed": True, "rotated": True}


kernel = Kernel(
    name="fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    arguments=(
        Argument(q, mutated=True),
        Argument(kv),
        Argument(k_cache, layout="rows", least_rank=2, mutated=True),
        *INDICES,
        Scalar("eps"),
        Scalar("cache_block_size", block_size),
    ),
    branches=(Branch("kv_row", arrange_kv, kv_row), Branch("q_head", arrange_q, q_head)),
    divides={"heads": (num_heads,)},
    derived={"block_stride": "k_cache.stride(0)", "tail_block_stride": "k_cache.stride(0) // 2"},
    slots=SLOTS,
    quantities={"tokens": "num_tokens", "programs": "num_tokens * (num_heads + 1)"},
    requirements=(
        fewer_slots_than("q"),
        BLOCK_SIZE,
        Requirement(
            "LayoutError",
            f"k_cache.stride(0) % 2 == 0 and k_cache.stride(0) >= cache_block_size * {ROW_BYTES}",
            "k_cache has a block stride of {k_cache.stride(0)} bytes, an even one of at least "
            f"{{cache_block_size * {ROW_BYTES}}} ({{cache_block_size}} rows of {ROW_BYTES}) is needed",
            ("k_cache",),
        ),
        even_cache()[1],
    ),
)


@operator(kernel)
def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q: Any, kv: Any, k_cache: Any, slot_mapping: Any, position_ids: Any, cos_sin_cache: Any, eps: float,
    cache_block_size: int,
) -> None:  # fmt: skip
    """q = rotate(rms_norm(q)) in place; each kv row rotated, quantised and written to its slot of the cache.

    In float32 with one rounding: every head of q is divided by sqrt(mean(q^2) + eps) and its last 64 lanes are rotated
    by the position's angles, neighbours 2i and 2i + 1 together. Of a kv row, the first 448 lanes are stored as e4m3
    codes in 7 groups of 64, each with the ue8m0 code of the smallest power of two that brings its largest magnitude (at
    least 1e-4) to 448 or less; the last 64 lanes are rotated and stored in kv's dtype.

    Args:
        q: [tokens, heads, 512] bfloat16 or float16, contiguous; any number of heads; changed in place.
        kv: [tokens, 512], q's dtype, contiguous.
        k_cache: uint8, [blocks, ...] with unit stride along the last axis. Only `stride(0)`, the bytes of a block, is
            used: even, at least cache_block_size * 584. Row i of a block has its codes and lanes at i * 576 and its
            scales, 7 bytes and a zero, at cache_block_size * 576 + i * 8.
        slot_mapping: [inserted] int64, inserted <= tokens, any stride; row i goes to this slot, a negative one nowhere.
            Slots are below the cache's capacity and distinct: the caller's word.
        position_ids: [tokens] int64, any stride, each within cos_sin_cache; that of a row whose kv goes nowhere still
            rotates its q.
        cos_sin_cache: [positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        eps: added to the mean of squares.
        cache_block_size: rows of a cache block.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM up to 0.21 and FlagGems, `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`.
    """
