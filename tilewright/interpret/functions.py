"""Kernels and device functions: launched as `fn[grid](...)`, or called by one another."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import KernelInterface

from tilewright.errors import DeviceError
from tilewright.interpret.launch import Launch, Storage, current
from tilewright.interpret.semantic import Tensor, builder, semantic, static
from tilewright.interpret.statements import function_code

_POINTEES = {
    torch.bool: tl.int1,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
    **{
        getattr(torch, name): getattr(tl, name)
        for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
        if hasattr(torch, name)
    },
}


class InterpretedFunction(KernelInterface[Any]):
    """A `@triton.jit` function, interpreted.

    Args:
        fn: the Python function.
        namespace: gives the globals it sees, once the module that holds it is complete.
        rewritten: whether the text of `fn` was rewritten when its module was loaded.
    """

    def __init__(self, fn: Any, *, namespace: Callable[[], dict[str, Any]], rewritten: bool = True) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.namespace = namespace
        self.rewritten = rewritten
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        annotations = {name: parameter.annotation for name, parameter in self.signature.parameters.items()}
        self.static = {name for name, annotation in annotations.items() if _names_constexpr(annotation)}

    @functools.cached_property
    def device(self) -> Callable[..., Any]:
        """The function as a program runs it."""
        fn = self.fn
        code = fn.__code__ if self.rewritten else function_code(fn)
        function = types.FunctionType(code, self.namespace(), fn.__name__, fn.__defaults__, fn.__closure__)
        function.__kwdefaults__ = fn.__kwdefaults__
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current()  # an error outside a launch
        return self.device(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Runs every program of `grid`, one after the other; launch options in `kwargs` are ignored."""
        if warmup:
            return
        bound = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in self.arg_names})
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        x, y, z = (int(size) for size in (*sizes, 1, 1)[:3])
        storages: list[Storage] = []
        values = {
            name: static(value) if name in self.static else _argument(name, value, storages)
            for name, value in bound.arguments.items()
        }
        Launch(self.__name__, (x, y, z), storages).run(functools.partial(self.device, **values))


def _names_constexpr(annotation: Any) -> bool:
    return annotation is tl.constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


def _argument(name: str, value: Any, storages: list[Storage]) -> Any:
    """A kernel's run-time argument as its programs see it; notes which memory it gives them."""
    if hasattr(value, "data_ptr"):
        base = getattr(value, "base", value)  # what triton.reinterpret makes has one
        if base.device.type != "cpu":
            raise DeviceError(f"{name} is on {base.device}; an interpreted kernel takes tensors on the CPU")
        storage = base.untyped_storage()
        if storage.nbytes():
            storages.append(Storage(storage.data_ptr(), storage.nbytes(), name))
        ty = tl.pointer_type(value.dtype if isinstance(value.dtype, tl.dtype) else _POINTEES[value.dtype])
        return Tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), ty), ty)
    if isinstance(value, tuple):
        return tuple(_argument(name, item, storages) for item in value)
    if isinstance(value, bool):
        return Tensor(builder.get_int1(value), tl.int1)
    if isinstance(value, int):
        if value >= 2**63:
            return Tensor(builder.get_uint64(value), tl.uint64)
        ty = tl.int32 if -(2**31) <= value < 2**31 else tl.int64
        return semantic.scalar_constant(value, ty)
    if isinstance(value, float):
        return Tensor(builder.get_fp32(value), tl.float32)
    return value
