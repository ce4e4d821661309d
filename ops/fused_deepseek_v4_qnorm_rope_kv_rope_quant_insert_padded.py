"""DeepSeek-V4's fused operator with a query output of its own, zero heads behind it, and mx rows."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import kv_row, kv_row_mx, q_head, zero_heads
from tilewright.arrangements import deepseek_v4
from tilewright.arrangements.deepseek_v4 import (
    CHUNK,
    GROUP,
    HEAD,
    MX_GROUP,
    MX_ROW_BYTES,
    PASSED,
    ROW_BYTES,
    as_stored,
    deinterleaved,
    mx_cache,
    packed_cache,
    packed_rows,
)
from tilewright.arrangements.token_heads import token_heads
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Flag, Kernel, Output, Requirement, Scalar
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
    slot_mapping,
    tail_block_stride,
)
from tilewright.tensor import Tensor

q_head_padded = Size("q_head_padded", "constexpr", high=16384)
num_heads = Size("num_heads", "constexpr", low=1, high=q_head_padded.expr)  # without heads, no program takes any
num_pads = Size("num_pads", "constexpr", low=1, high=16384)

q_in = Tensor("q_in", "tokens heads dim", (num_tokens, num_heads, HEAD), "bfloat16|float16")
q_in_or_none = Tensor("q_in", "tokens heads dim", (num_tokens, Size("num_heads"), HEAD), q_in.source.dtype)
q_out = Tensor("q_out", "tokens heads dim", (num_tokens, q_head_padded, HEAD), "like:q_in")
padded_q_out = Tensor("q_out", "tokens heads dim", (num_tokens, num_heads.expr + num_pads, HEAD), "like:q_in")
kv = Tensor("kv", "tokens dim", (num_tokens, HEAD), "like:q_in")
k_cache = Tensor("k_cache", "blocks bytes", (num_blocks, Size("block_bytes")), "uint8", (block_stride, 1))


def arrange_kv(kv_tokens: Expr, *, kv_mxfp8: bool = False) -> dict[str, Any]:
    """A program takes `kv_tokens` rows of kv to the rows of the cache that their slots name."""
    if kv_mxfp8:
        cache, groups = mx_cache(k_cache, num_blocks, block_size, block_stride), {"passed": PASSED // MX_GROUP}
    else:
        cache = packed_cache(k_cache, num_blocks, block_size, block_stride, tail_block_stride, "kv")
        groups = {"quantised": PASSED // GROUP}
    return {**packed_rows(kv, cache, cos_sin_cache, slot_mapping, position_ids, block_size, kv_tokens), **groups}


def arrange_q(
    tokens: Expr, heads: Expr, *, apply_q_norm: bool = True, apply_q_rope: bool = True, is_q_interleaved: bool = False
) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` heads of q_in to q_out."""
    x, out, arranged = q_in, q_out[:, :num_heads], deepseek_v4.heads
    if is_q_interleaved:
        out = _chunks(q_out)[:, :, :num_heads]
        if apply_q_norm:
            x, out = deinterleaved(_chunks(q_in)), deinterleaved(out)
        else:
            out, arranged = as_stored(out), deepseek_v4.pieces
    tiles = arranged(x, out, cos_sin_cache, position_ids, tokens, heads)
    steps = {"normed": apply_q_norm, "rotated": apply_q_rope}
    return {**tiles, "dim": HEAD, "eps": "eps", **steps}


