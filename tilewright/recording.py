"""What stands for a compiled module's kernels: it remembers launches, only compiles, and keeps captures whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tilewright import kernel_cache
from tilewright.errors import CaptureError


class Recorded(threading.local):
    """This thread's current call of an operator.

    Attributes:
        launches: (compiled kernel, grid, values of all parameters) of each, where somebody asked.
        preparing: whether launches only compile.
    """

    launches: list[tuple[Any, ...]] | None = None
    preparing = False


class Recorder:
    """Stands for a `@triton.jit` kernel in a module of `operator`."""

    def __init__(self, kernel: Any, recorded: Recorded, operator: str = ""):
        self.kernel, self.recorded = kernel, recorded
        self.__name__ = kernel.__name__
        self.arg_names = kernel.arg_names
        if hasattr(kernel, "_do_compile"):
            kernel._do_compile = _careful(kernel, operator)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if self.recorded.preparing:
                self._prepare(grid, args, kwargs)
                return
            compiled = self.kernel[grid](*args, **kwargs)
            if self.recorded.launches is not None:
                values = dict(zip(self.arg_names, args, strict=False)) | kwargs
                self.recorded.launches.append((compiled, grid, {name: values[name] for name in self.arg_names}))

        return launch

    def _prepare(self, grid: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compiled = self.kernel.warmup(*map(_stand_in, args), grid=grid, **kwargs)
        _ = compiled.run  # loads it on the current device


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _stand_in(value: Any) -> Any:
    """A dtype where a tensor has no memory: the compiler then takes an address that is a multiple of 16."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    return value.dtype if isinstance(value, torch.Tensor) and isinstance(value, FakeTensor) else value


def _careful(kernel: Any, operator: str) -> Callable[..., Any]:
    """`kernel._do_compile`, which Triton calls for what is not compiled yet, refusing to do it within a capture."""
    do_compile = kernel._do_compile

    def compile_outside_captures(*args: Any, **kwargs: Any) -> Any:
        if capturing():
            raise CaptureError(
                f"{operator}: a CUDA graph is being captured and the kernel of this call is not compiled; before the "
                f"capture, call {operator}.prepare(...) with these arguments, or the operator itself"
            )
        kernel.compile = kernel_cache.compiler()
        return do_compile(*args, **kwargs)

    return compile_outside_captures
