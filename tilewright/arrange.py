"""Cuts by axis name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.errors import ArrangementError
from tilewright.expr import Expr, const, nonnegative, wrap
from tilewright.tensor import Axis, Indices, Place, SizeLike, Tensor, _inside, _make


def cut(
    tensors: Sequence[Tensor], program: Mapping[str, SizeLike], steps: Mapping[str, SizeLike] | None = None
) -> tuple[Tensor, ...]:
    """Cuts every tensor the same way, by the names of its axes.

    One program gets `program[axis]` positions of each named axis and everything of the axes not named; the grid's axes
    are those of `program`, in that order. A tensor without one of them is shared along it. `steps[axis]` cuts one of
    the other axes into what one step of the application's loop holds, seen there as `x[step]`.

    Raises:
        ArrangementError: an axis that no tensor has or that is cut twice, a tile that may be empty, or two tensors that
            disagree about an axis's size.
    """
    steps = dict(steps or {})
    counts: dict[str, Expr] = {}
    for axis, tile in [*program.items(), *steps.items()]:
        if axis in counts:
            raise ArrangementError(f"cut: axis {axis} is cut into programs, it cannot be cut into steps too")
        if not nonnegative(wrap(tile) - 1):
            raise ArrangementError(f"cut: tile size {tile} along axis {axis} is not known to be >= 1")
        sizes = [(t.name, t.shape[t.names.index(axis)]) for t in tensors if axis in t.names]
        if not sizes:
            raise ArrangementError(f"cut: no tensor has an axis {axis}")
        if len({size for _, size in sizes}) > 1:
            text = ", ".join(f"{name} {size}" for name, size in sizes)
            raise ArrangementError(f"cut: axis {axis} differs: {text}")
        size = sizes[0][1]
        counts[axis] = (size + wrap(tile) - 1) // wrap(tile)
    return tuple(_cut_one(t, dict(program), steps, counts) for t in tensors)


def _cut_one(
    tensor: Tensor, program: Mapping[str, SizeLike], steps: Mapping[str, SizeLike], counts: Mapping[str, Expr]
) -> Tensor:
    if len(tensor.levels) != 1:
        raise ArrangementError(f"cut: {tensor!r} is cut already")
    tiles = {axis: wrap(size) for axis, size in {**program, **steps}.items()}
    old_axes = tensor.axes
    own_steps = [axis for axis in steps if axis in tensor.names]

    def locate(levels: Sequence[Indices]) -> Place:
        number = dict(zip(program, levels[0], strict=True))
        if own_steps:
            number |= dict(zip(own_steps, levels[1], strict=True))
        old, checked, axes = [], [], []
        for axis, lane in zip(old_axes, levels[-1], strict=True):
            if axis.name in number:
                lane = number[axis.name] * tiles[axis.name] + lane
                checked.append(lane)
                axes.append(axis)
            old.append(lane)
        place, mask = tensor._locate([tuple(old)])
        return place, _inside(checked, axes) + mask

    grid = tuple(Axis(axis, counts[axis]) for axis in program)
    tile = tuple(Axis(a.name, tiles.get(a.name or "", a.size)) for a in old_axes)
    middle = (tuple(Axis(axis, counts[axis]) for axis in own_steps),) if own_steps else ()
    return _make(tensor.source, (grid, *middle, tile), locate, tensor.fill)


def one(size: SizeLike) -> bool:
    """Is this tile size the literal 1?"""
    return wrap(size) == const(1)


def named(names: Iterable[str], arranged: Sequence[Tensor]) -> dict[str, Tensor]:
    """Arranged tensors by the names of an application's parameters, in order."""
    return dict(zip(names, arranged, strict=True))
