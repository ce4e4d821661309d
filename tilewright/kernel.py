"""A kernel: arrangements and applications paired, with the operator's arguments and checks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright import rules as rule_files
from tilewright.access import Limit, Order, Places
from tilewright.errors import GenerationError
from tilewright.expr import Expr, Size, const, wrap
from tilewright.rules import Rule, Rules
from tilewright.tensor import Tensor
from tilewright.translate import Mask, Translator

INDEX_TYPE = "index_type"  # of large offsets: a parameter where a profile wants 32 bits and a launch may not


@dataclass(frozen=True)
class Argument:
    """A tensor argument of an operator.

    Attributes:
        tensor: its axes, sizes and dtype; several dtypes as `bfloat16|float16`, another argument's as `like:q`.
        layout: "contiguous", "strided" (any strides) or "rows" (unit stride along the last axis).
        least_rank: at least that many axes instead of exactly the tensor's; only axis 0 and the last are then used.
        mutated: the operator writes it.
        optional: it may be None; only flags that say so may lead to texts that use it.

    A dtype of `e4m3` is the profile's float8 format; kernels see its bytes.
    """

    tensor: Tensor
    layout: str = "contiguous"
    least_rank: int | None = None
    mutated: bool = False
    optional: bool = False

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.tensor.source.dtype.split("|"))


@dataclass(frozen=True)
class Scalar:
    """A number argument: a float, an integer that is a size of the contract, or an `integer` for checks alone."""

    name: str
    size: Size | None = None
    integer: bool = False

    @property
    def is_integer(self) -> bool:
        return self.integer or self.size is not None


@dataclass(frozen=True)
class Flag:
    """A choice with kernel texts of its own for each value: an argument, or one that the call computes.

    Attributes:
        value: host text over the arguments; "" for an argument of that name.
        values: what it can be, bools or names; the first is the plain one.
        words: by value, what the names of device functions say of it; of the first value nothing.
    """

    name: str
    value: str = ""
    values: tuple[Any, ...] = (False, True)
    words: Mapping[Any, str] = field(default_factory=dict)

    def word(self, value: Any) -> str:
        """`_unnormed`, or nothing for the plain value."""
        if value == self.values[0]:
            return ""
        return "_" + self.words.get(value, self.name if isinstance(value, bool) else str(value))


@dataclass(frozen=True)
class Output:
    """A tensor that the call makes and returns; its dtype and device are those of an argument, `like:q` say.

    `shape` is its host text, over arguments and sizes.
    """

    tensor: Tensor
    shape: str

    @property
    def name(self) -> str:
        return self.tensor.name


@dataclass(frozen=True)
class Requirement:
    """A check beyond ranks, sizes, dtypes, layouts and devices.

    Attributes:
        kind: "ShapeError", "DtypeError", "LayoutError" or "ContractError".
        holds: Python text over the arguments, true where the call is right.
        message: text of an f-string over the arguments.
        needs: the tensor arguments whose rank must be right before this can be asked.
    """

    kind: str
    holds: str
    message: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Branch:
    """An arrangement with its application: the programs of one kind in a launch.

    `arrange(**tile sizes)` returns the application's arguments by name: arranged tensors, sizes, numbers, and the name
    of a float argument as text. Its keyword-only parameters are flags of the operator, with their plain values as
    defaults: each value has a text of its own.

    Attributes:
        by: a flag that chooses the application.
        limit: an axis of the grid and a tensor [1]: programs that begin at or past the number in it do nothing. They
            must have nothing to do: where a device can have no loop under a test, they go through their masks.
        order: an axis of the grid and a parameter: programs go through so many tiles of it before the next column.
        instead: the applications of its values other than the plain one.
        when: a bool flag without which the branch has no programs.
    """

    name: str
    arrange: Callable[..., Mapping[str, Any]]
    application: Callable[..., None]
    by: str = ""
    instead: Mapping[Any, Callable[..., None]] = field(default_factory=dict)
    when: str = ""
    limit: tuple[str, Tensor] | None = None
    order: tuple[str, str] | None = None

    @property
    def arranged(self) -> tuple[str, ...]:
        """The tile sizes that the arrangement takes."""
        parameters = inspect.signature(self.arrange).parameters.values()
        return tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)

    @property
    def tiles(self) -> tuple[str, ...]:
        return (*self.arranged, *(self.order[1:] if self.order else ()))

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags whose values have texts of their own."""
        parameters = inspect.signature(self.arrange).parameters.values()
        arranged = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        return tuple(dict.fromkeys([*([self.by] if self.by else []), *arranged]))

    @property
    def applications(self) -> tuple[Callable[..., None], ...]:
        return (self.application, *self.instead.values())


