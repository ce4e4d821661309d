"""DeepSeek-V4: query norm and rotation in place, and the insert of whole rotated rows."""

from __future__ import annotations

from typing import Any

from tilewright.applications.deepseek_v4 import q_head
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

q = Tensor("q", "tokens heads dim", (num_tokens, num_heads, HEAD), "bfloat16|float16")
kv = Tensor("kv", "tokens dim", (num_tokens, HEAD), "like:q")
cache_argument, k_cache = row_cache("like:q")


def arrange_kv(kv_tokens: Expr) -> dict[str, Any]:
    """A program takes `kv_tokens` rows of kv to the rows of the cache that their slots name."""
    tiles = rows(kv, k_cache, cos_sin_cache, slot_mapping, position_ids, block_size, kv_tokens)
    return {**tiles, "dim": HEAD, "eps": 0.0, "normed": False, "rotated": True}


def arrange_q(tokens: Expr, heads: Expr, *, apply_q_norm: bool = True) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` heads of q, in place."""
    tiles = deepseek_v4.heads(q, q, cos_sin_cache, position_ids, tokens, heads)
    return {**tiles, "dim": HEAD, "eps": "eps", "normed": apply_q_norm, "rotated": True}


kernel = Kernel(
    name="fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    arguments=(
        Argument(q, mutated=True),
        Argument(kv),
        cache_argument,
        *INDICES,
        Scalar("eps"),
        Scalar("cache_block_size", block_size),
        Flag("apply_q_norm", values=(True, False), words={False: "unnormed"}),
    ),
    branches=(Branch("kv_row", arrange_kv, q_head), Branch("q_head", arrange_q, q_head)),
    divides={"heads": (num_heads,)},
    slots=SLOTS,
    quantities={"tokens": "num_tokens", "programs": "num_tokens * (num_heads + 1)"},
    requirements=(fewer_slots_than("q"), BLOCK_SIZE, rows_of_a_block(), *rows_apart()),
)


@operator(kernel)
def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: Any, kv: Any, k_cache: Any, slot_mapping: Any, position_ids: Any, cos_sin_cache: Any, eps: float,
    cache_block_size: int, apply_q_norm: bool = True,
) -> None:  # fmt: skip
    """q = rotate(rms_norm(q)) in place; each kv row, rotated and rounded once, to its slot of the cache.

    In float32 with one rounding: every head of q is divided by sqrt(mean(q^2) + eps); the last 64 lanes of q's heads
    and kv's rows are rotated by the position's angles, neighbours 2i and 2i + 1 together. Lanes of kv, and without the
    norm of q, that do not rotate keep their bits.

    Args:
        q: [tokens, heads, 512] bfloat16 or float16, contiguous; any number of heads; changed in place.
        kv: [tokens, 512], q's dtype, contiguous.
        k_cache: [blocks, cache_block_size, 512], q's dtype, unit stride along the last axis, any other strides.
        slot_mapping: [inserted] int64, inserted <= tokens, any stride; row i goes to this slot, a negative one nowhere.
            Slots are below the cache's capacity and distinct: the caller's word.
        position_ids: [tokens] int64, any stride, each within cos_sin_cache.
        cos_sin_cache: [positions, 64] float32, contiguous: 32 cosines, then 32 sines.
        eps: added to the mean of squares.
        cache_block_size: rows of a cache block.
        apply_q_norm: divide every head of q by its root mean square.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `_C.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert`.
    """
