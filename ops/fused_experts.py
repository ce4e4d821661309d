"""The fused mixture of experts by the names that callers of vLLM use."""

from __future__ import annotations

from typing import Any

from tilewright.ops.fused_experts_impl import fused_experts_impl


def fused_experts(
    hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any = "silu",
    apply_router_weight_on_input: bool = False, global_num_experts: int = -1, expert_map: Any = None,
    quant_config: Any = None,
) -> Any:  # fmt: skip
    """`fused_experts_impl` without quantisation; `activation` may be an enumeration whose value is its name.

    Raises:
        NotImplementedError: a quant_config that is not None.
        ContractError: as `fused_experts_impl`.

    Contract: vLLM 0.33, `fused_experts`.
    """
    if quant_config is not None:
        raise NotImplementedError("fused_experts: quant_config is given: quantised modes are not there yet")
    return fused_experts_impl(
        hidden_states, w1, w2, topk_weights, topk_ids, getattr(activation, "value", activation),
        apply_router_weight_on_input, global_num_experts=global_num_experts, expert_map=expert_map,
    )  # fmt: skip
