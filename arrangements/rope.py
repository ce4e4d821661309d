"""Which lanes of a head rotate, and with which of its neighbours."""

from __future__ import annotations

from tilewright.tensor import IndexTensor, SizeLike, Tensor


def neighbour_pairs(x: Tensor, axis: str = "dim") -> Tensor:
    """GPT-J's pairing: lanes 2i and 2i + 1 are the two sides of pair i."""
    return x.split(axis, pairs=-1, side=2)


def trailing_tables(
    table: Tensor, positions: IndexTensor, pairs: SizeLike
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token over `pairs` pairs, of which only the last ones rotate.

    `table` [positions, rotary] holds the cosines in its first half and the sines in its second. Pairs before the
    rotating ones read cos 1 and sin 0, which leaves them as they are.
    """
    half = table.shape[1] // 2
    before = pairs - half
    cos, sin = (
        part.rename(rotary="pairs").pad(((0, 0), (before, 0))).gather("positions", positions)
        for part in (table[:, :half], table[:, half:])
    )
    return cos.filled(1.0), sin.filled(0.0)
