"""torch.library: every operator of `tilewright.ops` as `torch.ops.tilewright.<name>`.

It happens when `tilewright.ops` is imported, or, where torch is imported after that, as torch's import ends; so the
order of the two does not matter, and importing Tilewright loads no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tilewright import errors, vendors
from tilewright.kernel import Argument, Flag, Kernel
from tilewright.launch import OPERATORS, Operator

NAMESPACE = "tilewright"
_library: Any = None  # torch drops the operators of a library that nobody holds


def schema(kernel: Kernel, public: Callable[..., Any]) -> str:
    """The operator's schema: mutated arguments as `Tensor!`, numbers, flags and defaults as the public function has."""
    parameters = inspect.signature(public).parameters
    arguments = []
    for argument in kernel.arguments:
        if isinstance(argument, Argument):
            kind = "Tensor" + ("!" if argument.mutated else "") + ("?" if argument.optional else "")
        elif isinstance(argument, Flag):
            kind = "str" if isinstance(argument.values[0], str) else "bool"
        else:
            kind = "int" if argument.is_integer else "float"
        default = parameters[argument.name].default
        text = f'"{default}"' if isinstance(default, str) else default
        arguments.append(f"{kind} {argument.name}" + ("" if default is inspect.Parameter.empty else f"={text}"))
    results = ["Tensor"] * len(kernel.outputs)
    returned = results[0] if len(results) == 1 else f"({', '.join(results)})"
    return f"{kernel.name}({', '.join(arguments)}) -> {returned}"


def when_torch_is_there() -> None:
    """Registers now, or when somebody imports torch."""
    if sys.modules.get("torch") is not None:
        register()
    elif "torch" not in sys.modules and not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())


def register() -> None:
    """Makes the operators of `tilewright.ops` that are not torch's yet operators of torch."""
    global _library
    import torch

    if _library is None:
        _library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for operator in list(OPERATORS.values()):
        if operator.registered is None and operator.public.__module__.startswith("tilewright.ops."):
            _register(torch, operator)


def _register(torch: Any, operator: Operator) -> None:
    # A graph must hand over tensors with the strides that the checks saw when it was traced.
    exact = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
    _library.define(schema(operator.kernel, operator.public), tags=(torch.Tag.pt2_compliant_tag, exact))
    _library.impl(operator.name, operator.direct, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{operator.name}", _fake(operator), lib=_library)
    operator.registered = getattr(getattr(torch.ops, NAMESPACE), operator.name).default
    operator.call.__globals__.update(_tracing=torch.compiler.is_dynamo_compiling, _registered=operator.registered)


def _fake(operator: Operator) -> Callable[..., Any]:
    """The operator on tensors without memory: the same checks, outputs of the right form, and no kernel."""

    def fake(*args: Any) -> Any:
        return operator.fake(_profile(args[operator.position].device))(*args)

    return fake


def _profile(device: Any) -> str:
    """The profile of a traced device; generic where there is none here, as when a graph is made on another machine."""
    try:
        return vendors.detect(device)
    except errors.DeviceError:
        return "generic"


class _AfterTorch:
    """Finds torch as everybody else does, and registers when it has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                register()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
