"""A permuted tensor as a new contiguous one, and the transposed layout of expert weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilewright.errors import ContractError, DeviceError, DtypeError, ShapeError
from tilewright.ops.strided_copy import strided_copy

MOST_AXES = 5


class Axis(NamedTuple):
    """One axis of a copy: its size, and the distances of neighbours in elements."""

    size: int
    source: int
    target: int


class PreparedWeights(NamedTuple):
    """Weights of the fused MoE in the transposed layout; the owner passes them as w1 and w2, `*prepared`.

    w1 is [experts, 2 * inner, hidden] and w2 [experts, hidden, inner] as before; the second axis has unit stride.
    """

    w1: Any
    w2: Any


def permute_copy(x: Any, dims: Sequence[int], **options: Any) -> Any:
    """x.permute(dims) as a new contiguous tensor, bit for bit.

    Axes that lie side by side in both are merged; what remains goes through `strided_copy`, whose tile is turned in the
    program where the last axis of the result is not the last of x.

    Args:
        x: any dtype, any strides; at most 5 axes after merging.
        dims: an order of x's axes; below 0 counts from the end.
        options: those of an operator: config, thresholds, profile.

    Raises:
        ContractError: or its subclass for shapes or dtypes, before anything is launched.

    Contract: `torch.permute_copy`, with a contiguous result.
    """
    import torch

    order = _order(x, dims)
    plain = x.resolve_conj().resolve_neg()
    result = torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device)
    if result.numel() == 0:
        return result
    source, out = _bits(plain), _bits(result)
    source = source.permute((*order, *range(x.dim(), source.dim())))
    axes = _merged(source.shape, source.stride(), out.stride())
    if len(axes) > MOST_AXES:
        sizes = ", ".join(f"{axis.size} ({axis.source} apart)" for axis in axes)
        raise ShapeError(
            f"permute_copy: dims {tuple(dims)} of x {list(x.shape)} leave {len(axes)} axes that do not lie side by "
            f"side, at most {MOST_AXES} are supported: {sizes}"
        )
    axes = _arranged(axes)
    shape = [axis.size for axis in axes]
    strided_copy(
        source.as_strided(shape, [axis.source for axis in axes]), out.as_strided(shape, [axis.target for axis in axes]),
        **options,
    )  # fmt: skip
    return result


def prepare_weights(w1: Any, w2: Any, **options: Any) -> PreparedWeights:
    """w1 and w2 copied into the layout [experts, k, n], each seen as the [experts, n, k] it was.

    For devices whose GEMM reads weights with n side by side. The copy is the caller's: it doubles the memory of the
    weights as long as it is kept, and does not follow later changes of w1 or w2. Nothing is remembered here.

    Args:
        w1: [experts, 2 * inner, hidden], any floating dtype, any strides; read only.
        w2: [experts, hidden, inner], w1's dtype, any strides; read only.
        options: those of an operator: config, thresholds, profile.

    Raises:
        ContractError: or its subclass for shapes or dtypes, before anything is launched.
    """
    _check_weights(w1, w2)
    turned = (permute_copy(weight, (0, 2, 1), **options).transpose(1, 2) for weight in (w1, w2))
    return PreparedWeights(*turned)


def _order(x: Any, dims: Any) -> tuple[int, ...]:
    """`dims` counted from 0, checked."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"permute_copy: x is of type {type(x).__name__}, a tensor is needed")
    if not isinstance(dims, Sequence) or not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise DtypeError(f"permute_copy: dims is {dims!r}, a sequence of ints is needed")
    rank = x.dim()
    if sorted(d + rank if d < 0 else d for d in dims) != list(range(rank)):
        raise ShapeError(f"permute_copy: dims {tuple(dims)} is no order of the {rank} axes of x {list(x.shape)}")
    return tuple(d % rank for d in dims)


def _merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Axis]:
    """The axes of a copy to a contiguous target without those of size 1, neighbours that lie side by side as one."""
    axes: list[Axis] = []
    for axis in map(Axis, shape, source, target):
        if axis.size == 1:
            continue
        if axes and axes[-1].source == axis.source * axis.size:
            axes[-1] = Axis(axes[-1].size * axis.size, axis.source, axis.target)
        else:
            axes.append(axis)
    return axes


def _arranged(axes: list[Axis]) -> list[Axis]:
    """Five axes: last that along which the result is contiguous, before it that which is densest in the source."""
    axes = [*axes] or [Axis(1, 1, 1)]
    last = axes.pop()
    if axes and last.source != 1:
        densest = min(range(len(axes)), key=lambda i: axes[i].source)
        axes.append(axes.pop(densest))
    return [Axis(1, 1, 1)] * (MOST_AXES - 1 - len(axes)) + [*axes, last]


def _bits(tensor: Any) -> Any:
    """The tensor as integers of its elements' size, two of them for an element of 16 bytes."""
    import torch

    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _check_weights(w1: Any, w2: Any) -> None:
    import torch

    given = {"w1": w1, "w2": w2}
    problems: list[tuple[type[ContractError], str]] = []
    for name, weight in given.items():
        if not isinstance(weight, torch.Tensor):
            problems.append((DtypeError, f"{name} is of type {type(weight).__name__}, a tensor is needed"))
            continue
        if weight.dim() != 3:
            problems.append((ShapeError, f"{name} has rank {weight.dim()}, 3 is needed: {WEIGHT_AXES[name]}"))
        if not weight.is_floating_point():
            problems.append((DtypeError, f"{name} is {_name(weight.dtype)}, a floating dtype is needed"))
    if all(isinstance(weight, torch.Tensor) for weight in given.values()):
        if w1.dim() == w2.dim() == 3:
            sizes = (("experts", w1.shape[0], w2.shape[0]), ("hidden", w1.shape[2], w2.shape[1]),
                     ("2 * inner", w1.shape[1], 2 * w2.shape[2]))  # fmt: skip
            problems += [(ShapeError, f"w2 has {n}={b}, w1 has {a}") for n, a, b in sizes if a != b]
        if w1.dtype != w2.dtype:
            problems.append((DtypeError, f"w2 is {_name(w2.dtype)}, w1 is {_name(w1.dtype)}: they must agree"))
        if w1.device != w2.device:
            problems.append((DeviceError, f"w2 is on {w2.device}, w1 on {w1.device}"))
    if problems:
        kinds = {kind for kind, _ in problems}
        raise (kinds.pop() if len(kinds) == 1 else ContractError)(
            "prepare_weights: " + "\n".join(text for _, text in problems)
        )


WEIGHT_AXES = {"w1": "[experts, 2 * inner, hidden]", "w2": "[experts, hidden, inner]"}


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
