"""Checks fused_qk_norm_rope on a GPU and prints one line a case.

    python tests/gpu/check_qk_norm_rope.py                    # everything
    python tests/gpu/check_qk_norm_rope.py --groups grid      # some groups
    python tests/gpu/check_qk_norm_rope.py --match 65536      # the cases whose name has this

Every result is compared with float64 in slices of rows, untouched memory exactly, and called again
on equal inputs for equal bits; across each call the peak of allocated memory must not change.
Beyond the operator's own tensors a case may take 2 GiB. Small cases run in several processes,
because compiling is most of their time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import runner  # noqa: E402
from qk_norm_rope import FAR, FORCED, Case, Inputs, check_same, make, run, run_far  # noqa: E402
from qk_norm_rope import check as check_heads  # noqa: E402
from qk_norm_rope_grid import cases, config  # noqa: E402
from runner import Result  # noqa: E402

from tilewright import ops  # noqa: E402

SIZED = {1: 1, 7: 127, 8: 1024, 9: 777, 17: 4099}  # tokens of the grid, in the interpreter and here
HEADS = ((16, 8, 8), (32, 8, 8), (64, 8, 8), (96, 8, 8))  # of q, k and v
TOKENS = (1, 17, 128, 1024, 4096, 8192, 65536)
PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
FAR_BYTES = 2 * (2 * FAR + 2 * 8192)  # what `run_far` takes, about


@dataclass(frozen=True)
class Check:
    """A case and how it is called; `kind` names a function of `KINDS`."""

    group: str
    case: Case
    kind: str = "call"
    repeats: int = 1
    profile: str | None = None
    thresholds: int | None = None
    forced: int = -1
    tiling: tuple[int, int, int] | None = None  # tokens, heads, num_warps

    def options(self) -> dict[str, Any]:
        options = {"profile": self.profile, "thresholds": self.thresholds}
        forced = {"forced_token_heads_per_warp": self.forced} if self.forced > 0 else {}
        return {**options, **forced, "config": config(*self.tiling) if self.tiling else None}

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors."""
        return self.case.own_bytes + (FAR_BYTES if self.kind == "far" else 0)

    def __str__(self) -> str:
        words = [self.group, str(self.case)]
        words += [self.profile] if self.profile else []
        words += ["first_rule"] if self.thresholds == 0 else []
        words += [f"forced{self.forced}"] if self.forced > 0 else []
        words += [f"tile{'.'.join(map(str, self.tiling))}"] if self.tiling else []
        words += [self.kind] if self.kind != "call" else []
        words += [f"{self.repeats}_repeats"] if self.repeats > 1 else []
        return " ".join(words)


# The cases


def every_check() -> Iterator[Check]:
    yield from grid_checks()
    for heads, dim, tokens in itertools.product(HEADS, (128, 256), TOKENS):
        yield Check("heads", Case(tokens, heads, dim, cache_dtype=torch.bfloat16))
    for heads, thresholds in itertools.product(HEADS, (None, 0)):
        yield Check("heads", Case(2048, heads, 128, 64, neox=False, dtype=torch.float16), thresholds=thresholds)
    for profile, thresholds, tokens in itertools.product(PROFILES, (None, 0), (777, 4096)):
        for rotary, neox in ((None, True), (96, True), (None, False), (36, False)):
            case = Case(tokens, (16, 8, 8), 128, rotary, neox=neox)
            yield Check("profiles", case, profile=profile, thresholds=thresholds)
    yield from fault_checks()
    yield from large_checks()


def grid_checks() -> Iterator[Check]:
    for case, options, _ in cases():
        tiling, forced = options.get("config"), options.get("forced_token_heads_per_warp", -1)
        sizes = (tiling["tokens"], tiling["heads"], tiling["num_warps"]) if tiling else None
        yield Check("grid", replace(case, tokens=SIZED[case.tokens]), forced=forced, tiling=sizes)


