"""A small call of the fused MoE, and how far a result may lie from its reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.moe_reference import exact_experts, fused_experts


def example() -> tuple[Tensor, ...]:
    """Tensors of a call on the CPU: 12 tokens, some not routed, by 4 experts."""
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=made) / 10).bfloat16()

    ids = torch.randint(-1, 5, (12, 2), generator=made).int()  # -1 and 4 are no experts
    return normal(12, 64), normal(4, 48, 64), normal(4, 64, 24), torch.rand((12, 2), generator=made), ids


def reference(*tensors: Tensor) -> Tensor:
    """The result, rounded where blocks of rows are: the activated product, each routed row, the sum."""
    return fused_experts(*tensors, rounds=("activated", "routed", "output"))


def allowed(*tensors: Tensor) -> Tensor:
    """Distances, [tokens, hidden] float64, within which two results may lie that round at other points."""
    return 4 * exact_experts(*tensors).spread


def written(*tensors: Any) -> dict[str, Tensor]:
    """A call returns what it writes."""
    return {}
