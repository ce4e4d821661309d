"""From an application's text to the body of a device function."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright.access import Access, Places
from tilewright.errors import ApplicationError
from tilewright.expr import Expr, Size
from tilewright.language import (
    AND,
    HELPERS,
    WORDS,
    Joined,
    Products,
    Step,
    Value,
    Word,
    binary,
    mentions,
    named,
    number_text,
    opened,
    reshaped,
)
from tilewright.loops import Loop
from tilewright.tensor import Axis, Tensor


@dataclass(frozen=True)
class TileRef:
    """A parameter that is a tile: not read before something needs its value."""

    parameter: str
    dtype: str | None = None
    step: bool = False  # of the step that the loop is at


@dataclass(frozen=True)
class Mask:
    """The conditions of a load or store of a parameter's tile, each >= 0, and how a person would write them."""

    parameter: str
    kind: str
    conditions: tuple[Expr, ...]
    texts: tuple[str, ...]


@dataclass(eq=False)
class Frame:
    """One application, or one function it calls, while its text is read."""

    function: Callable[..., Any]
    values: dict[str, Any]
    file: str
    first_line: int
    names: dict[str, str] = field(default_factory=dict)  # local name -> generated name


@dataclass
class Translator:
    """Reads an application and writes the body of its device function; the `Scope` of the words."""

    places: Places
    lowering: Mapping[str, str]
    body: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)
    masks: list[Mask] = field(default_factory=list)
    scalars: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.frames: list[Frame] = []
        self.order: Sequence[str] = list(self.places.axes)
        self.loaded: dict[tuple[Any, ...], Value] = {}
        self.kept: dict[str, Value] = {}
        self.stored: dict[str, str] = {}
        self.targets: tuple[str, ...] = ()
        self.node: ast.AST | None = None
        self.in_loop = False

    def run(self, application: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Translates `application` called with `arguments` (tensors, sizes, numbers, names of float arguments)."""
        values: dict[str, Any] = {}
        for name in inspect.signature(application).parameters:
            if name not in arguments:
                raise ApplicationError(f"{application.__name__}: its parameter {name} is not in the arrangement")
            value = arguments[name]
            values[name] = TileRef(name) if isinstance(value, Tensor) else self._scalar(name, value)
        unused = set(arguments) - set(values)
        if unused:
            raise ApplicationError(f"{application.__name__}: has no parameter {', '.join(sorted(unused))}")
        self._call(application, values)
        for name, conditions in self.places.index_loads.items():
            self._note(name, "index", conditions)

    def _scalar(self, name: str, value: Any) -> Value:
        if isinstance(value, bool | int | float):
            return literal(value)
        if isinstance(value, Size | Expr):
            size = value.expr if isinstance(value, Size) else value
            if size.value is not None:
                return literal(size.value)
            return Value(self.places.text(size), "int32", binds=9 if size.single else 6)
        if isinstance(value, str):  # the name of a float argument of the operator
            self.scalars[value] = None
            return Value(value, "float32")
        raise ApplicationError(f"parameter {name}: {value!r} is no tile, size or number")

    # -- reading text
    def _call(self, function: Callable[..., Any], values: dict[str, Any]) -> Any:
        try:
            lines, first = inspect.getsourcelines(function)
        except OSError as error:
            raise ApplicationError(f"{function.__name__}: its text cannot be found") from error
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise ApplicationError(f"{function.__name__} is not a plain function")
        frame = Frame(function, values, inspect.getsourcefile(function) or "?", first)
        if self.frames:
            if self.body and self.body[-1].startswith("# "):  # the caller's own line has nothing under it
                self.body.pop()
            self.body.append(f"# {_short(frame)}:{first}")
        self.frames.append(frame)
        result = None
        for statement in tree.body:
            self.node = statement
            if isinstance(statement, ast.Return):
                result = self.value(statement.value) if statement.value else None
                break
            self.statement(statement)
        self.frames.pop()
        return result

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            left = self.value(ast.Name(node.target.id, ast.Load()))
            self._store(node.target, binary(self, type(node.op).__name__, left, self.value(node.value)))
        elif isinstance(node, ast.If):
            self._if(node)
        elif isinstance(node, ast.For):
            Loop(self, node).write()
        else:
            raise self.refuse("this statement has no meaning in an application")

    def _if(self, node: ast.If) -> None:
        test = self.value(node.test)
        if not isinstance(test, Value) or not isinstance(test.literal, bool):
            raise self.refuse("an if chooses by a flag of the operator; choose among values with where()")
        for statement in node.body if test.literal else node.orelse:
            self.node = statement
            self.statement(statement)

    def _assign(self, target: ast.expr, expression: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._store(target, self.value(expression))
            return
        if not isinstance(target, ast.Tuple) or not all(isinstance(t, ast.Name) for t in target.elts):
            raise self.refuse("only names and tuples of names can be assigned to")
        names = [t for t in target.elts if isinstance(t, ast.Name)]
        self.targets = tuple(t.id for t in names)
        values = self.value(expression)
        self.targets = ()
        if not isinstance(values, tuple) or len(values) != len(names):
            count = len(values) if isinstance(values, tuple) else 1
            raise self.refuse(f"the left side names {len(names)}, the right side gives {count}")
        plain = all(isinstance(v, Value) for v in values) and not any(self.is_tile(t) for t in names)
        written = [self._local(t.id) for t in names] if plain else []
        clash = plain and any(
            mentions(values[j].code, written[i]) and values[i].code != written[i]
            for i in range(len(names)) for j in range(i + 1, len(names))
        )  # fmt: skip
        if clash:  # simultaneous, as Python means it
            self._forget(*written)
            right = ", ".join(v.code for v in values)
            self.body.append(f"{', '.join(written)} = {right if len(right) < 70 else f'({right})'}")
            for name, generated, value in zip(names, written, values, strict=True):
                self.frames[-1].values[name.id] = Value(generated, value.dtype, value.dims)
            return
        for name, value in zip(names, values, strict=True):
            self._store(name, value)

    def is_tile(self, target: ast.Name) -> bool:
        return isinstance(self._parameter(target.id), TileRef)

    def _parameter(self, name: str) -> Any:
        return self.frames[-1].values.get(name) if name in self.places.tensors and len(self.frames) == 1 else None

    def _store(self, target: ast.Name, value: Any) -> None:
        reference = self._parameter(target.id)
        if isinstance(reference, TileRef):
            self._store_tile(target.id, value)
            return
        frame = self.frames[-1]
        if isinstance(value, Joined | TileRef | tuple):
            frame.values[target.id] = value
            return
        if value.literal is not None:
            frame.values[target.id] = value
            return
        if value.code.isidentifier():  # another name for the same variable
            frame.values[target.id] = value
            return
        generated = self._local(target.id)
        self._forget(generated)
        self.body.append(f"{generated} = {value.code}")
        frame.values[target.id] = named(value, generated)

    def _local(self, name: str) -> str:
        """The generated name to assign a local variable to; one that another variable still means is left alone."""
        frame = self.frames[-1]
        generated = frame.names.get(name)
        meant_elsewhere = any(
            isinstance(v, Value) and v.code == generated
            for f in self.frames for n, v in f.values.items() if not (f is frame and n == name)
        )  # fmt: skip
        if generated is None or meant_elsewhere:
            generated = frame.names[name] = self.places.fresh(name)
        return generated

    def _forget(self, *names: str) -> None:
        self.kept = {
            code: value for code, value in self.kept.items() if not any(mentions(code, n) for n in names)
        }

    # -- expressions
    def value(self, node: ast.expr) -> Any:
        self.node = node
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else literal(node.value)
        if isinstance(node, ast.Name):
            return self._look_up(node.id)
        if isinstance(node, ast.Tuple):
            return tuple(self.value(element) for element in node.elts)
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            self.node = node
            return binary(self, type(node.op).__name__, left, right)
        if isinstance(node, ast.BoolOp):
            return self._flags(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return binary(self, type(node.ops[0]).__name__, self.value(node.left), self.value(node.comparators[0]))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.read(self.value(node.operand))
            if value.literal is not None:
                return literal(-value.literal)
            return Value(f"-{value.bound(8)}", value.dtype, value.dims, 8)
        if isinstance(node, ast.Call):
            return self._word(node)
        if isinstance(node, ast.Subscript):
            tile, step = self.value(node.value), self.value(node.slice)
            self.node = node
            return self._step(tile, step)
        raise self.refuse("this expression has no meaning in an application")

    def _flags(self, node: ast.BoolOp) -> Value:
        """`and` and `or` of flags."""
        values = [self.value(operand) for operand in node.values]
        self.node = node
        if not all(isinstance(v, Value) and isinstance(v.literal, bool) for v in values):
            raise self.refuse("and, or join flags of the operator; tiles are chosen among with where()")
        return literal((all if isinstance(node.op, ast.And) else any)(v.literal for v in values))

    def _step(self, tile: Any, step: Any) -> TileRef:
        if not isinstance(tile, TileRef) or not isinstance(step, Step):
            raise self.refuse("only a tile has steps, and only the variable of a loop names one: x[k]")
        if step.axis not in self.steps(tile):
            raise self.refuse(f"{tile.parameter} has no steps along {step.axis.name}")
        return replace(tile, step=True)

    def _look_up(self, name: str) -> Any:
        frame = self.frames[-1]
        if name in frame.values:
            return frame.values[name]
        outer = inspect.getclosurevars(frame.function)
        value = {**outer.globals, **outer.nonlocals}.get(name)
        if isinstance(value, bool | int | float):
            return literal(value)
        raise self.refuse(f"{name} is not defined here")

    def _word(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name):
            raise self.refuse("only words of tilewright.language and plain functions can be called")
        outer = inspect.getclosurevars(self.frames[-1].function)
        function = {**outer.globals, **outer.nonlocals}.get(node.func.id)
        arguments: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                spread = self.value(argument.value)
                if not isinstance(spread, tuple):
                    raise self.refuse("only a tuple can be spread")
                arguments.extend(spread)
            else:
                arguments.append(self.value(argument))
        self.node = node
        if node.keywords:
            raise self.refuse(f"{node.func.id}: pass its parameters by position")
        if isinstance(function, Word):
            if not _takes(function.lower, self, *arguments):
                names = [str(p).split(":")[0] for p in inspect.signature(function.lower).parameters.values()]
                raise self.refuse(f"{node.func.id} takes the operands ({', '.join(names[1:])}), not {len(arguments)}")
            try:
                return function.lower(self, *arguments)
            except TypeError as error:
                raise self.refuse(f"{function.name}() does not take these operands: {error}") from error
        if not inspect.isfunction(function):
            raise self.refuse(f"{node.func.id} is no word of tilewright.language and no function")
        names = list(inspect.signature(function).parameters)
        if len(names) != len(arguments):
            raise self.refuse(f"{node.func.id} takes the parameters ({', '.join(names)}), not {len(arguments)}")
        targets, self.targets = self.targets, ()
        bound = [self.keep(a, n) if isinstance(a, Value) else a for n, a in zip(names, arguments, strict=True)]
        result = self._call(function, dict(zip(names, bound, strict=True)))
        self.targets = targets
        return result

    # -- the Scope of the words
    def refuse(self, message: str) -> ApplicationError:
        """An error that points at the application's own line."""
        frame = self.frames[-1]
        line = frame.first_line + getattr(self.node, "lineno", 1) - 1
        text = linecache.getline(frame.file, line).rstrip()
        indent = len(text) - len(text.lstrip())
        dedent = _function_indent(frame)
        column = getattr(self.node, "col_offset", 0) + dedent
        pointer = " " * (max(column, indent)) + "^"
        return ApplicationError(
            f"{frame.function.__name__}: {message}\n  {_short(frame)}:{line}\n    {text}\n    {pointer}"
        )

    def helper(self, name: str) -> str:
        if name not in HELPERS:
            raise self.refuse(f"no lowering {name}")
        self.helpers[name] = None
        return name

    def keep(self, value: Value, hint: str) -> Value:
        value = self.read(value)
        if value.code.isidentifier() or value.literal is not None:
            return value
        if value.code not in self.kept:
            name = self.places.fresh(hint)
            self.body.append(f"{name} = {value.code}")
            self.kept[value.code] = Value(name, value.dtype, value.dims)
        return self.kept[value.code]

    def lane(self, axis: str) -> Value:
        found = self.axis(axis)
        if found.size == 1:
            return literal(0)
        return Value(self.places.lane((found,)).name, "int32", ((found,),))

    def axis(self, name: str) -> Axis:
        if name not in self.places.axes:
            raise self.refuse(f"there is no axis {name}, only {', '.join(self.places.axes)}")
        return self.places.axes[name]

    def size_text(self, axis: Axis) -> str:
        return self.places.text(axis.size)

    def steps(self, operand: Any) -> tuple[Axis, ...]:
        """The axes along which a tile has steps."""
        levels = self.places.tensors[operand.parameter].levels if isinstance(operand, TileRef) else ()
        return tuple(axis for level in levels[1:-1] for axis in level)

    def load_as(self, operand: Any, dtype: str) -> Any:
        if isinstance(operand, TileRef):
            return replace(operand, dtype=dtype)
        value = self.read(operand)
        if value.dtype == dtype:
            return value
        return Value(f"{value.bound(9)}.to(tl.{dtype})", dtype, value.dims)

    def element(self, operand: Any) -> str:
        if not isinstance(operand, TileRef):
            raise self.refuse("rounded() takes its dtype from a tile")
        return self.places.element(self.places.tensors[operand.parameter].source)

    def axes_of(self, operand: Any) -> tuple[str, ...]:
        """The axes along which the elements of an operand differ."""
        if isinstance(operand, TileRef):
            return self.places.moving(operand.parameter)
        return tuple(map(str, self.read(operand).names))

    def matrix(self, operand: Any, axis: str) -> Value:
        """An operand with two dimensions: `axis`, and all others as one before it."""
        free = tuple(name for name in self.axes_of(operand) if name != axis)
        if isinstance(operand, TileRef):
            joined = free if len(free) > 1 else ()
            return self._load(operand, self._access(operand, joined=joined), operand.parameter)
        value = self.read(operand)
        apart = tuple(a for a in value.axes if a.name != axis)
        return reshaped(self, value, (apart, *((a,) for a in value.axes if a.name == axis)))

    def read(self, operand: Any) -> Value:
        if isinstance(operand, TileRef):
            return self._load(operand, self._access(operand), operand.parameter)
        if isinstance(operand, Joined):
            return self._joined(operand)
        if isinstance(operand, Products):
            total: Value = WORDS["sum"].lower(self, operand.terms, operand.axis)
            return total
        if isinstance(operand, Value):
            return operand
        raise self.refuse(f"{operand!r} is no value")

    def inside(self, operand: Any, axis: str) -> Value:
        if not isinstance(operand, TileRef):
            raise self.refuse("inside() asks about a tile")
        access = self.places.access(operand.parameter)
        along = self.places.along(self.axis(axis), access.conditions)
        return Value(self.places.mask(along, access.dims), "bool", access.dims, AND) if along else literal(True)

    def split(self, operand: Any, axis: str) -> tuple[Value, Value]:
        found = self.axis(axis)
        if found.size != 2:
            raise self.refuse(f"axis {axis} has {found.size} positions, split() needs 2")
        if isinstance(operand, Joined) and operand.axis == axis:
            return operand.first, operand.second
        if isinstance(operand, TileRef) and not self._interleaved(operand.parameter, axis):
            sides = []
            for side, suffix in enumerate(("first", "second")):
                name = f"{operand.parameter}_{suffix}"
                access = self._access(operand, {axis: side}, f"_{suffix}")
                sides.append(self._load(operand, access, name))
            return sides[0], sides[1]
        value = opened(self, self.read(operand), [axis])
        if (found,) not in value.dims:
            raise self.refuse(f"split() along {axis}: {value.names} has no such axis")
        if value.dims[-1] != (found,):
            order = [d for d, dim in enumerate(value.dims) if dim != (found,)] + [value.dims.index((found,))]
            text = f"tl.permute({value.code}, ({', '.join(map(str, order))}))"
            value = Value(text, value.dtype, tuple(value.dims[d] for d in order))
        hints = self.targets if len(self.targets) == 2 and not self._shadows() else ("first", "second")
        if len(self.targets) == 2 and not self._shadows():
            names = [self._local(name) for name in hints]
            self._forget(*names)
        else:
            names = [self.places.fresh(name) for name in hints]
        self.body.append(f"{', '.join(names)} = tl.split({value.code})")
        return Value(names[0], value.dtype, value.dims[:-1]), Value(names[1], value.dtype, value.dims[:-1])

    def _shadows(self) -> bool:
        return any(self._parameter(name) is not None for name in self.targets)

    def _interleaved(self, parameter: str, axis: str) -> bool:
        """Are the two sides of `axis` neighbours in memory?"""
        tensor = self.places.tensors[parameter]
        names = [str(a.name) for a in tensor.levels[-1]]
        return bool(names) and names[-1] == axis

    def _joined(self, value: Joined) -> Value:
        from tilewright.language import aligned

        (a, b), dims = aligned(self, [value.first, value.second])
        return Value(f"tl.join({a.code}, {b.code})", a.dtype, (*dims, (self.axis(value.axis),)))

    # -- memory
    def _access(self, reference: TileRef, *where: Any, **how: Any) -> Access:
        if self.steps(reference) and not reference.step:
            raise self.refuse(f"{reference.parameter} is read a step at a time: {reference.parameter}[k]")
        return self.places.access(reference.parameter, *where, **how)

    def _load(self, reference: TileRef, access: Access, name: str) -> Value:
        key = (access.pointers, reference.dtype, access.step)
        if key in self.loaded:
            return self.loaded[key]
        tensor = self.places.tensors[reference.parameter]
        memory = tensor.source.memory
        if memory in self.stored:
            stored = self.stored[memory]
            raise self.refuse(f"{reference.parameter} is read after {stored} was stored in the same memory")
        text = self._load_text(access)
        dtype = tensor.source.dtype
        generated = self.places.fresh(name)
        if len(self.frames) == 1 and name == reference.parameter:
            self.frames[0].names.setdefault(name, generated)
        (self.body if access.step else self.places.head).append(f"{generated} = {text}")
        self._note(reference.parameter, "load", access.conditions)
        if reference.dtype and dtype != reference.dtype:
            # Widened where it is first used: a conversion right behind a load makes the next load wait for it. But a
            # loop must not change the type of what it found.
            dtype = reference.dtype
            lines = self.places.head if self.in_loop and not access.step else self.body
            lines.append(f"{generated} = {generated}.to(tl.{dtype})")
        self.loaded[key] = Value(generated, dtype, access.dims)
        return self.loaded[key]

    def _load_text(self, access: Access) -> str:
        either = access.either
        if either is None:
            mask = f", mask={access.mask}, other={number_text(access.fill)}" if access.mask else ""
            step = f" + {access.step}" if access.step else ""
            return f"tl.load({access.pointers}{step}{mask})"
        mask = f", mask={either.mask}, other={number_text(access.fill)}" if either.mask else ""
        index = ", ".join(":" if dim in either.dims else "None" for dim in access.dims)
        at = f"[{index}]" if either.dims and len(either.dims) < len(access.dims) else ""
        values = []
        for name, pointers in either.sides:
            values.append(self.places.fresh(name))
            self.places.head.append(f"{values[-1]} = tl.load({pointers}{mask})")
        text = f"tl.where({either.test}, {values[1]}{at}, {values[0]}{at})"
        return f"tl.where({either.exists}, {text}, {number_text(access.fill)})" if either.exists else text

    def _store_tile(self, parameter: str, value: Any) -> None:
        tensor = self.places.tensors[parameter]
        if isinstance(value, Joined) and not self._interleaved(parameter, value.axis):
            for side, part in enumerate((value.first, value.second)):
                suffix = "_first" if side == 0 else "_second"
                self._write(parameter, self.places.access(parameter, {value.axis: side}, suffix), part)
        else:
            self._write(parameter, self.places.access(parameter), self.read(value))
        self.stored[tensor.source.memory] = parameter

    def _write(self, parameter: str, access: Access, value: Value) -> None:
        from tilewright.language import expanded

        if access.either:
            raise self.refuse(f"{parameter} is one of two tensors for each lane: it can be read, not stored")
        held = [axis for dim in access.dims for axis in dim]
        missing = [axis.name for axis in value.axes if axis not in held]
        if missing:
            raise self.refuse(f"{parameter} has no axis {', '.join(map(str, missing))} to store the value along")
        if value.dims and set(value.axes) != set(held):
            value = expanded(self, value, access.dims)
        elif value.dims:
            value = reshaped(self, value, access.dims)
        text = value.bound(9)
        if value.literal is None:
            text = f"{text}.to({access.element})" if access.element != f"tl.{value.dtype}" else value.code
        mask = f", mask={access.mask}" if access.mask else ""
        self.body.append(f"tl.store({access.pointers}, {text}{mask})")
        self._note(parameter, "store", access.conditions)

    def _note(self, parameter: str, kind: str, conditions: tuple[Expr, ...]) -> None:
        self.masks.append(Mask(parameter, kind, conditions, tuple(map(self.places.describe, conditions))))


def literal(value: Any) -> Value:
    """A Python number as a value."""
    kind = "bool" if isinstance(value, bool) else "float32" if isinstance(value, float) else "int32"
    return Value(number_text(value), kind, literal=value, binds=8 if not isinstance(value, bool) and value < 0 else 9)


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _short(frame: Frame) -> str:
    """`applications/rope.py` for a module of the project, the file otherwise."""
    module = frame.function.__module__
    if module.startswith("tilewright."):
        return module.removeprefix("tilewright.").replace(".", "/") + ".py"
    return frame.file


def _function_indent(frame: Frame) -> int:
    first = linecache.getline(frame.file, frame.first_line)
    return len(first) - len(first.lstrip())

