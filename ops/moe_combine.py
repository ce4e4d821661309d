"""The sum of each token's routed rows, of those slots that have an expert."""

from __future__ import annotations

from typing import Any

from tilewright.applications.moe_sum import sum_slots
from tilewright.arrangements.routed_rows import expert_of
from tilewright.arrangements.token_columns import token_columns
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Kernel, Requirement, Scalar
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.ops.moe import num_tokens, slot_lanes, top_k
from tilewright.tensor import Tensor

num_experts = Size("num_experts")
out = Tensor("out", "tokens columns", (num_tokens, moe.size_n), "like:routed")
routed = Tensor("routed", "routed columns", (moe.num_routed, moe.size_n), moe.FLOATS)


def arrange(tokens: Expr, columns: Expr, *, mapped: bool = False) -> dict[str, Any]:
    """A program takes `tokens` tokens by `columns` columns, and all slots of each that have an expert."""
    strides = (top_k.expr * moe.size_n, moe.size_n, 1)
    x = routed.view("routed", "tokens slots columns", (num_tokens, top_k, moe.size_n), strides, moe.FLOATS)
    x = x.where(expert_of(moe.topk_ids, moe.expert_map if mapped else None), num_experts)
    x = x.pad(((0, 0), (0, slot_lanes.expr - top_k), (0, 0)))
    x, summed = token_columns(x, out, tokens=tokens, columns=columns)
    return {"x": x, "out": summed}


kernel = Kernel(
    name="moe_combine",
    arguments=(
        Argument(routed), moe.IDS, moe.EXPERT_MAP, Scalar("num_experts", num_experts), Argument(out, mutated=True),
    ),
    branches=(Branch("sum_slots", arrange, sum_slots),),
    divides={"columns": (moe.size_n,)},
    derived={"slot_lanes": moe.SLOT_LANES},
    flags=(moe.MAPPED,),
    quantities={"tokens": "num_tokens", "slots": "top_k", "columns": "size_n"},
    requirements=(
        Requirement(
            "ShapeError", "routed.shape[0] == topk_ids.shape[0] * topk_ids.shape[1]",
            "routed has routed={routed.shape[0]}, topk_ids has {topk_ids.shape[0]} tokens x {topk_ids.shape[1]} slots",
            ("routed", "topk_ids"),
        ),
    ),
)  # fmt: skip


@operator(kernel)
def moe_combine(routed: Any, topk_ids: Any, expert_map: Any, num_experts: int, out: Any) -> None:
    """out[t] = sum over token t's slots s that have an expert of routed[t * slots + s], in float32, rounded once.

    `moe_sum` that reads no row of a slot without an expert, as nothing need have written it.

    Args:
        routed: [tokens * slots, columns] bfloat16, float16 or float32, contiguous.
        topk_ids: as `moe_gemv_gated`.
        expert_map: as `moe_gemv_gated`.
        num_experts: experts that ids, or what they are mapped to, may name.
        out: [tokens, columns], routed's dtype, contiguous; written.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `moe_sum` with topk_ids and expert_map.
    """
