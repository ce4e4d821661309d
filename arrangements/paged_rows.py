"""Rows of a paged cache, found by slot."""

from __future__ import annotations

from tilewright.tensor import IndexTensor, SizeLike, Tensor


def paged_rows(cache: Tensor, slots: IndexTensor, block_size: SizeLike) -> Tensor:
    """`cache` [blocks, rows, ...] by token: token i is row `slots[i] % block_size` of block `slots[i] // block_size`.

    A skipped slot has no row, so nothing is written for it.
    """
    return cache.gather("blocks", slots // block_size).gather("rows", slots % block_size)
