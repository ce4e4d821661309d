"""DeepSeek-V4's head and row texts: query norm and rotation, and the rows of the caches."""

from __future__ import annotations

from tilewright.applications.quantise import dequantise_ue8m0, quantise_ue8m0
from tilewright.applications.rms_norm import rms_norm
from tilewright.applications.rope import rotate, rotate_inside
from tilewright.language import Tile, e4m3, float32, join, position, reciprocal, rounded, split, where


def q_head(
    x: Tile, cos: Tile, sin: Tile, out: Tile, dim: int, eps: float, normed: bool, rotated: bool
) -> None:
    """out = rotate(rms_norm(x)), rounded once; x itself where no step is asked for.

    x and out [tokens, heads, pairs, side], `dim` lanes a head, or without heads; cos and sin [tokens, pairs] float32.
    Pairs that the tables have not do not rotate.
    """
    if normed or rotated:
        first, second = turned_head(x, cos, sin, dim, eps, normed, rotated)
        out = join(first, second, "side")
    else:
        out = x


def head_e4m3(
    x: Tile, cos: Tile, sin: Tile, out: Tile, scale: Tile, dim: int, eps: float, normed: bool,
    inverted: bool,
) -> None:  # fmt: skip
    """out = e4m3(rotate(rms_norm(x)) * scale), or / scale if `inverted`: codes straight from float32.

    As q_head; out uint8, scale one float32.
    """
    first, second = turned_head(x, cos, sin, dim, eps, normed, True)
    factor = scale
    if inverted:
        factor = reciprocal(scale)
    out = e4m3(join(first * factor, second * factor, "side"))


def turned_head(
    x: Tile, cos: Tile, sin: Tile, dim: int, eps: float, normed: bool, rotated: bool
) -> tuple[Tile, Tile]:
    """Both sides of the pairs of rotate(rms_norm(x)), in float32."""
    first, second = split(float32(x), "side")
    if normed:
        first, second = rms_norm(first, second, dim, eps)
    if rotated:
        first, second = rotate_inside(first, second, cos, sin)
    return first, second


def zero_heads(out: Tile) -> None:
    """out = +0.0."""
    out = 0.0


def kv_row(
    x: Tile, turning: Tile, cos: Tile, sin: Tile, codes: Tile, scales: Tile, tail: Tile, quantised: int
) -> None:
    """codes, scales = quantise(x), tail = rotate(turning).

    x [tokens, groups, pairs, side], of which `quantised` groups exist; codes, like x, uint8; scales [tokens, groups]
    uint8, 0 past those; turning and tail [tokens, pairs, side]; cos and sin [tokens, pairs] float32.
    """
    code, scale = quantise_ue8m0(float32(x))
    first, second = split(float32(turning), "side")
    first, second = rotate(first, second, cos, sin)
    codes = code
    scales = where(position("groups") < quantised, scale, 0)
    tail = join(first, second, "side")


def kv_row_mx(x: Tile, cos: Tile, sin: Tile, codes: Tile, scales: Tile, passed: int) -> None:
    """Rotates the groups of a row after the first `passed`, rounds them to x's dtype and quantises all of it.

    As kv_row, where every group is stored quantised.
    """
    row = float32(x)
    first, second = split(row, "side")
    first, second = rotate(first, second, cos, sin)
    turned = rounded(join(first, second, "side"), x)
    code, scale = quantise_ue8m0(where(position("groups") < passed, row, turned))
    codes = code
    scales = scale


def stored_row(codes: Tile, scales: Tile, tail: Tile, out: Tile, quantised: int) -> None:
    """out = a row that kv_row stored: its first `quantised` groups dequantised, the rest as it is."""
    out = where(position("groups") < quantised, dequantise_ue8m0(codes, scales), float32(tail))


def stored_row_mx(codes: Tile, scales: Tile, out: Tile) -> None:
    """out = a row that kv_row_mx stored, dequantised."""
    out = dequantise_ue8m0(codes, scales)
