"""Rotation of pairs."""

from __future__ import annotations

from tilewright.language import Tile, inside, where


def rotate(first: Tile, second: Tile, cos: Tile, sin: Tile) -> tuple[Tile, Tile]:
    """(a, b) -> (a cos - b sin, b cos + a sin), float32, no rounding."""
    return first * cos - second * sin, second * cos + first * sin


def rotate_inside(first: Tile, second: Tile, cos: Tile, sin: Tile) -> tuple[Tile, Tile]:
    """As rotate for the pairs that cos has; the others stay as they are to the bit, infinities and -0.0 too."""
    turned, other = rotate(first, second, cos, sin)
    rotates = inside(cos, "pairs")
    return where(rotates, turned, first), where(rotates, other, second)
