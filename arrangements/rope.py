"""Which lanes of a head rotate, and with which of its neighbours."""

from __future__ import annotations

from tilewright.expr import Expr, at_least, wrap
from tilewright.tensor import IndexTensor, SizeLike, Tensor


def neighbour_pairs(x: Tensor, axis: str = "dim") -> Tensor:
    """GPT-J's pairing: lanes 2i and 2i + 1 are the two sides of pair i."""
    return x.split(axis, pairs=-1, side=2)


def half_pairs(x: Tensor, axis: str = "dim") -> Tensor:
    """NeoX's pairing of a head that rotates as a whole: lanes i and i + n / 2 are the two sides of pair i."""
    return x.split(axis, side=2, pairs=-1)


def leading_half_pairs(x: Tensor, rotating: SizeLike, pairs: SizeLike, axis: str = "dim") -> Tensor:
    """NeoX's pairing where only the first 2 * `rotating` of 2 * `pairs` lanes rotate.

    Lanes i and i + rotating are the sides of pair i < rotating; the passed lanes make pairs of their own two halves.
    """
    rotating, pairs = wrap(rotating), wrap(pairs)

    def lane(side: Expr, pair: Expr) -> Expr:
        passed = at_least(pair, rotating)
        return pair + side * rotating + passed * (rotating + side * (pairs - 2 * rotating))

    return x.reindex(axis, lane, side=2, pairs=pairs)


def trailing_tables(table: Tensor, positions: IndexTensor, pairs: SizeLike) -> tuple[Tensor, Tensor]:
    """cos and sin of every token over `pairs` pairs, of which only the last ones rotate.

    `table` [positions, rotary] holds the cosines in its first half and the sines in its second. Pairs that do not
    rotate read cos 1 and sin 0, which leaves them as they are.
    """
    half = table.shape[1] // 2
    return _tables(table, positions, half, (pairs - half, 0))


def leading_tables(table: Tensor, positions: IndexTensor, pairs: SizeLike) -> tuple[Tensor, Tensor]:
    """As `trailing_tables`, where the first pairs rotate."""
    half = table.shape[1] // 2
    return _tables(table, positions, half, (0, pairs - half))


def _tables(
    table: Tensor, positions: IndexTensor, half: Expr, around: tuple[SizeLike, SizeLike]
) -> tuple[Tensor, Tensor]:
    cos, sin = (
        part.rename(rotary="pairs").pad(((0, 0), around)).gather("positions", positions)
        for part in (table[:, :half], table[:, half:])
    )
    return cos.filled(1.0), sin.filled(0.0)
