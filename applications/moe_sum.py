"""The sum of a token's routed rows."""

from __future__ import annotations

from tilewright.language import Tile, float32, sum


def sum_slots(x: Tile, out: Tile) -> None:
    """out = sum of x over slots, in float32 with one rounding; x [tokens, slots, columns], out [tokens, columns]."""
    out = sum(float32(x), "slots")
