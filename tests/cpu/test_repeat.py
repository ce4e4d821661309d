"""Repeated calls: which calls are one kind, and what a repeat hands to the launcher."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import deepseek_v4
import pytest
import torch
from qk_norm_rope import Case, make

from tilewright import repeat
from tilewright.launch import OPERATORS

NAME = "fused_qk_norm_rope"
DEEPSEEK = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
TENSORS = (0, 6, 7, 8, 10)  # qkv, q_weight, k_weight, cos_sin_cache, position_ids


class Device:
    """A device and its launcher, without either."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.slow: list[tuple[Any, ...]] = []
        self.done = 0
        self.current = 0
        self.enter, self.leave = SimpleNamespace(calls=[]), SimpleNamespace(calls=[])
        operator = OPERATORS[NAME]
        self.call = repeat.repeating(operator.kernel, operator.public, self._slow)
        self.call.__globals__.update(device=lambda: self.current, stream=lambda index: f"stream {index}")

    def _slow(self, *arguments: Any, **options: Any) -> tuple[None, Any]:
        self.slow.append(arguments)
        pick = repeat.itemgetter(0, 4, 1)
        found = (self._run, 7, "function", "metadata", pick, ("rest",), 0, self.enter, self.leave, self._done)
        return None, None if options else found

    def _run(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def _done(self) -> None:
        self.done += 1


@pytest.fixture
def device() -> Device:
    return Device()


def arguments(**case: Any) -> list[Any]:
    made = list(make(Case(5, (4, 2, 1), 64, **case)).arguments())
    return made if len(made) == 12 else [*made, -1]


def test_the_second_call_of_a_kind_is_launched_with_its_own_addresses(device: Device) -> None:
    first, second = arguments(), arguments()
    device.call(*first)
    assert (len(device.slow), device.launched) == (1, [])
    device.call(*second)
    own = [second[i].data_ptr() for i in TENSORS]
    assert len(device.slow) == 1
    before = (7, 1, 1, "stream 0", "function", "metadata", None, None, None)
    assert device.launched == [(*before, own[0], own[4], own[1], "rest")]
    assert device.done == 1


def other_kinds() -> dict[str, Any]:
    def swapped(position: int, value: Any) -> Any:
        def change(given: list[Any]) -> None:
            given[position] = value(given[position])

        return change

    def unaligned(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        return room[1:].view_as(tensor).copy_(tensor)

    return {
        "rows": swapped(0, lambda t: t[:4]),
        "row stride": swapped(0, lambda t: torch.empty(5, 2 * t.shape[1], dtype=t.dtype)[:, : t.shape[1]]),
        "dtype": swapped(0, lambda t: t.half()),
        "alignment": swapped(6, unaligned),
        "device": swapped(10, lambda t: t.to("meta")),
        "a number": swapped(3, lambda n: n + 1),
        "eps": swapped(5, lambda eps: eps * 2),
        "a flag": swapped(9, lambda flag: not flag),
        "a flag as a number": swapped(9, int),
        "a number as a float": swapped(4, float),
    }


@pytest.mark.parametrize("change", other_kinds().values(), ids=other_kinds().keys())
def test_another_kind_is_not_a_repeat(device: Device, change: Any) -> None:
    given = arguments()
    device.call(*given)
    change(given)
    device.call(*given)
    assert (len(device.slow), device.launched) == (2, [])


@pytest.mark.parametrize("options", [{"config": {}}, {"thresholds": 0}, {"profile": "generic"}], ids=str)
def test_options_are_not_repeated(device: Device, options: dict[str, Any]) -> None:
    given = arguments()
    device.call(*given)
    device.call(*given, **options)
    device.call(*given, **options)
    assert (len(device.slow), device.launched) == (3, [])


def test_a_default_and_its_value_are_one_kind(device: Device) -> None:
    given = arguments()
    device.call(*given[:11])
    device.call(*given[:11], forced_token_heads_per_warp=-1)
    assert len(device.launched) == 1


def test_another_current_device_and_hooks_of_a_profiler_take_the_slow_way(device: Device) -> None:
    given = arguments()
    device.call(*given)
    device.current = 1
    device.call(*given)
    device.current = 0
    device.enter.calls.append(print)
    device.call(*given)
    device.enter.calls.clear()
    device.leave.calls.append(print)
    device.call(*given)
    assert (len(device.slow), device.launched) == (4, [])
    device.leave.calls.clear()
    device.call(*given)
    assert len(device.launched) == 1


def test_what_is_no_tensor_reaches_the_checks(device: Device) -> None:
    given = arguments()
    given[0] = [1, 2]
    device.call(*given)
    given[0] = None
    device.call(*given)
    assert len(device.slow) == 2


def test_kinds_are_forgotten_when_there_are_too_many(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = device.call.__globals__["kinds"]
    kinds.update(dict.fromkeys(range(repeat.KINDS)))
    device.call(*arguments())
    assert len(kinds) == 1


def prepared(launches: list[Any], tensors: dict[str, Any]) -> Any:
    return repeat.prepared(Device().call, launches, tensors, lambda: None)


def test_calls_with_no_launch_or_several_are_not_repeated() -> None:
    launch = (SimpleNamespace(), (1,), {})
    given = {"q": torch.empty(1)}
    assert prepared([], given) is None
    assert prepared([launch, launch], given) is None
    assert prepared([launch], given) is None  # not on a GPU


def test_a_pointer_is_the_argument_of_its_name_else_the_only_one_at_its_address() -> None:
    a, b = torch.empty(4), torch.empty(4)
    given = {"q": a, "k": a, "cache": b}
    assert [repeat._argument(name, tensor, given) for name, tensor in given.items()] == [0, 1, 2]
    assert repeat._argument("tail", b.view(torch.uint8), given) == 2
    assert repeat._argument("view", a.view(torch.uint8), given) is None  # of which of the two?


def test_a_recorder_launches_and_remembers() -> None:
    class Kernel:
        __name__ = "kernel"
        arg_names = ("q", "size", "flag")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: ("compiled", grid, args, kwargs)

    recorded = repeat.Recorded()
    recorded.launches = []
    recorder = repeat.Recorder(Kernel(), recorded)
    recorder[(3,)]("q", 4, flag=True, num_warps=1)
    assert recorder.__name__ == "kernel"
    compiled = ("compiled", (3,), ("q", 4), {"flag": True, "num_warps": 1})
    assert recorded.launches == [(compiled, (3,), {"q": "q", "size": 4, "flag": True})]


def test_a_call_keeps_no_tensor_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = OPERATORS[DEEPSEEK]
    module = operator.module("generic", True)
    kernel = getattr(module, f"{DEEPSEEK}_kernel")

    class Stand:
        __name__, arg_names = kernel.__name__, kernel.arg_names

        def __getitem__(self, grid: Any) -> Any:
            return kernel[grid]

    monkeypatch.setattr(module, f"{DEEPSEEK}_kernel", repeat.Recorder(Stand(), operator._recorded))
    given = list(deepseek_v4.make(deepseek_v4.Case(4, 2)).arguments())
    held = weakref.ref(given[0])
    operator.first(*given)
    del given
    gc.collect()
    assert held() is None  # q of the first call of a kind, gigabytes of it in a profiling run
