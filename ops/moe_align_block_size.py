"""Routed rows grouped by expert, as the GEMMs of the fused MoE take them."""

from __future__ import annotations

from typing import Any

from tilewright import handwritten

NAME = "moe_align_block_size"


def moe_align_block_size(
    topk_ids: Any, block_size: int, num_experts: int, expert_map: Any = None, pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False, return_scatter_idx: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Flat indices of topk_ids by expert, each expert's rows padded to whole blocks; in a stable order.

    An id below 0, or at or past `num_experts` or the end of `expert_map`, is not routed. No two calls differ: nothing
    depends on the order in which programs run. It allocates its tables, waits for nothing and can be captured in a
    CUDA graph.

    Args:
        topk_ids: [tokens, top_k] int32 or int64, any strides, up to 2^22 ids.
        block_size: rows of a block, 1 to 65536.
        num_experts: experts that ids name, 1 to 1024.
        expert_map: [num_experts] int32 or int64, any stride: the name of each expert here, or -1.
        pad_sorted_ids: sorted_token_ids ends at a whole block.
        ignore_invalid_experts: the map is applied to the ids, so rows of experts that it sends to -1 are not routed and
            expert_ids counts by the map's names. Otherwise all experts have blocks, and the map only renames them: some
            are -1.
        return_scatter_idx: also returns where each row went.
        options: `config` replaces some of {ids, few, scan, num_warps}; `profile` names a vendor profile.

    Returns:
        sorted_token_ids: int32 [P], P = ids + num_experts * (block_size - 1), or ids * block_size if that is less and
            there are fewer ids than experts. Indices of an expert's rows in increasing order, its last block filled up
            with the number of ids; so is the tail.
        expert_ids: int32 [ceil(P / block_size)], the expert of each block, then -1.
        num_tokens_post_pad: int32 [1], rows in all blocks.
        scatter_idx: int32 [ids], the place of each id in sorted_token_ids, -1 if it is not routed.

    Raises:
        ContractError: or its subclass for shapes, dtypes or devices, before anything is written.

    Contract: vLLM 0.33, `moe_align_block_size`, but for the order within an expert, which is open there, and for the
    tail of expert_ids, where vLLM has expert_map[-1] if the map only renames. Written by hand: see
    `tilewright/handwritten.py`.
    """
    return handwritten.call(
        NAME, NAME, "topk_ids", topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts,
        return_scatter_idx, **options,
    )  # fmt: skip


def expert_rows(topk_ids: Any, num_experts: int, expert_map: Any = None, **options: Any) -> tuple[Any, Any]:
    """(rows, starts): expert e has the flat indices rows[starts[e]:starts[e + 1]], in increasing order, no padding.

    For few tokens, where a program walks the rows of its expert instead of a list of blocks.

    One launch up to `few` ids.

    Args:
        topk_ids: as for `moe_align_block_size`, and routed by the same rule.
        num_experts: experts that have rows, 1 to 1024.
        expert_map: [experts that ids name] int32 or int64, any stride: which of them each is, or -1.
        options: as for `moe_align_block_size`.

    Returns:
        rows: int32 [ids]; the number of ids after the last expert's.
        starts: int32 [num_experts + 1].
    """
    return handwritten.call(NAME, "expert_rows", "topk_ids", topk_ids, num_experts, expert_map, **options)
