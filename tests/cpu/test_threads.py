"""Threads at once, the first call included, and processes that are forked at the worst moment."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_gpu import Gpu, gpu, on_gpu
from samples import SAMPLES, A, B, cloned, contents, sample

import tilewright
from tilewright import ops
from tilewright.launch import OPERATORS, Operator

COUNT = 8


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that threads start together."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(number: int) -> None:
        barrier.wait()
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def device() -> Iterator[Gpu]:
    with gpu() as made:
        yield made


@pytest.mark.parametrize("name", ["A", "B", "padded"])
def test_first_calls_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is right, and the module is generated once."""
    operator, given = sample(name)
    wanted = cloned(given)
    result = contents(getattr(ops, operator)(*wanted), wanted)
    made, generate = [], Operator.source

    def source(self: Operator, *args: Any) -> str:
        made.append(args)
        time.sleep(0.05)
        return generate(self, *args)

    monkeypatch.setattr(Operator, "source", source)
    monkeypatch.setattr(OPERATORS[operator], "_modules", {})

    def call() -> list[bytes]:
        own = cloned(given)
        return contents(getattr(ops, operator)(*own), own)

    assert at_once(*[call] * COUNT) == [result] * COUNT
    assert len(made) == 1


def test_operators_and_torchs_at_once() -> None:
    calls = []
    wanted = []
    for name in SAMPLES:
        operator, given = sample(name)
        for function in (getattr(ops, operator), getattr(torch.ops.tilewright, operator)):

            def call(function: Any = function, given: Any = given) -> list[bytes]:
                own = cloned(given)
                return contents(function(*own), own)

            calls.append(call)
            wanted.append(call())
    assert at_once(*calls) == wanted


def test_each_thread_keeps_its_own_launch(device: Gpu) -> None:
    """First calls of kinds that three rules serve: what a repeat of each says of its launch is that kind's rule."""
    device.before = lambda: time.sleep(0.02)
    rules = {1: 2, 64: 1, 1024: 0}

    def call(tokens: int) -> None:
        q, kv = (on_gpu(torch.zeros(tokens, *s, dtype=torch.bfloat16)) for s in ((2, 512), (512,)))
        slots, positions = on_gpu(torch.arange(tokens)), on_gpu(torch.arange(tokens))
        cache, table = on_gpu(torch.zeros(64, 16 * 584, dtype=torch.uint8)), on_gpu(torch.zeros(2048, 64))
        getattr(ops, A)(q, kv, cache, slots, positions, table, 1e-6, 16)

    at_once(*[lambda tokens=tokens: call(tokens) for tokens in (*rules, *rules)])
    for tokens, rule in rules.items():
        before = len(device.repeated)
        call(tokens)
        launch = tilewright.last_launch()
        assert launch is not None and (launch.rule, len(device.repeated)) == (rule, before + 1)


# Forks


def forked(child: Callable[[], bool], seconds: float = 60) -> None:
    """Runs `child` in a forked process, which must end with True in time."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if child() else 2
        finally:
            os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child did not end")


def same(operator: str, given: list[Any], wanted: list[bytes]) -> bool:
    own = cloned(given)
    return contents(getattr(ops, operator)(*own), own) == wanted


@pytest.mark.parametrize("first", ["parent", "child"])
def test_forked_workers(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first call before the fork, or in each child."""
    operator, given = sample("B")
    own = cloned(given)
    wanted = contents(getattr(ops, operator)(*own), own)
    if first == "child":
        monkeypatch.setattr(OPERATORS[operator], "_modules", {})
    for _ in range(3):
        forked(lambda: same(operator, given, wanted))
    assert same(operator, given, wanted)


def test_a_fork_while_another_thread_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the lock's state, but not the thread that would give it back."""
    operator, given = sample("B")
    own = cloned(given)
    wanted = contents(getattr(ops, operator)(*own), own)
    made, stop, started = OPERATORS[B], threading.Event(), threading.Event()
    monkeypatch.setattr(made, "_modules", {})

    def hold() -> None:
        with made._lock:
            made._recorded.preparing = True
            started.set()
            stop.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert started.wait(60)
        forked(lambda: same(operator, given, wanted))
    finally:
        stop.set()
        thread.join()


def test_a_fork_within_a_call(device: Gpu) -> None:
    """A child that is made while its thread prepares a call launches its own."""
    given = [on_gpu(a) if isinstance(a, torch.Tensor) else a for a in sample("B")[1]]
    outcome: list[bool] = []

    def child() -> bool:
        ops.fused_qk_norm_rope(*given)
        return len(device.first) == 1

    warmup = device.compiled.add

    class Compiled(set):  # type: ignore[type-arg]
        def add(self, name: str) -> None:
            warmup(name)
            if not outcome:
                outcome.append(True)
                forked(child)

    device.compiled = Compiled()
    ops.fused_qk_norm_rope.prepare(*given)
    assert (outcome, device.first) == ([True], [])
