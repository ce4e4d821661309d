"""A stand-in for a GPU: tensors that say they are on cuda:0, and kernels that remember what they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright import launch, recording


class OnGpu(torch.Tensor):
    """A tensor of the CPU's memory that says it is on cuda:0."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at a multiple of 64 bytes."""
    memory = torch.empty(tensor.numel() * tensor.element_size() + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    made = memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    return made.copy_(tensor).as_subclass(OnGpu)


class Gpu:
    """What the stand-in was asked for.

    Attributes:
        first: (kernel, arguments) of launches through Triton's JIT.
        repeated: the arguments of launches that repeated calls made.
        prepared: (kernel, arguments) that were only compiled.
        capturing: whether a CUDA graph is being captured.
        compiled: kernels that are compiled, by name; others would be compiled at their launch.
        before: is called before each first launch.
    """

    def __init__(self) -> None:
        self.first: list[tuple[str, tuple[Any, ...]]] = []
        self.repeated: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[str, tuple[Any, ...]]] = []
        self.loaded = 0
        self.capturing = False
        self.compiled: set[str] = set()
        self.before: Callable[[], None] = lambda: None


class _Compiled:
    function, packed_metadata = 0, ()

    def __init__(self, gpu: Gpu):
        self.gpu = gpu

    @property
    def run(self) -> Callable[..., None]:
        self.gpu.loaded += 1
        return lambda *a: self.gpu.repeated.append(a)


class _Kernel:
    def __init__(self, kernel: Any, gpu: Gpu):
        self.arg_names, self.__name__, self.gpu = kernel.arg_names, kernel.__name__, gpu

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.gpu.before()
            if self.__name__ not in self.gpu.compiled:
                self._do_compile()
            self.gpu.first.append((self.__name__, args))
            return _Compiled(self.gpu)

        return run

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        if self.__name__ not in self.gpu.compiled:
            self._do_compile()
        self.gpu.prepared.append((self.__name__, args))
        return _Compiled(self.gpu)

    def _do_compile(self) -> None:
        self.gpu.compiled.add(self.__name__)


def _empty(stock: Any) -> Any:
    def empty(*size: Any, device: Any = None, **options: Any) -> Any:
        place = torch.device("cpu" if device is None else device)
        if place.type != "cuda" or torch._C._len_torch_dispatch_stack():
            return stock(*size, device=device, **options)
        return stock(*size, **options).as_subclass(OnGpu)

    return empty


@contextmanager
def gpu() -> Iterator[Gpu]:
    """Operators that were never called, on an H200 where nothing runs."""
    made = Gpu()

    class Recorder(recording.Recorder):
        def __init__(self, kernel: Any, recorded: recording.Recorded, operator: str):
            super().__init__(_Kernel(kernel, made), recorded, operator)

    def forget() -> None:
        for operator in launch.OPERATORS.values():
            operator.call.__globals__["_kinds"].clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _empty(torch.empty))
        patch.setattr(launch, "Recorder", Recorder)
        patch.setattr(launch.vendors, "detect", lambda device: "nvidia-h200")
        patch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_device=lambda: 0))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        for module in (recording, launch):
            patch.setattr(module, "capturing", lambda: made.capturing)
        for operator in launch.OPERATORS.values():
            patch.setattr(operator, "_modules", {})
        forget()
        yield made
        forget()
