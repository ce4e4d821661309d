"""What arranged tensors mean: by numpy over every index, and, of random arrangements, by NineToothed.

An `Arrangement` is data: a shape and a list of operations, with sizes as integers or names. It is applied alike to our
`Tensor` and to NineToothed's, from a fresh tensor each time and each result used once, since there a fork is wrong.
`read` gives the elements of any arranged tensor, gathers included, as a kernel would load them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from tilewright.expr import Expr, Index, Loaded, Size, const, simplify_mask
from tilewright.tensor import Source, Tensor

LARGEST = 7  # values of sizes
ELEMENTS = 1200  # of an arranged tensor
OPERATIONS = (
    *("tile",) * 4, "expand", "expand", "squeeze", "unsqueeze", "permute", "flatten", "flatten", "ravel", "pad",
    "__getitem__", "__getitem__",
)  # fmt: skip

SizeRef = int | str
Values = Mapping[str, int]


@cache
def oracle() -> Any:
    """NineToothed, its symbols with the operators they lack: padding needs -x, integers that meet a size the others."""
    import ninetoothed

    symbol = ninetoothed.Symbol
    symbol.__neg__ = lambda self: self * -1
    symbol.__rfloordiv__ = lambda self, other: symbol(other) // self
    symbol.__rmod__ = lambda self, other: symbol(other) % self
    return ninetoothed


@dataclass(frozen=True)
class Step:
    """One operation on the level `depth`: 0 is the outermost."""

    depth: int
    name: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{'.dtype' * self.depth}.{self.name}{self.arguments}"


@dataclass(frozen=True)
class Arrangement:
    """A tensor's shape, what is done to it, facts about named sizes, and values to evaluate it at."""

    shape: tuple[SizeRef, ...]
    steps: tuple[Step, ...]
    divides: tuple[tuple[str, str], ...]
    values: tuple[dict[str, int], ...]

    def __str__(self) -> str:
        return f"x{self.shape}" + "; ".join(map(str, self.steps)) + f" at {self.values}"

    def ours(self) -> Tensor:
        """Our tensor, arranged."""
        return self._apply(start(self.shape, self.divides), lambda s: size_of(s, self.divides))

    def theirs(self) -> Any:
        """NineToothed's tensor, arranged."""
        shape = _bound(self.shape, oracle().Symbol)
        return self._apply(oracle().Tensor(shape=shape), oracle().Symbol)

    def _apply(self, tensor: Any, bind: Any) -> Any:
        for step in self.steps:
            tensor = perform(tensor, step, bind)
        return tensor


@dataclass(frozen=True)
class Evaluated:
    """Every element's offset, -1 where there is none, by the oracle and by us; and what the prover did."""

    theirs: np.ndarray
    ours: np.ndarray
    remaining: np.ndarray  # is the mask that is left the same here?
    conditions: int
    left: int
    needless: int  # conditions left that hold everywhere


def start(shape: Sequence[SizeRef], divides: Sequence[tuple[str, str]]) -> Tensor:
    """Our tensor of a shape, nothing done to it."""
    return Tensor("x", " ".join("abc"[: len(shape)]), [size_of(s, divides) for s in shape])


def size_of(size: Any, divides: Sequence[tuple[str, str]]) -> Any:
    """Our size of a name; anything else is itself."""
    if not isinstance(size, str):
        return size
    facts = tuple(size_of(multiple, ()).expr for tile, multiple in divides if tile == size)
    return Size(size, "tile" if size[0] == "t" else "runtime", low=1, high=LARGEST, divides=facts)


def perform(tensor: Any, step: Step, bind: Any) -> Any:
    """Does one step, at its level, to a tensor of either kind."""
    owner, level = None, tensor
    for _ in range(step.depth):
        owner, level = level, level.dtype
    result = getattr(level, step.name)(*_bound(step.arguments, bind))
    if owner is None:
        return result
    owner.dtype = result
    return tensor


