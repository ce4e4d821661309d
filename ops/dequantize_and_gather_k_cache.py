"""DeepSeek-V4: rows of a packed or mx cache, dequantised, by slot."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import stored_row, stored_row_mx
from tilewright.arrangements.deepseek_v4 import (
    GROUP,
    HEAD,
    MX_ROW_BYTES,
    PASSED,
    ROW_BYTES,
    gathered_rows,
    mx_cache,
    packed_cache,
)
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Flag, Kernel, Requirement, Scalar
from tilewright.launch import operator
from tilewright.ops.deepseek_v4 import (
    BLOCK_SIZE,
    SLOTS,
    block_size,
    block_stride,
    even_cache,
    num_blocks,
    tail_block_stride,
)
from tilewright.tensor import Tensor

num_rows = Size("num_rows")
out = Tensor("out", "tokens dim", (num_rows, HEAD), "bfloat16|float16")
k_cache = Tensor("k_cache", "blocks bytes", (num_blocks, Size("block_bytes")), "uint8", (block_stride, 1))
slot_mapping = Tensor("slot_mapping", "tokens", (num_rows,), "int64", (Size("slot_stride"),))


def arrange(kv_tokens: Expr, *, kv_mxfp8: bool = False) -> dict[str, Any]:
    """A program takes the rows of the cache that `kv_tokens` slots name to rows of out."""
    if kv_mxfp8:
        cache = mx_cache(k_cache, num_blocks, block_size, block_stride)
        return gathered_rows(cache, out, slot_mapping, block_size, kv_tokens)
    cache = packed_cache(k_cache, num_blocks, block_size, block_stride, tail_block_stride, "out")
    return {**gathered_rows(cache, out, slot_mapping, block_size, kv_tokens), "quantised": PASSED // GROUP}


kernel = Kernel(
    name="dequantize_and_gather_k_cache",
    arguments=(
        Argument(out, mutated=True),
        Argument(k_cache, layout="rows", least_rank=2),
        Argument(slot_mapping, layout="strided"),
        Scalar("cache_block_size", block_size),
        Flag("kv_mxfp8", words={True: "mx"}),
    ),
    branches=(Branch("stored_row", arrange, stored_row, by="kv_mxfp8", instead={True: stored_row_mx}),),
    derived={"block_stride": "k_cache.stride(0)", "tail_block_stride": "k_cache.stride(0) // 2"},
    slots=SLOTS,
    quantities={"tokens": "num_rows"},
    requirements=(
        BLOCK_SIZE,
        Requirement(
            "LayoutError",
            f"k_cache.stride(0) >= cache_block_size * ({MX_ROW_BYTES} if kv_mxfp8 else {ROW_BYTES})",
            "k_cache has a block stride of {k_cache.stride(0)} bytes, {cache_block_size} rows need "
            f"{{cache_block_size * ({MX_ROW_BYTES} if kv_mxfp8 else {ROW_BYTES})}}",
            ("k_cache",),
        ),
        *even_cache("kv_mxfp8"),
    ),
)


@operator(kernel)
def dequantize_and_gather_k_cache(
    out: Any, k_cache: Any, slot_mapping: Any, cache_block_size: int, kv_mxfp8: bool = False
) -> None:
    """out[i] = the row of the cache that slot i names: codes times their scales, rotated lanes as they are stored.

    Each value is a float32 product, rounded once to out's dtype; for bfloat16 it is exact. The row of a negative slot
    is +0.0.

    Args:
        out: [rows, 512] bfloat16 or float16, contiguous; written. Lanes that a packed cache stores as they are must
            have been stored in this dtype.
        k_cache: uint8, [blocks, ...] with unit stride along the last axis, as
            `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded` writes it; read only.
        slot_mapping: [rows] int64, any stride; below the cache's capacity: the caller's word.
        cache_block_size: rows of a cache block.
        kv_mxfp8: the cache holds mx rows.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: the layouts of vLLM's `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`; by slots, where vLLM's
    `dequantize_and_gather_k_cache` takes a block table.
    """
