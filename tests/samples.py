"""One small call of every operator, and of each form that its optional arguments give it, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright import ops
from tilewright.launch import OPERATORS
from tilewright.ops.moe_reference import align

HEADS, ROWS, BLOCKS, POSITIONS, EPS = 4, 16, 3, 64, 1e-6
A = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
PADDED = f"{A}_padded"
KV = "fused_deepseek_v4_kv_rope_insert"
FULL_BF16 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"
FULL_FP8 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"
GATHER = "dequantize_and_gather_k_cache"
B = "fused_qk_norm_rope"
SUM = "moe_sum"
COPY = "strided_copy"
GEMM, GATED, GEMV, COMBINED = "moe_gemm", "moe_gemm_gated", "moe_gemv_gated", "moe_gemv_combine"
COMBINE, ACTIVATE = "moe_combine", "moe_activate"
EXPERTS, SLOTS, WIDTH, INNER = 3, 2, 32, 24  # of the fused mixture of experts


class Maker:
    """Random tensors on a device."""

    def __init__(self, device: Any, seed: int, tokens: int):
        self.device, self.tokens = torch.device(device), tokens
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def bytes(self, *shape: int) -> Tensor:
        return torch.randint(0, 120, shape, generator=self.generator, device=self.device, dtype=torch.uint8)

    def fp8(self, *shape: int) -> Tensor:
        return self.bytes(*shape).view(torch.float8_e4m3fn)

    def slots(self) -> Tensor:
        """Distinct; the second token has none."""
        made = torch.randperm(BLOCKS * ROWS, generator=self.generator, device=self.device)[: self.tokens]
        if self.tokens > 1:
            made[1] = -1
        return made

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """slot_mapping, position_ids, cos_sin_cache."""
        positions = torch.randint(POSITIONS, (self.tokens,), generator=self.generator, device=self.device)
        return self.slots(), positions, self.normal(POSITIONS, 64, dtype=torch.float32)

    def head(self) -> tuple[Tensor, Tensor]:
        """q and kv."""
        return self.normal(self.tokens, HEADS, 512), self.normal(self.tokens, 512)


def _a(make: Maker) -> list[Any]:
    return [*make.head(), make.bytes(BLOCKS, ROWS * 584), *make.indices(), EPS, ROWS]


def _padded(make: Maker) -> list[Any]:
    q, kv, cache, *indices = _a(make)[:6]
    return [q, kv, cache, *indices, 2 * HEADS, EPS, ROWS, True, False, True, False]


def _padded_mx(make: Maker) -> list[Any]:
    return [*_padded(make)[:6], 0, EPS, ROWS, False, True, False, True]


def _kv(make: Maker) -> list[Any]:
    return [make.head()[1], make.bytes(BLOCKS, ROWS, 584), *make.indices(), ROWS, None, False]


def _kv_fp8(make: Maker) -> list[Any]:
    scale = torch.full((1,), 0.5, device=make.device)
    return [make.head()[1], make.fp8(BLOCKS, ROWS, 512), *make.indices(), ROWS, scale, False]


def _full_bf16(make: Maker) -> list[Any]:
    return [*make.head(), make.normal(BLOCKS, ROWS, 512), *make.indices(), EPS, ROWS, True]


def _full_fp8(make: Maker) -> list[Any]:
    scales = [torch.full((1,), value, device=make.device) for value in (0.5, 2.0)]
    fp8 = make.fp8(make.tokens, HEADS, 512), make.fp8(BLOCKS, ROWS, 512)
    return [*make.head(), *fp8, *make.indices(), *scales, EPS, ROWS, True]


def _gather(make: Maker) -> list[Any]:
    return [make.normal(make.tokens, 512), make.bytes(BLOCKS, ROWS * 584), make.slots(), ROWS, False]


def _b(make: Maker, rotary: int = 64, is_neox: bool = True) -> list[Any]:
    weights = make.normal(64), make.normal(64)
    table, positions = make.normal(POSITIONS, rotary, dtype=torch.float32), make.indices()[1]
    return [make.normal(make.tokens, (4 + 2 + 1) * 64), 4, 2, 1, 64, EPS, *weights, table, is_neox, positions, -1]


def _b_partial(make: Maker) -> list[Any]:
    return _b(make, 32, False)


def _sum(make: Maker) -> list[Any]:
    return [make.normal(make.tokens, 3, 64), make.normal(make.tokens, 64)]


def _copy(make: Maker) -> list[Any]:
    """The rows of x lie side by side."""
    x = make.bytes(2, 3, 1, 9, make.tokens).transpose(3, 4)
    return [x, make.bytes(*x.shape)]


def _experts(make: Maker, columns: int, k: int) -> list[Any]:
    """Weights and bias of each expert, and the router's weights."""
    weights = torch.rand((make.tokens, SLOTS), generator=make.generator, device=make.device)
    return [make.normal(EXPERTS, columns, k), make.normal(EXPERTS, columns), weights]


