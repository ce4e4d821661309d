"""The words of an application, and what each becomes in Triton.

An application is read, never run: `from tilewright.language import sum` gives a `Word`, and the translator asks it for
text. Values carry named axes; an operation aligns its operands by those names, so an application never reshapes or
broadcasts, and a tile of one token needs no other text than a tile of eight. `//` and `%` of tiles round toward zero,
as the device's do.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tilewright.errors import ApplicationError
from tilewright.expr import const
from tilewright.tensor import Axis

Tile = Any  # what annotates a tile in an application
Dim = tuple[Axis, ...]  # one dimension of a Triton tensor: an axis, or neighbouring ones folded into one
ATOM, UNARY, PRODUCT, SUM, SHIFT, AND, COMPARE, NOT = 9, 8, 7, 6, 5, 4, 3, 2  # how tightly a text binds


@dataclass(frozen=True)
class Value:
    """A Triton expression: its text, dtype and dimensions. `literal` holds a Python number or bool."""

    code: str
    dtype: str
    dims: tuple[Dim, ...] = ()
    binds: int = ATOM
    literal: Any = None

    @property
    def axes(self) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def names(self) -> tuple[str | None, ...]:
        return tuple(axis.name for axis in self.axes)

    def bound(self, level: int) -> str:
        """The text, in parentheses if it binds less tightly than `level`."""
        return self.code if self.binds >= level else f"({self.code})"


class Scope(Protocol):
    """What a word may ask of the translator."""

    order: Sequence[str]
    lowering: Any

    def refuse(self, message: str) -> ApplicationError: ...
    def helper(self, name: str) -> str: ...
    def keep(self, value: Value, hint: str) -> Value: ...
    def lane(self, axis: str) -> Value: ...
    def read(self, operand: Any) -> Value: ...
    def size_text(self, axis: Axis) -> str: ...
    def axis(self, name: str) -> Axis: ...
    def split(self, operand: Any, axis: str) -> tuple[Value, Value]: ...
    def inside(self, operand: Any, axis: str) -> Value: ...
    def load_as(self, operand: Any, dtype: str) -> Any: ...
    def element(self, operand: Any) -> str: ...
    def steps(self, operand: Any) -> tuple[Axis, ...]: ...
    def axes_of(self, operand: Any) -> tuple[str, ...]: ...
    def matrix(self, operand: Any, axis: str) -> Value: ...


@dataclass(frozen=True)
class Joined:
    """Two sides of an axis that are not one tensor yet; a store may keep them apart."""

    first: Value
    second: Value
    axis: str


@dataclass(frozen=True)
class Steps:
    """What a loop goes over: the steps of a tile along an axis."""

    axis: Axis


@dataclass(frozen=True)
class Step:
    """The variable of a loop over the steps along an axis."""

    axis: Axis


@dataclass(frozen=True)
class Dot(Value):
    """A product of matrices; what is added to it may be its accumulator: `code` with `{}` for that, and a comma."""

    onto: str = ""


@dataclass(frozen=True)
class Products(Value):
    """What `axis` has still to be summed over; sums of such values are summed over it once, when one is read."""

    axis: str = ""

    @property
    def terms(self) -> Value:
        return Value(self.code, self.dtype, self.dims, self.binds)


@dataclass(frozen=True)
class Word:
    """A word of the language: `lower(scope, *operands)` gives its value."""

    name: str
    lower: Callable[..., Any]
    doc: str

    def __call__(self, *operands: Any) -> Any:
        raise ApplicationError(f"{self.name}() is a word of tilewright.language: it is translated, not called")


def named(value: Value, name: str) -> Value:
    """The variable `name` that holds a value."""
    if isinstance(value, Products):
        return replace(value, code=name, binds=ATOM)
    return Value(name, value.dtype, value.dims)


WORDS: dict[str, Word] = {}


def word(lower: Callable[..., Any]) -> Any:
    name = lower.__name__.rstrip("_")
    WORDS[name] = Word(name, lower, lower.__doc__ or "")
    return WORDS[name]


def number_text(value: float | int) -> str:
    """A Python number as text that needs no name."""
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f'-float("{-value}")' if value < 0 else f'float("{value}")'
    return repr(value)


def mentions(code: str, name: str) -> bool:
    """Does an expression's text use this name?"""
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(ast.parse(code, mode="eval")))