def _bound(value: Any, bind: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_bound(v, bind) for v in value)
    return bind(value) if isinstance(value, str) else value


def evaluate(arrangement: Arrangement) -> Iterator[Evaluated]:
    """Offsets of every element by both, at each of the arrangement's values."""
    theirs, ours = arrangement.theirs(), arrangement.ours()
    innermost = theirs.innermost()
    outer = prod(axis.size.evaluate(arrangement.values[0]) for level in ours.levels[:-1] for axis in level)
    if innermost.ndim == 0 or len(set(innermost.target_dims)) < innermost.ndim or outer > 20:
        # NineToothed numbers an innermost level without axes, or with two new ones, wrongly; and it evaluates the
        # positions of outer levels one by one.
        theirs, ours = theirs.ravel(), ours.ravel()
    for values in arrangement.values:
        shape = [values.get(s, s) if isinstance(s, str) else s for s in arrangement.shape]
        subs = {theirs.source: {"shape": shape}} | {oracle().Symbol(n): v for n, v in values.items()}
        yield _evaluate(ours, theirs.eval(subs), values)


def _evaluate(tensor: Tensor, theirs: np.ndarray, values: Values) -> Evaluated:
    levels, env, shape = grid(tensor, values)
    source, conditions = tensor.locate(*levels)
    offset = sum((i * s for i, s in zip(source, tensor.source.strides, strict=True)), const(0))
    left = simplify_mask(conditions)
    exists = _hold(conditions, env, shape)
    return Evaluated(
        theirs,
        np.where(exists, offset.evaluate(env), -1),
        _hold(left, env, shape) == exists,
        conditions=len(dict.fromkeys(conditions)),
        left=len(left),
        needless=sum(bool(_hold([e], env, shape).all()) for e in left),
    )


def grid(tensor: Tensor, values: Values) -> tuple[list[list[Expr]], dict[str, Any], list[int]]:
    """An index for every axis of every level, what evaluates them over all positions at once, and the whole shape."""
    axes = [(number, axis) for number, level in enumerate(tensor.levels) for axis in level]
    shape = [axis.size.evaluate(values) for _, axis in axes]
    env: dict[str, Any] = dict(values)
    levels: list[list[Expr]] = [[] for _ in tensor.levels]
    for dim, (number, axis) in enumerate(axes):
        role = "lane" if number == len(levels) - 1 else "program" if number == 0 else "step"
        index = Index(f"i{dim}", axis.size, role)
        levels[number].append(index.expr)
        env[index.label] = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(axes))])
    return levels, env, shape


def read(tensor: Tensor, memory: Mapping[str, np.ndarray], values: Values) -> np.ndarray:
    """The elements of an arranged tensor, its fill where there is none.

    `memory` holds the elements of each allocation by the name of its argument. The masks are those left by the prover;
    they must be the full ones, and no element outside its allocation may be read.
    """
    levels, env, shape = grid(tensor, values)
    place, conditions = tensor.locate(*levels)

    def loaded(atom: Loaded) -> np.ndarray:
        return _load(atom.source, atom.index, atom.mask, atom.fill, memory, env, shape, loaded)

    fill = 0 if tensor.fill is None else tensor.fill
    return _load(tensor.source, place, conditions, fill, memory, env, shape, loaded)


