"""Triton's front end over the builder: tensors that hold numpy data, and the semantic that types their operations."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

from tilewright.interpret.builder import Builder
from tilewright.interpret.numbers import wide


class _Size(int):
    """A size that is an int, and has the `value` of a constexpr."""

    @property
    def value(self) -> int:
        return int(self)


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, _Size]:
    return tl.tuple([_Size(size) for size in shape]), _Size(math.prod(shape))


class Tensor(tl.tensor):
    """A `tl.tensor` that holds numpy data and whose operators need no semantic passed to them."""

    def __init__(self, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = _sizes(tuple(type.shape.values) if type.is_block() else ())

    @property
    def T(self) -> Any:
        rank = len(self.shape)
        return semantic.permute(self, (*range(rank - 2), rank - 1, rank - 2))

    def __repr__(self) -> str:
        data = self.handle.data
        return f"{self}: {wide(data, self.dtype) if self.dtype.is_floating() else data}"


class _Semantic(TritonSemantic):
    tensor = Tensor

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        # As the original, in a third of its time: half of all a kernel's operations come by here.
        left, right = (value.handle.data.shape if value.type.is_block() else () for value in (lhs, rhs))
        if left == right:
            return lhs, rhs
        try:
            shape = np.broadcast_shapes(left, right)
        except ValueError:
            return super().broadcast_impl_value(lhs, rhs)  # for its message
        return tuple(
            value if mine == shape else tensor_of(np.broadcast_to(value.handle.data, shape), value.dtype)
            for value, mine in ((lhs, left), (rhs, right))
        )


builder = Builder()
semantic: Any = _Semantic(builder)


def tensor_of(data: np.ndarray, ty: Any) -> Tensor:
    """A tensor of `ty` scalars: a block, or a scalar where the data has no axis."""
    if data.ndim == 0:
        return Tensor(TensorHandle(data.reshape(1), ty), ty)
    return Tensor(TensorHandle(data, ty), _block_type(ty, data.shape))


_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}  # by name: a pointer type has no hash


def _block_type(ty: Any, shape: tuple[int, ...]) -> Any:
    known = _block_types.get((ty.name, shape))
    if known is None:
        known = _block_types[ty.name, shape] = tl.block_type(ty, list(shape))
    return known


def static(value: Any) -> Any:
    """The number or name that a constexpr holds; anything else as it is."""
    return value.value if isinstance(value, tl.constexpr) else value
