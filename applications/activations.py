"""Gated activations: what becomes of a gate and what it gates, in float32."""

from __future__ import annotations

from tilewright.language import Tile, erf, exp, maximum, minimum

SQRT_HALF = 0.7071067811865476
TANH_SCALE, TANH_CUBIC = 1.5957691216057308, 0.044715  # 2 * sqrt(2 / pi); of the tanh form of gelu


def silu(x: Tile) -> Tile:
    """x * sigmoid(x)."""
    return x / (1.0 + exp(-x))


def gelu(x: Tile) -> Tile:
    """x * P(X <= x) of a standard normal X."""
    return 0.5 * x * (1.0 + erf(x * SQRT_HALF))


def gelu_tanh(x: Tile) -> Tile:
    """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), by 0.5 * (1 + tanh(y)) = sigmoid(2 * y)."""
    return x / (1.0 + exp(-(TANH_SCALE * (x + TANH_CUBIC * x * x * x))))


def swigluoai(gate: Tile, up: Tile) -> Tile:
    """(up + 1) * gate * sigmoid(1.702 * gate), gate at most 7 and up within -7 .. 7."""
    gate = minimum(gate, 7.0)
    up = minimum(maximum(up, -7.0), 7.0)
    return (up + 1.0) * gate / (1.0 + exp(-1.702 * gate))
