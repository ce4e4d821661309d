"""RMSNorm with a weight, and rotation, of a query or key head."""

from __future__ import annotations

from tilewright.applications.rms_norm import rms_norm
from tilewright.applications.rope import rotate_inside
from tilewright.language import Tile, float32, join, split


def qk_head(x: Tile, weight: Tile, cos: Tile, sin: Tile, dim: int, eps: float) -> None:
    """x = rotate(rms_norm(x) * weight), in place, rounded once.

    x [tokens, heads, pairs, side] in any order of pairs and side, `dim` lanes a head; weight, like x without tokens:
    the weight of each head; cos and sin [tokens, pairs].
    """
    first, second = split(float32(x), "side")
    first, second = rms_norm(first, second, dim, eps)
    first_weight, second_weight = split(float32(weight), "side")
    first, second = rotate_inside(first * first_weight, second * second_weight, float32(cos), float32(sin))
    x = join(first, second, "side")
