"""All routed rows of a token by their experts' weights, summed."""

from __future__ import annotations

from typing import Any

from tilewright.applications.moe import combined_rows
from tilewright.arrangements.routed_rows import token_tiles
from tilewright.expr import Expr
from tilewright.kernel import Argument, Branch, Kernel, Requirement
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.ops.moe import num_tokens, slot_lanes, top_k
from tilewright.tensor import Tensor

out = Tensor("out", "tokens columns", (num_tokens, moe.size_n), "like:hidden_states")


def arrange(
    columns: Expr, block_k: Expr, *, biased: bool = False, mapped: bool = False, apply_router_weight: bool = False
) -> dict[str, Any]:
    """A program takes one token by `columns` columns, over all its experts, in steps of `block_k`."""
    strides = (top_k.expr * moe.size_k, moe.size_k, 1)
    x = moe.x.view("hidden_states", "tokens slots k", (num_tokens, top_k, moe.size_k), strides, moe.FLOATS)
    tiles = token_tiles(
        x, *moe.plain_weights(), moe.topk_weights, out, moe.topk_ids, moe.expert_map if mapped else None, slot_lanes,
        columns, block_k,
    )  # fmt: skip
    return {**tiles, "biased": biased, "weighted": apply_router_weight}


kernel = Kernel(
    name="moe_gemv_combine",
    arguments=(
        moe.X, moe.W, moe.BIAS, moe.WEIGHTS, moe.IDS, moe.EXPERT_MAP, Argument(out, mutated=True), moe.WEIGHTED,
    ),
    branches=(Branch("combined_rows", arrange, combined_rows),),
    divides={"columns": (moe.size_n,), "block_k": (moe.size_k,)},
    derived={"slot_lanes": moe.SLOT_LANES},
    flags=(moe.BIASED, moe.MAPPED),
    quantities={"tokens": "num_tokens", "slots": "top_k", "columns": "size_n", "k": "size_k"},
    requirements=(
        Requirement(
            "ShapeError", "hidden_states.shape[0] == topk_weights.shape[0] * topk_weights.shape[1]",
            "hidden_states has tokens={hidden_states.shape[0]}, topk_weights has {topk_weights.shape[0]} tokens x "
            "{topk_weights.shape[1]} slots", ("hidden_states", "topk_weights"),
        ),
        moe.columns(1),
    ),
)  # fmt: skip


@operator(kernel)
def moe_gemv_combine(
    hidden_states: Any, expert_weights: Any, expert_bias: Any, topk_weights: Any, topk_ids: Any, expert_map: Any,
    out: Any, apply_router_weight: bool,
) -> None:  # fmt: skip
    """out[t] = sum over token t's slots s of (x[t * slots + s] @ w[e]^T + bias[e]) * weight[t, s].

    e is the slot's expert, as in `moe_gemv_gated`; slots without one add nothing. Summed in float32 and rounded once.

    Args:
        hidden_states: [tokens * slots, k] bfloat16, float16 or float32, contiguous: a row for each slot.
        expert_weights: [experts, columns, k], hidden_states' dtype, any strides.
        expert_bias: [experts, columns], hidden_states' dtype, contiguous, or None.
        topk_weights: as `moe_gemm`.
        topk_ids: as `moe_gemv_gated`.
        expert_map: as `moe_gemv_gated`.
        out: [tokens, columns], hidden_states' dtype, contiguous; written.
        apply_router_weight: whether weight is topk_weights, else 1.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33's `fused_moe_kernel` without quantisation, then `moe_sum`.
    """
