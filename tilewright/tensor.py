"""Symbolic tensors: levels of shapes, and one pure function from indices to elements of the source.

The operations are NineToothed's, checked. None of them changes its tensor; each returns a new one, so an arranged
tensor may be used twice. Every axis can carry a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright.errors import ArrangementError
from tilewright.expr import Expr, Index, Loaded, Size, condition, const, is_guard, nonnegative, wrap

Indices = tuple[Expr, ...]
Place = tuple[Indices, tuple[Expr, ...]]  # where in the source, and the conditions (each >= 0) under which it is there
Locate = Callable[[Sequence[Indices]], Place]
SizeLike = int | Size | Expr


@dataclass(frozen=True)
class Axis:
    """One dimension: a name (or None) and a size."""

    name: str | None
    size: Expr

    def __str__(self) -> str:
        return f"{self.name}={self.size}" if self.name else str(self.size)


@dataclass(frozen=True)
class Source:
    """What a tensor is in memory: element strides and offset over the allocation of the argument `memory`.

    `dtype` is a dtype's name, or the name of the argument whose dtype it shares, as `like:q`.
    """

    name: str
    axes: tuple[Axis, ...]
    strides: tuple[Expr, ...]
    dtype: str
    memory: str
    offset: Expr = const(0)
    choices: tuple[Source, ...] = ()  # of a stack: the first index says which


@dataclass(frozen=True)
class _TileSource(Source):
    """Stands in for the source of a tile: positions in the inner levels of the tensor that locates by `parent`."""

    parent: Locate | None = None
    lengths: tuple[int, ...] = ()  # how many axes each of those levels has


class Tensor:
    """A tensor named `name` with the axes of `axes` ("tokens heads dim") and sizes `shape`.

    Strides are counted in elements: None means row-major and contiguous; a tuple gives sizes or expressions.
    """

    _owner: Tensor | None = None  # of a tile: the tensor whose `.dtype` it is
    _tile: Tensor | None  # its `.dtype`, once asked for

    def __init__(
        self,
        name: str,
        axes: str,
        shape: Sequence[SizeLike],
        dtype: str = "float32",
        strides: Sequence[SizeLike] | None = None,
    ):
        names = axes.split()
        if len(names) != len(shape):
            raise ArrangementError(f"{name}: {len(names)} axes are named, {len(shape)} sizes are given")
        if len(set(names)) != len(names):
            raise ArrangementError(f"{name}: an axis is named twice in '{axes}'")
        if strides is not None and len(strides) != len(names):
            raise ArrangementError(f"{name}: {len(names)} axes are named, {len(strides)} strides are given")
        sizes = [wrap(size) for size in shape]
        for axis, size in zip(names, sizes, strict=True):
            if nonnegative(-size - 1):
                raise ArrangementError(f"{name}: axis {axis} has size {size}")
        source = Source(
            name=name,
            axes=tuple(map(Axis, names, sizes)),
            strides=_row_major(sizes) if strides is None else tuple(map(wrap, strides)),
            dtype=dtype,
            memory=name,
        )
        self._set(source, (source.axes,), lambda levels: (levels[0], ()), None)

    def _set(
        self, source: Source, levels: tuple[tuple[Axis, ...], ...], locate: Locate, fill: float | int | None
    ) -> None:
        self.source = source
        self.levels = levels
        self._locate = locate
        self.fill = fill
        self._tile = None

    def _derive(self, axes: Iterable[Axis], to_old: Callable[[Indices], Place]) -> Tensor:
        """A tensor whose outermost level has `axes` and whose indices there become old ones by `to_old`."""
        inner = self._locate

        def locate(levels: Sequence[Indices]) -> Place:
            old, conditions = to_old(levels[0])
            place, more = inner([old, *levels[1:]])
            return place, conditions + more

        return _make(self.source, (tuple(axes), *self.levels[1:]), locate, self.fill)

    # -- looking
    @property
    def name(self) -> str:
        return self.source.name

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.levels[0]

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[Expr, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def dtype(self) -> Any:
        """The tile as a tensor of its own, or the element's dtype at the innermost level.

        Setting it changes this tensor, and `x.dtype.dtype = ...` changes x; what was made from x before stays.
        """
        if len(self.levels) == 1:
            return self.source.dtype
        if self._tile is None or self._tile._owner is not self:
            self._tile = self._new_tile()
        return self._tile

    @dtype.setter
    def dtype(self, tile: Tensor) -> None:
        new = self.with_dtype(tile)
        self._set(new.source, new.levels, new._locate, new.fill)
        if self._owner is not None:
            self._owner.dtype = self
            own = self._owner._new_tile()
            self._set(own.source, own.levels, own._locate, own.fill)
            self._owner._tile = self

    def _new_tile(self) -> Tensor:
        axes = tuple(axis for level in self.levels[1:] for axis in level)
        stand_in = _TileSource(
            self.name, axes, _row_major([a.size for a in axes]), self.source.dtype, self.name,
            parent=self._locate, lengths=tuple(map(len, self.levels[1:])),
        )  # fmt: skip
        tile = _make(
            stand_in,
            self.levels[1:],
            lambda levels: (tuple(index for level in levels for index in level), ()),
            self.fill,
        )
        tile._owner = self
        return tile

    def with_dtype(self, tile: Tensor) -> Tensor:
        """This tensor with its tile replaced by `tile`, which was made from `self.dtype`."""
        stand_in = tile.source if isinstance(tile, Tensor) else None
        if not isinstance(stand_in, _TileSource) or stand_in.parent is not self._locate:
            raise ArrangementError(f"{self.name}: the new tile is not made from this tensor's own .dtype")
        locate, in_tile, lengths = self._locate, tile._locate, stand_in.lengths

        def composed(levels: Sequence[Indices]) -> Place:
            flat, conditions = in_tile(levels[1:])
            inner, start = [], 0
            for length in lengths:
                inner.append(flat[start : start + length])
                start += length
            place, more = locate([levels[0], *inner])
            return place, conditions + more

        return _make(self.source, (self.axes, *tile.levels), composed, tile.fill)

    def locate(self, *levels: Sequence[Any]) -> Place:
        """Source indices of the element at `levels`, and the conditions, unsimplified, under which it exists."""
        given = [tuple(map(wrap, level)) for level in levels]
        if [len(level) for level in given] != [len(level) for level in self.levels]:
            raise ArrangementError(f"{self.name}.locate: {'; '.join(map(str, given))} does not index {self!r}")
        return self._locate(given)

    def __repr__(self) -> str:
        return f"{self.name}" + "".join(f"[{', '.join(map(str, level))}]" for level in self.levels)

    # -- NineToothed's operations
    def tile(
        self,
        tile_shape: Sequence[SizeLike],
        strides: Sequence[SizeLike] | None = None,
        dilation: Sequence[SizeLike] | None = None,
        floor_mode: bool = False,
    ) -> Tensor:
        """Cuts into tiles: the new outermost level counts tiles, the level below it lies within one.

        A size or stride of -1 means the whole axis, or the tile's size. Source: `ninetoothed.Tensor.tile`.
        """
        self._one_each("tile", "tile sizes", tile_shape)
        shape = [a.size if _is(t, -1) else wrap(t) for a, t in zip(self.axes, tile_shape, strict=True)]
        given = [-1] * self.ndim if strides is None else strides
        self._one_each("tile", "strides", given)
        steps = [t if _is(s, -1) else wrap(s) for s, t in zip(given, shape, strict=True)]
        gaps = [const(1)] * self.ndim if dilation is None else [wrap(d) for d in dilation]
        self._one_each("tile", "dilations", gaps)
        for axis, size, step, gap in zip(self.axes, shape, steps, gaps, strict=True):
            if size != axis.size:  # a whole axis may be empty
                self._positive("tile size", axis, size)
            if step != axis.size:
                self._positive("tile stride", axis, step)
            self._positive("dilation", axis, gap)
        outer = []
        for axis, size, step, gap in zip(self.axes, shape, steps, gaps, strict=True):
            room = axis.size - gap * (size - 1) - 1
            count = (room if floor_mode else room + step - 1) // step + 1 if room != 0 else const(1)
            if count.value is not None and count.value < 1:
                raise ArrangementError(f"{self.name}.tile: no tile of {size} fits axis {axis}")
            outer.append(Axis(axis.name, count))
        old_axes, inner = self.axes, self._locate

        def locate(levels: Sequence[Indices]) -> Place:
            old = tuple(o * s + i * g for o, s, i, g in zip(levels[0], steps, levels[1], gaps, strict=True))
            place, more = inner([old, *levels[2:]])
            return place, _inside(old, old_axes) + more

        tile_axes = tuple(Axis(axis.name, size) for axis, size in zip(self.axes, shape, strict=True))
        return _make(self.source, (tuple(outer), tile_axes, *self.levels[1:]), locate, self.fill)

    def expand(self, shape: Sequence[SizeLike]) -> Tensor:
        """Repeats axes of size 1; -1 keeps an axis."""
        self._one_each("expand", "sizes", shape)
        axes, kept = [], []
        for axis, size in zip(self.axes, shape, strict=True):
            keep = _is(size, -1) or wrap(size) == axis.size
            if not keep and axis.size != 1:
                raise ArrangementError(f"{self.name}.expand: axis {axis} cannot become {size}, only 1 can")
            if not keep and isinstance(size, int) and size < 1:
                raise ArrangementError(f"{self.name}.expand: axis {axis} cannot become {size}")
            axes.append(axis if keep else Axis(axis.name, wrap(size)))
            kept.append(keep)
        zero = const(0)
        return self._derive(
            axes, lambda index: (tuple(i if k else zero for i, k in zip(index, kept, strict=True)), ())
        )

    def unsqueeze(self, dim: int, name: str | None = None) -> Tensor:
        """Inserts an axis of size 1 before axis `dim`."""
        dim = self._dim("unsqueeze", dim, self.ndim + 1)
        axes = [*self.axes[:dim], Axis(name, const(1)), *self.axes[dim:]]
        self._once("unsqueeze", [name], axes)
        return self._derive(axes, lambda index: (index[:dim] + index[dim + 1 :], ()))

    def squeeze(self, dim: int | str | Sequence[int | str]) -> Tensor:
        """Removes axes of size 1."""
        dims = (dim,) if isinstance(dim, int | str) else tuple(dim)
        gone = {self._dim("squeeze", d) for d in dims}
        for d in sorted(gone):
            if self.axes[d].size != 1:
                raise ArrangementError(f"{self.name}.squeeze: axis {self.axes[d]} is not of size 1")

        def to_old(index: Indices) -> Place:
            rest = iter(index)
            return tuple(const(0) if d in gone else next(rest) for d in range(len(index) + len(gone))), ()

        return self._derive((a for d, a in enumerate(self.axes) if d not in gone), to_old)

    def permute(self, dims: Sequence[int | str]) -> Tensor:
        """Reorders the axes, by position or by name."""
        order = [self._dim("permute", d) for d in dims]
        if sorted(order) != list(range(self.ndim)):
            raise ArrangementError(f"{self.name}.permute: {tuple(dims)} is no order of the axes {self._text()}")
        return self._derive(
            (self.axes[d] for d in order),
            lambda index: (tuple(index[order.index(d)] for d in range(len(order))), ()),
        )

    def flatten(
        self, start_dim: int | None = None, end_dim: int | None = None, name: str | None = None
    ) -> Tensor:
        """Joins the axes from `start_dim` up to, not including, `end_dim` into one."""
        start = 0 if start_dim is None else self._dim("flatten", start_dim)
        end = self.ndim if end_dim in (None, self.ndim) else self._dim("flatten", end_dim)
        if end <= start:
            raise ArrangementError(f"{self.name}.flatten: axes {start} to {end} are none")
        joined = self.axes[start:end]
        size = const(1)
        for axis in joined:
            size = size * axis.size
        if name is None and len({a.name for a in joined}) == 1:
            name = joined[0].name
        axes = [*self.axes[:start], Axis(name, size), *self.axes[end:]]

        def to_old(index: Indices) -> Place:
            old = unravel(index[start], [a.size for a in joined])
            return index[:start] + old + index[start + 1 :], _inside(old[:1], joined[:1])

        return self._derive(axes, to_old)

    def ravel(self) -> Tensor:
        """Joins all levels into one, without joining axes."""
        lengths = [len(level) for level in self.levels]
        inner = self._locate

        def locate(levels: Sequence[Indices]) -> Place:
            old, start = [], 0
            for length in lengths:
                old.append(levels[0][start : start + length])
                start += length
            return inner(old)

        axes = tuple(axis for level in self.levels for axis in level)
        return _make(self.source, (axes,), locate, self.fill)

    def pad(self, pad: Sequence[tuple[SizeLike, SizeLike]]) -> Tensor:
        """Adds (before, after) positions to each axis that hold no element and read as the fill."""
        self._one_each("pad", "pairs", pad)
        before = [wrap(b) for b, _ in pad]
        padded = [not (_is(b, 0) and _is(after, 0)) for b, after in pad]
        axes = [
            Axis(a.name, a.size + b + wrap(after))
            for a, b, (_, after) in zip(self.axes, before, pad, strict=True)
        ]
        old_axes = self.axes
        for axis, new in zip(old_axes, axes, strict=True):
            if nonnegative(-new.size):
                raise ArrangementError(f"{self.name}.pad: nothing is left of axis {axis}")

        def to_old(index: Indices) -> Place:
            old = tuple(i - b for i, b in zip(index, before, strict=True))
            some = [d for d, is_padded in enumerate(padded) if is_padded]
            return old, _inside((old[d] for d in some), (old_axes[d] for d in some))

        return self._derive(axes, to_old)

    def __getitem__(self, items: Any) -> Tensor:
        """Slices, integers, None and an ellipsis, as in NumPy, but a slice may pass the end: nothing is there.

        A negative step may stop at -1, before the first position. Source: `ninetoothed.Tensor`.
        """
        items = items if isinstance(items, tuple) else (items,)
        if sum(item is Ellipsis for item in items) > 1:
            raise ArrangementError(f"{self.name}[...]: an ellipsis may stand once")
        used = sum(item is not None and item is not Ellipsis for item in items)
        if used > self.ndim:
            raise ArrangementError(f"{self.name}[...]: {used} indices for {self.ndim} axes {self._text()}")
        whole: list[Any] = []
        for item in items:
            whole.extend([slice(None)] * (self.ndim - used) if item is Ellipsis else [item])
        out, dim = self, 0
        for item in whole:
            if item is None:
                out, dim = out.unsqueeze(dim), dim + 1
            elif isinstance(item, slice):
                out, dim = out._slice(dim, item), dim + 1
            elif isinstance(item, int | Size | Expr):
                start = out._start(dim, item)
                past = start - out.axes[dim].size
                if (start.value or 0) < 0 or (past.value is not None and past.value >= 0):
                    raise ArrangementError(f"{self.name}[...]: {item} is past axis {out.axes[dim]}")
                out = out._slice(dim, slice(start, start + 1)).squeeze(dim)
            else:
                raise ArrangementError(f"{self.name}[...]: {item!r} is no index, slice or None")
        return out

    def _start(self, dim: int, item: SizeLike) -> Expr:
        if isinstance(item, int) and item < 0:
            return self.axes[dim].size + item
        return wrap(item)

    def _slice(self, dim: int, part: slice) -> Tensor:
        if part == slice(None):
            return self
        axis = self.axes[dim]
        step = 1 if part.step is None else part.step
        if not isinstance(step, int) or step == 0:
            raise ArrangementError(f"{self.name}[...]: a step of {step} along axis {axis}")
        if part.start is None:
            start = const(0) if step > 0 else axis.size - 1
        else:
            start = self._start(dim, part.start)
        if part.stop is None or (step < 0 and _is(part.stop, -1)):
            stop = axis.size if step > 0 else const(-1)
        else:
            stop = self._start(dim, part.stop)
        length = (stop - start + step - (1 if step > 0 else -1)) // step if step > 0 else (
            (start - stop - step - 1) // -step
        )
        if length.value is not None and length.value <= 0:
            raise ArrangementError(f"{self.name}[...]: {start}:{stop}:{step} along axis {axis} is empty")

        def to_old(index: Indices) -> Place:
            old = start + index[dim] * step
            return (*index[:dim], old, *index[dim + 1 :]), _inside((old,), (axis,))

        return self._derive((*self.axes[:dim], Axis(axis.name, length), *self.axes[dim + 1 :]), to_old)

    # -- beyond NineToothed
    def filled(self, value: float | int) -> Tensor:
        """What positions without an element read as."""
        return _make(self.source, self.levels, self._locate, value)

    def rename(self, **names: str) -> Tensor:
        """Renames axes of the outermost level: `x.rename(old="new")`."""
        for old in names:
            self._dim("rename", old)
        axes = tuple(Axis(names.get(a.name, a.name) if a.name else None, a.size) for a in self.axes)
        self._once("rename", names.values(), axes)
        return _make(self.source, (axes, *self.levels[1:]), self._locate, self.fill)

    def split(self, axis: str, **parts: SizeLike) -> Tensor:
        """Splits an axis into named ones, the first the slowest; one part may be -1 and takes what is left.

        `x.split("dim", pairs=-1, side=2)` pairs neighbours, `x.split("dim", side=2, pairs=-1)` pairs halves.
        """
        dim = self._dim("split", axis)
        whole = self.axes[dim].size
        known = const(1)
        for size in parts.values():
            if not _is(size, -1):
                known = known * wrap(size)
        for size in (known, *map(wrap, parts.values())):
            if size != -1 and nonnegative(-size):
                text = ", ".join(f"{name}={part}" for name, part in parts.items())
                raise ArrangementError(f"{self.name}.split: {text} of axis {self.axes[dim]}")
        sizes = [whole // known if _is(s, -1) else wrap(s) for s in parts.values()]
        product = const(1)
        for size in sizes:
            product = product * size
        if product != whole:
            raise ArrangementError(f"{self.name}.split: {' x '.join(map(str, sizes))} is not axis {self.axes[dim]}")
        axes = [*self.axes[:dim], *map(Axis, parts, sizes), *self.axes[dim + 1 :]]
        self._once("split", parts, axes)

        def to_old(index: Indices) -> Place:
            old = ravel_index(index[dim : dim + len(sizes)], sizes)
            return (*index[:dim], old, *index[dim + len(sizes) :]), ()

        return self._derive(axes, to_old)

    def reindex(self, axis: str, position: Callable[..., Any], **parts: SizeLike) -> Tensor:
        """Replaces an axis by named ones: index (i, j, ..) of them is position `position(i, j, ..)` of it.

        That every position lies within the axis, and none is hit twice, is the caller's word.
        """
        dim = self._dim("reindex", axis)
        axes = [*self.axes[:dim], *(Axis(n, wrap(s)) for n, s in parts.items()), *self.axes[dim + 1 :]]
        self._once("reindex", parts, axes)
        count = len(parts)

        def to_old(index: Indices) -> Place:
            return (*index[:dim], wrap(position(*index[dim : dim + count])), *index[dim + count :]), ()

        return self._derive(axes, to_old)

    def gather(self, axis: str, index: Tensor | IndexTensor) -> Tensor:
        """Data-dependent placement: position i of the new axes is position `index[i]` of `axis`.

        The index's axes take the place of `axis`; those that the tensor has already are one with them. Where the index
        does not exist, is skipped or is out of range there is no element.
        """
        dim = self._dim("gather", axis)
        at = index.index() if isinstance(index, Tensor) else index
        old_axis = self.axes[dim]
        shared = {a.name: d for d, a in enumerate(self.axes) if d != dim and a.name}
        fresh = [a for a in at.axes if a.name not in shared]
        axes = [*self.axes[:dim], *fresh, *self.axes[dim + 1 :]]
        checks_above = at.above == "check"

        def to_old(new: Indices) -> Place:
            own = iter(new[dim : dim + len(fresh)])
            rest = (*new[:dim], None, *new[dim + len(fresh) :])
            where = tuple(
                wrap(rest[shared[a.name]]) if a.name in shared else next(own) for a in at.axes
            )
            value, conditions = at.at(where)
            old = tuple(value if d == dim else wrap(rest[d]) for d in range(len(rest)))
            if checks_above:
                conditions = (*conditions, *_inside((value,), (old_axis,)))
            return old, conditions

        return self._derive(axes, to_old)

    def where(self, index: IndexTensor, below: SizeLike | None = None) -> Tensor:
        """Elements exist only where the index, over some of the axes, is not skipped, and below `below` if given."""
        dims = [self._dim("where", str(a.name)) for a in index.axes]

        def to_old(new: Indices) -> Place:
            value, conditions = index.at(tuple(new[d] for d in dims))
            return new, conditions if below is None else (*conditions, wrap(below) - 1 - value)

        return self._derive(self.axes, to_old)

    def index(
        self, *, above: str = "check", negative: str = "skip", name: str | None = None
    ) -> IndexTensor:
        """This integer tensor as an index.

        Args:
            name: what one value is called in generated text, "slot" say.
            above: "check" masks values past the axis; "never" relies on the contract.
            negative: "skip" masks negative values; "never" relies on the contract.
        """
        if above not in ("check", "never") or negative not in ("skip", "never"):
            raise ArrangementError(f"{self.name}.index: above={above!r}, negative={negative!r}")
        if len(self.levels) != 1:
            raise ArrangementError(f"{self.name}.index: an index has one level, this has {len(self.levels)}")
        if isinstance(self.source, _TileSource):
            raise ArrangementError(f"{self.name}.index: a tile is no index, the tensor itself is")
        guarded = negative == "skip"
        fill, value_name = -1 if guarded else 0, name or f"{self.name}_value"

        def at(index: Indices) -> Place:
            place, mask = self._locate([index])
            mask = _inside(index, self.axes) + mask
            left = tuple(test for test in map(condition, mask) if is_guard(test) or not nonnegative(test))
            value = Loaded(self.source, place, left, fill, guarded, value_name)
            return (value.expr,), ((value.expr,) if guarded else mask)

        return IndexTensor(self.axes, lambda i: (at(i)[0][0], at(i)[1]), above)

    def __floordiv__(self, other: SizeLike) -> IndexTensor:
        return self.index() // other

    def __mod__(self, other: SizeLike) -> IndexTensor:
        return self.index() % other

    def view(
        self,
        name: str,
        axes: str,
        shape: Sequence[SizeLike],
        strides: Sequence[SizeLike],
        dtype: str,
        offset: SizeLike = 0,
    ) -> Tensor:
        """Another tensor over the same allocation; strides and offset count elements of its own dtype."""
        out = Tensor(name, axes, shape, dtype, strides)
        source = replace(out.source, memory=self.source.memory, offset=wrap(offset))
        return _make(source, out.levels, out._locate, None)

    # -- checks
    def _dim(self, op: str, dim: int | str, ndim: int | None = None) -> int:
        if isinstance(dim, str):
            if dim not in self.names:
                raise ArrangementError(f"{self.name}.{op}: there is no axis {dim}, only {self._text()}")
            return self.names.index(dim)
        ndim = self.ndim if ndim is None else ndim
        if not -ndim <= dim < ndim:
            raise ArrangementError(f"{self.name}.{op}: axis {dim} of {ndim}")
        return dim % ndim

    def _one_each(self, op: str, what: str, given: Sequence[Any]) -> None:
        if len(given) != self.ndim:
            raise ArrangementError(f"{self.name}.{op}: {len(given)} {what} for the {self.ndim} axes {self._text()}")

    def _positive(self, what: str, axis: Axis, size: Expr) -> None:
        if not nonnegative(size - 1):
            raise ArrangementError(f"{self.name}.tile: {what} {size} along axis {axis} is not known to be >= 1")

    def _once(self, op: str, names: Iterable[str | None], axes: Sequence[Axis]) -> None:
        for name in names:
            if name and sum(axis.name == name for axis in axes) > 1:
                raise ArrangementError(f"{self.name}.{op}: axis {name} would be there twice in [{_listed(axes)}]")

    def _text(self) -> str:
        return f"[{_listed(self.axes)}]"


@dataclass(frozen=True)
class IndexTensor:
    """Integer positions over named axes: a loaded tensor, arithmetic on one, or a computed expression."""

    axes: tuple[Axis, ...]
    at: Callable[[Indices], tuple[Expr, tuple[Expr, ...]]]
    above: str = "check"

    def _map(self, change: Callable[[Expr], Expr]) -> IndexTensor:
        at = self.at

        def mapped(index: Indices) -> tuple[Expr, tuple[Expr, ...]]:
            value, mask = at(index)
            return change(value), mask

        return replace(self, at=mapped)

    def __floordiv__(self, other: SizeLike) -> IndexTensor:
        return self._map(lambda v: v // other)

    def __mod__(self, other: SizeLike) -> IndexTensor:
        return self._map(lambda v: v % other)

    def __add__(self, other: SizeLike) -> IndexTensor:
        return self._map(lambda v: v + other)

    def __mul__(self, other: SizeLike) -> IndexTensor:
        return self._map(lambda v: v * other)


def computed(axes: Sequence[Axis], value: Callable[..., Any]) -> IndexTensor:
    """An index that is arithmetic on positions, `value(*positions)`; its range is the caller's word."""
    return IndexTensor(tuple(axes), lambda index: (wrap(value(*index)), ()), "never")