# -- alignment
def aligned(scope: Scope, values: Sequence[Value]) -> tuple[list[Value], tuple[Dim, ...]]:
    """The values with matching dimensions (size 1 where one is absent), and the dimensions of the result."""
    axes = {axis.name: axis for value in values for axis in value.axes}
    order = sorted(axes, key=lambda name: scope.order.index(str(name)))
    folds = [dim for value in values for dim in value.dims if len(dim) > 1]
    cuts: set[str | None] = set()  # names before which a fold must be opened
    for value in values:
        if not value.dims:
            continue
        own = set(value.names)
        for dim in value.dims:
            cuts.add(dim[0].name)
        for name, before in zip(order[1:], order, strict=False):
            if (name in own) != (before in own):
                cuts.add(name)
    foldable = {(a.name, b.name) for dim in folds for a, b in zip(dim, dim[1:], strict=False)}
    dims: list[list[Axis]] = []
    for name in order:
        joins = dims and name not in cuts and (dims[-1][-1].name, name) in foldable
        if joins:
            dims[-1].append(axes[name])
        else:
            dims.append([axes[name]])
    result = tuple(map(tuple, dims))
    return [expanded(scope, value, result) for value in values], result


def expanded(scope: Scope, value: Value, dims: tuple[Dim, ...]) -> Value:
    """`value` with a dimension for each of `dims`; absent ones have size 1."""
    if not value.dims:
        return value
    own = set(value.names)
    wanted = tuple(dim for dim in dims if dim[0].name in own)
    value = reshaped(scope, value, wanted)
    if len(wanted) == len(dims):
        return value
    index = ", ".join(":" if dim in wanted else "None" for dim in dims)
    return replace(value, code=f"{value.bound(ATOM)}[{index}]", binds=ATOM)


def reshaped(scope: Scope, value: Value, dims: tuple[Dim, ...]) -> Value:
    """`value` with its axes folded as in `dims`."""
    if value.dims == dims:
        return value
    if [a for dim in dims for a in dim] != list(value.axes):
        wanted = [axis.name for dim in dims for axis in dim]
        raise scope.refuse(f"{value.code} has axes {value.names}, not {wanted} in this order")
    out = replace(value, code=f"tl.reshape({value.code}, {shape_text(scope, dims)})", dims=dims, binds=ATOM)
    if len(dims) < len(value.dims) or not value.code.isidentifier():
        return out
    return scope.keep(out, f"{value.code}_by_{dims[-1][0].name}")


def shape_text(scope: Scope, dims: Sequence[Dim]) -> str:
    sizes = []
    for dim in dims:
        literals = [axis.size.value for axis in dim]
        if all(size is not None for size in literals):
            product = 1
            for size in literals:
                product *= _power_of_two(size or 1)
            sizes.append(str(product))
        else:
            sizes.append(" * ".join(scope.size_text(axis) for axis in dim))
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def opened(scope: Scope, value: Value, names: Sequence[str]) -> Value:
    """`value` with the axes `names` apart from the others."""
    dims: list[list[Axis]] = []
    for dim in value.dims:
        for i, axis in enumerate(dim):
            if i and (axis.name in names) == (dim[i - 1].name in names):
                dims[-1].append(axis)
            else:
                dims.append([axis])
    return reshaped(scope, value, tuple(map(tuple, dims)))


# -- elementwise
FLOAT = ("float32", "float64")


def arithmetic(scope: Scope, values: Sequence[Value]) -> str:
    """The dtype of arithmetic on `values`; 16-bit floats must be made float32 first, so that rounding is visible."""
    kinds = {v.dtype for v in values if v.literal is None}
    for kind in kinds:
        if kind.startswith("like:") or "float16" in kind or kind.startswith("float8"):
            raise scope.refuse(f"arithmetic on {kind}: write float32(...) first, a rounding is never implied")
    if any(k in FLOAT for k in kinds) or any(isinstance(v.literal, float) for v in values):
        return "float32"
    return next((k for k in ("int64", "int32", "uint8") if k in kinds), "bool" if kinds == {"bool"} else "int32")


def elementwise(scope: Scope, function: str, *operands: Any, dtype: str | None = None) -> Value:
    values, dims = aligned(scope, [scope.read(o) for o in operands])
    text = f"{function}({', '.join(v.code for v in values)})"
    return Value(text, dtype or arithmetic(scope, values), dims)


