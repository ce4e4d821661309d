"""DeepSeek-V4: query norm and rotation to e4m3, and the insert of rotated e4m3 rows, one scale a tensor."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import head_e4m3
from tilewright.arrangements import deepseek_v4
from tilewright.arrangements.deepseek_v4 import HEAD, rows
from tilewright.expr import Expr
from tilewright.kernel import Argument, Branch, Flag, Kernel, Scalar
from tilewright.launch import operator
from tilewright.ops.deepseek_v4 import (
    BLOCK_SIZE,
    INDICES,
    SLOTS,
    block_size,
    cos_sin_cache,
    fewer_slots_than,
    num_heads,
    num_tokens,
    position_ids,
    row_cache,
    rows_apart,
    rows_of_a_block,
    slot_mapping,
)
from tilewright.tensor import Tensor

SHAPE = (num_tokens, num_heads, HEAD)
q = Tensor("q", "tokens heads dim", SHAPE, "bfloat16|float16")
kv = Tensor("kv", "tokens dim", (num_tokens, HEAD), "like:q")
q_fp8 = Tensor("q_fp8", "tokens heads dim", SHAPE, "uint8")
cache_argument, k_cache = row_cache("e4m3", "uint8")
fp8_scale = Tensor("fp8_scale", "one", (1,), "float32")
q_fp8_scale_inv = Tensor("q_fp8_scale_inv", "one", (1,), "float32")


def arrange_kv(kv_tokens: Expr) -> dict[str, Any]:
    """A program takes `kv_tokens` rows of kv to the rows of the cache that their slots name."""
    index = (cos_sin_cache, slot_mapping, position_ids, block_size)
    tiles = rows(kv, k_cache, *index, kv_tokens, scale=fp8_scale)
    return {**tiles, "dim": HEAD, "eps": 0.0, "normed": False, "inverted": True}


def arrange_q(tokens: Expr, heads: Expr, *, apply_q_norm: bool = True) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` heads of q to q_fp8."""
    tiles = deepseek_v4.heads(q, q_fp8, cos_sin_cache, position_ids, tokens, heads, scale=q_fp8_scale_inv)
    return {**tiles, "dim": HEAD, "eps": "eps", "normed": apply_q_norm, "inverted": False}


kernel = Kernel(
    name="fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    arguments=(
        Argument(q),
        Argument(kv),
        Argument(Tensor("q_fp8", "tokens heads dim", SHAPE, "e4m3"), mutated=True),
        cache_argument,
        *INDICES,
        Argument(fp8_scale),
        Argument(q_fp8_scale_inv),
        Scalar("eps"),
        Scalar("cache_block_size", block_size),
        Flag("apply_q_norm", values=(True, False), words={False: "unnormed"}),
    ),
    branches=(Branch("kv_row", arrange_kv, head_e4m3), Branch("q_head", arrange_q, head_e4m3)),
    divides={"heads": (num_heads,)},
    slots=SLOTS,
    quantities={"tokens": "num_tokens", "programs": "num_tokens * (num_heads + 1)"},
    requirements=(fewer_slots_than("q"), BLOCK_SIZE, rows_of_a_block(), *rows_apart()),
)


@operator(kernel)
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: Any, kv: Any, q_fp8: Any, k_cache: Any, slot_mapping: Any, position_ids: Any, cos_sin_cache: Any,
    fp8_scale: Any, q_fp8_scale_inv: Any, eps: float, cache_block_size: int, apply_q_norm: bool = True,
) -> None:  # fmt: skip
    """q_fp8 = e4m3(rotate(rms_norm(q)) * q_fp8_scale_inv); each kv row as e4m3(rotate(kv) * (1 / fp8_scale)).

    In float32 and rounded once, to e4m3, saturating at 448: every head of q is divided by sqrt(mean(q^2) + eps); the
    last 64 lanes of q's heads and kv's rows are rotated by the position's angles, neighbours 2i and 2i + 1 together. A
    NaN becomes -448.

    Args:
        q: [tokens, heads, 512] bfloat16 or float16, contiguous; any number of heads; read only.
        kv: [tokens, 512], q's dtype, contiguous.
        q_fp8: [tokens, heads, 512] float8_e4m3fn (float8_e4m3fnuz on gfx942), contiguous; written.
        k_cache: [blocks, cache_block_size, 512], q_fp8's dtype, unit stride along the last axis, any other strides.
        slot_mapping: [inserted] int64, inserted <= tokens, any stride; row i goes to this slot, a negative one nowhere.
            Slots are below the cache's capacity and distinct: the caller's word.
        position_ids: [tokens] int64, any stride, each within cos_sin_cache.
        cos_sin_cache: [positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        fp8_scale: [1] float32, what kv is divided by.
        q_fp8_scale_inv: [1] float32, what q is multiplied by.
        eps: added to the mean of squares.
        cache_block_size: rows of a cache block.
        apply_q_norm: divide every head of q by its root mean square.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `_C.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert`.
    """
