"""Repeated calls: which calls are one kind, and what a repeat hands to the launcher."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import deepseek_v4
import pytest
import torch
from qk_norm_rope import Case, make

from tilewright import recording, repeat
from tilewright.launch import OPERATORS

NAME = "fused_qk_norm_rope"
DEEPSEEK = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
TENSORS = (0, 6, 7, 8, 10)  # qkv, q_weight, k_weight, cos_sin_cache, position_ids


class Device:
    """A device and its launcher, without either."""

    def __init__(self, name: str = NAME) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.slow: list[tuple[Any, ...]] = []
        self.current: Any = None  # the index of a CPU
        self.kernel = OPERATORS[name].kernel
        hooks = {name: SimpleNamespace(calls=[]) for name in ("launch_enter_hook", "launch_exit_hook")}
        self.hooks = SimpleNamespace(**hooks)
        self.kinds: dict[Any, Any] = {}
        self.last: list[Any] = [None]
        self.call = repeat.repeating(self.kernel, OPERATORS[name].public, self._slow, self.kinds, self.last)
        self.call.__globals__.update(
            _device=lambda: self.current, _stream=lambda index: f"stream {index}", _hooks=self.hooks,
            _enter=self.hooks.launch_enter_hook, _leave=self.hooks.launch_exit_hook, _empty=torch.empty,
            **{f"_no_{t.name}": repeat._absent(t.name) for t in self.kernel.tensors if t.optional},
        )  # fmt: skip

    def _slow(self, *given: Any, **options: Any) -> tuple[str, Any]:
        """A first call: its kernel takes the addresses of all tensors, outputs behind them, in reverse."""
        self.slow.append(given)
        names = [argument.name for argument in self.kernel.arguments]
        tensors = [given[names.index(t.name)] for t in self.kernel.tensors]
        if options or not isinstance(tensors[0], torch.Tensor):
            return "slow", None
        values = dict(zip((t.name for t in self.kernel.tensors), tensors, strict=True))
        outputs = [torch.empty(3, 2, dtype=torch.float16) for _ in self.kernel.outputs]
        made = dict(zip((o.name for o in self.kernel.outputs), outputs, strict=True))
        compiled = SimpleNamespace(run=self._run, function="function", packed_metadata="metadata")
        launch = (compiled, (7,), {**dict(reversed([*values.items(), *made.items()])), "size": "rest"})
        result = None if not outputs else outputs[0]
        with pytest.MonkeyPatch.context() as patch:  # what was recorded was on a GPU
            patch.setattr(repeat, "_on_gpu", lambda device: True)
            return "slow", repeat.kind(self.kernel, [launch], values, result, "launched")

    def _run(self, *arguments: Any) -> None:
        self.launched.append(arguments)


@pytest.fixture
def device() -> Device:
    return Device()


def arguments(**case: Any) -> list[Any]:
    made = list(make(Case(5, (4, 2, 1), 64, **case)).arguments())
    return made if len(made) == 12 else [*made, -1]


def test_the_second_call_of_a_kind_is_launched_with_its_own_addresses(device: Device) -> None:
    first, second = arguments(), arguments()
    assert device.call(*first) == "slow"
    assert (len(device.slow), device.launched) == (1, [])
    assert device.call(*second) is None
    own = [second[i].data_ptr() for i in reversed(TENSORS)]
    assert len(device.slow) == 1
    before = (7, 1, 1, "stream None", "function", "metadata", None, None, None)
    assert device.launched == [(*before, *own, "rest")]
    assert device.last == ["launched"]


PADDED = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded"


def test_a_repeat_makes_its_outputs_anew() -> None:
    device = Device(PADDED)
    given = list(deepseek_v4.make(deepseek_v4.Case(4, 2)).arguments())
    given[6:] = [2, 1e-6, 16, True, False, True, False]
    device.call(*given)
    made = device.call(*given), device.call(*given)
    assert [(out.shape, out.dtype) for out in made] == [((3, 2), torch.float16)] * 2
    addresses = [arguments[9] for arguments in device.launched]
    assert addresses == [out.data_ptr() for out in made] and addresses[0] != addresses[1]


INSERT = "fused_deepseek_v4_kv_rope_insert"


def test_an_optional_tensor_that_is_none_stays_none() -> None:
    device = Device(INSERT)
    kv, cache, slots, positions, table = deepseek_v4.make(deepseek_v4.Case(4, 2)).arguments()[1:6]
    cache, scale = cache[:, : 16 * 512].view(2, 16, 512), torch.ones(1)
    for given in (None, None, scale, scale, None):
        device.call(kv, cache, slots, positions, table, 16, given)
    assert len(device.slow) == 2
    assert [arguments[9] for arguments in device.launched] == [None, scale.data_ptr(), None]


def other_kinds() -> dict[str, Any]:
    def swapped(position: int, value: Any) -> Any:
        def change(given: list[Any]) -> None:
            given[position] = value(given[position])

        return change

    def alignments(low: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """A copy `low` bytes behind a multiple of 16."""

        def place(tensor: torch.Tensor) -> torch.Tensor:
            room = torch.empty(tensor.nbytes + 32, dtype=torch.uint8)
            start = -room.data_ptr() % 16 + low
            return room[start : start + tensor.nbytes].view(tensor.dtype).view_as(tensor).copy_(tensor)

        return place

    return {
        "rows": swapped(0, lambda t: t[:4]),
        "row stride": swapped(0, lambda t: torch.empty(5, 2 * t.shape[1], dtype=t.dtype)[:, : t.shape[1]]),
        "dtype": swapped(0, lambda t: t.half()),
        "alignment": swapped(6, alignments(2)),
        "device": swapped(10, lambda t: t.to("meta")),
        "a number": swapped(3, lambda n: n + 1),
        "eps": swapped(5, lambda eps: eps * 2),
        "a flag": swapped(9, lambda flag: not flag),
        "a flag as a number": swapped(9, int),
        "a number as a float": swapped(4, float),
    }


@pytest.mark.parametrize("change", other_kinds().values(), ids=other_kinds().keys())
@pytest.mark.parametrize("guards", [True, False], ids=["torch's guards", "one by one"])
def test_another_kind_is_not_a_repeat(
    device: Device, change: Any, guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not guards:
        monkeypatch.setattr(repeat, "same_metadata", repeat._compared)
    given = arguments()
    device.call(*given)
    device.call(*given)
    assert (len(device.slow), len(device.launched)) == (1, 1)
    change(given)
    device.call(*given)
    assert (len(device.slow), len(device.launched)) == (2, 1)


def test_every_alignment_is_a_kind_of_its_own(device: Device) -> None:
    """A first call 8 bytes off vouches for no call 2 bytes off."""
    given = arguments()
    room = torch.empty(given[6].nbytes + 32, dtype=torch.uint8)
    start = -room.data_ptr() % 16
    for low in (8, 2, 8, 0, 2):
        weight = room[start + low : start + low + given[6].nbytes].view(given[6].dtype)
        device.call(*given[:6], weight, *given[7:])
    assert (len(device.slow), len(device.launched)) == (3, 2)


def test_one_tensor_twice_is_repeated_too(device: Device) -> None:
    given = arguments()
    given[7] = given[6]
    device.call(*given)
    device.call(*given)
    assert (len(device.slow), len(device.launched)) == (1, 1)


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
    device.current = None
    device.hooks.launch_enter_hook.calls.append(print)
    device.call(*given)
    device.hooks.launch_enter_hook.calls.clear()
    device.hooks.launch_exit_hook.calls.append(print)
    device.call(*given)
    device.hooks.launch_exit_hook.calls.clear()
    for name, chain in list(vars(device.hooks).items()):
        setattr(device.hooks, name, print)  # in the place of Triton's chain
        device.call(*given)
        setattr(device.hooks, name, chain)
    assert (len(device.slow), device.launched) == (6, [])
    device.call(*given)
    assert len(device.launched) == 1
    kept = [len(alike) for key, alike in device.kinds.items() if key is not None]
    assert kept == [1]  # none of the slow ones was a new kind


def test_what_is_no_tensor_reaches_the_checks(device: Device) -> None:
    given = arguments()
    given[0] = [1, 2]
    device.call(*given)
    given[0] = None
    device.call(*given)
    assert len(device.slow) == 2


def test_kinds_are_forgotten_when_there_are_too_many(device: Device) -> None:
    device.kinds.update(dict.fromkeys(range(repeat.KINDS), ()))
    device.call(*arguments())
    assert len(device.kinds) == 1


def test_of_kinds_that_are_alike_the_newest_are_kept(device: Device) -> None:
    given = arguments()
    for extra in range(repeat.ALIKE + 2):
        given[8] = torch.zeros(100 + extra, given[8].shape[1])
        device.call(*given)
    assert [len(alike) for alike in device.kinds.values()] == [repeat.ALIKE]
    device.call(*given)
    assert len(device.launched) == 1


def prepared(launches: list[Any], tensors: dict[str, Any]) -> Any:
    return repeat.kind(OPERATORS[NAME].kernel, launches, tensors, None, None)


def test_calls_with_no_launch_or_several_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(run=None, function=None, packed_metadata=None)
    given = {"q": torch.empty(1)}
    launch = (compiled, (1,), dict(given))
    assert prepared([launch], given) is None  # not on a GPU
    monkeypatch.setattr(repeat, "_on_gpu", lambda device: True)
    assert prepared([launch], given) is not None
    assert prepared([], given) is None
    assert prepared([launch, launch], given) is None
    assert prepared([(compiled, (1, 2), given)], given) is None
    assert prepared([(compiled, (1,), {"scratch": torch.empty(1)})], given) is None


def test_a_pointer_is_the_argument_of_its_name_else_the_only_one_at_its_address() -> None:
    a, b = torch.empty(4), torch.empty(4)
    given = {"q": a, "k": a, "cache": b, "scale": None}
    assert [repeat._place(name, tensor, given) for name, tensor in given.items()] == [0, 1, 2, 3]
    assert repeat._place("tail", b.view(torch.uint8), given) == 2
    assert repeat._place("view", a.view(torch.uint8), given) is None  # of which of the two?
    assert repeat._place("size", 4, given) is None


def test_a_recorder_launches_and_remembers() -> None:
    class Kernel:
        __name__ = "kernel"
        arg_names = ("q", "size", "flag")

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: ("compiled", grid, args, kwargs)

    recorded = recording.Recorded()
    recorded.launches = []
    recorder = recording.Recorder(Kernel(), recorded)
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

    monkeypatch.setattr(module, f"{DEEPSEEK}_kernel", recording.Recorder(Stand(), operator._recorded))
    given = list(deepseek_v4.make(deepseek_v4.Case(4, 2)).arguments())
    held = weakref.ref(given[0])
    operator.first(*given)
    del given
    gc.collect()
    assert held() is None  # q of the first call of a kind, gigabytes of it in a profiling run


def test_an_operator_without_numbers_is_repeated() -> None:
    device, given = Device("moe_sum"), [torch.zeros(3, 2, 64), torch.zeros(3, 64)]
    assert [device.call(*given) for _ in range(4)] == ["slow", None, None, None]
    assert len(device.launched) == 3