OPERATORS = {
    "Add": ("+", SUM), "Sub": ("-", SUM), "Mult": ("*", PRODUCT), "Div": ("/", PRODUCT),
    "FloorDiv": ("//", PRODUCT), "Mod": ("%", PRODUCT), "BitAnd": ("&", AND), "BitOr": ("|", COMPARE + 0),
    "RShift": (">>", SHIFT), "LShift": ("<<", SHIFT),
}  # fmt: skip
COMPARISONS = {"Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!="}


def binary(scope: Scope, operator: str, left: Any, right: Any) -> Value:
    """left operator right, aligned by axis names."""
    if operator == "Add" and isinstance(left, Dot) != isinstance(right, Dot):
        dot, other = (left, scope.read(right)) if isinstance(left, Dot) else (right, scope.read(left))
        if other.literal is None and (other.dims, other.dtype) == (dot.dims, dot.dtype):
            return Value(dot.onto.format(other.code), dot.dtype, dot.dims)
    if operator == "Add" and isinstance(right, Products):
        if isinstance(left, Products) and left.axis == right.axis:
            return _products(binary(scope, "Add", left.terms, right.terms), right.axis)
        if isinstance(left, Value) and left.literal == 0:
            return right
    (a, b), dims = aligned(scope, [scope.read(left), scope.read(right)])
    if operator in COMPARISONS:
        arithmetic(scope, [a, b])
        return Value(f"{a.bound(SUM)} {COMPARISONS[operator]} {b.bound(SUM)}", "bool", dims, COMPARE)
    if operator not in OPERATORS:
        raise scope.refuse(f"the operator {operator} has no meaning on tiles")
    sign, binds = OPERATORS[operator]
    dtype = arithmetic(scope, [a, b])
    return Value(f"{a.bound(binds)} {sign} {b.bound(binds + 1)}", "float32" if sign == "/" else dtype, dims, binds)


def _products(terms: Value, axis: str) -> Products:
    return Products(terms.code, terms.dtype, terms.dims, terms.binds, axis=axis)


NEUTRAL = {  # of a reduction, for floats and for integers
    "sum": (0.0, 0), "max": (-float("inf"), -(2**31)), "min": (float("inf"), 2**31 - 1)
}  # fmt: skip


def _without_padding(scope: Scope, name: str, value: Value, axes: Sequence[str]) -> Value:
    """`value` with the reduction's neutral element in lanes that only round an axis up to a power of two."""
    for axis in map(scope.axis, axes):
        size = axis.size.value
        if size is None or size == _power_of_two(size) or axis.name not in value.names:
            continue
        exists = binary(scope, "Lt", scope.lane(str(axis.name)), Value(str(size), "int32", literal=size))
        neutral = NEUTRAL[name][0 if value.dtype in FLOAT else 1]
        value = where.lower(scope, exists, value, Value(number_text(neutral), value.dtype, literal=neutral))
    return value


def _reduction(name: str, function: str) -> Any:
    def lower(scope: Scope, x: Any, *axes: str) -> Value:
        value = scope.read(x)
        arithmetic(scope, [value])
        for axis in axes:
            scope.axis(axis)
        if not axes:
            raise scope.refuse(f"{name}() needs the axes to reduce over")
        value = _without_padding(scope, name, value, axes)
        if name in ("max", "min") and value.dtype in FLOAT and scope.lowering["nan_max"] == "select":
            value = scope.keep(value, "values")
            lowest = '-float("inf")' if name == "max" else 'float("inf")'
            value = replace(value, code=f"tl.where({value.code} == {value.code}, {value.code}, {lowest})")
        value = opened(scope, value, axes)
        for dim in range(len(value.dims) - 1, -1, -1):
            if value.dims[dim][0].name in axes:
                dims = value.dims[:dim] + value.dims[dim + 1 :]
                value = Value(f"{function}({value.code}, axis={dim})", value.dtype, dims)
        return value

    lower.__name__ = name
    nan = "" if name == "sum" else " A NaN counts for nothing."
    lower.__doc__ = f"{name}(x, *axes): over the named axes, in x's dtype.{nan}"
    return word(lower)


sum = _reduction("sum", "tl.sum")
max = _reduction("max", "tl.max")
min = _reduction("min", "tl.min")


def _unary(name: str) -> Any:
    def lower(scope: Scope, x: Any) -> Value:
        return elementwise(scope, f"tl.{name}", x)

    lower.__name__ = name
    lower.__doc__ = f"{name}(x), elementwise, in x's dtype."
    return word(lower)


