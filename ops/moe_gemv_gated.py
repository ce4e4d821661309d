"""One routed row at a time by its expert's gate and up weights, and the activation."""

from __future__ import annotations

from typing import Any

from tilewright.arrangements.routed_rows import listed_tiles
from tilewright.expr import Expr
from tilewright.kernel import Kernel
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.ops.moe import num_tokens, top_k


def arrange(
    columns: Expr, block_k: Expr, *, activation: str = "silu", biased: bool = False, mapped: bool = False,
    apply_router_weight: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A program takes one routed row by `columns` columns of gate and of up, in steps of `block_k`."""
    x = moe.x.view("hidden_states", "tokens k", (num_tokens, moe.size_k), (moe.size_k, 1), moe.FLOATS)
    tiles = listed_tiles(
        x, *moe.gated_weights(activation), moe.topk_weights, moe.routed_out, moe.topk_ids,
        moe.expert_map if mapped else None, moe.ROUTED, top_k, columns, block_k,
    )  # fmt: skip
    return {**tiles, "biased": biased, "weighted": apply_router_weight}


kernel = Kernel(
    name="moe_gemv_gated",
    arguments=(
        moe.X, moe.W, moe.BIAS, moe.WEIGHTS, moe.IDS, moe.EXPERT_MAP, moe.OUT, moe.ACTIVATIONS, moe.WEIGHTED,
    ),
    branches=(moe.gated_branch("gated_row", arrange),),
    divides={"columns": (moe.size_n,), "block_k": (moe.size_k,)},
    flags=(moe.BIASED, moe.MAPPED),
    quantities={"rows": "num_routed", "columns": "size_n", "k": "size_k"},
    requirements=(moe.PER_TOKEN, moe.ALL_ROUTED, moe.columns(2)),
)  # fmt: skip


@operator(kernel)
def moe_gemv_gated(
    hidden_states: Any, expert_weights: Any, expert_bias: Any, topk_weights: Any, topk_ids: Any, expert_map: Any,
    out: Any, activation: str, apply_router_weight: bool,
) -> None:  # fmt: skip
    """out[i] = activation(gate) * up, of gate, up = (x[i // slots] @ w[e]^T + bias[e]) * weight[i].

    As `moe_gemm_gated` without an alignment: e is row i's own expert, topk_ids[i // slots, i % slots], through
    expert_map if there is one; without an expert the row is 0. For few rows, each of which reads its expert's weights.

    Args:
        hidden_states: as `moe_gemm_gated`.
        expert_weights: as `moe_gemm_gated`.
        expert_bias: as `moe_gemm_gated`.
        topk_weights: as `moe_gemm`.
        topk_ids: [tokens, slots] int32 or int64, any strides; a row whose id, or what it is mapped to, is negative or
            no expert's, becomes 0.
        expert_map: [global experts] int32, contiguous, the expert that each id means, or None.
        out: [tokens * slots, columns], hidden_states' dtype, contiguous; written.
        activation: silu, gelu, gelu_tanh or swigluoai.
        apply_router_weight: whether weight is topk_weights, else 1.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33's `fused_moe_kernel` without quantisation, and its activations.
    """
