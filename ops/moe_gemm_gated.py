"""Rows by their experts' gate and up weights, and the activation, block by block of an alignment."""

from __future__ import annotations

from typing import Any

from tilewright.arrangements.routed_rows import aligned_tiles
from tilewright.expr import Expr
from tilewright.kernel import Kernel
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.ops.moe import block_size, expert_ids, num_tokens, num_tokens_post_pad, sorted_token_ids, top_k


def arrange(
    columns: Expr, block_k: Expr, *, activation: str = "silu", biased: bool = False, apply_router_weight: bool = False
) -> dict[str, Any]:
    """A program takes a block of routed rows by `columns` columns of gate and of up, in steps of `block_k`."""
    x = moe.x.view("hidden_states", "tokens k", (num_tokens, moe.size_k), (moe.size_k, 1), moe.FLOATS)
    tiles = aligned_tiles(
        x, *moe.gated_weights(activation), moe.topk_weights, moe.routed_out, sorted_token_ids, expert_ids, top_k,
        top_k, block_size, columns, block_k,
    )  # fmt: skip
    return {**tiles, "biased": biased, "weighted": apply_router_weight}


kernel = Kernel(
    name="moe_gemm_gated",
    arguments=(
        moe.X, moe.W, moe.BIAS, moe.WEIGHTS, *moe.ALIGNMENT, moe.OUT, moe.BLOCK_SIZE, moe.ACTIVATIONS, moe.WEIGHTED,
    ),
    branches=(
        moe.gated_branch("gated_rows", arrange, limit=("rows", num_tokens_post_pad), order=("rows", "group")),
    ),
    divides={"columns": (moe.size_n,), "block_k": (moe.size_k,)},
    flags=(moe.BIASED,),
    quantities=moe.QUANTITIES,
    requirements=(moe.PER_TOKEN, moe.ALL_ROUTED, moe.columns(2), *moe.ALIGNED),
)  # fmt: skip


@operator(kernel)
def moe_gemm_gated(
    hidden_states: Any, expert_weights: Any, expert_bias: Any, topk_weights: Any, sorted_token_ids: Any,
    expert_ids: Any, num_tokens_post_pad: Any, out: Any, block_size: int, activation: str, apply_router_weight: bool,
) -> None:  # fmt: skip
    """out[i] = activation(gate) * up, of gate, up = (x[i // slots] @ w[e]^T + bias[e]) * weight[i].

    As `moe_gemm`, where w has twice the columns of out: first those of the gate, then those of up; for swigluoai each
    of the gate before its own of up. All in float32 with one rounding.

    Args:
        hidden_states: [tokens, k] bfloat16, float16 or float32, contiguous.
        expert_weights: [experts, 2 * columns, k], hidden_states' dtype, any strides.
        expert_bias: [experts, 2 * columns], hidden_states' dtype, contiguous, or None.
        topk_weights: as `moe_gemm`.
        sorted_token_ids: as `moe_gemm`.
        expert_ids: as `moe_gemm`.
        num_tokens_post_pad: as `moe_gemm`.
        out: [tokens * slots, columns], hidden_states' dtype, contiguous; written.
        block_size: as `moe_gemm`.
        activation: silu, gelu, gelu_tanh or swigluoai.
        apply_router_weight: whether weight is topk_weights, else 1.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33's `fused_moe_kernel` without quantisation, and its activations.
    """