rsqrt = _unary("rsqrt")
sqrt = _unary("sqrt")
exp = _unary("exp")
log = _unary("log")
erf = _unary("erf")
abs = _unary("abs")


@word
def mean(scope: Scope, x: Any, *axes: str) -> Value:
    """mean(x, *axes): sum over the axes, divided by how many elements they have."""
    count = const(1)
    for axis in axes:
        count = count * scope.axis(axis).size
    total = sum.lower(scope, x, *axes)
    text = str(count.value) if count.value is not None else scope.size_text(Axis(None, count))
    return Value(f"{total.bound(PRODUCT)} / {text}", total.dtype, total.dims, PRODUCT)


@word
def maximum(scope: Scope, x: Any, y: Any) -> Value:
    """maximum(x, y), elementwise; which operand a NaN yields is the device's affair, so test for it with where."""
    return elementwise(scope, "tl.maximum", x, y)


@word
def minimum(scope: Scope, x: Any, y: Any) -> Value:
    """minimum(x, y), elementwise; as maximum for NaN."""
    return elementwise(scope, "tl.minimum", x, y)


@word
def where(scope: Scope, condition: Any, x: Any, y: Any) -> Value:
    """where(condition, x, y), elementwise."""
    values, dims = aligned(scope, [scope.read(v) for v in (condition, x, y)])
    if isinstance(values[0].literal, bool):
        return scope.read(x if values[0].literal else y)
    if values[0].dtype != "bool":
        raise scope.refuse(f"where() chooses by a comparison, not by {values[0].code}")
    kind = next((v.dtype for v in values[1:] if v.literal is None), values[1].dtype)
    return Value(f"tl.where({', '.join(v.code for v in values)})", kind, dims)


@word
def steps(scope: Scope, x: Any) -> Steps:
    """steps(x): the steps into which the arrangement cuts x; `for k in steps(x)` reads x[k]."""
    axes = scope.steps(x)
    if len(axes) != 1:
        raise scope.refuse("steps() takes a tile that the arrangement cuts into steps along one axis")
    return Steps(axes[0])


@word
def dot(scope: Scope, x: Any, y: Any) -> Value:
    """dot(x, y): sum of x * y over the one axis that both have, accumulated in float32.

    The axes of the result are the others, in the order of the arrangement. Where one operand has no other, products are
    added in float32, those of all steps of a loop before they are summed; so they are where lowering.dot is "none",
    summed at each step. Else the matrix unit takes both in their own dtype, which must be the same, float32 included.
    """
    names = [scope.axes_of(operand) for operand in (x, y)]
    common = [name for name in names[0] if name in names[1]]
    if len(common) != 1:
        raise scope.refuse(f"dot() sums over the one axis that both have; these have {', '.join(common) or 'none'}")
    axis = common[0]
    is_vector = builtins.min(len(own) for own in names) == 1
    if scope.lowering["dot"] == "none" or is_vector:
        products = binary(scope, "Mult", *(scope.load_as(operand, "float32") for operand in (x, y)))
        return _products(products, axis) if is_vector else sum.lower(scope, products, axis)
    # The operand whose other axes come first in the arrangement gives the rows.
    place = {name: i for i, name in enumerate(scope.order)}
    free = [builtins.min(place[name] for name in own if name != axis) for own in names]
    first, second = (x, y) if free[0] < free[1] else (y, x)
    a, b = scope.matrix(first, axis), scope.matrix(second, axis)
    if a.dtype != b.dtype and not any(":" in v.dtype or "|" in v.dtype for v in (a, b)):
        raise scope.refuse(f"dot() of {a.dtype} and {b.dtype}: they must agree")
    _check_matrices(scope, (*a.dims, *b.dims))
    left = a.code if a.dims[-1][0].name == axis else f"tl.trans({a.code})"
    right = f"tl.trans({b.code})" if b.dims[-1][0].name == axis else b.code
    dims = tuple(dim for value in (a, b) for dim in value.dims if dim[0].name != axis)
    precise = 'input_precision="ieee"'
    onto = f"tl.dot({left}, {right}, {{}}, {precise})"
    return Dot(f"tl.dot({left}, {right}, {precise})", "float32", dims, onto=onto)


