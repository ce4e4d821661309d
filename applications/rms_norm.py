"""RMSNorm of a head held as the two sides of its pairs."""

from __future__ import annotations

from tilewright.language import Tile, mean, rsqrt


def rms_norm(first: Tile, second: Tile, eps: float) -> tuple[Tile, Tile]:
    """x / sqrt(mean(x^2) + eps) over both sides, float32, no rounding."""
    scale = rsqrt(mean(first * first + second * second, "pairs") / 2 + eps)
    return first * scale, second * scale