def fault_checks() -> Iterator[Check]:
    """Faults that implementations of this operator have had; the CPU tests tell more of each."""
    # Partial NeoX over several heads a warp, all but the first wrong, NaN at 8.
    for tokens, heads in ((4, (16, 4, 4)), (512, (16, 4, 4)), (64, (96, 8, 8)), (2048, (96, 8, 8))):
        yield Check("faults", Case(tokens, heads, 128, 64), "forced")
    for case in (
        Case(129, (16, 8, 8)),
        Case(129, (5, 3, 1), 128, 96),
        Case(129, (16, 8, 8), 256, neox=False),
        Case(129, (7, 2, 3), 512, 80, dtype=torch.float16, cache_dtype=torch.float16),
        Case(129, (4, 2, 0), 64, 36, neox=False, position_dtype=torch.int32, strided=True),
    ):
        yield Check("faults", case, "forced")
    # A store before the load of the head's other half: different bits from run to run.
    for tokens in (8, 1024):
        yield Check("faults", Case(tokens, (64, 8, 8)), repeats=20, tiling=(1, 8, 8))
        yield Check("faults", Case(tokens, (64, 8, 8), 128, 64), repeats=20, tiling=(4, 8, 8))
    # Each row has its own position.
    for heads, tokens in (((64, 4, 1), (256, 257)), ((12, 1, 1), (1024, 1025))):
        for count in tokens:
            yield Check("faults", Case(count, heads, position_dtype=torch.int32))
    for dtype in (torch.bfloat16, torch.float16):
        yield Check("faults", Case(9, (8, 4, 4), 128, 64, dtype=dtype, content="zeros"))
        yield Check("faults", Case(9, (8, 4, 4), dtype=dtype, content="not finite"))
    yield Check("faults", Case(9, (8, 4, 4), spread=12, eps=1e-2))
    yield Check("faults", Case(0, (16, 8, 8)))
    for tokens in (1, 17, 1024):
        yield Check("faults", Case(tokens, (16, 8, 8)), "graph")
    yield Check("faults", Case(1024, (16, 8, 8), around=(0, 4096)))
    yield Check("faults", Case(1024, (16, 8, 8), around=(3, 2)))
    if torch.cuda.device_count() > 1:
        yield Check("faults", Case(17, (16, 8, 8)), "other_device")


def large_checks() -> Iterator[Check]:
    """More than 2^31 elements: 524,290 rows of 4096 columns, then three rows 2^31 elements apart."""
    for neox in (True, False):
        yield Check("large", Case(524_290, (16, 8, 8), neox=neox, cache_dtype=torch.bfloat16))
    yield Check("large", Case(524_290, (16, 8, 8), 128, 96), forced=8)
    yield Check("large", Case(3, (16, 8, 8)), "far")


# How a case is called


def operator(*arguments: Any, **options: Any) -> None:
    """A call that must allocate nothing."""
    device = arguments[0].device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.max_memory_allocated(device)
    ops.fused_qk_norm_rope(*arguments, **options)
    taken = torch.cuda.max_memory_allocated(device) - before
    if taken:
        raise AssertionError(f"the call raised the peak of allocated memory by {taken} bytes")


def call(inputs: Inputs, check: Check) -> None:
    run(operator, inputs, repeats=check.repeats, **check.options())


def far(inputs: Inputs, check: Check) -> None:
    """The last row begins past 2^31 elements."""
    run_far(operator, inputs, **check.options())


def forced(inputs: Inputs, check: Check) -> str:
    """Right under every forced value; says whether the bits are the same too."""
    first, different = None, 0
    for value in (*FORCED, -1):
        inputs.reset()
        run(operator, inputs, forced_token_heads_per_warp=value, **check.options())
        bits = inputs.memory.view(torch.int16)
        if first is None:
            first = bits.clone()
        different = max(different, int((bits != first).sum()))
    return f"forced values differ in {different} of {first.numel()} elements" if different else "equal bits"


def graph(inputs: Inputs, check: Check) -> None:
    """Captured once, replayed twice, both exact."""
    operator(*inputs.arguments(), **check.options())
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        operator(*inputs.arguments(), **check.options())
    written = []
    for _ in range(2):
        inputs.reset()
        captured.replay()
        check_heads(inputs)
        written.append(inputs.written())
    check_same("the second replay changed", written[1], written[0])


KINDS = {"call": call, "far": far, "forced": forced, "graph": graph, "other_device": call}


def run_check(check: Check) -> Result:
    """A case, judged; never raises."""
    return runner.judged(check, make, KINDS[check.kind], far_bytes=FAR_BYTES)


def main(arguments: Iterable[str] | None = None) -> int:
    return runner.main("checks of fused_qk_norm_rope on a GPU", list(every_check()), run_check, arguments)


if __name__ == "__main__":
    sys.exit(main())
