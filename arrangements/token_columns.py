"""Programs of some tokens by some columns of their rows, and of some rows by some columns of a matrix."""

from __future__ import annotations

from tilewright.arrange import cut
from tilewright.tensor import SizeLike, Tensor


def token_columns(*tensors: Tensor, tokens: SizeLike, columns: SizeLike) -> tuple[Tensor, ...]:
    """One program: `tokens` tokens by `columns` columns, and everything of the other axes."""
    return cut(tensors, program={"tokens": tokens, "columns": columns})


def matrix_tiles(*tensors: Tensor, rows: SizeLike, columns: SizeLike) -> tuple[Tensor, ...]:
    """One program: `rows` rows by `columns` columns of one matrix; the axes before those two count matrices."""
    batch = {str(axis.name): 1 for axis in tensors[0].axes[:-2]}
    return cut(tensors, program={**batch, "rows": rows, "columns": columns})
