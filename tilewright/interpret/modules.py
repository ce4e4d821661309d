"""Modules as interpreted functions see them: Triton's, bound to the interpreter, and those loaded from a text."""

from __future__ import annotations

import functools
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction as _StockFunction
from triton.runtime.jit import JITFunction

from tilewright.interpret.functions import InterpretedFunction
from tilewright.interpret.reductions import reduce, reduce_with_indices, scan
from tilewright.interpret.semantic import Tensor, semantic, static
from tilewright.interpret.statements import BUILTINS, HELPERS, JIT, device_range, module_code


def load(source: str, name: str, filename: str) -> types.ModuleType:
    """Executes `source` as a module whose `@triton.jit` functions are interpreted on CPU tensors.

    Launch options (num_warps, num_stages, enable_fp_fusion, a vendor's own) are accepted and ignored. The lines of
    `source` are known to tracebacks under `filename`; the module is not entered in `sys.modules`.

    Args:
        source: the text of a generated module.
        name: the `__name__` of the module.
        filename: the `__file__` of the module, which need not exist.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    names = module.__dict__
    names[JIT] = functools.partial(InterpretedFunction, namespace=_namespace(names))
    exec(module_code(source, filename), names)
    return module


def _namespace(names: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """The globals of a module's device functions, made when first needed: by then the module is complete."""

    @functools.cache
    def seen() -> dict[str, Any]:
        return {**BUILTINS, **{name: _view(value) for name, value in names.items()}, **HELPERS}

    return seen


_namespaces: dict[int, Callable[[], dict[str, Any]]] = {}  # by id: of modules that were imported, which stay
_views: dict[int, tuple[Any, Any]] = {}  # by id: what is seen, what is shown instead


def _view(value: Any) -> Any:
    """What an interpreted function sees where a compiled one sees `value`."""
    known = _views.get(id(value))
    if known is not None:
        return known[1]
    if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "triton":
        shown: Any = _ModuleView(value)
    elif isinstance(value, JITFunction | _StockFunction):
        names = value.fn.__globals__
        namespace = _namespaces.setdefault(id(names), _namespace(names))
        shown = InterpretedFunction(value.fn, namespace=namespace, rewritten=False)
    elif isinstance(value, types.FunctionType) and tl.core.is_builtin(value):
        shown = _bound(value)
    elif isinstance(value, tl.constexpr):
        return value.value
    else:
        return value
    return _views.setdefault(id(value), (value, shown))[1]


class _ModuleView(types.ModuleType):
    """A module of Triton, its functions bound to the interpreter."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = _view(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _bound(member: Any) -> Callable[..., Any]:
    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        out = member(*args, **kwargs)
        return Tensor(out.handle, out.type) if type(out) is tl.tensor else out  # triton.language.math makes these

    return call


def _method(function: Any) -> Callable[..., Any]:
    shown = _view(function)
    return lambda self, *args, **kwargs: shown(self, *args, **kwargs)


def _static_range(start: Any, stop: Any = None, step: Any = None) -> range:
    first, last = (0, start) if stop is None else (start, stop)
    return range(static(first), static(last), 1 if step is None else static(step))


def _static_assert(condition: Any, message: Any = "") -> None:
    if isinstance(condition, tl.tensor):
        raise TypeError("tl.static_assert needs a condition known when compiling")
    if not condition:
        raise AssertionError(static(message))


def _hint(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"tl.{name} is not interpreted")

    return refuse


_REPLACED: dict[str, Any] = {
    "reduce": reduce,
    "_reduce_with_indices": reduce_with_indices,
    "associative_scan": scan,
    "range": device_range,
    "static_range": _static_range,
    "static_assert": _static_assert,
    "static_print": print,
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), _hint),
    **{name: _missing(name) for name in ("map_elementwise", "inline_asm_elementwise", "make_tensor_descriptor")},
}


def _fill_views() -> None:
    """Binds what `tl` and `tl.tensor` offer to the interpreter."""
    for name, replacement in _REPLACED.items():
        for module in (tl, tl.core):
            if (original := getattr(module, name, None)) is not None:
                _views[id(original)] = (original, replacement)
    _views[id(tl.tensor)] = (tl.tensor, Tensor)
    for name in dir(tl.tensor):
        member, function = inspect.getattr_static(tl.tensor, name), getattr(tl, name, None)
        if name in _REPLACED:
            setattr(Tensor, name, _REPLACED[name])
        elif isinstance(function, JITFunction | _StockFunction):
            setattr(Tensor, name, _method(function))
        elif isinstance(member, types.FunctionType) and tl.core.is_builtin(member):
            setattr(Tensor, name, _bound(member))

    for module in (tl, tl.core, tl.math, tl.standard):  # now, since a launch of the stock interpreter changes them
        for name in dir(module):
            getattr(_view(module), name)


_fill_views()
