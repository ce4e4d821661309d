"""The kernels of the fused MoE, compiled for devices that are not there: matrix instructions, spills, room, masks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import Binary, Launched, compiled, launched, module_of

import tilewright.ops  # noqa: F401  (declares them)
from tilewright import vendors
from tilewright.launch import OPERATORS
from tilewright.ops import moe_reference as reference

H200_SHARED = 232448  # bytes of shared memory of a program
SHARED = {"sm_80": 166912, "sm_90": H200_SHARED, "gfx942": 65536}
EXPERTS, HIDDEN = 4, 2048
STAND_INS = {
    "nvidia-h200": ("sm_90",), "nvidia-a100": ("sm_80",), "amd-mi300x": ("gfx942",),
    "generic": ("sm_80", "sm_90", "gfx942"), "hygon-bw1000": ("sm_90", "gfx942"), "metax-c550": ("sm_90", "gfx942"),
}  # fmt: skip
TENSOR_CORES = {"wgmma": "wgmma.mma_async", "mma.sync": "mma.sync", "mfma": "v_mfma"}


@functools.cache
def module(name: str, profile: str) -> Any:
    return module_of(OPERATORS[name].source(profile), f"{name}_{profile.replace('-', '_')}")


def launch(name: str, profile: str, *arguments: Any) -> Launched:
    (only,) = launched(module(name, profile), functools.partial(getattr(module(name, profile), name), *arguments))
    return only


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def gated(profile: str, block: int, inner: int, hidden: int = HIDDEN, **more: Any) -> Launched:
    return _gemm("moe_gemm_gated", profile, block, 2 * inner, hidden, inner, **more)


def plain(profile: str, block: int, inner: int, hidden: int = HIDDEN, **more: Any) -> Launched:
    return _gemm("moe_gemm", profile, block, hidden, inner, hidden, **more)


def _gemm(
    name: str, profile: str, block: int, columns: int, k: int, out: int, dtype: torch.dtype = torch.bfloat16,
    turned: bool = False,
) -> Launched:  # fmt: skip
    ids = torch.arange(2 * block).reshape(-1, 2) % EXPERTS
    tables = reference.align(ids, block, EXPERTS, None, True, True)
    w = empty(EXPERTS, k, columns, dtype=dtype).transpose(1, 2) if turned else empty(EXPERTS, columns, k, dtype=dtype)
    rows = (len(ids) if name == "moe_gemm_gated" else ids.numel(), k)
    more = ("silu", False) if name == "moe_gemm_gated" else (True,)
    weights = torch.ones(ids.shape)
    return launch(name, profile, empty(*rows, dtype=dtype), w, None, weights, *tables,
                  empty(ids.numel(), out, dtype=dtype), block, *more)  # fmt: skip


def listed(profile: str, inner: int, tokens: int = 4) -> Launched:
    ids = torch.arange(tokens * 8, dtype=torch.int32).reshape(tokens, 8) % EXPERTS
    return launch(
        "moe_gemv_gated", profile, empty(tokens, HIDDEN), empty(EXPERTS, 2 * inner, HIDDEN), None,
        torch.ones(ids.shape), ids, None, empty(tokens * 8, inner), "silu", False,
    )  # fmt: skip


def combined(profile: str, inner: int, tokens: int = 4) -> Launched:
    ids = torch.arange(tokens * 8, dtype=torch.int32).reshape(tokens, 8) % EXPERTS
    return launch(
        "moe_gemv_combine", profile, empty(tokens * 8, inner), empty(EXPERTS, HIDDEN, inner), None,
        torch.ones(ids.shape), ids, None, empty(tokens, HIDDEN), True,
    )  # fmt: skip


def instructions(binary: Binary) -> dict[str, int]:
    """How often each matrix instruction stands in the text."""
    return {name: count for name, text in TENSOR_CORES.items() if (count := binary.text.count(text))}


def copy_sizes(binary: Binary) -> set[int]:
    """Bytes of the asynchronous copies to shared memory."""
    return {int(size, 16) for size in re.findall(r"cp\.async\.c[ag].*?\], (0x\w+)", binary.text)}


def check(binary: Binary, profile: str, title: str, record: Callable[[str, object], None]) -> None:
    use = f"{binary.resources['registers']:>3} registers {binary.shared:>6} bytes shared"
    found = ", ".join(f"{count} {name}" for name, count in instructions(binary).items()) or "no matrix instruction"
    record("row", f"{profile:<12} {title:<28} {binary.target:<6} {use}  {found}")
    assert binary.code.startswith(b"\x7fELF")
    assert binary.resources["spilled"] == 0
    assert binary.shared <= min(vendors.load(profile).scratch_bytes or H200_SHARED, SHARED[binary.target])


PAIRS = [pytest.param(p, target, id=f"{p}-{target}") for p, targets in STAND_INS.items() for target in targets]


@pytest.mark.parametrize(("profile", "target"), PAIRS)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("make", [gated, plain], ids=["gated", "plain"])
def test_gemm(
    make: Callable[..., Launched], block: int, profile: str, target: str, record_property: Callable[[str, object], None]
) -> None:
    """Blocks of 64 rows become wgmma on sm_90, smaller ones mma.sync; nothing spills."""
    for inner in (256, 1024) if profile == "nvidia-h200" else (256,):
        recorded = make(profile, block, inner)
        assert recorded.kernel.__name__.endswith("_kernel")  # the tiles divide: the exact kernel
        binary = compiled(recorded, target)
        check(binary, profile, f"{recorded.kernel.__name__} {block} {inner}", record_property)
        wanted = "mfma" if target == "gfx942" else "wgmma" if target == "sm_90" and block >= 64 else "mma.sync"
        assert set(instructions(binary)) == {wanted}


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("make", [gated, plain], ids=["gated", "plain"])
def test_loads_of_the_h200_are_asynchronous(make: Callable[..., Launched], block: int) -> None:
    """Both operands come by 16-byte cp.async, some steps ahead."""
    binary = compiled(make("nvidia-h200", block, 1024), "sm_90")
    assert copy_sizes(binary) == {16}
    assert {access.size for access in binary.accesses if access.kind == "load"} == {4}  # ids, experts, weights


def test_transposed_weights_are_read_16_bytes_wide() -> None:
    binary = compiled(gated("nvidia-h200", 128, 1024, turned=True), "sm_90")
    assert set(instructions(binary)) == {"wgmma"}
    assert copy_sizes(binary) == {16}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block", [16, 64, 128])
def test_other_dtypes(dtype: torch.dtype, block: int, record_property: Callable[[str, object], None]) -> None:
    """float32 takes no matrix instruction, whose float32 is TF32."""
    for make in (gated, plain):
        binary = compiled(make("nvidia-h200", block, 1024, dtype=dtype), "sm_90")
        check(binary, "nvidia-h200", f"{dtype} {block}", record_property)
        assert bool(instructions(binary)) == (dtype == torch.float16)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_sizes_that_no_tile_divides(block: int, record_property: Callable[[str, object], None]) -> None:
    for make in (gated, plain):
        recorded = make("nvidia-h200", block, 96, hidden=511)
        assert recorded.kernel.__name__.endswith("_masked")
        check(compiled(recorded, "sm_90"), "nvidia-h200", f"odd sizes {block}", record_property)


@pytest.mark.parametrize(("profile", "target"), PAIRS)
@pytest.mark.parametrize("make", [listed, combined], ids=["gated", "combine"])
def test_gemv(
    make: Callable[..., Launched], profile: str, target: str, record_property: Callable[[str, object], None]
) -> None:
    """Weights are read 16 bytes wide, or as wide as a lane's share."""
    for inner in (256, 1024) if profile == "nvidia-h200" else (256,):
        binary = compiled(make(profile, inner), target)
        check(binary, profile, f"{make.__name__} {inner}", record_property)
        if profile == "nvidia-h200":
            (sizes,) = (sizes for name, sizes in binary.widths.items() if name.endswith("load w"))
            assert set(sizes) == {16}


