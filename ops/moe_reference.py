"""References of the fused MoE and its parts: float64 with the contract's roundings, and tables from a stable sort."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.ops.rounding import FORMATS, round_once

# Where a pipeline of kernels rounds to the dtype of hidden_states: stage 1's result, the activated product, a routed
# row's result, the sum of a token's rows.
ROUNDINGS = ("gate_up", "activated", "routed", "output")


@dataclass(frozen=True)
class Exact:
    """[tokens, hidden], float64: the result, and how far one may lie from it that is rounded elsewhere.

    `spread` is the root of the sum of squares of what each rounding and each float32 addition of a kernel may
    contribute, wherever it rounds: one standard deviation, or a little more.
    """

    value: Tensor
    spread: Tensor


def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    rounds: Collection[str] = ROUNDINGS,
) -> Tensor:
    """out[t] = sum over slots s of weight[t, s] * (w2[e] @ act(w1[e] @ hidden[t])) with e = expert of topk_ids[t, s].

    Everything is float64 but for the points of `rounds`.

    Args:
        hidden_states: [tokens, hidden] bfloat16, float16 or float32.
        w1: [experts, 2 * inner, hidden], any strides: gate rows, then up rows; in turn for "swigluoai".
        w2: [experts, hidden, inner], any strides.
        topk_weights: [tokens, top_k], any floating dtype, any strides; read as float32.
        topk_ids: [tokens, top_k] integers, any strides. One that `local_experts` gives no expert adds nothing.
        activation: "silu", "gelu", "gelu_tanh" or "swigluoai".
        apply_router_weight_on_input: the weight multiplies stage 1's result, before the activation, not stage 2's.
        global_num_experts: how many experts ids name; the experts of w1, or the length of expert_map, if below 0.
        expert_map: [global experts] integers: the expert of w1 and w2, or -1 for one that is elsewhere.
        w1_bias: [experts, 2 * inner], added to stage 1's result before the router weight.
        w2_bias: [experts, hidden], added to stage 2's result before the router weight.
        rounds: those of `ROUNDINGS` at which values are rounded to hidden_states' dtype.

    Returns:
        [tokens, hidden], hidden_states' dtype if "output" is in `rounds`, else float64. A token without any routed
        row is exactly 0.

    Raises:
        ValueError: an activation or a rounding that does not exist.
    """
    local = local_experts(topk_ids, w1.shape[0], global_num_experts, expert_map)
    value, _ = _summed(
        hidden_states, w1, w2, topk_weights, local, activation, apply_router_weight_on_input, w1_bias, w2_bias, rounds
    )
    return round_once(value, hidden_states.dtype) if "output" in rounds else value


def exact_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Exact:
    """As `fused_experts` without any rounding, and the spread of results that round where kernels may."""
    local = local_experts(topk_ids, w1.shape[0], global_num_experts, expert_map)
    return Exact(*_summed(
        hidden_states, w1, w2, topk_weights, local, activation, apply_router_weight_on_input, w1_bias, w2_bias, ()
    ))  # fmt: skip


def local_experts(
    topk_ids: Tensor, num_experts: int, global_num_experts: int = -1, expert_map: Tensor | None = None
) -> Tensor:
    """The expert of each id, int64, -1 where it is not routed.

    An id below 0, at or past `global_num_experts` or past the end of the map is not routed, nor one that the map sends
    elsewhere: to -1, or past the `num_experts` there are.
    """
    ids = topk_ids.long()
    count = global_num_experts if global_num_experts >= 0 else num_experts
    if expert_map is not None:
        count = min(global_num_experts, len(expert_map)) if global_num_experts >= 0 else len(expert_map)
    known = (ids >= 0) & (ids < count)
    if expert_map is not None and len(expert_map):
        ids = expert_map.long()[torch.where(known, ids, 0)]
    return torch.where(known & (ids >= 0) & (ids < num_experts), ids, -1)


def _summed(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    local: Tensor,
    activation: str,
    on_input: bool,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    rounds: Collection[str],
) -> tuple[Tensor, Tensor]:
    """The sum over a token's routed rows, and its spread, [tokens, hidden] float64."""
    unknown = set(rounds) - set(ROUNDINGS)
    if unknown:
        raise ValueError(f"rounds: {', '.join(sorted(unknown))} is none of {', '.join(ROUNDINGS)}")
    dtype, hidden, inner = hidden_states.dtype, w2.shape[1], w2.shape[2]
    ulp, step = 2.0 ** -FORMATS[dtype][0], 2.0**-24  # half a unit of the dtype and of float32, relative

    def at(point: str, values: Tensor) -> Tensor:
        return round_once(values, dtype).double() if point in rounds else values

    out = torch.zeros(len(hidden_states), hidden, dtype=torch.float64, device=hidden_states.device)
    variance = torch.zeros_like(out)
    for expert in local.unique().tolist():
        if expert < 0:
            continue
        token, slot = (local == expert).nonzero(as_tuple=True)
        x, weight = hidden_states[token].double(), topk_weights[token, slot].float().double()[:, None]
        first, second = w1[expert].double(), w2[expert].double()

        row = x @ first.T
        bias = 0.0 if w1_bias is None else w1_bias[expert].double()
        scale = weight if on_input else 1.0
        row = at("gate_up", (row + bias) * scale)
        # n float32 additions of terms of one size leave sqrt(n / 2) times the root of their sum of squares.
        noise = step**2 * (x.shape[1] / 2 + 1) * (x.square() @ first.T.square()) * scale**2 + (ulp * row).square()
        product, product_noise = _activated(row, noise, activation)
        product_noise = product_noise + 2 * (ulp * product).square()
        product = at("activated", product)

        row = product @ second.T
        bias = 0.0 if w2_bias is None else w2_bias[expert].double()
        scale = 1.0 if on_input else weight
        row = at("routed", (row + bias) * scale)
        noise = product_noise + step**2 * (inner / 2 + 1) * product.square()
        noise = (noise @ second.T.square()) * scale**2 + (ulp * row).square()
        out.index_add_(0, token, row)
        variance.index_add_(0, token, noise)
    variance += (2 * ulp * out).square()
    return out, variance.sqrt()


