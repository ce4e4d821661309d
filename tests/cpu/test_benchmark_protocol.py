"""A benchmark's status and report: a missed goal, a failed tiling and a missing GPU are each a failure."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "protocol.py"


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The protocol with a GPU that copies at 4000, then 4100 GB/s."""
    spec = importlib.util.spec_from_file_location("protocol", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "protocol", module)
    spec.loader.exec_module(module)
    copies = iter((4000.0, 4100.0))
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "copy_gbps", lambda: next(copies))
    monkeypatch.setattr(module, "described", lambda: {"device": "none"})
    return module


def drive(protocol: ModuleType, path: Path, sweep: bool, rows: dict[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    def judge(row: dict[str, Any], copy: float) -> None:
        row["copy"] = copy

    status = protocol.drive(
        Namespace(sizes=list(rows), sweep=sweep, budget=10.0, json=path),
        list(rows),
        prepare=lambda deadline: {},
        sweep=lambda size, deadline, prepared: [rows[size]],
        measure=lambda size: rows[size],
        judge=judge,
        print_table=lambda rows: None,
    )
    return status, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize(("last", "status"), [({"met": True}, 0), ({}, 0), ({"met": False}, 1)], ids=str)
def test_a_missed_goal_fails(protocol: ModuleType, tmp_path: Path, last: dict[str, Any], status: int) -> None:
    found, report = drive(protocol, tmp_path / "report.json", False, {1: {"met": True}, 2: last})
    assert found == status
    assert report["copy_gbps"] == [4000.0, 4100.0]
    assert report["results"] == [{"met": True, "copy": 4100.0}, {**last, "copy": 4100.0}]


@pytest.mark.parametrize(("last", "status"), [({"p50_us": 2.0}, 0), ({"error": "out of registers"}, 1)], ids=str)
def test_a_failed_tiling_fails(protocol: ModuleType, tmp_path: Path, last: dict[str, Any], status: int) -> None:
    found, report = drive(protocol, tmp_path / "report.json", True, {1: {"p50_us": 1.0}, 2: last})
    assert (found, report["sweep"]) == (status, [{"p50_us": 1.0}, last])


def test_no_gpu_fails_and_writes_nothing(
    protocol: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.torch.cuda, "is_available", lambda: False)
    assert drive(protocol, tmp_path / "report.json", False, {1: {"met": True}}) == (1, {})


def test_a_problem_by_its_name(protocol: ModuleType) -> None:
    problems = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    parse = protocol.by_name(problems)
    assert parse("b") is problems[1]
    with pytest.raises(argparse.ArgumentTypeError, match=r"^c: choose among a, b$"):
        parse("c")