def arrange_pads(tokens: Expr, heads: Expr, *, is_q_interleaved: bool = False) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` of the heads that q_out has and q_in has not."""
    q = padded_q_out
    out = as_stored(_chunks(q)[:, :, num_heads:]) if is_q_interleaved else q[:, num_heads:]
    (out,) = token_heads(out, tokens=tokens, heads=heads)
    return {"out": out}


def _chunks(q: Tensor) -> Tensor:
    """Interleaved heads as they lie in memory."""
    shape = (q.shape[0], HEAD // CHUNK, q.shape[1], CHUNK)
    return Tensor(q.name, "tokens chunks heads lanes", shape, q.source.dtype)


kernel = Kernel(
    name="fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded",
    arguments=(
        Argument(q_in_or_none),
        Argument(kv),
        Argument(k_cache, layout="rows", least_rank=2, mutated=True),
        *INDICES,
        Scalar("q_head_padded", q_head_padded),
        Scalar("eps"),
        Scalar("cache_block_size", block_size),
        Flag("apply_q_norm", values=(True, False), words={False: "unnormed"}),
        Flag("kv_mxfp8", words={True: "mx"}),
        Flag("apply_q_rope", values=(True, False), words={False: "unrotated"}),
        Flag("is_q_interleaved", words={True: "interleaved"}),
    ),
    branches=(
        Branch("kv_row", arrange_kv, kv_row, by="kv_mxfp8", instead={True: kv_row_mx}),
        Branch("q_head", arrange_q, q_head, when="has_q"),
        Branch("zero_heads", arrange_pads, zero_heads, when="has_pads"),
    ),
    divides={"heads": (num_heads, num_pads)},
    derived={
        "num_pads": "q_head_padded - q_in.shape[1]",
        "block_stride": "k_cache.stride(0)", "tail_block_stride": "k_cache.stride(0) // 2",
    },
    flags=(Flag("has_q", "q_head_padded > 0 and q_in.shape[1] > 0"), Flag("has_pads", "q_head_padded > q_in.shape[1]")),
    outputs=(Output(q_out, "(num_tokens, q_head_padded, 512) if q_head_padded else (0,)"),),
    slots=SLOTS,
    quantities={
        "tokens": "num_tokens",
        "programs": "num_tokens * (q_head_padded + 1)",
        "interleaved": "int(is_q_interleaved)",
        "unnormed": "int(not apply_q_norm)",
        "unrotated": "int(not apply_q_rope)",
        "copied": "int(not apply_q_norm and not apply_q_rope)",
        "pads": "num_pads",
        "kv_alone": "int(q_head_padded == 0)",
    },
    requirements=(
        fewer_slots_than("q_in"),
        Requirement(
            "ShapeError",
            "q_head_padded == 0 or q_in.shape[1] <= q_head_padded <= 16384",
            "q_head_padded is {q_head_padded}, 0 or {q_in.shape[1]} heads of q_in to 16384 is needed",
            ("q_in",),
        ),
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
def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded(
    q_in: Any, kv: Any, k_cache: Any, slot_mapping: Any, position_ids: Any, cos_sin_cache: Any, q_head_padded: int,
    eps: float, cache_block_size: int, apply_q_norm: bool = True, kv_mxfp8: bool = False, apply_q_rope: bool = True,
    is_q_interleaved: bool = False,
) -> Any:  # fmt: skip
    """q_out = rotate(rms_norm(q_in)), with zero heads behind it; each kv row to its slot of the cache.

    The arithmetic is that of `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`. Without the norm, lanes that do not
    rotate keep their bits; without norm and rotation q_out is a copy. With `kv_mxfp8` all 512 lanes of a kv row are
    stored as e4m3 codes, in 16 groups of 32; the last 64 are rotated and rounded to kv's dtype before that.

    Args:
        q_in: [tokens, heads, 512] bfloat16 or float16, contiguous; read only.
        kv: [tokens, 512], q_in's dtype, contiguous.
        k_cache: uint8, [blocks, ...] with unit stride along the last axis. Only `stride(0)`, the bytes of a block, is
            used. Packed: even, at least cache_block_size * 584; row i of a block has its codes and lanes at i * 576
            and its scales, 7 bytes and a zero, at cache_block_size * 576 + i * 8. With `kv_mxfp8`: at least
            cache_block_size * 528; row i has 512 codes at i * 528, then 16 scales.
        slot_mapping: [inserted] int64, inserted <= tokens, any stride; row i goes to this slot, a negative one nowhere.
            Slots are below the cache's capacity and distinct: the caller's word.
        position_ids: [tokens] int64, any stride, each within cos_sin_cache where it is used: by rows with a slot, and
            by every token whose q is rotated.
        cos_sin_cache: [positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        q_head_padded: heads of q_out, at least those of q_in, at most 16384; 0: insert kv alone.
        eps: added to the mean of squares.
        cache_block_size: rows of a cache block.
        apply_q_norm: divide every head by its root mean square.
        kv_mxfp8: store mx rows.
        apply_q_rope: rotate the last 64 lanes of every head.
        is_q_interleaved: q_in and q_out hold, for each token, 32 chunks of all heads' next 16 lanes; zero heads stand
            at the end of every chunk.

    Returns:
        q_out [tokens, q_head_padded, 512] in q_in's dtype; the added heads are +0.0. For q_head_padded 0, an empty
        tensor [0].

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM from 0.22, `_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`.
    """