def stack(*tensors: Tensor, axis: str, name: str | None = None) -> Tensor:
    """Several tensors of one shape and dtype along a new first axis; a gather along it picks one by its pointer."""
    if not tensors:
        raise ArrangementError("stack: no tensor is given")
    first = tensors[0]
    probe = [Index(str(d), a.size).expr for d, a in enumerate(first.axes)]
    for other in tensors:
        if len(other.levels) != 1:
            raise ArrangementError(f"stack: {other!r} is cut already")
        if (other.axes, other.source.dtype) != (first.axes, first.source.dtype):
            raise ArrangementError(f"stack: {other!r} differs from {first!r}")
        if _laid_out(other, probe) != _laid_out(first, probe):
            raise ArrangementError(f"stack: {other!r} and {first!r} are not laid out alike")
    count = Axis(axis, const(len(tensors)))
    source = Source(
        name=name or "_or_".join(t.name for t in tensors),
        axes=(count, *first.source.axes),
        strides=(const(0), *first.source.strides),
        dtype=first.source.dtype,
        memory=first.source.memory,
        offset=first.source.offset,
        choices=tuple(t.source for t in tensors),
    )
    inner = first._locate

    def locate(levels: Sequence[Indices]) -> Place:
        place, mask = inner([levels[0][1:]])
        return (levels[0][0], *place), mask

    return _make(source, ((count, *first.axes),), locate, first.fill)


