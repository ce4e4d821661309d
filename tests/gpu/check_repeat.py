"""Checks on a GPU that a repeated call works on its own tensors.

    python tests/gpu/check_repeat.py

For each operator that repeats calls: a first call, where two arguments may be one tensor, then calls of the same kind
on other tensors, each compared to the bit with the same call the slow way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tilewright import last_launch, ops  # noqa: E402
from tilewright.launch import OPERATORS  # noqa: E402

A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"


def deepseek(seed: int, shared: bool) -> list[Any]:
    torch.manual_seed(seed)
    q = torch.randn(37, 8, 512, device="cuda", dtype=torch.bfloat16)
    kv, cache = torch.randn_like(q[:, 0]), torch.zeros(4, 16 * 584, device="cuda", dtype=torch.uint8)
    slots = torch.randperm(64, device="cuda")[:37]
    positions = slots if shared else torch.randint(4096, (37,), device="cuda")
    return [q, kv, cache, slots, positions, torch.randn(4096, 64, device="cuda"), 1e-6, 16]


def qk(seed: int, shared: bool) -> list[Any]:
    torch.manual_seed(seed)
    qkv, weight = torch.randn(37, 32 * 128, device="cuda").bfloat16(), torch.randn(128, device="cuda").bfloat16()
    other = weight if shared else torch.randn_like(weight)
    positions = torch.randint(4096, (37,), device="cuda")
    return [qkv, 16, 8, 8, 128, 1e-6, weight, other, torch.randn(4096, 128, device="cuda"), True, positions, -1]


def results(name: str, made: list[Any], **options: Any) -> list[torch.Tensor]:
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in made]
    shared = [next(k for k, b in enumerate(made) if b is a) for a in made]  # what was one tensor stays one
    getattr(ops, name)(*(copies[k] for k in shared), **options)
    return [c for c in copies if isinstance(c, torch.Tensor)]


def checks() -> Iterator[tuple[str, bool]]:
    cases: dict[str, Callable[[int, bool], list[Any]]] = {A: deepseek, B: qk}
    for (name, make), shared in ((case, shared) for case in cases.items() for shared in (True, False)):
        kinds = OPERATORS[name].call.__globals__["_kinds"]
        kinds.clear()
        results(name, make(0, shared))
        launch = last_launch()
        if launch is None or len(kinds) != 1:
            yield f"{name}: the first call was not recorded", False
            continue
        for seed in (1, 2, 3):
            made = make(seed, False)
            repeated, slow = results(name, made), results(name, made, config=dict(launch.config))
            pairs = zip(repeated, slow, strict=True)
            equal = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
            yield f"{name}: repeat {seed} after a first call with {'one' if shared else 'two'} tensors", equal
        yield f"{name}: all were repeats", len([key for key in kinds if key is not None]) == 1


def main() -> int:
    rows = list(checks())
    for name, passed in rows:
        print("PASS" if passed else "FAIL", name)
    print(f"{sum(p for _, p in rows)} passed, {sum(not p for _, p in rows)} failed; {torch.cuda.get_device_name()}")
    return int(not all(passed for _, passed in rows))


if __name__ == "__main__":
    sys.exit(main())
