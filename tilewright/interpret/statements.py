"""What Python's statements mean in a device function: its text rewritten, and what the rewritten text calls."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from tilewright.errors import GenerationError
from tilewright.interpret.semantic import semantic, static

JIT = "__interpreted__"  # what `@triton.jit` becomes


@functools.lru_cache(maxsize=64)
def module_code(source: str, filename: str) -> types.CodeType:
    """The code of a module, its device functions rewritten and decorated with `JIT`."""
    tree = _ModuleText().visit(ast.parse(source, filename))
    return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)


def function_code(fn: types.FunctionType) -> types.CodeType:
    """The code of a device function of an imported module, its text rewritten."""
    if fn.__closure__:
        raise GenerationError(f"{fn.__qualname__} is a closure, which is interpreted only in a module that was loaded")
    lines, start = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition: Any = tree.body[0]
    definition.decorator_list = []
    definition.body = [_DeviceText().visit(statement) for statement in definition.body]
    ast.increment_lineno(ast.fix_missing_locations(tree), start - 1)
    module = compile(tree, inspect.getsourcefile(fn) or "<triton>", "exec", dont_inherit=True)
    codes = [const for const in module.co_consts if isinstance(const, types.CodeType)]
    return next(code for code in codes if code.co_name == fn.__name__)


class _ModuleText(ast.NodeTransformer):
    """Turns `@triton.jit` functions into interpreted ones and leaves the rest of a module as it is."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        interpreted = False
        for index, decorator in enumerate(node.decorator_list):
            name = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(name) in ("triton.jit", "jit", "triton.runtime.jit.jit"):
                node.decorator_list[index] = ast.copy_location(ast.Name(JIT, ast.Load()), decorator)
                interpreted = True
        if not interpreted:
            return self.generic_visit(node)
        node.body = [_DeviceText().visit(statement) for statement in node.body]
        return node


class _DeviceText(ast.NodeTransformer):
    """Makes Python's statements mean what the compiler takes them to mean."""

    def _call(self, name: str, *args: ast.expr) -> ast.Call:
        call = ast.Call(ast.Name(name, ast.Load()), list(args), [])
        return ast.fix_missing_locations(ast.copy_location(call, args[0]))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._call("__assign__", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            constant = ast.unparse(node.annotation).strip("'").endswith("constexpr")
            node.value = self._call("__static__" if constant else "__assign__", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], self._call("__assign__", value)), node)

    def _conditional(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = self._call("__truth__", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _conditional

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = self._call("__all_true__", node.test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        rest = [ast.copy_location(ast.Lambda(nothing, value), value) for value in node.values[1:]]
        return self._call("__and__" if isinstance(node.op, ast.And) else "__or__", node.values[0], *rest)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("__negate__", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:
            raise GenerationError(f"line {node.lineno}: Triton compares two values at a time: {ast.unparse(node)}")
        return self.generic_visit(node)


def device_range(start: Any, stop: Any = None, step: Any = None, **_hints: Any) -> Iterator[Any]:
    """The `range` and `tl.range` of a kernel: the variable is a tensor of the bounds' common type."""
    bounds = [semantic.to_tensor(bound) for bound in ((0, start) if stop is None else (start, stop))]
    bounds.append(semantic.to_tensor(1 if step is None else step))
    ty = functools.reduce(semantic.integer_promote_impl, (bound.dtype for bound in bounds))
    for value in range(*(int(semantic.cast(bound, ty).handle.data[0]) for bound in bounds)):
        yield semantic.scalar_constant(value, ty)


def _extreme(builtin: Callable[..., Any], elementwise: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any) -> Any:
        if any(isinstance(arg, tl.tensor) for arg in args):
            return functools.reduce(functools.partial(elementwise, _semantic=semantic), args)
        return builtin(*args)

    return choose


def _assign(value: Any) -> Any:
    """Numbers become tensors when they are assigned, as in the compiler."""
    value = static(value)
    if isinstance(value, int | float):
        return semantic.to_tensor(value)
    return tuple(map(_assign, value)) if type(value) is tuple else value


def _truth(value: Any) -> bool:
    if isinstance(value, tl.tensor):
        if value.numel != 1:
            raise TypeError(f"a condition must be a scalar, this one is a block of {tuple(value.shape)}")
        return bool(value.handle.data.any())
    return bool(value)


def _all_true(value: Any) -> bool:
    return bool(value.handle.data.all()) if isinstance(value, tl.tensor) else bool(value)


def _logical(method: str, decisive: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    # As the compiler: a number decides at once, tensors are all evaluated.
    tensors = []
    for operand in (lambda: first, *rest):
        value = operand()
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is decisive:
            return value
    return functools.reduce(lambda left, right: getattr(left, method)(right), tensors) if tensors else value


def _negate(value: Any) -> Any:
    return semantic.not_(value) if isinstance(value, tl.tensor) else not value


BUILTINS: dict[str, Callable[..., Any]] = {  # in place of Python's, where a module has none of its own
    "range": device_range,
    "min": _extreme(min, tl.minimum),
    "max": _extreme(max, tl.maximum),
}
HELPERS: dict[str, Callable[..., Any]] = {
    "__assign__": _assign,
    "__static__": static,
    "__truth__": _truth,
    "__all_true__": _all_true,
    "__negate__": _negate,
    "__and__": functools.partial(_logical, "logical_and", False),
    "__or__": functools.partial(_logical, "logical_or", True),
}
