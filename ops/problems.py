"""Calls that binaries are compiled for: the sizes that a kernel's text is specialised on, on tensors of few rows.

Nothing is read or written by compiling, so a problem's tensors are empty ones on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (64, 128, 256)
ROWS, BLOCK = 64, 64  # rows of a call, and of a cache block; divisible by 16, as strides of real calls are

Problem = tuple[str, tuple[Any, ...]]  # its name, and the arguments of the public function


def problems(operator: str, e4m3: str = "float8_e4m3fn") -> Iterator[Problem]:
    """The calls of an operator, with torch's name of the device's float8; none where it has no list here."""
    made: Callable[[str], Iterator[Problem]] | None = LISTS.get(operator)
    return made(e4m3) if made else iter(())


def _index() -> tuple[Any, Any, Any]:
    import torch

    return torch.arange(ROWS), torch.arange(ROWS), torch.empty(4096, 64)


def _rows() -> Any:
    import torch

    return torch.empty(ROWS, 512, dtype=torch.bfloat16)


def _heads(heads: int) -> Any:
    import torch

    return torch.empty(ROWS, heads, 512, dtype=torch.bfloat16)


def _packed(row_bytes: int = 584) -> Any:
    import torch

    return torch.empty(2, BLOCK * row_bytes, dtype=torch.uint8)


def _whole(dtype: str) -> Any:
    import torch

    return torch.empty(2, BLOCK, 512, dtype=getattr(torch, dtype))


def _insert(e4m3: str) -> Iterator[Problem]:
    for heads in HEADS:
        yield f"{heads}_heads", (_heads(heads), _rows(), _packed(), *_index(), 1e-6, BLOCK)


def _padded(e4m3: str) -> Iterator[Problem]:
    for heads in HEADS:
        yield f"{heads}_heads", (_heads(heads), _rows(), _packed(), *_index(), heads, 1e-6, BLOCK)


def _bf16_cache(e4m3: str) -> Iterator[Problem]:
    for heads in HEADS:
        yield f"{heads}_heads", (_heads(heads), _rows(), _whole("bfloat16"), *_index(), 1e-6, BLOCK)


def _e4m3_cache(e4m3: str) -> Iterator[Problem]:
    import torch

    for heads in HEADS:
        codes = torch.empty(ROWS, heads, 512, dtype=getattr(torch, e4m3))
        scales = (torch.empty(1), torch.empty(1))
        yield f"{heads}_heads", (_heads(heads), _rows(), codes, _whole(e4m3), *_index(), *scales, 1e-6, BLOCK)


def _kv(e4m3: str) -> Iterator[Problem]:
    import torch

    yield "packed", (_rows(), torch.empty(2, BLOCK, 584, dtype=torch.uint8), *_index(), BLOCK)
    yield "rows", (_rows(), _whole("bfloat16"), *_index(), BLOCK)
    yield "e4m3", (_rows(), _whole(e4m3), *_index(), BLOCK, torch.empty(1))


def _gather(e4m3: str) -> Iterator[Problem]:
    import torch

    yield "packed", (_rows(), _packed(), torch.arange(ROWS), BLOCK)


def _qk(e4m3: str) -> Iterator[Problem]:
    import torch

    for dim in HEAD_DIMS:
        for heads in HEADS:
            qkv = torch.empty(ROWS, (heads + 16) * dim, dtype=torch.bfloat16)
            weights = (torch.empty(dim, dtype=torch.bfloat16), torch.empty(dim, dtype=torch.bfloat16))
            table = torch.empty(4096, dim, dtype=torch.bfloat16)
            arguments = (qkv, heads, 8, 8, dim, 1e-6, *weights, table, True, torch.arange(ROWS))
            yield f"{heads}_8_8_heads_of_{dim}", arguments


LISTS: dict[str, Callable[[str], Iterator[Problem]]] = {
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": _insert,
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded": _padded,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": _bf16_cache,
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": _e4m3_cache,
    "fused_deepseek_v4_kv_rope_insert": _kv,
    "dequantize_and_gather_k_cache": _gather,
    "fused_qk_norm_rope": _qk,
}