def _check_matrices(scope: Scope, dims: Sequence[Dim]) -> None:
    """Refuses matrices of literal sizes that are too small where the device's matrix unit wants 16."""
    if scope.lowering["dot"] != "pad16":
        return
    for dim in dims:
        sizes = [axis.size.value for axis in dim]
        if None not in sizes and (count := math.prod(map(int, filter(None, sizes)))) < 16:
            raise scope.refuse(f"dot() of {count} {' x '.join(str(a.name) for a in dim)}: this device needs 16")


@word
def float32(scope: Scope, x: Any) -> Any:
    """float32(x): x in float32; a tile is widened as it is loaded."""
    return scope.load_as(x, "float32")


@word
def rounded(scope: Scope, x: Any, tile: Any) -> Value:
    """rounded(x, tile): x rounded to the tile's dtype, in float32 again."""
    value = scope.read(x)
    return Value(f"{value.bound(ATOM)}.to({scope.element(tile)}).to(tl.float32)", "float32", value.dims)


@word
def reciprocal(scope: Scope, x: Any) -> Value:
    """reciprocal(x): 1 / x, correctly rounded."""
    value = scope.read(x)
    arithmetic(scope, [value])
    if scope.lowering["reciprocal"] == "div_rn":
        return Value(f"tl.div_rn(1.0, {value.code})", "float32", value.dims)
    return Value(f"{scope.helper('reciprocal')}({value.code})", "float32", value.dims)


@word
def position(scope: Scope, axis: str) -> Value:
    """position(axis): where each element lies along an axis of the tile, int32."""
    return scope.lane(axis)


@word
def inside(scope: Scope, tile: Any, axis: str) -> Value:
    """inside(tile, axis): where a tile has elements along an axis, rather than its fill; bool."""
    return scope.inside(tile, axis)


@word
def split(scope: Scope, x: Any, axis: str) -> tuple[Value, Value]:
    """split(x, axis): the two sides of an axis of size 2."""
    return scope.split(x, axis)


@word
def join(scope: Scope, first: Any, second: Any, axis: str) -> Joined:
    """join(first, second, axis): the tile whose two sides along `axis` these are."""
    return Joined(scope.read(first), scope.read(second), axis)


@word
def e4m3(scope: Scope, x: Any) -> Value:
    """e4m3(x): uint8 codes of the device's e4m3, to nearest even, saturating; a NaN becomes the least value.

    The format is e4m3fn, up to 448, or e4m3fnuz, up to 224.
    """
    value = scope.read(x)
    name = f"e4m3{_fnuz(scope)}_{scope.lowering['e4m3_encode']}"
    if scope.lowering["e4m3_encode"] == "cast" and scope.lowering["nan_max"] == "select":
        name += "_select"
    return Value(f"{scope.helper(name)}({value.code})", "uint8", value.dims)


@word
def e4m3_value(scope: Scope, code: Any) -> Value:
    """e4m3_value(code): the float32 that a uint8 code of the device's e4m3 stands for."""
    value = scope.read(code)
    name = f"e4m3{_fnuz(scope)}_value_{scope.lowering['e4m3_decode']}"
    return Value(f"{scope.helper(name)}({value.code})", "float32", value.dims)


@word
def ue8m0(scope: Scope, magnitude: Any) -> tuple[Value, Value]:
    """ue8m0(m): (code, inverse) of the smallest power of two s with m <= 448 s, or 224 s where e4m3 ends at 224.

    code is int32, s = 2 ** (code - 127), clamped to 0; inverse is 1 / s, or 0 where m is infinite (code 255).
    """
    value = scope.read(magnitude)
    name = scope.helper(f"ue8m0{_fnuz(scope)}_code")
    code = scope.keep(Value(f"{name}({value.code})", "int32", value.dims), "scale_code")
    return code, Value(f"{scope.helper('ue8m0_inverse')}({code.code})", "float32", value.dims)


@word
def ue8m0_value(scope: Scope, code: Any) -> Value:
    """ue8m0_value(code): 2 ** (code - 127), infinite for 255."""
    value = scope.read(code)
    return Value(f"{scope.helper('ue8m0_value')}({value.code})", "float32", value.dims)


def _fnuz(scope: Scope) -> str:
    return "fnuz" if scope.lowering["e4m3_format"] == "fnuz" else ""


