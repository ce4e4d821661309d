"""Repeated calls: one with the metadata of an earlier one goes straight to the compiled kernel's launcher.

The first call of a kind runs the module's public function, with its checks and rules, while the launch it makes is
recorded. Tensors of the same shapes, strides, dtypes and devices, with the same alignment and the same numbers, pass
the same checks and choose the same kernel, grid and integers; only addresses differ. So a repeated call compares its
metadata with what was recorded and launches. torch's own guards compare all tensors in one call: 0.3 us for six
tensors, where reading and comparing shapes, strides, dtypes and devices one by one takes 1.7 us (Xeon, Python 3.11).
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from tilewright.kernel import Argument, Flag, Kernel
from tilewright.launcher import launcher

KINDS = 4096  # keys remembered; then all are forgotten, as a serving process has far fewer
ALIKE = 16  # kinds of one key: the same first shape and numbers, other tensors


def repeating(
    kernel: Kernel,
    public: Callable[..., Any],
    slow: Callable[..., Any],
    kinds: dict[Any, Any],
    last: list[Any],
    traced: bool = True,
) -> Callable[..., Any]:
    """A function with `public`'s parameters that repeats a call or leaves it to `slow(*arguments)`.

    Args:
        kernel: Says which arguments are tensors and what the call returns.
        public: Has the parameters' names and defaults.
        slow: Returns (result, kind) where kind is None if the call must not be repeated, else what `kind` gives.
        kinds: Where kinds are kept, by the first tensor's shape and the numbers; under None the one repeated last,
            with its numbers: a call with the same objects needs no key.
        last: A list of one, which a repeat sets to what its kind launched.
        traced: While torch.compile traces, call the operator that `register` puts into the globals.
    """
    tensors, first = kernel.tensors, kernel.tensors[0].name
    names = ", ".join(a.name for a in kernel.arguments)
    numbers = [a for a in kernel.arguments if not isinstance(a, Argument)]
    absent = [f"{t.name} is None" for t in tensors if t.optional]
    key = ", ".join([f"{first}.shape", *(n.name for n in numbers), *absent])
    # True is no 1 and 4.0 no 4, though they are equal; a whole number for a float takes the slow way.
    types = " and ".join(f"type({n.name}) is {_type(n)}" for n in numbers) or "True"
    present = ", ".join(f"_no_{t.name} if {t.name} is None else {t.name}" if t.optional else t.name for t in tensors)
    addresses = "".join(f"_{t.name} = {_address(t)}\n" for t in tensors)
    any_low = " | ".join(f"_{t.name}" for t in tensors)
    low = " | ".join(f"(_{t.name} & 15) << {4 * i}" for i, t in enumerate(tensors))
    outputs = "".join(
        f"    _shape, _dtype, _place = _outputs[{i}]\n    {o.name} = _empty(_shape, dtype=_dtype, device=_place)\n"
        for i, o in enumerate(kernel.outputs)
    )
    pointers = "".join([*(f"_{t.name}, " for t in tensors), *(f"{o.name}.data_ptr(), " for o in kernel.outputs)])
    returned = ", ".join(o.name for o in kernel.outputs)
    before = [f"_before_{i}" for i in range(len(numbers) + len(absent))]
    asked = [*(n.name for n in numbers), *(f"({test})" for test in absent)]
    identical = " and ".join(f"{a} is {b}" for a, b in zip(asked, before, strict=True)) or "True"
    recent = ", ".join(["_kind", *(n.name for n in numbers), *absent])
    unpacked = "_same, _alignment, _index, _run, _grid, _middle, _spread, _pick, _rest, _outputs, _launched = _kind\n"
    aligned = f"{addresses}_low = ({any_low}) & 15\nif _low:\n    _low = {low}\n"
    launch = f"""\
if (
    _device() == _index and _hooks.launch_enter_hook is _enter and _hooks.launch_exit_hook is _leave
    and not (_enter.calls or _leave.calls)
):
{outputs}    if _pick is not None:
        _arguments = (*_pick(({pointers}None)), *_rest)
        _run(_grid, 1, 1, _stream(_index), *_middle, *(_arguments if _spread else (_arguments,)))
    elif _spread:
        _run(_grid, 1, 1, _stream(_index), *_middle, {pointers}*_rest)
    else:
        _run(_grid, 1, 1, _stream(_index), *_middle, ({pointers}*_rest))
    _last[0] = _launched
"""
    tracing = f"""
    if _tracing():
        if config is None and thresholds is None and profile is None:
            return _registered({names})
        raise ValueError("{kernel.name}: config, thresholds and profile are for calls outside torch.compile")"""
    text = f"""
def call({', '.join(_parameters(public))}, *, config=None, thresholds=None, profile=None):{tracing if traced else ''}
    if not (config is None and thresholds is None and profile is None):
        return _slow({names}, config=config, thresholds=thresholds, profile=profile)[0]
    {', '.join(['_kind', *before])}, = _kinds.get(None, _nothing)
    if {identical} and _kind is not None:
        {unpacked}        if _same({present}):
{_indented(aligned, 12)}            if _low == _alignment:
{_indented(launch, 16)}                    return {returned}
    try:
        _key = ({key},)
        _found = _kinds.get(_key, ()) if {types} else ()
    except (AttributeError, TypeError):  # not even a tensor
        return _slow({names})[0]
    _known = False
    for _kind in _found:
        {unpacked}        if not _same({present}):
            continue
{_indented(aligned, 8)}        if _low != _alignment:
            continue
{_indented(launch, 8)}            _kinds[None] = ({recent},)
            return {returned}
        _known = True
        break
    _result, _made = _slow({names})
    if _made is not None and not _known and {types}:
        if len(_kinds) >= {KINDS}:
            _kinds.clear()
        _kinds[_key] = (_made, *_kinds.get(_key, ())[: {ALIKE - 1}])
    return _result
