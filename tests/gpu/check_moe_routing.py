"""Checks moe_align_block_size, expert_rows, moe_sum, permute_copy and prepare_weights on a GPU, one line a case.

    python tests/gpu/check_moe_routing.py                      # everything
    python tests/gpu/check_moe_routing.py --groups large       # some groups
    python tests/gpu/check_moe_routing.py --match align        # the cases whose name has this

Tables are compared bit for bit with those of a stable sort, sums with float64, copies bit for bit. What a call of the
first two allocates is poisoned and guarded; calls are repeated for equal bits. Beyond the operator's own tensors a case
may take 2 GiB.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import runner  # noqa: E402
from compare import check_close, fingerprint  # noqa: E402
from moe import check_aligned, guarded  # noqa: E402
from runner import Result  # noqa: E402

from tilewright import ops  # noqa: E402
from tilewright.ops import moe_reference as reference  # noqa: E402
from tilewright.ops.moe_align_block_size import expert_rows  # noqa: E402

PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
SLICE = 1 << 25  # elements that are judged at a time


@dataclass(frozen=True)
class Case:
    """A call: `sizes` are (tokens, top_k, experts, block), (tokens, top_k, columns), or a shape.

    Attributes:
        content: how ids are drawn, how a sum's input lies, or the order of a copy's axes.
        config: pairs of a configuration.
    """

    operator: str
    sizes: tuple[int, ...]
    content: Any = "mixed"
    dtype: torch.dtype = torch.bfloat16
    config: tuple[tuple[str, int], ...] = ()
    mapped: str = ""

    @property
    def tokens(self) -> int:
        return self.sizes[0]

    @property
    def elements(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def result_bytes(self) -> int:
        """What a call returns in a tensor of its own."""
        return self.elements * self.dtype.itemsize if self.operator in ("permute", "prepare") else 0

    @property
    def own_bytes(self) -> int:
        if self.operator in ("align", "rows"):
            tokens, top_k, experts, *_ = self.sizes
            return tokens * top_k * 64 + tokens * top_k * experts // 8
        return self.elements * self.dtype.itemsize + self.result_bytes

    def __str__(self) -> str:
        words = [self.operator, "x".join(map(str, self.sizes)), str(self.content).replace(" ", "")]
        words += [str(self.dtype).removeprefix("torch.")] + ([self.mapped] if self.mapped else [])
        return " ".join([*words, *(f"{name}={value}" for name, value in self.config)])


@dataclass(frozen=True)
class Check:
    group: str
    case: Case
    kind: str = "call"
    profile: str | None = None
    thresholds: int | None = None

    def own_bytes(self) -> int:
        return self.case.own_bytes

    def options(self) -> dict[str, Any]:
        return {"profile": self.profile, **({"config": dict(self.case.config)} if self.case.config else {})}

    def __str__(self) -> str:
        words = [self.group, str(self.case), self.profile or "", self.kind if self.kind != "call" else ""]
        return " ".join(filter(None, words))


# The cases


def every_check() -> Iterator[Check]:
    # Of vLLM's grid, then other numbers of experts, of ids about 128 and 1024, and blocks.
    for top_k, experts, block in itertools.product((1, 2, 16, 32), (32, 160, 256, 257), (32, 128)):
        for tokens in (1, 3, 256, 2256, 4096):
            yield Check("grid", Case("align", (tokens, top_k, experts, block)))
    sizes_of_contents = (
        (1, 1, 1, 1), (43, 3, 33, 16), (127, 1, 5, 3), (341, 3, 1024, 64), (16384, 8, 256, 64), (999, 8, 3, 1),
    )  # fmt: skip
    for sizes in sizes_of_contents:
        for content in ("mixed", "missing", "past", "first", "last", "skewed"):
            yield Check("contents", Case("align", sizes, content))
    for mapped in ("ignored", "renamed", "short", "long"):
        for sizes in ((16, 8, 64, 16), (5000, 8, 64, 16)):
            yield Check("contents", Case("align", sizes, mapped=mapped))
    for content in ("int64", "strided", "transposed", "expanded"):
        for tokens in (60, 5000):
            yield Check("contents", Case("align", (tokens, 8, 160, 64), content))
    for tokens, experts in ((1, 256), (16, 256), (128, 256), (512, 256), (4096, 1024), (0, 8)):
        yield Check("contents", Case("rows", (tokens, 8, experts)))
    for name, value in (("ids", 64), ("ids", 256), ("few", 0), ("few", 8192), ("scan", 1), ("scan", 8), ("scan", 16),
                        ("num_warps", 1), ("num_warps", 4)):  # fmt: skip
        for tokens in (100, 1000, 17000):
            if (name, value) != ("few", 8192) or tokens <= 1000:
                yield Check("configs", Case("align", (tokens, 8, 256, 64), config=((name, value),)))
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for top_k, columns, dtype in itertools.product((2, 6, 8, 17), (128, 511, 1024, 2048, 7168), dtypes):
        yield Check("sums", Case("sum", (222, top_k, columns), "contiguous", dtype))
    for content in ("slots first", "columns first", "sliced", "odd"):
        yield Check("sums", Case("sum", (333, 6, 1024), content))
    yield Check("sums", Case("sum", (0, 8, 64), "contiguous"))
    for dims in itertools.permutations(range(4)):
        yield Check("copies", Case("permute", (9, 34, 130, 66), dims), "far")
    for dtype in (torch.uint8, torch.float32, torch.float64, torch.complex128):
        for dims in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
            yield Check("copies", Case("permute", (7, 1000, 321), dims, dtype), "far")
    yield Check("copies", Case("prepare", (16, 1024, 2048), (0, 2, 1)), "far")
    for profile in PROFILES:
        yield Check("profiles", Case("align", (4100, 8, 256, 64)), profile=profile)
        yield Check("profiles", Case("sum", (1000, 6, 2048), "contiguous"), profile=profile)
        yield Check("profiles", Case("permute", (30, 1000, 520), (0, 2, 1)), "far", profile=profile)
    for tokens in (16, 2048):
        yield Check("graphs", Case("align", (tokens, 8, 256, 64)), "graph")
        yield Check("graphs", Case("rows", (tokens, 8, 256)), "graph")
    if torch.cuda.device_count() > 1:
        yield Check("graphs", Case("align", (16, 8, 256, 64)), "other_device")
        yield Check("graphs", Case("align", (2048, 8, 256, 64)), "other_device")
        yield Check("graphs", Case("sum", (100, 6, 2048), "contiguous"), "other_device")
    # 2^20 ids, and up to 1024 experts; more than 2^31 elements.
    for sizes in ((131072, 8, 256, 64), (131072, 8, 1024, 128), (32768, 32, 257, 16)):
        for content in ("mixed", "first", "missing", "skewed"):
            yield Check("large", Case("align", sizes, content))
    for sizes in ((65536, 10, 4096), (131072, 8, 2048), (131072, 2, 16384)):
        yield Check("large", Case("sum", sizes, "contiguous"))
    yield Check("large", Case("permute", (1088, 1024, 2048), (0, 2, 1)), "far")
    yield Check("large", Case("permute", (1088, 1024, 2048), (1, 0, 2)), "far")
    yield Check("large", Case("permute", (1024, 2048, 2080), (2, 1, 0), torch.uint8), "far")


# Inputs


def make(case: Case, device: torch.device) -> Any:
    random = torch.Generator(device).manual_seed(0)
    if case.operator in ("align", "rows"):
        return ids_of(case, random, device)
    if case.operator == "sum":
        return sum_input(case, random, device)
    size = case.dtype.itemsize
    if case.elements * size < SLICE:
        data = torch.randint(256, (case.elements * size,), generator=random, device=device, dtype=torch.uint8)
    else:
        data = torch.empty(case.elements * size, dtype=torch.uint8, device=device)
        data.view(torch.int64).random_(generator=random) if data.numel() % 8 == 0 else data.random_(generator=random)
    return data.view(case.dtype).view(case.sizes)


def ids_of(case: Case, random: torch.Generator, device: torch.device) -> torch.Tensor:
    tokens, top_k, experts = case.sizes[:3]
    shape = (top_k, tokens) if case.content == "transposed" else (tokens, top_k)
    ids = torch.randint(experts, shape, generator=random, device=device)
    if case.content == "skewed":
        ids = (experts * torch.rand(shape, generator=random, device=device) ** 6).long()
    odd = torch.rand(shape, generator=random, device=device)
    if case.content not in ("first", "last", "skewed"):
        ids = torch.where(odd < 0.03, -1, torch.where(odd < 0.05, experts + 5, ids))
    fixed = {"missing": -1, "past": experts, "first": 0, "last": experts - 1}
    if case.content in fixed:
        ids.fill_(fixed[case.content])
    if case.content == "int64":
        return torch.where(odd > 0.98, ids + 2**32, ids)
    ids = ids.int()
    if case.content == "strided":
        return torch.stack((ids, ids + 1), dim=2)[..., 0]
    if case.content == "expanded":
        return ids[:1].expand(shape)
    return ids.T if case.content == "transposed" else ids


def sum_input(case: Case, random: torch.Generator, device: torch.device) -> torch.Tensor:
    tokens, top_k, columns = case.sizes
    shapes = {"slots first": (top_k, tokens, columns), "columns first": (columns, top_k, tokens),
              "sliced": (tokens, top_k, columns + 24), "odd": (tokens * top_k * columns + 1,)}  # fmt: skip
    x = torch.empty(shapes.get(case.content, case.sizes), dtype=case.dtype, device=device)
    for part in x.view(-1).split(SLICE):
        part.normal_(generator=random)
    if case.content == "odd":
        return x[1:].view(case.sizes)
    orders = {"slots first": (1, 0, 2), "columns first": (2, 1, 0)}
    return x.permute(orders[case.content]) if case.content in orders else x[..., :columns]


# Calls


def call(inputs: torch.Tensor, check: Check) -> str | None:
    return CALLS[check.case.operator](inputs, check)


def align_arguments(ids: torch.Tensor, check: Check) -> tuple[tuple[Any, ...], dict[str, Any]]:
    _, _, experts, block = check.case.sizes
    kind = check.case.mapped
    if not kind:
        return (ids, block, experts), {"return_scatter_idx": True}
    expert_map = torch.arange(experts, device=ids.device, dtype=torch.int32) - experts // 4
    expert_map = torch.where((expert_map >= 0) & (expert_map < experts // 4), expert_map, -1)
    expert_map = {"short": expert_map[: experts // 2].clone(), "long": expert_map.repeat(2)}.get(kind, expert_map)
    options = {"ignore_invalid_experts": kind != "renamed", "pad_sorted_ids": kind == "long"}
    return (ids, block, experts, expert_map), {**options, "return_scatter_idx": True}


def aligned(ids: torch.Tensor, check: Check) -> None:
    """Every table to the bit, five times."""
    arguments, options = align_arguments(ids, check)
    before, first = fingerprint(ids), None
    for _ in range(5):
        with guarded():
            tables = ops.moe_align_block_size(*arguments, **options, **check.options())
        if first is None:
            check_aligned(tables, *arguments, **options)
            first = tables
        for ours, theirs in zip(tables, first, strict=True):
            if not torch.equal(ours, theirs):
                raise AssertionError("a repeated call gave other tables")
    if fingerprint(ids) != before:
        raise AssertionError("the call changed topk_ids")


def rows_of(ids: torch.Tensor, check: Check) -> None:
    with guarded():
        check_rows(ids, check.case.sizes[2], *expert_rows(ids, check.case.sizes[2], **check.options()))


def check_rows(ids: torch.Tensor, experts: int, rows: torch.Tensor, starts: torch.Tensor) -> None:
    local = reference.local_experts(ids.reshape(-1), experts)
    counts = torch.bincount(local[local >= 0], minlength=experts)
    routed = int(counts.sum())
    wanted = torch.where(local >= 0, local, experts).sort(stable=True).indices
    wanted[routed:] = ids.numel()
    if not torch.equal(rows, wanted.int()) or not torch.equal(starts[1:], counts.cumsum(0).int()) or int(starts[0]):
        raise AssertionError(f"rows: {int((rows != wanted).sum())} of {rows.numel()} differ, or the starts do")


def summed(x: torch.Tensor, check: Check) -> str:
    tokens, _, columns = x.shape
    out = torch.full((tokens, columns), torch.nan, dtype=x.dtype, device=x.device)
    ops.moe_sum(x, out, **check.options())
    off, step = 0, max(1, SLICE // max(1, x.shape[1] * columns))
    for start in range(0, tokens, step):
        part, got = x[start : start + step], out[start : start + step]
        exact, total = reference.moe_sum(part), part.abs().sum(1, dtype=torch.float64)
        off += check_close("output", got, exact, ulps=1, floor=total * 2.0**-22, axes="token column",
                           first_axis=torch.arange(start, start + len(part)))  # fmt: skip
    first = fingerprint(out)
    out.fill_(torch.nan)
    ops.moe_sum(x, out, **check.options())
    if fingerprint(out) != first:
        raise AssertionError("a repeated call gave other bits")
    return f"{off} of {out.numel()} one rounding apart"


def permuted(x: torch.Tensor, check: Check) -> None:
    out = ops.permute_copy(x, check.case.content, **check.options())
    check_equal(out, x.permute(check.case.content))


def check_equal(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """The same bits, a slice of the first axis at a time."""
    if out.shape != wanted.shape or not out.is_contiguous():
        raise AssertionError(f"{tuple(out.shape)} of strides {out.stride()}, not {tuple(wanted.shape)} contiguous")
    step = max(1, SLICE * out.shape[0] // max(1, out.numel()))
    for start in range(0, out.shape[0], step):
        ours, theirs = (t[start : start + step].contiguous().reshape(-1) for t in (out, wanted))
        if out.dtype.is_complex:
            ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
        if not torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
            raise AssertionError(f"other bits within [{start}:{start + step}] of the first axis")


def prepared(x: torch.Tensor, check: Check) -> None:
    experts, n, k = x.shape
    w2 = x.reshape(-1)[: experts * k * (n // 2)].view(experts, k, n // 2)
    made = ops.prepare_weights(x, w2, **check.options())
    for ours, given in zip(made, (x, w2), strict=True):
        if ours.stride() != (given[0].numel(), 1, given.shape[1]):
            raise AssertionError(f"strides {ours.stride()}")
        check_equal(ours.contiguous(), given)


CALLS: dict[str, Callable[[Any, Check], str | None]] = {
    "align": aligned, "rows": rows_of, "sum": summed, "permute": permuted, "prepare": prepared,
}  # fmt: skip


def graph(ids: torch.Tensor, check: Check) -> None:
    """Captured once, replayed on other ids."""
    case = check.case
    if case.operator == "align":
        arguments, options = align_arguments(ids, check)
        operator: Callable[..., Any] = lambda: ops.moe_align_block_size(*arguments, **options)  # noqa: E731
    else:
        operator = lambda: expert_rows(ids, case.sizes[2])  # noqa: E731
    operator()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        tables = operator()
    for seed in (1, 2, 3):
        random = torch.Generator(ids.device).manual_seed(seed)
        ids.copy_(ids_of(case, random, ids.device))
        for table in tables:
            table.fill_(-7)
        captured.replay()
        if case.operator == "align":
            check_aligned(tables, *arguments, **options)
        else:
            check_rows(ids, case.sizes[2], *tables)


KINDS: dict[str, Callable[[Any, Check], str | None]] = {
    "call": call, "far": call, "graph": graph, "other_device": call,
}  # fmt: skip


def run_check(check: Check) -> Result:
    """A case, judged; never raises."""
    return runner.judged(check, make, KINDS[check.kind], far_bytes=2 * check.case.result_bytes)


def main(arguments: Iterable[str] | None = None) -> int:
    return runner.main("checks of the routing operators on a GPU", list(every_check()), run_check, arguments)


if __name__ == "__main__":
    sys.exit(main())
