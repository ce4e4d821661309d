"""The fused mixture of experts: both products, the activation between them and the sum over a token's experts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tilewright import rules, vendors
from tilewright.ops import moe_contract
from tilewright.ops.moe_align_block_size import moe_align_block_size
from tilewright.ops.moe_combine import moe_combine
from tilewright.ops.moe_gemm import moe_gemm
from tilewright.ops.moe_gemm_gated import moe_gemm_gated
from tilewright.ops.moe_gemv_combine import moe_gemv_combine
from tilewright.ops.moe_gemv_gated import moe_gemv_gated

NAME = "fused_experts_impl"


def fused_experts_impl(
    hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: str = "silu",
    apply_router_weight_on_input: bool = False, use_fp8_w8a8: bool = False, use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False, use_int4_w4a16: bool = False, ocp_mx_scheme: str | None = None,
    per_channel_quant: bool = False, global_num_experts: int = -1, expert_map: Any = None, w1_scale: Any = None,
    w2_scale: Any = None, w1_zp: Any = None, w2_zp: Any = None, a1_scale: Any = None, a2_scale: Any = None,
    block_shape: Any = None, w1_bias: Any = None, w2_bias: Any = None, *, block_size: int | None = None,
    profile: str | None = None,
) -> Any:  # fmt: skip
    """out[t] = sum over slots s of weight[t, s] * (w2[e] @ act(w1[e] @ hidden[t] + b1[e]) + b2[e]).

    e is the expert of topk_ids[t, s]. Products accumulate in float32. Values are rounded to hidden_states' dtype where
    they are stored: the activated product, each routed row's result (unless a program sums a token's rows), and out.
    Tokens without any routed row are exactly 0, results do not depend on the order of programs, and nothing waits for
    the device.

    Args:
        hidden_states: [tokens, hidden] bfloat16, float16 or float32, contiguous; read only.
        w1: [experts, 2 * inner, hidden], hidden_states' dtype, any strides: gate rows, then up rows; in turn for
            swigluoai.
        w2: [experts, hidden, inner], hidden_states' dtype, any strides.
        topk_weights: [tokens, slots] float32, bfloat16 or float16, any strides; up to 64 slots.
        topk_ids: [tokens, slots] int32 or int64, any strides. An id below 0, or at or past the number of experts or
            the end of expert_map, is not routed.
        activation: silu, gelu (by erf), gelu_tanh or swigluoai.
        apply_router_weight_on_input: the weight multiplies w1's product, bias included, instead of w2's.
        global_num_experts: experts that ids name; those of w1, or the length of expert_map, if below 0.
        expert_map: [global experts] int32, contiguous: the expert of w1 and w2 that each id means, or -1; or None.
        w1_bias: [experts, 2 * inner], hidden_states' dtype, contiguous, or None.
        w2_bias: [experts, hidden], hidden_states' dtype, contiguous, or None.
        block_size: rows of a block, 16 to 256, or 1 to take routed rows as they are listed; None leaves it to the
            device's rules.
        profile: a vendor profile other than the detected one.

    The other arguments are those of quantised weights, which are not there yet.

    Returns:
        [tokens, hidden], hidden_states' dtype.

    Raises:
        NotImplementedError: a quantised mode, or one of its arguments.
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is launched.

    Contract: vLLM 0.33, `fused_experts_impl`; it multiplies by the weight and rounds before it sums, as this does with
    blocks.
    """
    given = dict(locals())
    moe_contract.refuse_quantised(NAME, given)
    moe_contract.check(NAME, given)
    import torch

    tokens, hidden = hidden_states.shape
    slots, inner = topk_ids.shape[1], w2.shape[2]
    out = torch.empty((tokens, hidden), dtype=hidden_states.dtype, device=hidden_states.device)
    if expert_map is not None and 0 <= global_num_experts < len(expert_map):
        expert_map = expert_map[:global_num_experts]
    if expert_map is None and 0 <= global_num_experts < w1.shape[0]:
        w1, w2 = w1[:global_num_experts], w2[:global_num_experts]
        w1_bias, w2_bias = (None if bias is None else bias[:global_num_experts] for bias in (w1_bias, w2_bias))
    if 0 in (out.numel(), slots, w1.shape[0], 1 if expert_map is None else len(expert_map)):
        return out.zero_()
    experts, options = w1.shape[0], {"profile": profile}
    activated = hidden_states.new_empty((tokens * slots, inner))
    block = block_size or planned(tokens, tokens * slots // experts, hidden_states.device, profile)
    on_input = apply_router_weight_on_input
    if block == 1:
        routing = (topk_weights, topk_ids, expert_map)
        moe_gemv_gated(hidden_states, w1, w1_bias, *routing, activated, activation, on_input, **options)
        moe_gemv_combine(activated, w2, w2_bias, *routing, out, not on_input, **options)
        return out
    aligned = moe_align_block_size(
        topk_ids, block, experts if expert_map is None else len(expert_map), expert_map, pad_sorted_ids=True,
        ignore_invalid_experts=True, **options,
    )  # fmt: skip
    routed = hidden_states.new_empty((tokens * slots, hidden))
    tables = (topk_weights, *aligned)
    moe_gemm_gated(hidden_states, w1, w1_bias, *tables, activated, block, activation, on_input, **options)
    moe_gemm(activated, w2, w2_bias, *tables, routed, block, not on_input, **options)
    moe_combine(routed, topk_ids, expert_map, experts, out, **options)
    return out


def planned(tokens: int, per_expert: int, device: Any, profile: str | None = None) -> int:
    """Rows of a block by the device's rules; 1 where routed rows are taken as they are listed."""
    name = vendors.load(profile).name if profile else vendors.detect("cpu" if device.type == "cpu" else device)
    quantities: Mapping[str, int] = {"tokens": tokens, "per_expert": per_expert}
    return next(
        rule.config["block_size"] for rule in _rules(name).rules
        if all(quantities[name] >= least for name, least in rule.least.items())
    )  # fmt: skip


@functools.cache
def _rules(device: str) -> rules.Rules:
    return rules.load(NAME, device, ("block_size",), ("tokens", "per_expert"), launches=False)
