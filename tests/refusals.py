"""Calls that an operator refuses: the error, and the lines about the tensors that end its message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pytest
import torch

from tilewright import interpret, ops
from tilewright.errors import ContractError


class Watched(Protocol):
    """Inputs of a call that know what it may write and what it may only read."""

    def written(self) -> dict[str, int]: ...
    def read_only(self) -> dict[str, int]: ...


def described(arguments: Mapping[str, Any], axes_of: Mapping[str, Sequence[str]]) -> list[str]:
    """The lines about the tensors that end a message."""
    lines, width = [], max(map(len, axes_of))
    for name, axes in axes_of.items():
        tensor = arguments[name]
        if isinstance(tensor, torch.Tensor):
            sizes = [str(size) for size in tensor.shape]
            if len(sizes) == len(axes):
                sizes = [f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)]
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines.append(f"  {name:<{width}}  [{', '.join(sizes)}]  {dtype}  {tensor.device}")
    return lines


def refused(operator: str, inputs: Watched, arguments: Mapping[str, Any], **options: Any) -> ContractError:
    """The error of a call that must start no program and change nothing."""
    before = inputs.written(), inputs.read_only()
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        getattr(ops, operator)(*arguments.values(), **options)
    assert counts.programs == 0
    assert (inputs.written(), inputs.read_only()) == before
    return caught.value
