"""What a call of the fused mixture of experts must keep to, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError

Problem = tuple[type[ContractError], str]
AXES = {
    "hidden_states": ("tokens", "hidden"),
    "w1": ("experts", "2 * inner", "hidden"),
    "w2": ("experts", "hidden", "inner"),
    "topk_weights": ("tokens", "slots"),
    "topk_ids": ("tokens", "slots"),
    "expert_map": ("global experts",),
    "w1_bias": ("experts", "2 * inner"),
    "w2_bias": ("experts", "hidden"),
}
OPTIONAL = ("expert_map", "w1_bias", "w2_bias")
FLOATS, IDS = ("bfloat16", "float16", "float32"), ("int32", "int64")
DTYPES = {"hidden_states": FLOATS, "topk_weights": ("float32", "bfloat16", "float16"), "topk_ids": IDS,
          "expert_map": ("int32",)}  # fmt: skip
CONTIGUOUS = ("hidden_states", "expert_map", "w1_bias", "w2_bias")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
BLOCKS = (1, 16, 32, 64, 128, 256)
MOST = {"experts": 1024, "slots": 64, "hidden": 1 << 20, "inner": 1 << 20}
MODES = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
SCALES = ("ocp_mx_scheme", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "block_shape")


def refuse_quantised(name: str, given: Mapping[str, Any]) -> None:
    """Raises NotImplementedError where a call asks for weights or activations in fewer bits."""
    asked = [f"{mode} is {given[mode]}" for mode in MODES if given[mode]]
    asked += [f"{scale} is given" for scale in SCALES if given[scale] is not None]
    if asked:
        raise NotImplementedError(f"{name}: {', '.join(asked)}: quantised modes are not there yet")


def check(name: str, given: Mapping[str, Any]) -> None:
    """Raises for everything that is wrong with a call of `name`, by the names of its arguments."""
    import torch

    tensors = {n: given[n] for n in AXES if n not in OPTIONAL or given[n] is not None}
    problems = [
        *(
            (DtypeError, f"{n} is of type {type(value).__name__}, a tensor is needed")
            for n, value in tensors.items()
            if not isinstance(value, torch.Tensor)
        ),
        *_options(given),
    ]
    tensors = {n: value for n, value in tensors.items() if isinstance(value, torch.Tensor)}
    fit = {}
    for n, tensor in tensors.items():
        axes = AXES[n]
        if tensor.dim() == len(axes):
            fit[n] = tensor
        else:
            problems.append(
                (ShapeError, f"{n} has rank {tensor.dim()}, {len(axes)} is needed: [{', '.join(axes)}]")
            )
    problems += [*_sizes(fit), *_dtypes(tensors), *_layouts(tensors)]
    if problems:
        kinds = {kind for kind, _ in problems}
        width = max(map(len, AXES))
        lines = [text for _, text in problems] + [_described(n.ljust(width), AXES[n], t) for n, t in tensors.items()]
        raise (kinds.pop() if len(kinds) == 1 else ContractError)(f"{name}: " + "\n".join(lines))


def _options(given: Mapping[str, Any]) -> Iterator[Problem]:
    activation, count, block = given["activation"], given["global_num_experts"], given["block_size"]
    if not isinstance(given["apply_router_weight_on_input"], bool):
        kind = type(given["apply_router_weight_on_input"]).__name__
        yield DtypeError, f"apply_router_weight_on_input is of type {kind}, a bool is needed"
    if type(count) is not int:
        yield DtypeError, f"global_num_experts is of type {type(count).__name__}, an int is needed"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        yield ContractError, f"activation is {activation!r}, {_either(ACTIVATIONS)} is needed"
    if block is not None and (type(block) is not int or block not in BLOCKS):
        yield ContractError, f"block_size is {block!r}, {_either((*map(str, BLOCKS), 'None'))} is needed"


def _sizes(fit: Mapping[str, Any]) -> Iterator[Problem]:
    """Each size is that of the first argument that has it."""
    seen: dict[str, tuple[str, int]] = {}
    for name, tensor in fit.items():
        for axis, size in zip(AXES[name], tensor.shape, strict=True):
            first = seen.setdefault(axis, (name, size))
            if first[1] != size:
                yield ShapeError, f"{name} has {axis}={size}, {first[0]} has {first[1]}"
            elif first[0] == name and size > MOST.get(axis, size):
                yield ShapeError, f"{name} has {axis}={size}, at most {MOST[axis]} is supported"
    if "2 * inner" in seen and "inner" in seen:
        (name, both), (other, inner) = seen["2 * inner"], seen["inner"]
        if both != 2 * inner:
            yield ShapeError, f"{name} has 2 * inner={both}, {other} has inner={inner}"
    if seen.get("inner", ("", 1))[1] == 0:
        yield ShapeError, "w2 has inner=0, at least 1 is needed"


def _dtypes(tensors: Mapping[str, Any]) -> Iterator[Problem]:
    for name, tensor in tensors.items():
        if name in DTYPES:
            if _name(tensor.dtype) not in DTYPES[name]:
                yield DtypeError, f"{name} is {_name(tensor.dtype)}, {' or '.join(DTYPES[name])} is needed"
        elif "hidden_states" in tensors and tensor.dtype != tensors["hidden_states"].dtype:
            wanted = _name(tensors["hidden_states"].dtype)
            yield DtypeError, f"{name} is {_name(tensor.dtype)}, hidden_states is {wanted}: they must agree"


def _layouts(tensors: Mapping[str, Any]) -> Iterator[Problem]:
    for name in CONTIGUOUS:
        if name in tensors and not tensors[name].is_contiguous():
            yield LayoutError, f"{name} is not contiguous: its strides are {tuple(tensors[name].stride())}"
    first = tensors.get("hidden_states")
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            yield DeviceError, f"{name} is on {tensor.device}, hidden_states on {first.device}"


def _described(name: str, axes: tuple[str, ...], tensor: Any) -> str:
    sizes = [str(n) for n in tensor.shape]
    if len(axes) == len(sizes):
        sizes = [f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True)]
    return f"  {name}  [{', '.join(sizes)}]  {_name(tensor.dtype)}  {tensor.device}"


def _either(options: tuple[str, ...]) -> str:
    return f"{', '.join(options[:-1])} or {options[-1]}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
