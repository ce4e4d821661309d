"""The fused MoE's benchmark: floors, goals, and pipelines that agree, on the CPU with stand-ins for sizes and times."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("protocol", "fused_moe"):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return sys.modules["fused_moe"]


@pytest.mark.parametrize(
    ("tokens", "columns", "hit", "us"),
    [(1, 512, 8, 5.95), (1, 2048, 8, 23.8), (512, 512, 256, 191.4), (2048, 2048, 256, 765.5),
     (16384, 2048, 256, 2087.7)],
)  # fmt: skip
def test_floor(bench: ModuleType, tokens: int, columns: int, hit: int, us: float) -> None:
    """Weights of the experts that are hit, or the products: figures worked out by hand."""
    assert bench.Size(tokens, columns).floor_us(hit) == pytest.approx(us, rel=2e-3)


def row(percent: float, ratio: float, tokens: int = 8, columns: int = 512) -> dict[str, Any]:
    return {"tokens": tokens, "columns": columns, "percent_of_floor": percent, "ratio": ratio, "parts_us": {},
            "floor_us": 1.0, "fused_us": 1.0, "plain_us": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("percent", "ratio", "met"), [(86.0, 0.98, True), (85.9, 2.0, False), (99.0, 0.97, False)]
)
def test_goals(bench: ModuleType, percent: float, ratio: float, met: bool) -> None:
    judged = row(percent, ratio)
    bench.judge(judged, 4000.0)
    assert judged["met"] is met


def test_a_mean_that_is_too_low_fails(bench: ModuleType) -> None:
    for ratio, met in ((1.16, True), (1.14, False)):
        rows = [row(200.0, ratio, tokens, columns) for columns, goals in bench.GOALS.items() for tokens in goals]
        for one in rows:
            bench.judge(one, 4000.0)
        bench.print_table(rows)
        assert all(one["met"] for one in rows) is met


def test_every_size_has_a_plain_tiling(bench: ModuleType) -> None:
    """16 rows up to 511 tokens, then more, as the public configurations have it."""
    blocks = {tokens: {tiling[0] for tiling in bench.plain_tilings(tokens)} for tokens in bench.REPORT}
    assert all(blocks[tokens] == {16} for tokens in (1, 8, 32, 128))
    assert blocks[512] == {32, 64} and blocks[2048] == {64, 128} and blocks[16384] == {128}


@pytest.fixture
def small(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """Problems of few experts on the CPU."""
    for name, value in (("DEVICE", torch.device("cpu")), ("EXPERTS", 10), ("HIDDEN", 64), ("ROTATED", 2)):
        monkeypatch.setattr(bench, name, value)
    return lambda tokens: bench.Problem(bench.Size(tokens, 64))


@pytest.mark.parametrize("tokens", [2, 20])
def test_pipelines_are_right(bench: ModuleType, small: Callable[[int], Any], tokens: int) -> None:
    """The fused one, the plain one with and without an alignment, and the parts in their order."""
    problem = small(tokens)
    ids = problem.draw()
    assert len(ids) == (2 if tokens <= 16 else 1)
    assert bench.checked(problem, ids[0], bench.fused(problem, ids[0])) < 5e-3
    (call,) = bench.plain_calls(problem, ids[:1], (16, 32, 32, 2, 4, 1))
    assert bench.checked_plain(problem, ids[0], call()) < 1e-2
    with pytest.raises(AssertionError, match="plain pipeline: relative error"):
        bench.checked_plain(problem, ids[0], call() * 1.05)
    parts = [(name, [part() for part in calls]) for name, calls in bench.parts(problem, ids[:1])]
    assert [name for name, _ in parts] == (["gemv1", "gemv2"] if tokens == 2 else ["align", "gemm1", "gemm2", "sum"])


def test_every_candidate_of_a_sweep_fits_a_program(bench: ModuleType) -> None:
    for columns in bench.GOALS:
        for tokens in bench.GOALS[columns]:
            found = list(bench.candidates(bench.Size(tokens, columns)))
            parts = {part for part, *_ in found}
            assert parts == ({"gemv1", "gemv2"} if tokens <= 16 else set()) | {"gemm1", "gemm2"}
            assert len(set(map(str, found))) == len(found) > 20