@dataclass(frozen=True)
class BranchText:
    """The device function of a branch."""

    name: str
    parameters: tuple[str, ...]
    source: str
    grid: Expr
    helpers: tuple[str, ...]
    sizes: Mapping[str, Size]
    pointers: Mapping[str, Any]
    scalars: tuple[str, ...]
    masks: tuple[Mask, ...]


@dataclass(frozen=True)
class Kernel:
    """An operator's kernel, for every device and configuration.

    Attributes:
        name: the operator's name, also the kernel's.
        arguments: tensor and number arguments in the public order.
        branches: programs of the first come first in the launch.
        divides: a tile parameter and the sizes it may divide; where it divides all, masks along it are dropped.
        derived: host text of sizes that no argument's shape or stride gives.
        quantities: host text of what dispatch rules may ask.
        requirements: further checks.
        flags: those that the call computes; bool and name arguments are flags without being listed here.
        outputs: tensors that the call makes and returns.
        refits: a tile of `divides` and another tile: where a rule's tile does not divide, it is halved until it does,
            and the other doubled, so that a program keeps its size.
        forces: an integer argument that, above 0, picks one of these configurations.
        slots: an argument of slots and the host text of how many there are, checked under TILEWRIGHT_CHECK_SLOTS.
    """

    name: str
    arguments: Sequence[Argument | Scalar | Flag]
    branches: Sequence[Branch]
    divides: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    quantities: Mapping[str, str] = field(default_factory=dict)
    requirements: Sequence[Requirement] = ()
    flags: Sequence[Flag] = ()
    outputs: Sequence[Output] = ()
    slots: tuple[str, str] | None = None
    refits: Mapping[str, str] = field(default_factory=dict)
    forces: tuple[str, Mapping[int, Mapping[str, int]]] | None = None

    @property
    def all_flags(self) -> dict[str, Flag]:
        """Bool arguments and computed flags by name."""
        own = [a for a in self.arguments if isinstance(a, Flag)]
        return {flag.name: flag for flag in (*own, *self.flags)}

    @property
    def tensors(self) -> tuple[Argument, ...]:
        return tuple(a for a in self.arguments if isinstance(a, Argument))

    @property
    def tiles(self) -> tuple[str, ...]:
        """The arrangement's parameters, in order of the branches."""
        return tuple(dict.fromkeys(tile for branch in self.branches for tile in branch.tiles))

    def rules(self, device: str) -> Rules:
        """The dispatch rules of `device`."""
        return rule_files.load(self.name, device, self.tiles, tuple(self.quantities))

    def tile_size(self, tile: str, bound: Mapping[str, int], exact: bool) -> Expr:
        """A tile parameter as an expression: its literal where bound, else a `tl.constexpr`."""
        divides = tuple(size.expr for size in self.divides.get(tile, ())) if exact else ()
        value = bound.get(tile)
        if value is None:
            return Size(tile, "tile", low=1, high=1024, divides=divides).expr
        if not divides or value == 1:
            return const(value)
        return Size(tile, "tile", low=value, high=value, divides=divides).expr

    def branch(
        self, number: int, lowering: Mapping[str, str], bound: Mapping[str, int] | None = None, exact: bool = True,
        flags: Mapping[str, Any] | None = None,
    ) -> BranchText:  # fmt: skip
        """The device function of branch `number`.

        Args:
            lowering: how capabilities are spelt, from a profile.
            bound: tile sizes that become literals; the others stay `tl.constexpr` parameters.
            exact: whether the tiles of `divides` divide their sizes.
            flags: values of the branch's flags; the plain ones where left out.
        """
        branch = self.branches[number]
        known = self.all_flags
        chosen = {name: known[name].values[0] for name in branch.flags} | dict(flags or {})
        application = branch.instead.get(chosen[branch.by], branch.application) if branch.by else branch.application
        name = branch.name + "".join(known[flag].word(value) for flag, value in chosen.items())
        sizes = {tile: self.tile_size(tile, bound or {}, exact) for tile in branch.tiles}
        in_arrange = inspect.signature(branch.arrange).parameters
        given = {tile: sizes[tile] for tile in branch.arranged}
        arranged = dict(branch.arrange(**given, **{n: v for n, v in chosen.items() if n in in_arrange}))
        tensors = {name: value for name, value in arranged.items() if isinstance(value, Tensor)}
        places = Places(
            tensors,
            fold=lowering["pair"] == "reshape_split_join",
            recast=lowering["ptr_recast"] == "in_kernel",
            exact=lowering["tail"] == "exact",
            index="tl.int64" if lowering["index_width"] == "i64" else INDEX_TYPE,
            reserved={
                "pid", "tl", "triton", INDEX_TYPE, *(a.name for a in (*self.arguments, *self.outputs)), *self.tiles,
                *_size_names(arranged),
            },
            order=_order(branch, sizes),
            limit=Limit(*branch.limit) if branch.limit and lowering["branch"] != "separate" else None,
        )
        translator = Translator(places, lowering)
        translator.run(application, arranged)
        grid = const(1)
        for axis in places.grid:
            grid = grid * axis.size
        places.text(grid)
        lines = [item if isinstance(item, str) else item.text for item in places.head] + translator.body
        if guard := places.guard():
            lines[places.prologue :] = [f"if {guard}:", *(f"    {line}" for line in lines[places.prologue :])]
        order = [a.name for a in (*self.arguments, *self.outputs)]
        used = sorted(places.pointers, key=lambda n: (order.index(n) if n in order else len(order), n))
        parameters = [
            "pid",
            *used,
            *translator.scalars,
            *(n for n, s in places.sizes.items() if s.kind == "runtime"),
            *(f"{n}: tl.constexpr" for n, s in places.sizes.items() if s.kind != "runtime"),
        ]
        if any(INDEX_TYPE in line for line in lines):
            parameters.append(f"{INDEX_TYPE}: tl.constexpr")
        doc = (inspect.getdoc(application) or branch.name).splitlines()[0]
        body = "\n".join(f"    {line}" for line in lines)
        source = (
            f"@triton.jit\ndef {name}({', '.join(parameters)}):\n"
            f'    """{doc}"""\n{body}\n'
        )
        return BranchText(
            name, tuple(p.split(":")[0] for p in parameters), source, grid, tuple(translator.helpers),
            places.sizes, {n: places.pointers[n] for n in used}, tuple(translator.scalars), tuple(translator.masks),
        )  # fmt: skip

    def application_hash(self) -> str:
        """Hash of the text of all applications and of the functions of the project they call."""
        return _text_hash([a for branch in self.branches for a in branch.applications])

    def arrangement_hash(self) -> str:
        """Hash of the text of all arrangements, as `application_hash`."""
        return _text_hash([branch.arrange for branch in self.branches])

    def checked_config(self, config: Mapping[str, int]) -> dict[str, int]:
        """`config` with every parameter present and a power of two.

        Raises:
            GenerationError: naming each parameter that is missing, unknown or no power of two.
        """
        if not isinstance(config, Mapping):
            raise GenerationError(f"{self.name}: config is of type {type(config).__name__}, a mapping is needed")
        wanted = {*self.tiles, "num_warps", "num_stages"}
        problems = [f"{k} is missing" for k in sorted(wanted - set(config))]
        problems += [f"{k} is unknown" for k in sorted(set(config) - wanted)]
        for key, value in config.items():
            if type(value) is not int or value < 1 or (key != "num_stages" and value & (value - 1)):
                kind = "whole number above 0" if key == "num_stages" else "power of two"
                problems.append(f"{key} = {value!r} is no {kind}")
        if problems:
            raise GenerationError(f"{self.name}: configuration {dict(config)}: {'; '.join(problems)}")
        return dict(config)


