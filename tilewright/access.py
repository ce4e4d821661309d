"""Where a tile lies: from index expressions to the text of pointers, masks and loads of one device function."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from tilewright.errors import GenerationError
from tilewright.expr import (
    INT32,
    Atom,
    Div,
    Expr,
    Index,
    Loaded,
    Mod,
    Named,
    Size,
    Test,
    condition,
    const,
    nonnegative,
    render,
    simplify_mask,
    top,
)
from tilewright.language import Dim
from tilewright.tensor import Axis, Source, Tensor


@dataclass
class Definition:
    """One named integer of the function: an axis's position, a lane, a loaded index or arithmetic on them."""

    name: str
    dims: tuple[Dim, ...]
    narrow: str
    wide: str
    is_wide: bool = False  # 64 bits, because some offset needs it

    @property
    def text(self) -> str:
        return f"{self.name} = {self.wide if self.is_wide else self.narrow}"


@dataclass(frozen=True)
class Access:
    """A tile in memory: its pointers' name, its dimensions, its mask's text and conditions, what absent lanes read."""

    pointers: str
    dims: tuple[Dim, ...]
    mask: str
    conditions: tuple[Expr, ...]
    fill: float | int
    element: str  # text of the element's dtype
    either: Either | None = None
    step: str = ""  # what the pointers move by within a loop


@dataclass(frozen=True)
class Either:
    """A choice between two tensors that differs within a tile: each is read over `dims`, and a lane takes its own.

    Attributes:
        sides: what each read is called, and the name of its pointers.
        mask: of both reads, and `dims` theirs.
        test: where the second is meant.
        exists: where either is.
    """

    sides: tuple[tuple[str, str], tuple[str, str]]
    mask: str
    dims: tuple[Dim, ...]
    test: str
    exists: str


@dataclass(frozen=True)
class Order:
    """Programs of a two-dimensional grid, `size` tiles of `axis` at a time, so that those share what the L2 holds."""

    axis: str
    size: Expr


@dataclass(frozen=True)
class Limit:
    """Programs whose positions along `axis` all lie past the number that `count` [1] holds do nothing."""

    axis: str
    count: Tensor


Place = tuple[tuple[Expr, ...], tuple[Expr, ...], list[Axis]]


@dataclass(frozen=True)
class Located:
    """Where tiles lie, which no line of text changes."""

    known: dict[tuple[object, ...], Place]


def singular(name: str) -> str:
    """An index along axis `tokens` is a `token`."""
    return name[:-1] if name.endswith("s") and len(name) > 2 else name


def lane_size(size: Expr) -> int | None:
    """How many lanes hold an axis of literal size: the next power of two; None for a symbolic one, which is one."""
    return None if size.value is None else 1 << (size.value - 1).bit_length()


