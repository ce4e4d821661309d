"""Tile maths: what one program does with its tiles. No pointer, no mask, no tile size, no device."""
