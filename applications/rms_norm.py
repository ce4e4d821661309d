"""RMSNorm of a head held as the two sides of its pairs."""

from __future__ import annotations

from tilewright.language import Tile, rsqrt, sum


def rms_norm(first: Tile, second: Tile, dim: int, eps: float) -> tuple[Tile, Tile]:
    """x / sqrt(sum(x^2) / dim + eps) over the `dim` lanes of both sides, float32, no rounding."""
    scale = rsqrt(sum(first * first + second * second, "pairs") / dim + eps)
    return first * scale, second * scale
