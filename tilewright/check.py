"""Runs operators on small inputs on the CPU and compares them with their references."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tilewright

# Operators whose reference module `tilewright.ops.<module>` has `reference`, `example` and `written`, and `allowed`
# where several roundings lie between the two.
REFERENCES = {
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": "deepseek_v4_reference",
    "fused_experts_impl": "moe_example",
    "fused_qk_norm_rope": "qk_norm_rope_reference",
}


@dataclass(frozen=True)
class Compared:
    """One tensor that an operator gave: its elements, how many of them differ, and whether the rule allows that.

    Integers must be equal; a floating element may be one rounding of its dtype away, or what the reference allows.
    """

    operator: str
    tensor: str
    dtype: str
    elements: int
    differing: int
    fits: bool


def check(profile: str | None = None) -> Iterator[Compared]:
    """Compares every operator that has a reference, on the CPU, with the text of `profile` (generic by default)."""
    import torch

    for name, module in REFERENCES.items():
        made: Any = importlib.import_module(f"tilewright.ops.{module}")
        arguments = made.example()
        expected = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        result = getattr(tilewright.ops, name)(*arguments, profile=profile)
        returned = made.reference(*expected)
        wanted = made.written(*expected) if result is None else {"out": returned}
        for tensor, ours in (made.written(*arguments) if result is None else {"out": result}).items():
            theirs = wanted[tensor]
            differing = int((ours != theirs).sum())
            fits = differing == 0
            if hasattr(made, "allowed"):
                fits = bool(((ours.double() - theirs.double()).abs() <= made.allowed(*expected)).all())
            elif ours.is_floating_point():
                step = torch.finfo(ours.dtype).eps
                fits = torch.allclose(ours.double(), theirs.double(), rtol=step, atol=step * 2**-8)
            yield Compared(name, tensor, str(ours.dtype).removeprefix("torch."), ours.numel(), differing, fits)