def _load(
    source: Source, place: Sequence[Expr], conditions: Sequence[Expr], fill: float, memory: Mapping[str, np.ndarray],
    env: Mapping[str, Any], shape: Sequence[int], loaded: Any,
) -> np.ndarray:  # fmt: skip
    exists = _hold(conditions, env, shape, loaded)
    left = _hold(simplify_mask(conditions), env, shape, loaded)
    assert np.array_equal(exists, left), f"{source.name}: a needed condition was dropped"
    offset = sum((i * s for i, s in zip(place, source.strides, strict=True)), source.offset)
    at = np.broadcast_to(offset.evaluate(env, loaded), shape)
    choices = source.choices or (source,)
    which = np.broadcast_to(place[0].evaluate(env, loaded) if source.choices else 0, shape)
    assert ((which >= 0) & (which < len(choices)))[exists].all(), f"{source.name}: there is no such tensor"
    out = np.full(shape, fill, dtype=memory[choices[0].memory].dtype)
    for number, choice in enumerate(choices):
        here, elements = exists & (which == number), memory[choice.memory].reshape(-1)
        assert ((at >= 0) & (at < elements.size))[here].all(), f"{choice.name}: read outside its allocation"
        out[here] = elements[at[here]]
    return out


def _hold(
    conditions: Sequence[Expr], env: Mapping[str, Any], shape: Sequence[int], loaded: Any = None
) -> np.ndarray:
    """Where all conditions hold."""
    out = np.ones(shape, dtype=bool)
    for condition in conditions:
        out &= condition.evaluate(env, loaded) >= 0
    return out


def _names(value: Any) -> list[str]:
    if isinstance(value, tuple):
        return [name for v in value for name in _names(v)]
    return [value] if isinstance(value, str) else []