HELPERS = {
    "e4m3_cast": '''@triton.jit
def e4m3_cast(x):
    """uint8 codes of e4m3fn, to nearest even, saturating at 448; a NaN becomes -448."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)  # of a NaN and a number, maximum is the number
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
''',
    "e4m3_cast_select": '''@triton.jit
def e4m3_cast_select(x):
    """uint8 codes of e4m3fn, to nearest even, saturating at 448; a NaN becomes -448."""
    x = tl.where(x >= -448.0, x, -448.0)
    x = tl.where(x <= 448.0, x, 448.0)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
''',
    "e4m3_int_rne": '''@triton.jit
def e4m3_int_rne(x):
    """uint8 codes of e4m3fn by integers, to nearest even, saturating at 448; a NaN becomes -448."""
    x = tl.where(x >= -448.0, x, -448.0)
    x = tl.where(x <= 448.0, x, 448.0)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # rebias the exponent from 127 to 7
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0x7FFFFF  # rounds to multiples of 2 ** -9
    code = tl.where(size < 0x3C800000, subnormal, normal)  # 0x3C800000 is 2 ** -6
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
''',
    "e4m3fnuz_int_rne": '''@triton.jit
def e4m3fnuz_int_rne(x):
    """uint8 codes of e4m3fnuz by integers, to nearest even, saturating at 224; a NaN becomes -224."""
    x = tl.where(x >= -224.0, x, -224.0)
    x = tl.where(x <= 224.0, x, 224.0)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 952  # rebias the exponent from 127 to 8
    subnormal = (tl.abs(x) + 8192.0).to(tl.int32, bitcast=True) & 0x7FFFFF  # rounds to multiples of 2 ** -10
    code = tl.where(size < 0x3C000000, subnormal, normal)  # 0x3C000000 is 2 ** -7
    return tl.where(code > 0, code | ((bits >> 24) & 0x80), 0).to(tl.uint8)  # 0x80 would be NaN
''',
    "e4m3_value_cast": '''@triton.jit
def e4m3_value_cast(code):
    """float32 of e4m3fn codes."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
''',
    "e4m3_value_bits_to_fp16": '''@triton.jit
def e4m3_value_bits_to_fp16(code):
    """float32 of e4m3fn codes: their bits are those of a float16 that is 256 times too small."""
    bits = code.to(tl.int32)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
''',
    "e4m3fnuz_value_bits_to_fp16": '''@triton.jit
def e4m3fnuz_value_bits_to_fp16(code):
    """float32 of e4m3fnuz codes: their bits are those of a float16 that is 128 times too small."""
    bits = code.to(tl.int32)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(bits == 0x80, float("nan"), half.to(tl.float32) * 128.0)
''',
    "ue8m0_code": '''@triton.jit
def ue8m0_code(x):
    """Biased exponent of the smallest power of two s with x <= 448 * s, for x >= 0; 255 where x is infinite."""
    bits = x.to(tl.int32, bitcast=True)
    code = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2 ** 8
    return tl.where(bits >= 0x7F800000, 255, tl.maximum(code, 0))
''',
    "ue8m0fnuz_code": '''@triton.jit
def ue8m0fnuz_code(x):
    """Biased exponent of the smallest power of two s with x <= 224 * s, for x >= 0; 255 where x is infinite."""
    bits = x.to(tl.int32, bitcast=True)
    code = (bits >> 23) - 7 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 224 is 1.75 * 2 ** 7
    return tl.where(bits >= 0x7F800000, 255, tl.maximum(code, 0))
''',
    "ue8m0_value": '''@triton.jit
def ue8m0_value(code):
    """2 ** (code - 127), infinite for 255."""
    bits = code.to(tl.int32)
    return tl.where(bits > 0, bits << 23, 0x400000).to(tl.float32, bitcast=True)
''',
    "reciprocal": '''@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded: a quotient that may be an ulp or two off, and what it leaves of 1, exactly."""
    quotient = 1.0 / x
    x_high = (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)  # halves of 12 bits
    high = (quotient.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    x_low, low = x - x_high, quotient - high
    rest = ((1.0 - x_high * high) - x_high * low - x_low * high) - x_low * low
    return quotient + quotient * rest
''',
    "ue8m0_inverse": '''@triton.jit
def ue8m0_inverse(code):
    """1 / s of a scale's biased exponent, 0 for 255."""
    return tl.where(code < 255, ((254 - code) << 23).to(tl.float32, bitcast=True), 0.0)
''',
}
