"""benchmarks/host_cost.py on a stand-in for a GPU: its calls are repeats, and what it prints and says of goals."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from on_gpu import Gpu, gpu, on_gpu
from samples import A, sample

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "host_cost.py"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": 7})
    with gpu() as made:
        yield made


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_cost", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["A", "B", "padded", "kv"])
def test_a_row(name: str, benchmark: ModuleType, device: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    operator, given = sample(name)
    given = [on_gpu(a) if isinstance(a, torch.Tensor) else a for a in given]
    row: dict[str, Any] = benchmark.measured(name, operator, given, 3)
    assert len(device.first) <= 2  # the first call, and that of torch's operator, whose tensors it sees otherwise
    bare, eager = device.repeated[0], device.repeated[benchmark.LOOP]
    returned = {"padded": 6}.get(name)  # the output's place among the arguments, anew in each eager call
    kept = [i for i in range(9, len(bare)) if i - 9 != returned]
    assert [bare[i] for i in kept] == [eager[i] for i in kept]
    assert row["barest_us"] > 0 and row["over_us"] == row["eager_us"] - row["barest_us"]
    assert set(row["parts_us"]) >= {"nothing", "compare metadata", "addresses"}
    benchmark.printed(row)
    assert capsys.readouterr().out.startswith(f"{name:<11} barest ")


def test_goals_can_be_missed(benchmark: ModuleType, device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [on_gpu(a) if isinstance(a, torch.Tensor) else a for a in sample("A")[1]]
    monkeypatch.setattr(benchmark, "OVER_US", 1e9)  # reading a subclass of Tensor takes long
    monkeypatch.setattr(benchmark, "MOST_US", {A: 1e9})
    assert benchmark.measured("A", A, given, 1)["met"]
    monkeypatch.setattr(benchmark, "OVER_US", 0.001)
    assert not benchmark.measured("A", A, given, 1)["met"]
    monkeypatch.setattr(benchmark, "OVER_US", 1e9)
    monkeypatch.setattr(benchmark, "MOST_US", {A: 0.001})
    assert not benchmark.measured("A", A, given, 1)["met"]
    monkeypatch.setattr(benchmark, "MOST_US", {})
    stats = iter(range(100))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": next(stats)})
    assert not benchmark.measured("A", A, given, 1)["met"]


def test_a_call_that_was_not_recorded_is_no_measurement(benchmark: ModuleType, device: Gpu) -> None:
    with pytest.raises(RuntimeError, match="0 kinds were recorded, not one"):
        benchmark.recorded(A)
