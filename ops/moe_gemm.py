"""Rows by their experts' weights, block by block of an alignment."""

from __future__ import annotations

from typing import Any

from tilewright.applications.moe import routed_rows
from tilewright.arrangements.routed_rows import aligned_tiles
from tilewright.expr import Expr
from tilewright.kernel import Branch, Flag, Kernel, Requirement
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.ops.moe import block_size, expert_ids, num_tokens, num_tokens_post_pad, sorted_token_ids, top_k

FEWER = Flag("shared", "hidden_states.shape[0] != out.shape[0]", words={True: "shared"})


def arrange(
    columns: Expr, block_k: Expr, *, shared: bool = False, biased: bool = False, apply_router_weight: bool = False
) -> dict[str, Any]:
    """A program takes a block of routed rows by `columns` columns, in steps of `block_k`."""
    rows = (num_tokens, top_k) if shared else (moe.ROUTED, 1)
    x = moe.x.view("hidden_states", "tokens k", (rows[0], moe.size_k), (moe.size_k, 1), moe.FLOATS)
    tiles = aligned_tiles(
        x, *moe.plain_weights(), moe.topk_weights, moe.routed_out, sorted_token_ids, expert_ids, rows[1], top_k,
        block_size, columns, block_k,
    )  # fmt: skip
    return {**tiles, "biased": biased, "weighted": apply_router_weight}


kernel = Kernel(
    name="moe_gemm",
    arguments=(
        moe.X, moe.W, moe.BIAS, moe.WEIGHTS, *moe.ALIGNMENT, moe.OUT, moe.BLOCK_SIZE, moe.WEIGHTED,
    ),
    branches=(
        Branch("routed_rows", arrange, routed_rows, limit=("rows", num_tokens_post_pad), order=("rows", "group")),
    ),
    divides={"columns": (moe.size_n,), "block_k": (moe.size_k,)},
    flags=(moe.BIASED, FEWER),
    quantities=moe.QUANTITIES,
    requirements=(
        moe.ALL_ROUTED,
        Requirement(
            "ShapeError", "hidden_states.shape[0] in (topk_weights.shape[0], out.shape[0])",
            "hidden_states has tokens={hidden_states.shape[0]}, {topk_weights.shape[0]} or out's {out.shape[0]} are "
            "needed",
            ("hidden_states", "topk_weights", "out"),
        ),
        moe.columns(1),
        *moe.ALIGNED,
    ),
)  # fmt: skip


@operator(kernel)
def moe_gemm(
    hidden_states: Any, expert_weights: Any, expert_bias: Any, topk_weights: Any, sorted_token_ids: Any,
    expert_ids: Any, num_tokens_post_pad: Any, out: Any, block_size: int, apply_router_weight: bool,
) -> None:  # fmt: skip
    """out[i] = (x[i] @ w[e]^T + bias[e]) * weight[i] for every routed row i that is listed, e the expert of its block.

    Accumulated and scaled in float32 and rounded once. Rows that are not listed keep their values; those of a block
    whose expert is negative or not there become 0.

    Args:
        hidden_states: [tokens or tokens * slots, k] bfloat16, float16 or float32, contiguous: a row for each token,
            which all its slots share, or one for each slot.
        expert_weights: [experts, columns, k], hidden_states' dtype, any strides.
        expert_bias: [experts, columns], hidden_states' dtype, contiguous, or None.
        topk_weights: [tokens, slots] float32, bfloat16 or float16, any strides.
        sorted_token_ids: [rows] int32, routed rows (token * slots + slot) by expert in blocks; what is not below
            tokens * slots is padding.
        expert_ids: [blocks] int32, the expert of each block.
        num_tokens_post_pad: [1] int32: blocks that begin at or past it are not there.
        out: [tokens * slots, columns], hidden_states' dtype, contiguous; written.
        block_size: rows of a block: 16, 32, 64, 128 or 256.
        apply_router_weight: whether weight is topk_weights, else 1.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33's `fused_moe_kernel` without quantisation.
    """
