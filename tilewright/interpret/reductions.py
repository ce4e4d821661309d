"""Reductions and scans, at numpy's speed where Triton's library names the combine function, else step by step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import triton.language as tl

from tilewright.interpret.numbers import as_signed, as_unsigned, rounded, wide
from tilewright.interpret.semantic import static, tensor_of

_FOLDS: dict[str, tuple[np.ufunc, np.ufunc]] = {  # combine function: what it does to floats, to integers
    "_sum_combine": (np.add, np.add),
    "_prod_combine": (np.multiply, np.multiply),
    "_elementwise_max": (np.fmax, np.maximum),
    "_elementwise_min": (np.fmin, np.minimum),
    "_or_combine": (np.bitwise_or, np.bitwise_or),
    "_xor_combine": (np.bitwise_xor, np.bitwise_xor),
}


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """`tl.reduce`."""
    inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
    axis = static(axis)
    types = [part.dtype for part in inputs]
    if axis is None:
        parts = [part.handle.data.reshape(-1) for part in inputs]
    else:
        parts = [np.moveaxis(part.handle.data, axis, 0) for part in inputs]

    name = _library_name(combine_fn)
    if len(parts) == 1 and name in _FOLDS:
        outs = [_fold(name, "reduce", parts[0], types[0])]
    elif len(parts) == 2 and name.startswith(("_argmax_combine", "_argmin_combine")):
        first = _first_of(name, parts[0], types[0])
        outs = [np.take_along_axis(part, first[None], axis=0)[0] for part in parts]
    else:
        while len(parts[0]) > 1:
            parts = _combined(combine_fn, [part[0::2] for part in parts], [part[1::2] for part in parts], types)
        outs = [part[0] for part in parts]

    if static(keep_dims):
        kept = tuple(range(len(inputs[0].shape))) if axis is None else axis
        outs = [np.expand_dims(out, kept) for out in outs]
    return _results(input, outs, types)


def reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """`tl.core._reduce_with_indices`, which `tl.argmax` and its like call."""
    shape = input.handle.data.shape
    axis = static(axis) % len(shape)
    positions = np.arange(shape[axis], dtype=np.int32).reshape([-1 if at == axis else 1 for at in range(len(shape))])
    return reduce((input, tensor_of(np.broadcast_to(positions, shape), tl.int32)), axis, combine_fn, keep_dims)


def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """`tl.associative_scan`."""
    inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
    axis, step = static(axis), -1 if static(reverse) else 1
    types = [part.dtype for part in inputs]
    parts = [np.moveaxis(part.handle.data, axis, 0)[::step] for part in inputs]

    name = _library_name(combine_fn)
    if len(parts) == 1 and name in _FOLDS:
        outs = [_fold(name, "accumulate", parts[0], types[0])]
    else:
        steps = [[part[:1] for part in parts]]
        for at in range(1, len(parts[0])):
            steps.append(_combined(combine_fn, steps[-1], [part[at : at + 1] for part in parts], types))
        outs = [np.concatenate(column) for column in zip(*steps, strict=True)]
    return _results(input, [np.moveaxis(out[::step], 0, axis) for out in outs], types)


def _library_name(combine: Any) -> str:
    fn = getattr(combine, "fn", None)
    return fn.__name__ if fn is not None and fn.__module__ == tl.standard.__name__ else ""


def _fold(name: str, method: Literal["reduce", "accumulate"], data: np.ndarray, ty: Any) -> np.ndarray:
    """Along axis 0. Floats are rounded once, at the end."""
    on_floats, on_integers = _FOLDS[name]
    if ty.is_floating():
        return rounded(getattr(on_floats, method)(wide(data, ty), axis=0), ty)
    values = as_unsigned(data) if ty.is_int_unsigned() else data
    return as_signed(getattr(on_integers, method)(values, axis=0, dtype=values.dtype))


def _first_of(name: str, data: np.ndarray, ty: Any) -> np.ndarray:
    """The position along axis 0 of the first largest or smallest value."""
    largest = name.startswith("_argmax")
    if ty.is_floating():
        values = wide(data, ty)
        values = np.where(np.isnan(values), -np.inf if largest else np.inf, values)
    else:
        values = as_unsigned(data) if ty.is_int_unsigned() else data
    return (np.argmax if largest else np.argmin)(values, axis=0)


def _combined(combine: Any, left: list[np.ndarray], right: list[np.ndarray], types: list[Any]) -> list[np.ndarray]:
    parts = [*map(tensor_of, left, types), *map(tensor_of, right, types)]
    out = combine(*parts)
    return [part.handle.data for part in (out if isinstance(out, tuple | tl.tuple) else (out,))]


def _results(input: Any, outs: list[np.ndarray], types: list[Any]) -> Any:
    """A tensor for a tensor, else a tuple; a number of numpy's is a scalar."""
    results = tuple(map(tensor_of, map(np.asarray, outs), types))
    return results[0] if isinstance(input, tl.tensor) else results