def _activated(row: Tensor, noise: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """act(gate) * up of rows [rows, 2 * inner], and its variance from the variance of `row`."""
    row = row.detach().requires_grad_()
    gate, up = (row[:, 0::2], row[:, 1::2]) if activation == "swigluoai" else row.chunk(2, dim=1)
    product = activate(gate, up, activation)
    (slope,) = torch.autograd.grad(product.sum(), row)
    spread = slope.square() * noise
    parts = (spread[:, 0::2], spread[:, 1::2]) if activation == "swigluoai" else spread.chunk(2, dim=1)
    return product.detach(), parts[0] + parts[1]


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The product that stage 2 takes, in the dtype given.

    "silu", "gelu" (by erf) and "gelu_tanh" of gate, times up; "swigluoai" is g * sigmoid(1.702 g) * (u + 1) with g
    at most 7 and u within -7 and 7.
    """
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu":
        return torch.nn.functional.gelu(gate) * up
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if activation == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    raise ValueError(f"activation {activation!r} is none of silu, gelu, gelu_tanh, swigluoai")


def align(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
    return_scatter_idx: bool = False,
) -> tuple[Tensor, ...]:
    """What `moe_align_block_size` returns, by a stable sort; its arguments are described there."""
    device, numel = topk_ids.device, topk_ids.numel()
    first = expert_map if ignore_invalid_experts else None
    known = num_experts if expert_map is None else min(num_experts, len(expert_map))
    local = local_experts(topk_ids.reshape(-1), num_experts, known, first)
    capacity = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        capacity = -(-capacity // block_size) * block_size
    if numel < num_experts:
        capacity = min(numel * block_size, capacity)

    by_expert = torch.where(local >= 0, local, num_experts).sort(stable=True).indices
    counts = torch.bincount(local[local >= 0], minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    start = (blocks.cumsum(0) - blocks) * block_size
    before = counts.cumsum(0) - counts
    order = by_expert[: int(counts.sum())]
    expert = local[order]
    place = start[expert] + torch.arange(len(order), device=device) - before[expert]

    sorted_ids = torch.full((capacity,), numel, dtype=torch.int32, device=device)
    sorted_ids[place] = order.int()
    expert_ids = torch.full((-(-capacity // block_size),), -1, dtype=torch.int32, device=device)
    of_blocks = torch.arange(num_experts, device=device).repeat_interleave(blocks)
    if expert_map is not None and not ignore_invalid_experts:
        of_blocks = expert_map.long()[of_blocks]
    expert_ids[: len(of_blocks)] = of_blocks.int()
    post_pad = (blocks.sum() * block_size).int().reshape(1)
    if not return_scatter_idx:
        return sorted_ids, expert_ids, post_pad
    scatter_idx = torch.full((numel,), -1, dtype=torch.int32, device=device)
    scatter_idx[order] = place.int()
    return sorted_ids, expert_ids, post_pad, scatter_idx


def moe_sum(input: Tensor) -> Tensor:
    """[tokens, top_k, hidden] -> [tokens, hidden] float64: the sum over top_k, without any rounding."""
    return input.double().sum(1)