# Masks, each condition once

ROUTED = "routed_row < (num_tokens * top_k)"
EXPERT = {"expert >= 0", "expert < num_experts"}
COLUMN, K = "column < size_n", "k < (size_k - step * block_k)"


def masks(name: str, exact: bool, **flags: Any) -> dict[str, set[str]]:
    branch = OPERATORS[name].kernel.branch(0, vendors.load("nvidia-h200").lowering, {"group": 1}, exact, flags)
    out: dict[str, set[str]] = {}
    for mask in branch.masks:
        assert len(set(mask.texts)) == len(mask.texts)
        out[f"{mask.kind} {mask.parameter}"] = set(mask.texts)
    return out


def test_masks_where_tiles_divide() -> None:
    """Padding and missing experts alone; nothing of columns or steps."""
    assert masks("moe_gemm", True, apply_router_weight=True, biased=True) == {
        "load x": {ROUTED, *EXPERT}, "load w": EXPERT, "load bias": EXPERT, "load weight": {ROUTED, *EXPERT},
        "store out": {ROUTED}, "index sorted_token_ids": set(), "index expert_ids": set(),
    }  # fmt: skip
    assert masks("moe_gemv_gated", True) == {
        "load x": EXPERT, "load w": EXPERT, "store out": set(), "index topk_ids": set(),
    }  # fmt: skip


def test_masks_where_they_do_not() -> None:
    """Steps are masked on both operands."""
    found = masks("moe_gemm", False)
    assert found["load x"] == {ROUTED, *EXPERT, K.replace("(", "").replace(")", "")}
    assert found["load w"] == {*EXPERT, COLUMN, K.replace("(", "").replace(")", "")}
    assert found["store out"] == {ROUTED, COLUMN}
