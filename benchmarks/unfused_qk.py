"""What `fused_qk_norm_rope` replaces: RMSNorm of the q and k heads, then their rotation, each a kernel of its own.

Both work in place on the same packed qkv, are made of the same pieces and by the same engine, and
take any tiling, so that each can be tuned as the fused kernel is. NeoX over whole heads alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor as Values

from tilewright.applications.rope import rotate as rotate_pairs
from tilewright.arrangements.rope import half_pairs, leading_tables
from tilewright.arrangements.token_heads import token_heads
from tilewright.expr import Expr, at_least
from tilewright.kernel import Argument, Branch, Kernel, Scalar
from tilewright.language import Tile, float32, join, rsqrt, split, sum
from tilewright.launch import Operator
from tilewright.ops.fused_qk_norm_rope import (
    DIM,
    cos_sin_cache,
    half_head,
    head_dim,
    k_weight,
    num_heads_k,
    num_heads_q,
    num_positions,
    position_ids,
    q_weight,
    qkv,
    rotated,
)
from tilewright.ops.qk_norm_rope_reference import exact_heads, rotate
from tilewright.rules import Rule, Rules
from tilewright.tensor import computed, stack

# The applications


def norm_head(x: Tile, weight: Tile, dim: int, eps: float) -> None:
    """x = rms_norm(x) * weight, in place. x [tokens, heads, dim]; weight [heads, dim]."""
    values = float32(x)
    scale = rsqrt(sum(values * values, "dim") / dim + eps)
    x = values * scale * float32(weight)


def rope_head(x: Tile, cos: Tile, sin: Tile) -> None:
    """x = rotate(x), in place. x [tokens, heads, side, pairs]; cos and sin [tokens, pairs]."""
    first, second = split(float32(x), "side")
    first, second = rotate_pairs(first, second, float32(cos), float32(sin))
    x = join(first, second, "side")


# The arrangements


def arrange_norm(tokens: Expr, heads: Expr) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` query or key heads, each with its weight."""
    weights = stack(*(w.view(w.name, "dim", (DIM,), (1,), "like:qkv") for w in (q_weight, k_weight)),
                    axis="kind", name="weight_of_head")  # fmt: skip
    is_key = computed(rotated.axes[1:2], lambda head: at_least(head, num_heads_q))
    x, weight = token_heads(rotated, weights.gather("kind", is_key), tokens=tokens, heads=heads)
    return {"x": x, "weight": weight, "dim": DIM, "eps": "eps"}


def arrange_rope(tokens: Expr, heads: Expr) -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` query or key heads."""
    dtype = cos_sin_cache.source.dtype
    table = cos_sin_cache.view("cos_sin_cache", "positions rotary", (num_positions, DIM), (DIM, 1), dtype)
    positions = position_ids.index(name="position", above="never", negative="never")
    cos, sin = leading_tables(table, positions, half_head)
    x, cos, sin = token_heads(half_pairs(rotated), cos, sin, tokens=tokens, heads=heads)
    return {"x": x, "cos": cos, "sin": sin}


# The kernels


class Untuned(Kernel):
    """A kernel whose tiling the caller forces; the two rules differ, so that tile sizes stay parameters."""

    def rules(self, device: str) -> Rules:
        sizes = ({"tokens": 4, "heads": 2}, {"tokens": 1, "heads": 1})
        rules = [Rule({}, {**tiles, "num_warps": 1, "num_stages": 1}, "known", "no rule") for tiles in sizes]
        return Rules(tuple(rules), "beside a benchmark")


HEADS = (Scalar("num_heads_q", num_heads_q), Scalar("num_heads_k", num_heads_k), Scalar("head_dim", head_dim))
COMMON: dict[str, Any] = {
    "divides": {"heads": (num_heads_q, num_heads_k)},
    "derived": {"row_stride": "qkv.stride(0)", "half_head": "head_dim // 2"},
    "quantities": {"tokens": "num_tokens"},
}
IN_PLACE = Argument(qkv, layout="rows", mutated=True)


def qk_norm(
    qkv: Any, num_heads_q: int, num_heads_k: int, head_dim: int, eps: float, q_weight: Any, k_weight: Any
) -> None:
    """Every query and key head of qkv becomes rms_norm(head) * weight, in place."""


def qk_rope(qkv: Any, num_heads_q: int, num_heads_k: int, head_dim: int, cos_sin_cache: Any, position_ids: Any) -> None:
    """Every query and key head of qkv is rotated by its position's angles, in place."""


NORM = Operator(
    Untuned(
        name="qk_norm",
        arguments=(IN_PLACE, *HEADS, Scalar("eps"), Argument(q_weight), Argument(k_weight)),
        branches=(Branch("norm_head", arrange_norm, norm_head),),
        **COMMON,
    ),
    qk_norm,
)
ROPE = Operator(
    Untuned(
        name="qk_rope",
        arguments=(IN_PLACE, *HEADS, Argument(cos_sin_cache), Argument(position_ids, layout="strided")),
        branches=(Branch("rope_head", arrange_rope, rope_head),),
        **COMMON,
    ),
    qk_rope,
)


# As the fused operator is called, and what each computes


def norm(*arguments: Any, **options: Any) -> None:
    x, hq, hk, _, dim, eps, qw, kw, *_ = arguments
    NORM(x, hq, hk, dim, eps, qw, kw, **options)


def rope(*arguments: Any, **options: Any) -> None:
    x, hq, hk, _, dim, _, _, _, table, _, positions = arguments
    ROPE(x, hq, hk, dim, table, positions, **options)


def exact_norm(heads: Values, weights: Values, cos_sin: Values, is_neox: bool, eps: float) -> Values:
    """[tokens, heads, dim], float64: normalised and scaled."""
    return exact_heads(heads, weights, cos_sin[:, :0], is_neox, eps)


def exact_rope(heads: Values, weights: Values, cos_sin: Values, is_neox: bool, eps: float) -> Values:
    """[tokens, heads, dim], float64: rotated."""
    return rotate(heads.double(), cos_sin.unsqueeze(1), is_neox)
