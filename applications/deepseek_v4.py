"""The two halves of DeepSeek-V4's fused query norm, rotation and cache insert."""

from __future__ import annotations

from tilewright.applications.quantise import quantise_ue8m0
from tilewright.applications.rms_norm import rms_norm
from tilewright.applications.rope import rotate
from tilewright.language import Tile, float32, join, position, split, where


def q_head(x: Tile, cos: Tile, sin: Tile, dim: int, eps: float) -> None:
    """x = rotate(rms_norm(x)), in place, rounded once.

    x [tokens, heads, pairs, side], `dim` lanes a head; cos and sin [tokens, pairs] float32.
    """
    first, second = split(float32(x), "side")
    first, second = rms_norm(first, second, dim, eps)
    first, second = rotate(first, second, cos, sin)
    x = join(first, second, "side")


def kv_row(
    x: Tile, cos: Tile, sin: Tile, codes: Tile, scales: Tile, tail: Tile, quantised: int
) -> None:
    """Quantises the first `quantised` groups of a row and rotates the rest.

    x [tokens, groups, pairs, side]; cos and sin [tokens, groups, pairs] float32. codes, like x, uint8: the groups that
    are stored quantised; scales [tokens, groups] uint8, 0 past them; tail, like x, in x's dtype: the rotated lanes.
    """
    row = float32(x)
    first, second = split(row, "side")
    first, second = rotate(first, second, cos, sin)
    code, scale = quantise_ue8m0(row)
    codes = code
    scales = where(position("groups") < quantised, scale, 0)
    tail = join(first, second, "side")
