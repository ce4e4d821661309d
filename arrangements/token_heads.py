"""Programs of some tokens by some heads."""

from __future__ import annotations

from tilewright.arrange import cut
from tilewright.tensor import SizeLike, Tensor


def token_heads(*tensors: Tensor, tokens: SizeLike, heads: SizeLike) -> tuple[Tensor, ...]:
    """One program: `tokens` tokens by `heads` heads. Tensors without one of the axes are shared along it."""
    return cut(tensors, program={"tokens": tokens, "heads": heads})


def token_rows(*tensors: Tensor, tokens: SizeLike) -> tuple[Tensor, ...]:
    """One program: `tokens` whole rows."""
    return cut(tensors, program={"tokens": tokens})
