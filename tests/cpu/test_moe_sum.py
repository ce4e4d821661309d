"""moe_sum: every layout of its input, and offsets past 2^31 at the sizes where others failed."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import check_close, check_rounding, fingerprint
from compiled import Launched, launched

import tilewright
from tilewright import interpret, ops
from tilewright.launch import OPERATORS
from tilewright.ops import moe_reference as reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")


def guarded_output(tokens: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """An output full of NaN, and the memory that it is the middle of."""
    memory = torch.full((tokens * columns + 128,), torch.nan, dtype=dtype)
    return memory[64 : 64 + tokens * columns].view(tokens, columns), memory


def check(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """A call, checked: each element right to a unit in the last place, and nothing else touched."""
    tokens, _, columns = x.shape
    out, memory = guarded_output(tokens, columns, x.dtype)
    before = fingerprint(x)
    assert ops.moe_sum(x, out, **options) is None
    assert fingerprint(x) == before
    exact, total = reference.moe_sum(x), x.double().abs().sum(1)
    off = check_close("output", out, exact, ulps=1, floor=total * 2.0**-22, axes="token column")
    check_rounding("output", off, out.numel(), share=0.01 if x.dtype != torch.float32 else 1.0)
    assert memory[:64].isnan().all() and memory[64 + out.numel() :].isnan().all()
    return out


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# vLLM's own grid, and slots and columns about powers of two and about a tile
SHAPES = [(m, top_k, k) for m in (1, 33) for top_k in (2, 6, 8) for k in (128, 511, 1024)]
SHAPES += [(3, 1, 256), (2, 3, 255), (2, 5, 257), (1, 9, 2049), (2, 16, 1), (1, 17, 2048), (1, 64, 300), (0, 8, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(normal(*shape, dtype=dtype))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_rule_of_every_profile(profile: str) -> None:
    seen = set()
    for top_k, columns in ((8, 2048), (8, 1536), (10, 2048), (10, 1030), (8, 512), (3, 300)):
        check(normal(3, top_k, columns), profile=profile)
        last = tilewright.last_launch()
        assert last.profile == profile and last.flags == {"padded": top_k & (top_k - 1) != 0}
        divides = columns % last.config["columns"] == 0
        assert last.kernel == ("moe_sum_kernel" if divides else "moe_sum_kernel_masked")
        seen.add(last.rule)
    assert seen == set(range(len(OPERATORS["moe_sum"].kernel.rules(profile).rules)))


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "slots first": lambda: normal(4, 9, 320).transpose(0, 1),
    "columns first": lambda: normal(320, 9, 4).permute(1, 2, 0),
    "every second column": lambda: normal(9, 4, 640)[:, :, ::2],
    "every second slot and token": lambda: normal(18, 8, 320)[::2, 1::2],
    "a row's first columns": lambda: normal(9, 4, 400)[:, :, :320],
    "one token again and again": lambda: normal(1, 4, 320).expand(9, 4, 320),
    "odd address": lambda: normal(9 * 4 * 320 + 1)[1:].view(9, 4, 320),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    x = LAYOUTS[layout]()
    assert tuple(x.shape) == (9, 4, 320)
    out = check(x)
    assert torch.equal(out, check(x.contiguous()))  # the order of the sum is that of the slots, not of memory


def test_one_rounding_from_float32() -> None:
    """Partial sums in bfloat16 would lose every small addend; NaN and infinities stay where they are."""
    x = torch.full((2, 8, 4), 2.0**-9, dtype=torch.bfloat16)
    x[:, 0] = 1.0
    x[1, 3, 1], x[1, 4, 2] = torch.nan, -torch.inf
    out, _ = guarded_output(2, 4, torch.bfloat16)
    ops.moe_sum(x, out)
    assert out[0].tolist() == [1.015625] * 4  # 1 + 7 * 2^-9, to nearest even
    assert out[1].isnan().tolist() == [False, True, False, False] and out[1, 2] == -torch.inf


def test_rows_with_a_nan_do_not_reach_others() -> None:
    """Lanes that only round 5 slots up to 8 read nothing: NaN lies right behind the rows."""
    memory = torch.full((3, 8, 64), torch.nan, dtype=torch.float16)
    x = memory[:, :5]
    x.copy_(normal(3, 5, 64, dtype=torch.float16))
    check(x)


# Fault 38: rows past 2^31 elements. Address space that no memory stands behind, but for what is touched.


def unbacked(elements: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.bfloat16)


def test_fault_38_tokens_far_apart() -> None:
    x = unbacked(2**32 + 4096).as_strided((3, 2, 256), (2**31, 1024, 1))
    x.copy_(normal(3, 2, 256))
    check(x)
    slots = unbacked(2**32 + 4096).as_strided((2, 3, 256), (512, 2**31, 1))
    slots.copy_(normal(2, 3, 256))
    check(slots)
    columns = unbacked(2**32 + 4096).as_strided((2, 2, 33), (2, 1, 2**27))
    columns.copy_(normal(2, 2, 33))
    check(columns)


def last_program(launches: list[Launched]) -> Launched:
    """The launch that holds a grid's last program alone."""
    last = launches[-1]
    *arguments, first = last.arguments  # a grid beyond the device's limit starts at `first_program`
    return replace(last, grid=(1,), arguments=(*arguments, first + last.grid[0] - 1))


@pytest.mark.parametrize(("tokens", "top_k", "columns"), [(65536, 10, 4096), (131072, 8, 2048), (131072, 2, 16384)])
def test_fault_38_the_last_program_of_the_real_shapes(tokens: int, top_k: int, columns: int) -> None:
    assert tokens * max(top_k * columns, 2 * columns) >= 2**31
    x = unbacked(tokens * top_k * columns).view(tokens, top_k, columns)
    out = unbacked(tokens * columns).view(tokens, columns)
    x[-1] = normal(top_k, columns)
    module = OPERATORS["moe_sum"].module("generic", True)
    assert module.LOWERINGS["grid"] == "chunked"
    launch = last_program(launched(module, lambda: module.moe_sum(x, out)))
    with interpret.counting() as counts:
        launch.kernel[launch.grid](*launch.arguments, **launch.keywords)
    tile = counts.bytes_stored // 2
    assert counts.programs == 1 and tile == 256
    exact = reference.moe_sum(x[-1:, :, -tile:])[0]
    check_close("output", out[-1, -tile:], exact, ulps=1, floor=exact.abs() * 2.0**-20, axes="column")
    assert bool((out[-1, :-tile] == 0).all()) and bool((out[0, :tile] == 0).all())