def _laid_out(tensor: Tensor, probe: Sequence[Expr]) -> tuple[Any, ...]:
    return tensor.source.strides, tensor.source.offset, tensor.locate(probe)


def unravel(index: Expr, shape: Sequence[Expr]) -> Indices:
    """Row-major coordinates of a flat index."""
    out: list[Expr] = []
    for size in reversed(shape[1:]):
        out.insert(0, index % size)
        index = index // size
    return (index, *out)


def ravel_index(index: Sequence[Expr], shape: Sequence[Expr]) -> Expr:
    """The flat index of row-major coordinates."""
    out = const(0)
    for i, size in zip(index, shape, strict=True):
        out = out * size + i
    return out


def _make(source: Source, levels: tuple[tuple[Axis, ...], ...], locate: Locate, fill: Any) -> Tensor:
    tensor = Tensor.__new__(Tensor)
    tensor._set(source, levels, locate, fill)
    return tensor


def _row_major(sizes: Sequence[Expr]) -> tuple[Expr, ...]:
    strides: list[Expr] = []
    step = const(1)
    for size in reversed(sizes):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


def _inside(index: Iterable[Expr], axes: Iterable[Axis]) -> tuple[Expr, ...]:
    out: list[Expr] = []
    for i, axis in zip(index, axes, strict=True):
        out += [i, axis.size - 1 - i]
    return tuple(out)


def _listed(axes: Iterable[Axis]) -> str:
    return ", ".join(map(str, axes))


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number
