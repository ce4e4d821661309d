"""Block quantisation to e4m3 with power-of-two scales."""

from __future__ import annotations

from tilewright.language import Tile, abs, e4m3, max, maximum, ue8m0, where


def quantise_ue8m0(row: Tile) -> tuple[Tile, Tile]:
    """e4m3 codes of `row` [.., pairs, side], and the ue8m0 code of each group's scale.

    The scale is the smallest power of two that brings the group's largest magnitude (at least 1e-4, NaN left out) to
    448 or less. A NaN, and an infinity times its scale 0, become the code of -448.
    """
    magnitude = max(where(row == row, abs(row), 0.0), "pairs", "side")
    scale, inverse = ue8m0(maximum(magnitude, 1e-4))
    return e4m3(row * inverse), scale
