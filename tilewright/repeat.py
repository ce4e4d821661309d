"""Repeated calls: one with the metadata of an earlier one goes straight to the compiled kernel's launcher.

The first call of a kind runs the module's public function, with its checks and rules, while the launch it makes is
recorded. Tensors of the same shapes, strides, dtypes and devices, with the same alignment and the same numbers, pass
the same checks and choose the same kernel, grid and integers; only addresses differ. So a repeated call looks its
metadata up and launches.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from tilewright.kernel import Argument, Kernel

KINDS = 4096  # of calls remembered; then all are forgotten, as a serving process has far fewer


class Recorded(threading.local):
    """The launches of this thread's current call: (compiled kernel, grid, values of all parameters)."""

    launches: list[tuple[Any, ...]] | None = None  # None: nobody asked


class Recorder:
    """Stands for a `@triton.jit` kernel in a module and remembers what it launched."""

    def __init__(self, kernel: Any, recorded: Recorded):
        self.kernel, self.recorded = kernel, recorded
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = self.kernel[grid](*args, **kwargs)
            values = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            if self.recorded.launches is not None:
                self.recorded.launches.append((compiled, grid, {name: values[name] for name in self.kernel.arg_names}))

        return launch


def supported(kernel: Kernel) -> bool:
    """Operators that make their outputs allocate on each call, and have no repeated form yet."""
    return not kernel.outputs and not any(a.optional for a in kernel.tensors)


def repeating(kernel: Kernel, public: Callable[..., Any], slow: Callable[..., Any]) -> Callable[..., Any]:
    """A function with `public`'s parameters that repeats a call or leaves it to `slow(*arguments)`.

    `slow` returns (result, launch) where launch is None if the call must not be repeated, else what `prepared` gives
    with what to call after a repeated launch.
    """
    tensors = [a.name for a in kernel.arguments if isinstance(a, Argument)]
    numbers = [a.name for a in kernel.arguments if not isinstance(a, Argument)]
    parameters = [str(p.replace(annotation=inspect.Parameter.empty)) for p in _parameters(public)]
    names = ", ".join(p.name for p in _parameters(public))
    addresses = ", ".join(f"{t}.data_ptr()" for t in tensors)
    parts = [part for t in tensors for part in (f"{t}.shape", f"{t}.stride()", f"{t}.dtype", f"{t}.device")]
    parts += [f"addresses[{i}] & 15 == 0" for i in range(len(tensors))]  # what the compiler may know of an address
    parts += [part for n in numbers for part in (n, f"{n}.__class__")]  # True is no 1
    text = f"""
def call({', '.join(parameters)}, *, config=None, thresholds=None, profile=None):
    if config is None and thresholds is None and profile is None:
        try:
            addresses = ({addresses})
            kind = ({', '.join(parts)})
            found = kinds.get(kind)
        except (AttributeError, TypeError):
            return slow({names})[0]
        if found is not None:
            run, grid, function, metadata, pick, rest, index, enter, leave, done = found
            if device() == index and not enter.calls and not leave.calls:
                run(grid, 1, 1, stream(index), function, metadata, None, None, None, *pick(addresses), *rest)
                done()
                return
        result, launch = slow({names})
        if launch is not None:
            if len(kinds) >= {KINDS}:
                kinds.clear()
            kinds[kind] = launch
        return result
    return slow({names}, config=config, thresholds=thresholds, profile=profile)[0]
"""
    space: dict[str, Any] = {"kinds": {}, "slow": slow, "device": _no_device, "stream": _no_device}
    exec(compile(text, f"<tilewright call {kernel.name}>", "exec"), space)
    call: Callable[..., Any] = space["call"]
    return call


def prepared(
    call: Callable[..., Any], launches: list[tuple[Any, ...]], arguments: dict[str, Any], done: Callable[[], None]
) -> tuple[Any, ...] | None:
    """What a repeat of the recorded call needs, or None where it cannot be repeated: no launch, or several.

    `arguments` are the tensors by their names, in the order in which `call` takes their addresses.
    """
    import torch
    from triton import knobs

    if len(launches) != 1:
        return None
    compiled, grid, values = launches[0]
    device = next(iter(arguments.values())).device
    if device.type != "cuda" or len(grid) != 1:
        return None
    order = []
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            at = _argument(name, value, arguments)
            if at is None:
                return None
            order.append(at)
    rest = tuple(values.values())[len(order) :]
    if any(isinstance(value, torch.Tensor) for value in rest):
        return None
    pick = itemgetter(*order) if len(order) > 1 else (lambda found: (found[order[0]],))
    call.__globals__["device"] = torch._C._cuda_getDevice
    call.__globals__["stream"] = torch._C._cuda_getCurrentRawStream
    runtime = knobs.runtime
    return (
        compiled.run, grid[0], compiled.function, compiled.packed_metadata, pick, rest, device.index,
        runtime.launch_enter_hook, runtime.launch_exit_hook, done,
    )  # fmt: skip


def _argument(name: str, pointer: Any, arguments: dict[str, Any]) -> int | None:
    """Which argument a kernel's pointer is: the one of its name, else the only one at its address, for a view."""
    names = list(arguments)
    if name in names:
        return names.index(name)
    same = [i for i, tensor in enumerate(arguments.values()) if tensor.data_ptr() == pointer.data_ptr()]
    return same[0] if len(same) == 1 else None


def _parameters(public: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(public).parameters.values())


def _no_device(*_: Any) -> int:
    return -1