def _routing(make: Maker) -> list[Any]:
    """Ids, of which the first names no expert here, and the map that says so."""
    ids = torch.randint(EXPERTS, (make.tokens, SLOTS), generator=make.generator, device=make.device).int()
    ids[:1] = EXPERTS
    return [ids, torch.tensor([*range(EXPERTS), -1], dtype=torch.int32, device=make.device)]


def _tables(make: Maker) -> list[Any]:
    """The alignment of all routed rows in blocks of 16."""
    ids = torch.randint(EXPERTS, (make.tokens, SLOTS), generator=make.generator, device=make.device)
    return list(align(ids, 16, EXPERTS, None, True, True))


def _gemm(make: Maker) -> list[Any]:
    out = make.normal(make.tokens * SLOTS, INNER)
    return [make.normal(make.tokens, WIDTH), *_experts(make, INNER, WIDTH), *_tables(make), out, 16, True]


def _gated(make: Maker) -> list[Any]:
    out = make.normal(make.tokens * SLOTS, INNER)
    return [make.normal(make.tokens, WIDTH), *_experts(make, 2 * INNER, WIDTH), *_tables(make), out, 16, "silu", True]


def _gemv(make: Maker) -> list[Any]:
    out, x = make.normal(make.tokens * SLOTS, INNER), make.normal(make.tokens, WIDTH)
    return [x, *_experts(make, 2 * INNER, WIDTH), *_routing(make), out, "swigluoai", False]


def _gemv_alone(make: Maker) -> list[Any]:
    """Without bias and map."""
    x, weights, _, scale, ids, _, *rest = _gemv(make)
    return [x, weights, None, scale, ids, None, *rest]


def _combined(make: Maker) -> list[Any]:
    out, x = make.normal(make.tokens, WIDTH), make.normal(make.tokens * SLOTS, INNER)
    return [x, *_experts(make, WIDTH, INNER), *_routing(make), out, True]


def _combine(make: Maker) -> list[Any]:
    return [make.normal(make.tokens * SLOTS, WIDTH), *_routing(make), EXPERTS, make.normal(make.tokens, WIDTH)]


def _activate(make: Maker) -> list[Any]:
    return [make.normal(make.tokens, 2 * INNER), make.normal(make.tokens, INNER), "gelu"]


SAMPLES: dict[str, tuple[str, Callable[[Maker], list[Any]]]] = {
    "A": (A, _a),
    "padded": (PADDED, _padded),
    "padded, mx rows alone": (PADDED, _padded_mx),
    "kv": (KV, _kv),
    "kv, fp8": (KV, _kv_fp8),
    "bf16 cache": (FULL_BF16, _full_bf16),
    "fp8 cache": (FULL_FP8, _full_fp8),
    "gather": (GATHER, _gather),
    "B": (B, _b),
    "B, partial": (B, _b_partial),
    "sum": (SUM, _sum),
    "copy": (COPY, _copy),
    "gemm": (GEMM, _gemm),
    "gated gemm": (GATED, _gated),
    "gated gemv": (GEMV, _gemv),
    "gated gemv, alone": (GEMV, _gemv_alone),
    "gemv of all slots": (COMBINED, _combined),
    "sum of those with an expert": (COMBINE, _combine),
    "activation": (ACTIVATE, _activate),
}


def operators() -> list[str]:
    """What `tilewright.ops` offers and the engine generates."""
    return [name for name in ops.__all__ if name in OPERATORS]


def sample(name: str, device: Any = "cpu", seed: int = 0, tokens: int = 5) -> tuple[str, list[Any]]:
    """The operator of one of `SAMPLES` and its arguments, the same for the same seed on a device."""
    operator, make = SAMPLES[name]
    return operator, make(Maker(device, seed, tokens))


def cloned(arguments: list[Any]) -> list[Any]:
    """The arguments with tensors of their own."""
    return [a.clone() if isinstance(a, Tensor) else a for a in arguments]


def contents(result: Any, arguments: list[Any]) -> list[bytes]:
    """The bytes of what a call returned and of all its tensors, to compare one call with another."""
    results = result if isinstance(result, (tuple, list)) else [result]
    tensors = [t for t in (*results, *arguments) if isinstance(t, Tensor)]
    return [t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
