"""Rotation of pairs."""

from __future__ import annotations

from tilewright.language import Tile


def rotate(first: Tile, second: Tile, cos: Tile, sin: Tile) -> tuple[Tile, Tile]:
    """(a, b) -> (a cos - b sin, b cos + a sin), float32, no rounding."""
    return first * cos - second * sin, second * cos + first * sin