"""
    space: dict[str, Any] = {
        "_kinds": kinds, "_nothing": (None,) * (1 + len(before)), "_slow": slow, "_last": last, "_tracing": _no,
        "_registered": None,
        "_device": _no_device, "_stream": _no_device, "_hooks": None, "_enter": None, "_leave": None, "_empty": None,
    }  # fmt: skip
    exec(compile(text, f"<tilewright call {kernel.name}>", "exec"), space)
    call: Callable[..., Any] = space["call"]
    return call


def kind(
    kernel: Kernel, launches: Sequence[tuple[Any, ...]], arguments: Mapping[str, Any], result: Any, launched: Any
) -> tuple[Any, ...] | None:
    """What a repeat of a recorded call needs, or None where it cannot be repeated: no launch, or several.

    Args:
        kernel: The operator's.
        launches: (compiled kernel, grid, values of its parameters) of each launch of the call.
        arguments: The call's tensors and Nones by name, in the order in which a repeat takes their addresses.
        result: What the call returned.
        launched: What `last` shall say of a repeat.
    """
    import torch

    if len(launches) != 1:
        return None
    compiled, grid, values = launches[0]
    given = list(arguments.values())
    device = given[0].device
    if not _on_gpu(device) or len(grid) != 1:
        return None
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    if len(results) != len(kernel.outputs):
        return None
    places = {**arguments, **dict(zip((o.name for o in kernel.outputs), results, strict=True))}
    tensors = [at for at, value in enumerate(values.values()) if isinstance(value, torch.Tensor)]
    order = []
    for name, value in list(values.items())[: max(tensors, default=-1) + 1]:
        at = -1 if value is None else _place(name, value, places)
        if at is None:
            return None
        order.append(at)
    rest = tuple(values.values())[len(order) :]
    pick: Any = itemgetter(*order) if len(order) > 1 else (lambda found: tuple(found[at] for at in order))
    if order == list(range(len(places))):
        pick = None
    present = [_absent(name) if value is None else value for name, value in arguments.items()]
    alignment = sum((0 if t is None else t.data_ptr() & 15) << 4 * i for i, t in enumerate(given))
    outputs = tuple((made.shape, made.dtype, device) for made in results)
    numbers = [None if isinstance(value, torch.Tensor) else value for value in values.values()]
    return (
        same_metadata(present), alignment, device.index, *_launch(compiled, grid[0], numbers), pick, rest, outputs,
        launched,
    )  # fmt: skip


def _launch(compiled: Any, grid: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
    found = launcher(compiled, grid, arguments)
    return found.function, grid, found.middle, found.spread


def connect(kernel: Kernel, call: Callable[..., Any]) -> None:
    """Gives a function of `repeating` torch's current device and stream and Triton's hooks."""
    import torch
    from triton import knobs

    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    call.__globals__.update(
        _enter=enter if hasattr(enter, "calls") else object(),  # somebody's own hook: nothing is repeated
        _leave=leave if hasattr(leave, "calls") else object(),
        _device=torch._C._cuda_getDevice,
        _stream=torch._C._cuda_getCurrentRawStream,
        _hooks=knobs.runtime,
        _empty=torch.empty,
        **{f"_no_{t.name}": _absent(t.name) for t in kernel.tensors if t.optional},
    )


def _on_gpu(device: Any) -> bool:
    return bool(device.type == "cuda")


def same_metadata(tensors: Sequence[Any]) -> Callable[..., bool]:
    """Whether as many tensors have the types, dtypes, devices, shapes and strides of these; False for what is none.

    Nor are they the same where a dispatch mode or a tensor subclass would want to see the call.
    """
    import torch

    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if hasattr(guards, "TensorGuards") and len(set(map(id, tensors))) == len(tensors):  # it refuses one tensor twice
        check: Callable[..., bool] = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check  # it keeps metadata, no tensor
        return check
    return _compared(tensors)


@functools.cache
def _absent(name: str) -> Any:
    """A tensor that stands for an optional argument that is None; each has its own."""
    import torch

    return torch.empty(0)


def _compared(tensors: Sequence[Any]) -> Callable[..., bool]:
    """As `same_metadata`, without torch's guards."""
    import torch

    def facts(given: Sequence[Any]) -> list[Any]:
        return [(type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in given]

    expected = facts(tensors)

    def same(*given: Any) -> bool:
        if torch._C._len_torch_dispatch_stack():
            return False
        return all(isinstance(t, torch.Tensor) for t in given) and facts(given) == expected

    return same


def _place(name: str, pointer: Any, places: Mapping[str, Any]) -> int | None:
    """Which tensor a kernel's pointer is: the one of its name, else the only one at its address, for a view."""
    names = list(places)
    if name in names:
        return names.index(name)
    address = getattr(pointer, "data_ptr", None)
    if address is None:
        return None
    same = [i for i, tensor in enumerate(places.values()) if tensor is not None and tensor.data_ptr() == address()]
    return same[0] if len(same) == 1 else None


def _parameters(public: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(public).parameters.values()
    return [str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters]


def _type(number: Any) -> str:
    if isinstance(number, Flag):
        return type(number.values[0]).__name__
    return "int" if number.is_integer else "float"


def _address(tensor: Argument) -> str:
    read = f"{tensor.name}.data_ptr()"
    return f"0 if {tensor.name} is None else {read}" if tensor.optional else read


def _indented(text: str, by: int) -> str:
    return textwrap.indent(text, " " * by)


def _no() -> bool:
    return False


def _no_device(*_: Any) -> int:
    """Stands where nothing was recorded yet."""
    return -1
