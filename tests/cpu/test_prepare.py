"""What a CUDA graph's capture needs: calls that are only compiled, and errors instead of broken captures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import _device
from on_gpu import Gpu, gpu, on_gpu
from samples import SAMPLES, A, B, cloned, contents, sample
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

import tilewright
from tilewright import interpret, ops, recording
from tilewright.errors import CaptureError, ContractError, ShapeError
from tilewright.launch import OPERATORS

EVERY = pytest.mark.parametrize("name", SAMPLES)


@pytest.fixture
def device() -> Iterator[Gpu]:
    with gpu() as made:
        yield made


def arguments(name: str, how: Any, **options: Any) -> tuple[str, list[Any]]:
    operator, given = sample(name, **options)
    return operator, [how(a) if isinstance(a, torch.Tensor) else a for a in given]


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


@EVERY
def test_prepare_on_the_cpu_checks_and_runs_nothing(name: str) -> None:
    operator, given = sample(name)
    before, launch = contents(None, given), tilewright.last_launch()
    with interpret.counting() as counts:
        assert getattr(ops, operator).prepare(*given) is None
    assert (counts.programs, contents(None, given), tilewright.last_launch()) == (0, before, launch)


@EVERY
@pytest.mark.parametrize("how", [on_gpu, meta], ids=["tensors", "meta"])
def test_prepare_compiles_and_loads_and_launches_nothing(name: str, how: Any, device: Gpu) -> None:
    operator, given = arguments(name, how)
    launch = tilewright.last_launch()
    prepared = getattr(ops, operator).prepare(*given, device="cuda:0")
    assert prepared is not None and (prepared.operator, prepared.profile) == (operator, "nvidia-h200")
    assert [kernel for kernel, _ in device.prepared] == [prepared.kernel]
    assert (device.first, device.loaded, tilewright.last_launch()) == ([], 1, launch)
    tensors = [a for a in device.prepared[0][1] if isinstance(a, (torch.Tensor, torch.dtype))]
    assert {isinstance(a, torch.dtype) for a in tensors} == {how is meta}


def test_prepare_takes_names_defaults_and_options(device: Gpu) -> None:
    _, given = arguments("B", meta)
    names = [a.name for a in OPERATORS[B].kernel.arguments]
    forced = {"tokens": 1, "heads": 1, "num_warps": 1, "num_stages": 1}
    named = dict(zip(names[:-1], given[:-1], strict=True))
    prepared = ops.fused_qk_norm_rope.prepare(**named, config=forced, device="cuda:0")
    assert prepared.config == forced


def test_prepare_refuses_what_the_call_refuses(device: Gpu) -> None:
    _, given = arguments("B", meta)
    given[3] = 2
    with pytest.raises(ShapeError, match="qkv has 448 columns, 4 \\+ 2 \\+ 2 heads of 64 need 512"):
        ops.fused_qk_norm_rope.prepare(*given)
    assert device.prepared == []


def test_prepare_of_no_tokens_has_nothing_to_compile(device: Gpu) -> None:
    _, given = arguments("B", on_gpu, tokens=0)
    assert ops.fused_qk_norm_rope.prepare(*given) is None


def test_meta_tensors_compile_what_aligned_tensors_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton's own rules, without a device: one binary for both, another for addresses that are less aligned."""
    monkeypatch.setattr(CompiledKernel, "run", None)  # there is nothing to load it on
    monkeypatch.setattr(OPERATORS[B], "_modules", {})
    monkeypatch.setattr(tilewright.launch.vendors, "detect", lambda device: "nvidia-h200")
    stand_in = type("Module", (), {"current_device": lambda: 0})
    monkeypatch.setattr(torch, "get_device_module", lambda device: stand_in)
    operator = ops.fused_qk_norm_rope
    with _device("sm_90"):
        operator.prepare(*arguments("B", meta)[1], device="cuda:0")
        (module,) = OPERATORS[B]._modules.values()
        kernel: JITFunction = getattr(module, f"{B}_kernel").kernel

        def binaries() -> int:
            return len(kernel.device_caches[list(kernel.device_caches)[0]][0])

        assert binaries() == 1
        given = arguments("B", on_gpu)[1]
        operator.prepare(*given)
        assert binaries() == 1
        given[6] = on_gpu(torch.zeros(65, dtype=torch.bfloat16))[1:]
        operator.prepare(*given)
        assert binaries() == 2


# Captures


@EVERY
def test_a_capture_of_what_is_not_compiled_is_refused(name: str, device: Gpu) -> None:
    operator, given = arguments(name, on_gpu)
    before = contents(None, given)
    device.capturing = True
    for call in (getattr(ops, operator), getattr(ops, operator).prepare):
        with pytest.raises(CaptureError) as caught:
            call(*given)
        assert str(caught.value) == (
            f"{operator}: a CUDA graph is being captured and the kernel of this call is not compiled; before the "
            f"capture, call {operator}.prepare(...) with these arguments, or the operator itself"
        )
    assert (device.first, device.prepared, contents(None, given)) == ([], [], before)


@EVERY
@pytest.mark.parametrize("before", ["prepared", "called"])
def test_a_capture_after_prepare_or_a_call_launches(name: str, before: str, device: Gpu) -> None:
    operator, given = arguments(name, on_gpu)
    function = getattr(ops, operator)
    (function.prepare if before == "prepared" else function)(*given)
    device.capturing = True
    function(*cloned(given)) if before == "called" else function(*given)
    assert len(device.first) + len(device.repeated) == (1 if before == "prepared" else 2)


def test_checking_slots_waits_so_a_capture_refuses_it(device: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CHECK_SLOTS", "1")
    _, given = arguments("A", on_gpu)
    device.capturing = True
    with pytest.raises(CaptureError) as caught:
        getattr(ops, A)(*given)
    assert str(caught.value) == (
        f"{A}: TILEWRIGHT_CHECK_SLOTS waits for the device, which the CUDA graph that is being captured cannot"
    )
    assert device.first == []


def test_a_capture_error_is_no_contract_error() -> None:
    assert issubclass(CaptureError, RuntimeError) and not issubclass(CaptureError, ContractError)


def test_tritons_kernels_have_what_guards_them() -> None:
    """Triton compiles in `_do_compile`, with `compile`, which recording.py replaces on each kernel of ours."""
    module: Any = OPERATORS[B].module("nvidia-h200", False)
    kernel = getattr(module, f"{B}_kernel")
    assert isinstance(kernel, recording.Recorder) and isinstance(kernel.kernel, JITFunction)
    assert vars(kernel.kernel)["_do_compile"].__name__ == "compile_outside_captures"
    assert "self.compile(" in inspect.getsource(JITFunction._do_compile)


def test_without_a_gpu_nothing_is_captured() -> None:
    assert recording.capturing() is False
