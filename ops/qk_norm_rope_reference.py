"""Reference of `fused_qk_norm_rope`: float64, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.ops.rounding import round_once


def reference(
    qkv: Tensor,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    position_ids: Tensor,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """x = rotate(x * rsqrt(mean(x^2) + eps) * weight) for every q and k head of qkv, in place.

    Everything is float64 with one rounding of what is stored.

    Args:
        qkv: [tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim], bfloat16 or float16, unit stride along the
            last axis; its q and k heads are overwritten, its v heads left as they are.
        num_heads_q: Heads that `q_weight` scales, the first ones of a row.
        num_heads_k: Heads that `k_weight` scales, the next ones.
        num_heads_v: Heads at the end of a row.
        head_dim: Lanes of a head.
        eps: Added to the mean square, as float32.
        q_weight: [head_dim], qkv's dtype.
        k_weight: [head_dim], qkv's dtype.
        cos_sin_cache: [positions, rotary], float32, float16 or bfloat16: rotary / 2 cosines, then as many sines. The
            first `rotary` lanes of a head rotate.
        is_neox: Lanes i and i + rotary / 2 rotate together; otherwise lanes 2i and 2i + 1.
        position_ids: [tokens], int64 or int32.
        forced_token_heads_per_warp: Changes no value.
    """
    count = num_heads_q + num_heads_k
    heads = qkv[:, : count * head_dim].unflatten(1, (count, head_dim))
    weights = torch.cat((q_weight.expand(num_heads_q, -1), k_weight.expand(num_heads_k, -1)))
    exact = exact_heads(heads, weights, cos_sin_cache[position_ids.long()], is_neox, eps)
    heads.copy_(round_once(exact, qkv.dtype))


def exact_heads(heads: Tensor, weights: Tensor, cos_sin: Tensor, is_neox: bool, eps: float) -> Tensor:
    """[tokens, heads, dim], float64: normalised, times `weights` [heads, dim], turned by `cos_sin` [tokens, rotary]."""
    values = heads.double()
    mean_square = values.square().mean(-1, keepdim=True)
    values *= (mean_square + float(torch.tensor(eps, dtype=torch.float32))).rsqrt_()
    values *= weights.double()
    rotary = cos_sin.shape[1]
    values[..., :rotary] = rotate(values[..., :rotary], cos_sin.unsqueeze(1), is_neox)
    return values


def rotate(values: Tensor, cos_sin: Tensor, is_neox: bool) -> Tensor:
    """Pairs (a, b) -> (a * cos - b * sin, b * cos + a * sin), in float64."""
    cos, sin = cos_sin.double().chunk(2, dim=-1)
    if is_neox:
        a, b = values.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    a, b = values[..., 0::2], values[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


def example() -> tuple[Tensor | float | int | bool, ...]:
    """Arguments of a small call on the CPU."""
    made = torch.Generator().manual_seed(0)
    tokens, q_heads, k_heads, v_heads, dim = 5, 4, 2, 2, 64

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).bfloat16()

    angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(dim // 2) / (dim // 2))
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(64, (tokens,), generator=made)
    qkv = normal(tokens, (q_heads + k_heads + v_heads) * dim)
    return qkv, q_heads, k_heads, v_heads, dim, 1e-6, normal(dim), normal(dim), table, True, positions


def written(qkv: Tensor, *others: Tensor | float | int | bool) -> dict[str, Tensor]:
    """What a call wrote."""
    return {"qkv": qkv}
