"""Repeated calls on a stand-in for a GPU: one tensor for two arguments in the first of a kind, two in later ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_gpu import gpu, on_gpu

from tilewright import ops


@pytest.fixture
def repeats() -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of every launch that a repeated call makes; the first calls launch nothing."""
    with gpu() as made:
        yield made.repeated


def normed(q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
    qkv, table = on_gpu(torch.zeros(4, 256, dtype=torch.bfloat16)), on_gpu(torch.zeros(9, 64))
    positions = on_gpu(torch.zeros(4, dtype=torch.int64))
    ops.fused_qk_norm_rope(qkv, 2, 1, 1, 64, 1e-6, q_weight, k_weight, table, True, positions)


def weight(value: float) -> torch.Tensor:
    return on_gpu(torch.full((64,), value, dtype=torch.bfloat16))


def test_one_weight_for_both_kinds_does_not_bind_the_next_call(repeats: list[tuple[Any, ...]]) -> None:
    """A first call with q_weight as k_weight, then one with two weights: the second must reach the kernel."""
    shared, other = weight(1.0), weight(2.0)
    normed(shared, shared)
    normed(shared, other)
    assert other.data_ptr() in repeats[-1]


def test_slots_as_positions_do_not_bind_the_next_call(repeats: list[tuple[Any, ...]]) -> None:
    """A prefill from slot 0 may give one tensor for both; a later step has two."""

    def insert(slots: torch.Tensor, positions: torch.Tensor) -> None:
        q, kv = on_gpu(torch.zeros(4, 2, 512, dtype=torch.bfloat16)), on_gpu(torch.zeros(4, 512, dtype=torch.bfloat16))
        cache, table = on_gpu(torch.zeros(2, 16 * 584, dtype=torch.uint8)), on_gpu(torch.zeros(4096, 64))
        ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q, kv, cache, slots, positions, table, 1e-6, 16)

    slots, positions = on_gpu(torch.arange(4)), on_gpu(torch.arange(4) + 1000)
    insert(slots, slots)
    insert(slots, positions)
    assert positions.data_ptr() in repeats[-1]
