"""The shapes of a device function's tiles, read from its text for given values of its constants."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int | None, ...]  # a dimension that the text does not tell is None


@dataclass(frozen=True)
class Made:
    """A tile: the expression that makes it, and its shape."""

    node: ast.expr
    shape: Shape


class Tiles(ast.NodeVisitor):
    """Reads one device function; `made` holds every tile in the order of the text.

    A shape that cannot be told, an argument's say, is unknown: such a tile is left out, never guessed.
    """

    def __init__(self, constants: Mapping[str, int]) -> None:
        self.constants = dict(constants)
        self.shapes: dict[str, Shape] = {}
        self.made: list[Made] = []
        self.dots: list[tuple[ast.Call, Shape, Shape]] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.shape(node.value)
        target = node.targets[0]
        if isinstance(target, ast.Name):
            number = self.number(node.value)
            if number is not None:
                self.constants[target.id] = number
            self._bind(target.id, value)
        elif isinstance(target, ast.Tuple):
            values: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(node.value, ast.Tuple):
                values = node.value.elts
            for name, own in zip(target.elts, values, strict=True):
                if isinstance(name, ast.Name):  # tl.split gives sides of one shape
                    self._bind(name.id, self.shape(own) if own is not None else value)

    def _bind(self, name: str, shape: Shape | None) -> None:
        if shape is None:
            self.shapes.pop(name, None)
        else:
            self.shapes[name] = shape

    def visit_Expr(self, node: ast.Expr) -> None:
        self.shape(node.value)

    def number(self, node: ast.expr) -> int | None:
        """An integer that the constants tell."""
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if isinstance(node, ast.Name):
            return self.constants.get(node.id)
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left), self.number(node.right)
            if left is None or right is None:
                return None
            return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}.get(type(node.op)) or (
                left // right if isinstance(node.op, ast.FloorDiv) and right else None
            )
        return None

    def shape(self, node: ast.expr) -> Shape | None:
        """The shape of an expression, () for a scalar."""
        found = self._shape(node)
        if found and isinstance(node, ast.Call | ast.BinOp | ast.Compare):
            self.made.append(Made(node, found))
        return found

    def _shape(self, node: ast.expr) -> Shape | None:
        if isinstance(node, ast.Constant):
            return ()
        if isinstance(node, ast.Name):
            return () if node.id in self.constants else self.shapes.get(node.id)
        if isinstance(node, ast.BinOp):
            return broadcast(self.shape(node.left), self.shape(node.right))
        if isinstance(node, ast.Compare):
            return broadcast(self.shape(node.left), self.shape(node.comparators[0]))
        if isinstance(node, ast.UnaryOp):
            return self.shape(node.operand)
        if isinstance(node, ast.Subscript):
            return self._indexed(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        return None

    def _indexed(self, node: ast.Subscript) -> Shape | None:
        value = self.shape(node.value)
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if value is None or not all(isinstance(i, ast.Slice) or _is_none(i) for i in index):
            return None
        left, out = list(value), []
        for i in index:
            out.append(1 if _is_none(i) else left.pop(0) if left else None)
        return (*out, *left)

    def _called(self, node: ast.Call) -> Shape | None:
        name = dotted(node.func)
        arguments = [self.shape(a) for a in node.args]
        for keyword in node.keywords:
            if keyword.arg in ("mask", "other"):
                self.shape(keyword.value)
        if name == "tl.arange":
            first, last = (self.number(a) for a in node.args)
            return None if first is None or last is None else (last - first,)
        if name in ("tl.zeros", "tl.full"):
            return self._literal(node.args[0])
        if name in ("tl.reshape", "tl.broadcast_to"):
            return self._literal(node.args[1])
        if name == "tl.split":
            return None if arguments[0] is None else arguments[0][:-1]
        if name == "tl.join":
            both = broadcast(arguments[0], arguments[1])
            return None if both is None else (*both, 2)
        if name == "tl.trans":
            return None if arguments[0] is None else arguments[0][::-1]
        if name == "tl.dot":
            left, right = arguments[0], arguments[1]
            if not left or not right:
                return None
            self.dots.append((node, left, right))
            return (*left[:-1], right[-1])
        if name in ("tl.sum", "tl.max", "tl.min"):
            return self._reduced(node, arguments[0])
        if name in ("tl.program_id", "tl.num_programs"):
            return ()
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return self.shape(node.func.value)
        known = [shape for shape in arguments if shape is not None]
        out: Shape | None = ()
        for shape in known:
            out = broadcast(out, shape)
        return out if known else None

    def _literal(self, node: ast.expr) -> Shape | None:
        if not isinstance(node, ast.Tuple | ast.List):
            return None
        return tuple(self.number(size) for size in node.elts)

    def _reduced(self, node: ast.Call, shape: Shape | None) -> Shape | None:
        axis = next((self.number(k.value) for k in node.keywords if k.arg == "axis"), None)
        if shape is None or axis is None or not -len(shape) <= axis < len(shape):
            return None
        return shape[:axis] + shape[axis + 1 :]


def dotted(node: ast.expr) -> str:
    """`tl.math.sqrt` of names and attributes, "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def broadcast(left: Shape | None, right: Shape | None) -> Shape | None:
    """The shape of an operation; an operand of unknown shape counts as one that fits."""
    if left is None or right is None:
        return left if right is None else right
    size = max(len(left), len(right))
    left, right = (1,) * (size - len(left)) + left, (1,) * (size - len(right)) + right
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


def elements(shape: Shape) -> int | None:
    """How many elements a tile has."""
    count = 1
    for size in shape:
        if size is None:
            return None
        count *= size
    return count


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