def _order(branch: Branch, sizes: Mapping[str, Expr]) -> Order | None:
    """The order of a branch's programs, if its groups hold more than one tile."""
    if branch.order is None or sizes[branch.order[1]] == 1:
        return None
    return Order(branch.order[0], sizes[branch.order[1]])


def forced(config: Mapping[str, int]) -> Rules:
    """Rules that always give `config`."""
    return Rules((Rule({}, dict(config), "stated", "the caller"),), "a configuration given by the caller")


def _text_hash(functions: Sequence[Callable[..., Any]]) -> str:
    """Hash of the functions' text and of those plain functions that they reach by name, the engine's left out."""
    seen: dict[str, str] = {}

    def visit(function: Callable[..., Any]) -> None:
        key = f"{function.__module__}.{function.__qualname__}"
        if key in seen:
            return
        seen[key] = inspect.getsource(function)
        for value in inspect.getclosurevars(function).globals.values():
            if inspect.isfunction(value) and value.__module__ not in ("tilewright.arrange", "tilewright.expr"):
                visit(value)

    for function in functions:
        visit(function)
    return hashlib.sha256("\n".join(seen[k] for k in sorted(seen)).encode()).hexdigest()[:12]


def _size_names(arranged: Mapping[str, Any]) -> set[str]:
    names: set[str] = set()
    for value in arranged.values():
        if isinstance(value, Tensor):
            for e in (*value.source.strides, *(a.size for level in value.levels for a in level)):
                names |= {a.name for a in wrap(e).atoms() if isinstance(a, Size)}
    return names