class Generator:
    """Draws one arrangement; the same seed gives the same one."""

    def __init__(self, seed: int, symbolic: bool):
        self.random = random.Random(seed)
        self.symbolic = symbolic
        self.values: dict[str, int] = {}
        self.divides: list[tuple[str, str]] = []
        self.shapes: list[Expr] = []  # every size that an operation made

    def draw(self) -> Arrangement:
        """An arrangement in which every operation is allowed and every level has elements."""
        shape = tuple(self.size("n", self.random.randint(1, LARGEST)) for _ in range(self.random.randint(1, 3)))
        ours, steps = start(shape, ()), []
        for _ in range(self.random.randint(2, 8)):
            depth = self.random.choice((*range(len(ours.levels)), len(ours.levels) - 1))
            name = self.random.choice(OPERATIONS)
            at = ours
            for _ in range(depth):
                at = at.dtype
            known = dict(self.values)
            arguments = getattr(self, name)(at, [s.evaluate(known) for s in at.shape])
            if arguments is None or (name == "tile" and len(ours.levels) == 3):
                continue
            step = Step(depth, name, arguments)
            after = perform(copy(ours), step, lambda s: size_of(s, self.divides))
            sizes = [axis.size for level in after.levels for axis in level]
            if self.fits(sizes, self.values) and len(sizes) <= 8:
                ours, steps = after, [*steps, step]
                self.shapes += sizes
        used = set(_names((shape, tuple(step.arguments for step in steps))))
        self.divides = [(tile, size) for tile, size in self.divides if tile in used]
        used |= {size for _, size in self.divides}
        self.values = {name: value for name, value in self.values.items() if name in used}
        final = [axis.size for level in ours.levels for axis in level]
        return Arrangement(shape, tuple(steps), tuple(self.divides), self.assignments(final))

    def assignments(self, sizes: Sequence[Expr]) -> tuple[dict[str, int], ...]:
        """The values drawn first and, of a symbolic arrangement, others that leave no level empty."""
        found = [self.values]
        for _ in range(20):
            other = {name: self.random.randint(1, LARGEST) for name in self.values}
            allowed = all(other[size] % other[tile] == 0 for tile, size in self.divides)
            if allowed and other not in found and self.fits(self.shapes, other) and self.fits(sizes, other):
                found.append(other)
        return tuple(found[:2])

    def fits(self, sizes: Sequence[Expr], values: Values) -> bool:
        """Is no level empty, and are the elements few?"""
        numbers = [size.evaluate(values) for size in sizes]
        return all(n >= 1 for n in numbers) and (sizes is self.shapes or prod(numbers) <= ELEMENTS)

    def size(self, letter: str, value: int) -> SizeRef:
        """`value`, or a new name for it."""
        if not self.symbolic or self.random.random() < 0.3:
            return value
        name = f"{letter}{len(self.values)}"
        multiples = [n for n, v in self.values.items() if n[0] == "n" and v % value == 0]
        if letter == "t" and multiples and self.random.random() < 0.5:
            self.divides.append((name, self.random.choice(multiples)))
        self.values[name] = value
        return name

    # -- arguments of each operation, None where it has none here
    def tile(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        floor, draw = self.random.random() < 0.3, self.random.randint
        rows = [[self.random.choice((-1, draw(1, min(n + 1, 5)))), draw(-1, 4) or -1, draw(1, 2)] for n in sizes]
        for row, n in zip(rows, sizes, strict=True):
            tile = n if row[0] == -1 else row[0]
            stride = tile if row[1] == -1 else row[1]
            room = n - row[2] * (tile - 1) - 1
            if (room if floor else room + stride - 1) // stride < 0:
                row[:] = [1, -1, 1]
        tiles = tuple(row[0] if row[0] == -1 else self.size("t", row[0]) for row in rows)
        plain = self.random.random() < 0.4
        strides = None if plain else tuple(r[1] if r[1] == -1 else self.size("t", r[1]) for r in rows)
        dilation = None if plain or self.random.random() < 0.5 else tuple(row[2] for row in rows)
        if strides is None and any(r[1] != -1 or r[2] != 1 for r in rows):
            floor = False
        return tiles, strides, dilation, floor

    def expand(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        ones = [size == 1 for size in at.shape]
        if not any(ones):
            return None
        return (tuple(self.size("n", self.random.randint(1, 4)) if one else -1 for one in ones),)

    def squeeze(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        dims = [d for d, size in enumerate(at.shape) if size == 1 and self.random.random() < 0.8]
        return (tuple(dims),) if dims else None

    def unsqueeze(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        return (self.random.randint(0, at.ndim),)

    def permute(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        return (tuple(self.random.sample(range(at.ndim), at.ndim)),) if at.ndim > 1 else None

    def flatten(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        if at.ndim < 1:
            return None
        first = self.random.randrange(at.ndim)
        end = self.random.randint(first + 1, at.ndim)
        return (
            self.random.choice((first, first - at.ndim, None if first == 0 else first)),
            None if end == at.ndim else self.random.choice((end, end - at.ndim)),
        )

    def ravel(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        return () if len(at.levels) > 1 and self.random.random() < 0.7 else None

    def pad(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        def amount() -> SizeRef:
            return self.size("n", self.random.randint(1, 2)) if self.random.random() < 0.4 else 0

        return (tuple((amount(), amount()) for _ in sizes),) if sizes else None

    def __getitem__(self, at: Tensor, sizes: Sequence[int]) -> tuple[Any, ...] | None:
        items: list[Any] = [self.item(n) for n in sizes]
        if self.random.random() < 0.2:
            items[self.random.randint(0, len(items)) :] = [Ellipsis]
        if self.random.random() < 0.2:
            items.insert(self.random.randint(0, len(items)), None)
        return (tuple(items),) if items else None

    def item(self, n: int) -> Any:
        """An index or a slice of an axis of `n`, some of it past the end."""
        draw = self.random.randint
        kind = draw(0, 4)
        if kind == 0:
            return slice(None)
        if kind == 1:
            return draw(0, n - 1)
        first, last = draw(0, n - 1), draw(0, n - 1)
        if kind == 2 and first >= last:
            stop = draw(-1, last - 1) if last else -1
            return slice(self.random.choice((first, first - n, None)), self.random.choice((stop, None)), -draw(1, 3))
        first, last = min(first, last), max(first, last)
        return slice(
            self.random.choice((first, first - n, None)),
            self.random.choice((last + 1, last + 1 - n or None, n + 1, None)),
            self.random.choice((None, 1, 2, 3)),
        )