@dataclass
class Places:
    """The index part of one device function, built as accesses are asked for."""

    tensors: Mapping[str, Tensor]
    fold: bool  # neighbouring lanes may become one long lane
    recast: bool  # a view of another dtype recasts the pointer here, else it is an argument
    reserved: set[str]
    exact: bool = False  # no lane's address leaves its tensor, whatever its mask
    index: str = "tl.int64"  # of offsets that 32 bits may not hold
    order: Order | None = None
    limit: Limit | None = None
    head: list[Definition | str] = field(default_factory=list)
    sizes: dict[str, Size] = field(default_factory=dict)
    pointers: dict[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grid = self._grid()
        self.definitions: dict[str, Definition] = {}
        self.named: dict[Atom, Named] = {}
        self.lanes: dict[tuple[str, ...], Named] = {}
        self.conditions: dict[Expr, str] = {}
        self.accesses: dict[tuple[object, ...], Access] = {}
        self.recasts: set[str] = set()
        self.pointer_names: dict[str, str] = {}  # by their text, so that equal ones are computed once
        self.choices: dict[tuple[str, Expr], str] = {}
        self.moved: dict[str, Named] = {}  # by their text
        self.index_loads: dict[str, tuple[Expr, ...]] = {}
        self.steps: dict[Atom, Named] = {}  # of the loop that is being written
        self.located = Located({})
        self.axes = self._tile_axes()
        self._define_programs()
        self.prologue = len(self.head)  # how many lines of the head say which program this is

    # -- the grid
    def _grid(self) -> tuple[Axis, ...]:
        grids = {name: t.axes for name, t in self.tensors.items()}
        first = next(iter(grids.values()))
        for name, grid in grids.items():
            if [a.size for a in grid] != [a.size for a in first]:
                raise GenerationError(
                    f"{name} is arranged over [{', '.join(map(str, grid))}], "
                    f"{next(iter(grids))} over [{', '.join(map(str, first))}]"
                )
        return first

    def _tile_axes(self) -> dict[str, Axis]:
        """The axes of all tiles, in an order that agrees with every tile's if there is one."""
        axes: dict[str, Axis] = {}
        for name, tensor in self.tensors.items():
            if len(tensor.levels) not in (2, 3):
                raise GenerationError(f"{name} has {len(tensor.levels)} levels, a grid and a tile are needed")
            for axis in tensor.levels[-1]:
                known = axes.setdefault(str(axis.name), axis)
                if known.size != axis.size:
                    raise GenerationError(f"{name}: axis {axis} of its tile is {known} in another")
        after: dict[str, set[str]] = {name: set() for name in axes}
        for tensor in self.tensors.values():
            names = [str(axis.name) for axis in tensor.levels[-1]]
            for before, name in zip(names, names[1:], strict=False):
                after[name].add(before)
        try:
            return {name: axes[name] for name in TopologicalSorter(after).static_order()}
        except CycleError:
            return axes

    def _define_programs(self) -> None:
        """`token = pid // head_tiles * tokens + tl.arange(0, tokens)` for every axis of the grid."""
        flat = "pid"
        grouped = self._grouped() if self.order else {}
        for position in reversed(range(len(self.grid))):
            axis = self.grid[position]
            name = str(axis.name)
            program = Index(name, axis.size, "program")
            tile = self.axes.get(name)
            if grouped:
                number = grouped[name]
            elif position:
                count = self.fresh(f"{singular(name)}_tiles")
                self.head.insert(0, f"{count} = {self.text(axis.size)}")
                number, flat = f"{flat} % {count}", f"{flat} // {count}"
            else:
                number = flat
            variable = self.fresh(singular(name))
            wide_number = f"({number})" if " " in number else number
            if tile is not None and tile.size != 1 and " " in number:
                counter = self.fresh(f"{singular(name)}_tile")
                wide = f"{wide_number}.to({self.index})"
                self._program(counter, (), number, wide, top(axis.size), program, program.expr)
                number = wide_number = counter
            elif tile is not None and tile.size != 1:
                self.named[program] = Named(number, top(axis.size))
                self.definitions[number] = Definition(number, (), number, number)
            if tile is None or tile.size == 1:
                wide = f"{wide_number}.to({self.index})"
                self._program(variable, (), number, wide, top(axis.size), program, program.expr)
                continue
            size = self.text(tile.size)
            lane = Index(name, tile.size, "lane")
            limit_axis, limit_tile = top(axis.size * tile.size), top(tile.size)
            limit = None if limit_axis is None or limit_tile is None else limit_axis + limit_tile
            self._program(
                variable,
                ((tile,),),
                f"{number} * {size} + tl.arange(0, {size})",
                f"{wide_number}.to({self.index}) * {size} + tl.arange(0, {size})",
                limit,
                lane,
                program.expr * tile.size + lane.expr,
            )

    def _grouped(self) -> dict[str, str]:
        """The number of the tile along each axis, where programs go through groups of tiles of one axis."""
        assert self.order is not None
        names = [str(a.name) for a in self.grid]
        if len(names) != 2 or names[0] != self.order.axis:
            raise GenerationError(f"an order by {self.order.axis} needs a grid of it and one more axis, not {names}")
        slow, fast = map(singular, names)
        size = self.text(self.order.size)
        counts = [self.fresh(f"{name}_tiles") for name in (slow, fast)]
        group, first, height = map(self.fresh, ("group_programs", f"first_{slow}_tile", f"group_{slow}_tiles"))
        self.head += [
            *(f"{count} = {self.text(axis.size)}" for count, axis in zip(counts, self.grid, strict=True)),
            f"{group} = {size} * {counts[1]}",
            f"{first} = pid // {group} * {size}",
            f"{height} = tl.minimum({counts[0]} - {first}, {size})",
        ]
        return {names[0]: f"{first} + pid % {group} % {height}", names[1]: f"pid % {group} // {height}"}

    def guard(self) -> str:
        """The test under which a program has anything to do; "" without a limit."""
        if self.limit is None:
            return ""
        axis = next(a for a in self.grid if a.name == self.limit.axis)
        tile = self.axes.get(self.limit.axis)
        program = Index(self.limit.axis, axis.size, "program")
        count = self.limit.count.source
        self.pointers.setdefault(count.memory, count)
        number = self.named[program].name
        start = number if tile is None or tile.size == 1 else f"{number} * {self.text(tile.size)}"
        return f"{start} < tl.load({count.memory})"

    def _program(
        self, name: str, dims: tuple[Dim, ...], narrow: str, wide: str, limit: int | None, key: Atom, value: Expr
    ) -> None:
        definition = Definition(name, dims, narrow, wide)
        self.definitions[name] = definition
        self.head.append(definition)
        self.named[key] = Named(name, _axis_limit(self.tensors.values(), name, limit))
        self.programs = [*getattr(self, "programs", []), (key, value)]

    # -- names
    def fresh(self, name: str) -> str:
        """A name that nothing else has: `name`, or with a number."""
        candidate, n = name, 1
        while candidate in self.reserved or keyword.iskeyword(candidate):
            candidate, n = f"{name}_{n}", n + 1
        self.reserved.add(candidate)
        return candidate

    def text(self, e: Expr) -> str:
        """Text of an expression of sizes alone."""
        return render(e, self._size_name)

    def _size_name(self, atom: Atom) -> str:
        if not isinstance(atom, Size):
            raise GenerationError(f"{atom.label} is no size")
        if atom.low == atom.high:
            return str(atom.low)
        self.sizes.setdefault(atom.name, atom)
        return atom.name

    def lane(self, dim: Dim) -> Named:
        """The variable that counts the lanes of a dimension; its size in memory order is the fold's."""
        key = tuple(str(axis.name) for axis in dim)
        if key not in self.lanes:
            size = const(1)
            literal = 1
            for axis in dim:
                size = size * axis.size
                literal *= lane_size(axis.size) or 1
            text = str(literal) if size.value is not None else self.text(size)
            name = self.fresh(singular(key[0]) if len(dim) == 1 else "lane")
            definition = Definition(name, (dim,), f"tl.arange(0, {text})", f"tl.arange(0, {text}).to({self.index})")
            self.definitions[name] = definition
            self.head.append(definition)
            self.lanes[key] = Named(name, top(size))
        return self.lanes[key]

    # -- accesses
    def access(
        self, parameter: str, fixed: Mapping[str, int] | None = None, suffix: str = "", joined: tuple[str, ...] = ()
    ) -> Access:
        """How the tile of `parameter` is reached; `fixed` pins axes to one position.

        Axes along which nothing moves are left out: one element serves all their positions. The axes `joined` become
        one lane wherever they lie.
        """
        fixed = dict(fixed or {})
        key = (parameter, tuple(sorted(fixed.items())), joined)
        if key not in self.accesses:
            self.accesses[key] = self._access(parameter, fixed, suffix, joined)
        return self.accesses[key]

    def moving(self, parameter: str) -> tuple[str, ...]:
        """The axes of a parameter's tile along which its elements differ."""
        return tuple(str(axis.name) for axis in self._located(parameter, {})[2])

    def _located(self, parameter: str, fixed: Mapping[str, int]) -> Place:
        """Where a tile's elements lie, under which conditions, and the axes along which they move."""
        key = (parameter, tuple(sorted(fixed.items())))
        if key not in self.located.known:
            self.located.known[key] = self._locate(parameter, fixed)
        return self.located.known[key]

    def _locate(self, parameter: str, fixed: Mapping[str, int]) -> Place:
        tensor = self.tensors[parameter]
        programs = [Index(str(a.name), a.size, "program").expr for a in tensor.axes]
        steps = [[Index(str(a.name), a.size, "step").expr for a in level] for level in tensor.levels[1:-1]]
        lanes: list[Expr] = []
        held: list[Axis] = []
        extra: list[Expr] = []
        for axis in tensor.levels[-1]:
            name = str(axis.name)
            if name in fixed:
                lanes.append(const(fixed[name]))
            elif axis.size == 1:
                lanes.append(const(0))
            else:
                padded = lane_size(axis.size)
                lane = Index(name, axis.size if padded is None else const(padded), "lane")
                if padded is not None and padded != axis.size.value:
                    extra.append(axis.size - 1 - lane.expr)
                lanes.append(lane.expr)
                held.append(axis)
        place, conditions = tensor.locate(programs, *steps, lanes)
        mask = simplify_mask([*conditions, *extra])
        moving = {a for e in (*place, *mask) for a in e.atoms()}
        return place, mask, [axis for axis in held if _lane(axis) in moving]

    def _access(self, parameter: str, fixed: Mapping[str, int], suffix: str, joined: tuple[str, ...]) -> Access:
        tensor = self.tensors[parameter]
        place, mask, held = self._located(parameter, fixed)
        step, place = self._stepped(parameter, place)
        place, mask, dims = self._folded(tensor.source, place, mask, held, joined)
        place = tuple(self._inside(tensor.source, place, mask))
        if tensor.source.choices and self._differs(place[0]):
            either = self._either(tensor.source, place, mask, dims, suffix)
            element = self.element(tensor.source.choices[0])
            return Access(f"{parameter}{suffix}", dims, self.mask(mask, dims), mask, _fill(tensor), element, either)
        base = self._base(tensor.source, place, dims)
        offset = self.offset(tensor.source, place, dims)
        text = f"{base} + {offset}" if offset else base
        pointers = self._pointers(text, f"{parameter}{suffix}")
        return Access(
            pointers, dims, self.mask(mask, dims), mask, _fill(tensor),
            self.element(tensor.source), step=step,
        )  # fmt: skip

    def _stepped(self, parameter: str, place: Sequence[Expr]) -> tuple[str, tuple[Expr, ...]]:
        """What a step adds to the tile's pointers, and where the tile of step 0 lies.

        Pointers that a loop computes as `base + step * constant` are those that Triton's pipeliner understands.
        """
        tensor = self.tensors[parameter]
        variables = {a for e in place for a in e.atoms() if isinstance(a, Index) and a.role == "step"}
        if not variables:
            return "", tuple(place)
        offset = sum((p * s for p, s in zip(place, tensor.source.strides, strict=True)), const(0))
        terms = []
        for variable in sorted(variables):
            stride = offset.coefficient(variable)
            if variable not in self.steps:
                raise GenerationError(f"{parameter} is read outside the loop over its steps of {variable.name}")
            rest = None if stride is None else (offset - stride * variable.expr).atoms()
            if stride is None or rest is None or variable in rest or not _is_size(stride):
                raise GenerationError(f"{parameter} does not move by one stride a step of {variable.name}")
            named = self.steps[variable]
            reach = top(variable.size * stride)
            text = self.text(stride)
            name = named.name if reach is not None and reach <= INT32 else f"{named.name}.to({self.index})"
            terms.append(f"{name} * {text if ' + ' not in text and ' - ' not in text else f'({text})'}")
        start: dict[Atom, Expr | int] = dict.fromkeys(variables, 0)
        return " + ".join(terms), tuple(e.substitute(start) for e in place)

    def _joined(
        self, place: tuple[Expr, ...], mask: tuple[Expr, ...], dims: list[Dim], lanes: list[Index], i: int
    ) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """Makes one lane of dimensions i and i + 1, which need not be neighbours in memory."""
        outer, inner = lanes[i], lanes[i + 1]
        joined = Index(f"{outer.name}+{inner.name}", outer.size * inner.size, "lane")
        apart: dict[Atom, Expr | int] = {outer: joined.expr // inner.size, inner: joined.expr % inner.size}
        place = tuple(_rejoin(p, outer, inner, joined, apart) for p in place)
        mask = tuple(condition(_rejoin(m, outer, inner, joined, apart)) for m in mask)
        lanes[i : i + 2] = [joined]
        dims[i : i + 2] = [dims[i] + dims[i + 1]]
        self.named[joined] = self.lane(dims[i])
        for axis, part in ((outer, joined.expr // inner.size), (inner, joined.expr % inner.size)):
            self._position_by_lane(axis, part, dims[i])
        return place, mask

    def _position_by_lane(self, axis: Index, part: Expr, dim: Dim) -> None:
        """Defines an axis's position for the lanes of a joined dimension, if programs divide the axis."""
        atom, grid = part.single, {str(a.name): a for a in self.grid}
        if axis.name not in grid or atom is None or atom in self.named:
            return
        program = Index(axis.name, grid[axis.name].size, "program")
        counter, size = self.named[program].name, self.text(axis.size)
        lane = render(self.name(part), lambda a: a.name if isinstance(a, Named) else self._size_name(a))
        self._program(
            self.fresh(f"{singular(axis.name)}_by_lane"), (dim,), f"{counter} * {size} + {lane}",
            f"{counter}.to({self.index}) * {size} + {lane}", top(program.size * axis.size), atom,
            program.expr * axis.size + part,
        )  # fmt: skip

    def _inside(self, source: Source, place: Sequence[Expr], mask: Sequence[Expr]) -> Sequence[Expr]:
        """`place` with what the mask tests moved to where it holds, if an address may leave the tensor.

        A condition on one variable moves that variable; others move the coordinates they are about, into their axis.
        """
        axes = source.choices[0].axes if source.choices else source.axes
        first = len(place) - len(axes)
        inside = [nonnegative(p) and nonnegative(a.size - 1 - p) for p, a in zip(place[first:], axes, strict=True)]
        if not self.exact or all(inside):
            return place
        bounds: dict[Named, list[str]] = {}
        about: set[Atom] = set()  # variables of the conditions on several
        for e in mask:
            named = self.name(e)
            subject = next((t[0] for t, c in named.terms.items() if len(t) == 1 and abs(c) == 1
                            and isinstance(t[0], Named)), None)  # fmt: skip
            if subject is None or self.dims_of(named - (named.coefficient(subject) or const(0)) * subject.expr):
                about |= {atom for atom in named.atoms() if isinstance(atom, Named)}
            elif named.coefficient(subject) == -1:
                bounds.setdefault(subject, []).append(f"tl.minimum({{}}, {self.text(named + subject.expr)})")
            else:
                bounds.setdefault(subject, []).append(f"tl.maximum({{}}, {self.text(subject.expr - named)})")
        named_place = [self.name(p) for p in place]
        used = {atom for p in named_place[first:] for atom in p.atoms()}
        moved: dict[Atom, Expr | int] = {
            subject: self._moved(subject, texts) for subject, texts in bounds.items() if subject in used
        }
        out = [p.substitute(moved) for p in named_place]
        for i, axis in enumerate(axes):
            if not inside[i] and about & set(out[first + i].atoms()):
                out[first + i] = self._within(out[first + i], axis)
        return out

    def _within(self, place: Expr, axis: Axis) -> Expr:
        """A variable that is `place` where that is a position of `axis`, and the nearest one elsewhere."""
        dims = self.dims_of(place)
        text = f"tl.minimum(tl.maximum({self.render(place, dims)}, 0), {self.text(axis.size - 1)})"
        if text not in self.moved:
            name = self.fresh(f"{singular(str(axis.name))}_in")
            self.definitions[name] = Definition(name, dims, text, f"{text}.to({self.index})")
            self.head.append(self.definitions[name])
            self.moved[text] = Named(name, top(axis.size))
        return self.moved[text].expr

    def _moved(self, subject: Named, bounds: Sequence[str]) -> Expr:
        """A variable that is `subject` where it is within bounds, and the nearest bound elsewhere."""
        text = subject.name
        for bound in bounds:
            text = bound.format(text)
        if text not in self.moved:
            old = self.definitions[subject.name]
            name = self.fresh(f"{subject.name}_in")
            wide = text if old.is_wide else f"{text}.to({self.index})"
            self.definitions[name] = Definition(name, old.dims, text, wide, old.is_wide)
            self.head.append(self.definitions[name])
            self.moved[text] = Named(name, subject.limit)
        return self.moved[text].expr

    def _folded(
        self, source: Source, place: Sequence[Expr], mask: tuple[Expr, ...], held: Sequence[Axis],
        joined_axes: tuple[str, ...] = (),
    ) -> tuple[tuple[Expr, ...], tuple[Expr, ...], tuple[Dim, ...]]:
        """Makes one lane of neighbouring axes that are neighbours in memory, so that an access is as wide as can be."""
        dims: list[Dim] = [(axis,) for axis in held]
        lanes = [_lane(axis) for axis in held]
        place = tuple(place)
        for i in range(len(dims) - 2, -1, -1):
            if {str(a.name) for d in dims[i : i + 2] for a in d} <= set(joined_axes):
                place, mask = self._joined(place, mask, dims, lanes, i)
        i = 0
        while self.fold and i + 1 < len(dims):
            outer, inner = lanes[i], lanes[i + 1]
            grid_axes = {str(a.name) for a in self.grid}
            apart_already = {str(a.name) for d in dims[i : i + 2] for a in d} & {*grid_axes, *joined_axes}
            if apart_already or inner.size.value is None:
                i += 1
                continue
            joined = Index(f"{outer.name}+{inner.name}", outer.size * inner.size, "lane")
            apart: dict[Atom, Expr | int] = {outer: joined.expr // inner.size, inner: joined.expr % inner.size}
            offset = sum((p * s for p, s in zip(place, source.strides, strict=True)), const(0))
            side_by_side = _neighbours(offset, outer, inner, strict=True)
            side_by_side = side_by_side or _in_runs(place, outer, inner, joined, apart)
            if not side_by_side or not all(_neighbours(m, outer, inner, strict=False) for m in mask):
                i += 1
                continue
            place = tuple(_rejoin(p, outer, inner, joined, apart) for p in place)
            mask = tuple(condition(_rejoin(m, outer, inner, joined, apart)) for m in mask)
            lanes[i : i + 2] = [joined]
            dims[i : i + 2] = [dims[i] + dims[i + 1]]
            i = 0
        for dim, lane in zip(dims, lanes, strict=True):
            if lane not in self.named and str(dim[0].name) not in {str(a.name) for a in self.grid}:
                self.named[lane] = self.lane(dim)
        return place, mask, tuple(dims)

    def _base(self, source: Source, place: Sequence[Expr], dims: tuple[Dim, ...]) -> str:
        if source.choices:
            return self._choice(source, place, dims)
        recast = source.memory != source.name and source.dtype not in ("uint8", f"like:{source.memory}")
        if not recast:
            self.pointers.setdefault(source.memory, source)
            return source.memory
        if not self.recast:
            self.pointers.setdefault(source.name, source)
            return source.name
        self.pointers.setdefault(source.memory, source)
        if source.name not in self.recasts:
            self.recasts.add(source.name)
            self.head.append(f"{source.name} = {source.memory}.to(tl.pointer_type({self.element(source)}))")
        return source.name

    def _choice(self, source: Source, place: Sequence[Expr], dims: tuple[Dim, ...]) -> str:
        """The pointer of one of two tensors, chosen by a test that is the same for all lanes."""
        named = self.name(self._which(source, place[0]).num)
        first, second = (self._base(choice, place[1:], ()) for choice in source.choices)
        if (source.name, named) not in self.choices:
            pointer = self.choices[source.name, named] = self.fresh(source.name)
            self.head.append(f"{pointer} = tl.where({self._test(named, ())}, {second}, {first})")
        return self.choices[source.name, named]

    def _which(self, source: Source, index: Expr) -> Test:
        which = index.single
        if len(source.choices) != 2 or not isinstance(which, Test):
            raise GenerationError(f"{source.name}: a choice is between two tensors, by at_least(); this is {index}")
        return which

    def _differs(self, index: Expr) -> bool:
        """Does a choice depend on the lane?"""
        return bool(self.dims_of(self.name(index)))

    def _either(
        self, source: Source, place: Sequence[Expr], mask: tuple[Expr, ...], dims: tuple[Dim, ...], suffix: str
    ) -> Either:
        """Two reads over the axes that they move along, for a choice along other axes.

        AMD's compiler knows no tile of pointers into two tensors.
        """
        which = self._which(source, place[0])
        own = self.dims_of(sum(map(self.name, place[1:]), const(0)))
        inside = tuple(e for e in mask if set(self.dims_of(self.name(e))) <= set(own))
        outside = tuple(e for e in mask if e not in inside)
        if any(set(self.dims_of(self.name(e))) & set(own) for e in outside):
            raise GenerationError(f"{source.name}: one condition is about its own axes and those of the choice")
        sides = []
        for choice in source.choices:
            base, offset = self._base(choice, place[1:], own), self.offset(choice, place[1:], own)
            name = f"{choice.memory}{suffix}"
            sides.append((name, self._pointers(f"{base} + {offset}" if offset else base, name)))
        test = self._test(self.name(which.num), dims)
        return Either((sides[0], sides[1]), self.mask(inside, own), own, test, self.mask(outside, dims))

    def _pointers(self, text: str, name: str) -> str:
        """The variable that holds pointers of this text; equal ones are computed once."""
        if text not in self.pointer_names:
            self.pointer_names[text] = self.fresh(f"{name}_ptrs")
            self.head.append(f"{self.pointer_names[text]} = {text}")
        return self.pointer_names[text]

    def _test(self, named: Expr, dims: tuple[Dim, ...]) -> str:
        for term, c in named.terms.items():
            if len(term) == 1 and abs(c) == 1 and isinstance(term[0], Named):
                return self._comparison(named, term[0], self.atom_text(term[0], dims, False), dims)
        return f"{self.render(named, dims)} >= 0"

    def element(self, source: Source) -> str:
        """The text of a source's dtype."""
        if source.dtype.startswith("like:") and source.memory != source.name:
            other = source.dtype.removeprefix("like:")
            self.pointers.setdefault(other, source)
            return f"{other}.dtype.element_ty"
        if source.dtype.startswith("like:") or "|" in source.dtype:
            return f"{source.memory}.dtype.element_ty"
        return f"tl.{source.dtype}"

    def offset(self, source: Source, place: Sequence[Expr], dims: tuple[Dim, ...]) -> str:
        """Text of the element offset, one product for each variable."""
        total = source.offset
        axes = source.axes
        loaded = set(self.moved.values())
        for axis, at, stride in zip(axes, place, source.strides, strict=True):
            parts = [a for a in at.atoms(deep=False) if isinstance(a, Div | Mod)]
            if any(isinstance(inner, Loaded) or inner in loaded for part in parts for inner in part.expr.atoms()):
                at = self.derived(singular(str(axis.name)), at)
            total = total + at * stride
        return self.render(total, dims, widen=True)

    def derived(self, name: str, value: Expr) -> Expr:
        """Arithmetic on a loaded index, as a variable of its own, once."""
        stand_in = self.name(value)
        key = Test(stand_in)  # any atom that holds the expression will do as its key
        if key not in self.named:
            dims = self.dims_of(stand_in)
            for loaded in stand_in.atoms():
                if isinstance(loaded, Named) and loaded.limit is None:
                    self.definitions[loaded.name].is_wide = True
            text = self.render(value, dims)
            variable = self.fresh(name)
            definition = Definition(variable, dims, text, text, is_wide=True)
            self.definitions[variable] = definition
            self.head.append(definition)
            self.named[key] = Named(variable, None)
        return self.named[key].expr

    def load_index(self, value: Loaded) -> Named:
        """The variable of a loaded index, loaded once."""
        if value not in self.named:
            mask = simplify_mask(value.mask)
            dims = self.dims_of(sum(map(self.name, value.index), const(0)))
            place = self._inside(value.source, value.index, mask)
            offset = self.offset(value.source, place, dims)
            base = self._base(value.source, place, dims)
            text = f"tl.load({base}" + (f" + {offset}" if offset else "")
            text += f", mask={self.mask(mask, dims)}, other={value.fill})" if mask else ")"
            variable = self.fresh(value.name)
            is_long = value.source.dtype == self.index.removeprefix("tl.")
            wide = text if is_long else f"{text}.to({self.index})"
            definition = Definition(variable, dims, text, wide, is_long or value.source.dtype == "int64")
            self.definitions[variable] = definition
            self.head.append(definition)
            self.index_loads[value.source.name] = mask
            self.named[value] = Named(variable, None)
        return self.named[value]

    # -- text of expressions over named variables
    def name(self, e: Expr) -> Expr:
        """`e` over variables of the text: positions, lanes, loaded values."""
        for key, value in self.programs:
            slope = e.coefficient(key)
            if slope is not None and slope.terms:
                e = e - slope * value + slope * self.named[key].expr
        values: dict[Atom, Expr | int] = {}
        for atom in e.atoms(deep=False):
            if isinstance(atom, Loaded):
                values[atom] = self.load_index(atom).expr
            elif isinstance(atom, Index) and atom in self.named:
                values[atom] = self.named[atom].expr
            elif isinstance(atom, Div):
                values[atom] = Expr({(Div(self.name(atom.num), atom.den),): 1})
            elif isinstance(atom, Mod):
                values[atom] = Expr({(Mod(self.name(atom.num), atom.den),): 1})
            elif isinstance(atom, Test):
                values[atom] = Expr({(Test(self.name(atom.num)),): 1})
        return _replace_outer(e, values)

    def dims_of(self, e: Expr) -> tuple[Dim, ...]:
        """The dimensions of an expression over named variables, in the order of the tile."""
        found: dict[Dim, None] = {}
        for atom in e.atoms():
            if isinstance(atom, Named):
                for dim in self.definitions[atom.name].dims:
                    found[dim] = None
        order = list(self.axes)
        return tuple(sorted(found, key=lambda dim: order.index(str(dim[0].name))))

    def render(self, e: Expr, dims: tuple[Dim, ...], widen: bool = False) -> str:
        """Text of `e` broadcast over `dims`; "" for 0."""
        named = self.name(e)
        groups: dict[tuple[Atom, ...], Expr] = {}
        for term, c in named.terms.items():
            moving = tuple(a for a in term if not isinstance(a, Size))
            fixed = tuple(a for a in term if isinstance(a, Size))
            groups[moving] = groups.get(moving, const(0)) + Expr({fixed: c})
        if widen:
            self._widen(groups)
        parts: list[tuple[str, str]] = []
        for moving, factor in sorted(groups.items(), key=lambda item: self._position(item[0])):
            sign = " + "
            if all(c < 0 for c in factor.terms.values()):
                sign, factor = " - ", -factor
            tests = [atom for atom in moving if isinstance(atom, Test)]
            moving = tuple(atom for atom in moving if not isinstance(atom, Test))
            texts = [self.atom_text(atom, dims, len(moving) > 1 or factor != 1) for atom in moving]
            if factor != 1 or not texts:
                text, most = self.text(factor), top(factor)
                # A product that may pass 2^31 must not be multiplied out before it meets what is 64 bits wide.
                apart = widen and bool(texts) and (most is None or most > INT32)
                texts.append(text if len(factor.terms) == 1 and (apart or " " not in text) else f"({text})")
            text = " * ".join(texts)
            for test in tests:
                text = f"tl.where({self._test(test.num, dims)}, {text}, 0)"
            parts.append((sign, text))
        if parts and parts[0][0] == " - ":  # `size - tile`, not `-tile + size`
            parts.sort(key=lambda part: part[0] == " - ")
        return "".join((sign if i else sign.strip(" +")) + text for i, (sign, text) in enumerate(parts))

    def _position(self, moving: tuple[Atom, ...]) -> tuple[int, int]:
        """Products stand in the order of the axes they move along, constants last."""
        order = list(self.axes)
        dims = [order.index(str(d[0].name)) for atom in moving for d in self.dims_of(atom.expr)]
        return (0 if moving else 1, max(dims, default=-1))

    def _widen(self, groups: Mapping[tuple[Atom, ...], Expr]) -> None:
        """Marks the variables of every product that may pass 2^31 - 1; those of 64 bits already need nothing."""
        total, narrow = 0, []
        for moving, factor in groups.items():
            names = [a for atom in moving for a in atom.expr.atoms() if isinstance(a, Named)]
            if any(self.definitions[n.name].is_wide for n in names):
                continue
            product = top(factor) if all(c > 0 for c in factor.terms.values()) else top(-factor)
            for atom in moving:
                limit = atom.limit if isinstance(atom, Named) else top(atom.expr)
                product = None if product is None or limit is None else product * limit
            if product is None or product > INT32:
                for n in names[:1]:
                    self.definitions[n.name].is_wide = True
            else:
                total += product
                narrow += [(product, n) for n in names[:1]]
        if total > INT32:
            for _, n in sorted(narrow, key=lambda item: -item[0])[:1]:
                self.definitions[n.name].is_wide = True

    def atom_text(self, atom: Atom, dims: tuple[Dim, ...], tight: bool) -> str:
        own = self.dims_of(atom.expr)
        if len(own) > 1 and isinstance(atom, Div | Mod):  # its numerator's variables have different dimensions
            den = self.text(atom.den)
            den = f"({den})" if " " in den else den
            text = f"({self.render(atom.num, dims)}) {'//' if isinstance(atom, Div) else '%'} {den}"
            return f"({text})" if tight else text
        text = render(atom.expr, lambda a: a.name if isinstance(a, Named) else self._size_name(a))
        if len(own) < len(dims) and own:
            text = text if text.isidentifier() else f"({text})"
            text += f"[{', '.join(':' if dim in own else 'None' for dim in dims)}]"
        elif tight and not text.isidentifier() and not text.startswith("("):
            text = f"({text})"
        return text

    # -- masks
    def along(self, axis: Axis, conditions: Iterable[Expr]) -> tuple[Expr, ...]:
        """Those conditions that ask where an element lies along an axis of the tile."""
        def asks(e: Expr) -> bool:
            lanes = (a for a in e.atoms() if isinstance(a, Index) and a.role == "lane")
            return any(str(axis.name) in lane.name.split("+") for lane in lanes)

        return tuple(filter(asks, conditions))

    def mask(self, conditions: Iterable[Expr], dims: tuple[Dim, ...]) -> str:
        """Text of the conjunction of conditions, broadcast over `dims`; "" if there is none."""
        ordered = sorted(conditions, key=lambda e: self._position(tuple(self.name(e).atoms(deep=False))))
        parts = [self.condition(e, dims) for e in ordered]
        if len(parts) > 1:
            parts = [f"({p})" if " " in p.split("[")[0] or " < " in p or " >= " in p else p for p in parts]
        return " & ".join(parts)

    def condition(self, e: Expr, dims: tuple[Dim, ...]) -> str:
        """Text of `e >= 0`; one about an axis's position or a loaded index is a variable, computed once."""
        named = self.name(e)
        subject = next(
            (a for t, c in named.terms.items() if len(t) == 1 and abs(c) == 1 for a in t if isinstance(a, Named)), None
        )
        if subject is None:
            return f"{self.render(named, dims)} >= 0"
        definition = self.definitions[subject.name]
        is_lane = any(subject == lane for lane in self.lanes.values())
        if is_lane or set(named.atoms()) & set(self.steps.values()):
            return self._comparison(named, subject, self.atom_text(subject, dims, False), dims)
        if named not in self.conditions:
            variable = self.fresh(f"{subject.name}_ok")
            self.conditions[named] = variable
            self.head.append(f"{variable} = {self._comparison(named, subject, subject.name, definition.dims)}")
        variable = self.conditions[named]
        if definition.dims and len(definition.dims) < len(dims):
            variable += f"[{', '.join(':' if dim in definition.dims else 'None' for dim in dims)}]"
        return variable

    def describe(self, e: Expr) -> str:
        """`e >= 0` as a person would write it: `token < num_tokens`."""
        named = self.name(e)
        for term, c in named.terms.items():
            if len(term) == 1 and abs(c) == 1 and isinstance(term[0], Named):
                return self._comparison(named, term[0], term[0].name, ())
        return f"{render(named)} >= 0"

    def _comparison(self, named: Expr, subject: Named, text: str, dims: tuple[Dim, ...]) -> str:
        if named.coefficient(subject) == -1:
            return f"{text} < {self.render(named + subject.expr + 1, dims) or '0'}"
        return f"{text} >= {self.render(subject.expr - named, dims) or '0'}"


def _fill(tensor: Tensor) -> float | int:
    """What lanes without an element read as: the tensor's fill, 0 without one, as a number of its kind."""
    is_float = "float" in tensor.source.dtype or tensor.source.dtype.startswith("like:")
    fill = 0 if tensor.fill is None else tensor.fill
    return float(fill) if is_float else fill


def _axis_limit(tensors: Iterable[Tensor], name: str, default: int | None) -> int | None:
    """The largest size of the axis, plus a tile, bounds its positions better than program times tile."""
    sizes = [top(a.size) for t in tensors for a in t.source.axes if a.name and singular(a.name) == name]
    known = [s for s in sizes if s is not None]
    if not known or default is None:
        return default
    return min(default, max(known) + 65536)


def _is_size(e: Expr) -> bool:
    return all(isinstance(a, Size) for a in e.atoms(deep=False))


def _lane(axis: Axis) -> Index:
    padded = lane_size(axis.size)
    return Index(str(axis.name), axis.size if padded is None else const(padded), "lane")


def _neighbours(e: Expr, outer: Index, inner: Index, strict: bool) -> bool:
    """May `outer` and `inner` be one lane in `e`? In a condition, `e` may also depend on the outer one alone."""
    deep = e.atoms()
    if outer not in deep and inner not in deep:
        return not strict
    high, low = e.coefficient(outer), e.coefficient(inner)
    shallow = e.atoms(deep=False)
    if (outer in deep and outer not in shallow) or (inner in deep and inner not in shallow):
        return False
    if high is None or low is None:
        return False
    if high == low * inner.size:
        return True
    return not strict and not low.terms


def _rejoin(e: Expr, outer: Index, inner: Index, joined: Index, apart: Mapping[Atom, Expr | int]) -> Expr:
    high, low = e.coefficient(outer), e.coefficient(inner)
    if high is not None and low is not None and low.terms and high == low * inner.size:
        return e - high * outer.expr - low * inner.expr + low * joined.expr
    return _gathered(e.substitute(apart), inner, joined)


def _gathered(e: Expr, inner: Index, joined: Index) -> Expr:
    """`2 * (lane // 2 % 8) + lane % 2` as `lane % 16`."""
    rest = Mod(joined.expr, inner.size)
    slope = e.coefficient(rest)
    if slope is None or not slope.terms:
        return e
    for atom in e.atoms(deep=False):
        if not isinstance(atom, Mod) or atom.num != joined.expr // inner.size:
            continue
        if e.coefficient(atom) == slope * inner.size:
            return e - slope * (rest.expr + inner.size * atom.expr) + slope * (joined.expr % (inner.size * atom.den))
    return e


def _in_runs(
    place: Sequence[Expr], outer: Index, inner: Index, joined: Index, apart: Mapping[Atom, Expr | int]
) -> bool:
    """Do the two lie side by side in runs, of 16 say, that may be far apart?"""
    deep = {atom for e in place for atom in e.atoms()}
    shallow = {atom for e in place for atom in e.atoms(deep=False)}
    if outer not in deep or outer in shallow or inner not in shallow:
        return False
    inside = {atom for e in place for atom in _rejoin(e, outer, inner, joined, apart).atoms()}
    return not inside & {Mod(joined.expr, inner.size), Div(joined.expr, inner.size)}


def _replace_outer(e: Expr, values: Mapping[Atom, Expr | int]) -> Expr:
    """Replaces atoms of the products themselves, without looking into divisions."""
    out = const(0)
    for term, c in e.terms.items():
        product = const(c)
        for atom in term:
            value = values.get(atom, atom.expr)
            product = product * value
        out = out + product
    return out
