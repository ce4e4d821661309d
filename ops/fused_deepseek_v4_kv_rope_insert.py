"""DeepSeek-V4: the insert of rotated key-value rows alone, into a packed, mx, whole or e4m3 cache."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import head_e4m3, kv_row, kv_row_mx, q_head
from tilewright.arrangements.deepseek_v4 import (
    GROUP,
    HEAD,
    MX_GROUP,
    MX_ROW_BYTES,
    PASSED,
    ROW_BYTES,
    mx_cache,
    packed_cache,
    packed_rows,
    rows,
)
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Flag, Kernel, Requirement, Scalar
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
    num_tokens,
    position_ids,
    row_stride,
    rows_apart,
    rows_of_a_block,
    slot_mapping,
    tail_block_stride,
)
from tilewright.tensor import Tensor

kv = Tensor("kv", "tokens dim", (num_tokens, HEAD), "bfloat16|float16")
fp8_scale = Tensor("fp8_scale", "one", (1,), "float32")
shape, strides = (num_blocks, block_size, Size("width")), (block_stride, row_stride, 1)
k_cache = Tensor("k_cache", "blocks rows width", shape, "uint8|bfloat16|float16|e4m3", strides)
packed = Tensor("k_cache", "blocks bytes", (num_blocks, Size("block_bytes")), "uint8", (block_stride, 1))
INDEX = (cos_sin_cache, slot_mapping, position_ids, block_size)


def arrange(kv_tokens: Expr, *, cache: str = "packed") -> dict[str, Any]:
    """A program takes `kv_tokens` rows of kv to the rows of the cache that their slots name."""
    if cache == "packed":
        parts = packed_cache(packed, num_blocks, block_size, block_stride, tail_block_stride, "kv")
        return {**packed_rows(kv, parts, *INDEX, kv_tokens), "quantised": PASSED // GROUP}
    if cache == "mx":
        parts = mx_cache(packed, num_blocks, block_size, block_stride)
        return {**packed_rows(kv, parts, *INDEX, kv_tokens), "passed": PASSED // MX_GROUP}
    dtype = "uint8" if cache == "e4m3" else "like:kv"
    whole = Tensor("k_cache", "blocks rows dim", (num_blocks, block_size, HEAD), dtype, strides)
    facts = {"dim": HEAD, "eps": 0.0, "normed": False}
    if cache == "rows":
        return {**rows(kv, whole, *INDEX, kv_tokens), **facts, "rotated": True}
    return {**rows(kv, whole, *INDEX, kv_tokens, scale=fp8_scale), **facts, "inverted": True}


kernel = Kernel(
    name="fused_deepseek_v4_kv_rope_insert",
    arguments=(
        Argument(kv),
        Argument(k_cache, layout="rows", mutated=True),
        *INDICES,
        Scalar("cache_block_size", block_size),
        Argument(fp8_scale, optional=True),
        Flag("kv_mxfp8"),
    ),
    branches=(
        Branch("kv_row", arrange, kv_row, by="cache", instead={"mx": kv_row_mx, "rows": q_head, "e4m3": head_e4m3}),
    ),
    derived={
        "block_stride": "k_cache.stride(0)",
        "tail_block_stride": "k_cache.stride(0) // 2",
        "row_stride": "k_cache.stride(1)",
    },
    flags=(
        Flag(
            "cache",
            '("mx" if kv_mxfp8 else "packed") if k_cache.dtype == torch.uint8'
            ' else "rows" if k_cache.dtype == kv.dtype else "e4m3"',
            values=("packed", "mx", "rows", "e4m3"),
        ),
    ),
    slots=SLOTS,
    quantities={"tokens": "num_tokens"},
    requirements=(
        fewer_slots_than("kv"),
        BLOCK_SIZE,
        rows_of_a_block(),
        *rows_apart(),
        Requirement(
            "DtypeError",
            "k_cache.dtype not in (torch.bfloat16, torch.float16) or k_cache.dtype == kv.dtype",
            "k_cache is {_name(k_cache.dtype)}, kv is {_name(kv.dtype)}: they must agree",
        ),
        Requirement(
            "DtypeError",
            "not kv_mxfp8 or k_cache.dtype == torch.uint8",
            "kv_mxfp8 is True, k_cache is {_name(k_cache.dtype)}, uint8 is needed",
        ),
        Requirement(
            "ShapeError",
            "k_cache.dtype != torch.uint8"
            f" or k_cache.shape[2] == k_cache.stride(1) == ({MX_ROW_BYTES} if kv_mxfp8 else {ROW_BYTES})",
            "k_cache has rows of {k_cache.shape[2]} bytes, {k_cache.stride(1)} apart, "
            f"{{{MX_ROW_BYTES} if kv_mxfp8 else {ROW_BYTES}}} is needed",
            ("k_cache",),
        ),
        Requirement(
            "ShapeError",
            f"k_cache.dtype == torch.uint8 or k_cache.shape[2] == {HEAD}",
            f"k_cache has width={{k_cache.shape[2]}}, {HEAD} is needed",
            ("k_cache",),
        ),
        *even_cache("k_cache.dtype != torch.uint8 or kv_mxfp8"),
        Requirement(
            "ContractError",
            "fp8_scale is not None or k_cache.dtype not in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)",
            "fp8_scale is None, k_cache is {_name(k_cache.dtype)}, which needs one",
        ),
    ),
)


@operator(kernel)
def fused_deepseek_v4_kv_rope_insert(
    kv: Any, k_cache: Any, slot_mapping: Any, position_ids: Any, cos_sin_cache: Any, cache_block_size: int,
    fp8_scale: Any = None, kv_mxfp8: bool = False,
) -> None:  # fmt: skip
    """Each kv row, its last 64 lanes rotated, to its slot of the cache, in the form that the cache's dtype asks for.

    uint8 stores e4m3 codes with ue8m0 scales, in packed rows or, with `kv_mxfp8`, in mx rows, as
    `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded` does. kv's dtype stores the row itself, rounded once;
    lanes that do not rotate keep their bits. float8_e4m3fn stores codes of row * (1 / fp8_scale), from float32.

    Args:
        kv: [tokens, 512] bfloat16 or float16, contiguous.
        k_cache: [blocks, cache_block_size, width], unit stride along the last axis. uint8: width 584, or 528 with
            `kv_mxfp8`, and no gap between rows; laid out as in that operator, so a packed block holds the data of all
            its rows before their scales. kv's dtype, or float8_e4m3fn (float8_e4m3fnuz on gfx942): width 512, any
            stride between rows.
        slot_mapping: [inserted] int64, inserted <= tokens, any stride; row i goes to this slot, a negative one nowhere.
            Slots are below the cache's capacity and distinct: the caller's word.
        position_ids: [tokens] int64, any stride, within cos_sin_cache for every row that has a slot; others are not
            read.
        cos_sin_cache: [positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        cache_block_size: rows of a cache block.
        fp8_scale: [1] float32; for a float8 cache alone.
        kv_mxfp8: store mx rows in a uint8 cache.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `_C.fused_deepseek_v4_kv_rope_insert`.
    """
