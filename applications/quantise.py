"""Block quantisation to e4m3 with power-of-two scales, and back."""

from __future__ import annotations

from tilewright.language import Tile, abs, e4m3, e4m3_value, max, maximum, ue8m0, ue8m0_value


def quantise_ue8m0(row: Tile) -> tuple[Tile, Tile]:
    """e4m3 codes of `row` [.., pairs, side], and the ue8m0 code of each group's scale.

    The scale is the smallest power of two that brings the group's largest magnitude (at least 1e-4, NaN left out) to
    448 or less, 224 where e4m3 is fnuz. A NaN, and an infinity times its scale 0, become the code of -448 or -224.
    """
    magnitude = max(abs(row), "pairs", "side")
    scale, inverse = ue8m0(maximum(magnitude, 1e-4))
    return e4m3(row * inverse), scale


def dequantise_ue8m0(codes: Tile, scales: Tile) -> Tile:
    """The float32 values of e4m3 `codes` [.., groups, pairs, side] under ue8m0 `scales` [.., groups]."""
    return e4m3_value(codes) * ue8m0_value(scales)
