"""Checks the operators around DeepSeek-V4's fused insert on a GPU and prints one line a case.

    python tests/gpu/check_deepseek_v4_siblings.py                     # everything
    python tests/gpu/check_deepseek_v4_siblings.py --groups flags kv   # some groups
    python tests/gpu/check_deepseek_v4_siblings.py --match 1048576     # the cases whose name has this

Every result is compared with float64 in slices of tokens, bytes and untouched memory exactly, and
called again on equal inputs for equal bits. Codes of rotated values, and all of q's, may be one off
where the exact value lies on a rounding edge; each line says how many are. Beyond the operator's own
tensors a case may take 2 GiB. Small cases run in several processes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import deepseek_v4_siblings as siblings  # noqa: E402
import runner  # noqa: E402
from deepseek_v4 import Case as Problem  # noqa: E402
from deepseek_v4 import check_same  # noqa: E402
from deepseek_v4_siblings import FULL_BF16, FULL_FP8, KV, PADDED, Case, Inputs, Off  # noqa: E402
from runner import GIB, Result  # noqa: E402

from tilewright import vendors  # noqa: E402

FEW = (1, 4, 17, 64)
HEADS = ((1, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32), (8, 64), (64, 64), (64, 128))  # live, padded
PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic", "nvidia-a100", "amd-mi300x")
FAR_BYTES = 9 * GIB  # what `run_far` takes, about, of a cache of 2-byte elements


@dataclass(frozen=True)
class Check:
    """A case and how it is called; `kind` names a function of `KINDS`."""

    group: str
    case: Case
    kind: str = "call"
    repeats: int = 1
    profile: str | None = None
    thresholds: int | None = None

    def options(self) -> dict[str, Any]:
        return {"profile": self.profile, "thresholds": self.thresholds}

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors."""
        return self.case.own_bytes + (FAR_BYTES if self.kind == "far" else 0)

    def __str__(self) -> str:
        words = [self.group, str(self.case)]
        words += [self.profile] if self.profile else []
        words += ["first_rule"] if self.thresholds == 0 else []
        words += [self.kind] if self.kind != "call" else []
        words += [f"{self.repeats}_repeats"] if self.repeats > 1 else []
        return " ".join(words)


# The cases


def sized(tokens: int, heads: int, block_size: int = 64, **more: Any) -> Problem:
    return Problem(tokens, heads, block_size, max_position=max(tokens, 4096), **more)


def every_check() -> Iterator[Check]:
    for tokens, (heads, padded), block_size in itertools.product((*FEW, 2048), HEADS, (16, 64)):
        yield Check("padded", Case(PADDED, sized(tokens, heads, block_size), padded=padded))
    for rows, extra, cache in itertools.product((4, 17), (1, 5), ("packed", "mx")):
        yield Check("padded", Case(PADDED, sized(rows + extra, 8, 16, inserted=rows), cache, 16))
    yield from flag_checks()
    for tokens, cache, block_size in itertools.product((*FEW, 8192), ("packed", "mx", "rows", "e4m3"), (16, 64)):
        yield Check("kv", Case(KV, sized(tokens, 1, block_size), cache))
    for tokens, heads, normed in itertools.product((1, 17, 64, 2048), (8, 17, 64), (True, False)):
        yield Check("full", Case(FULL_BF16, sized(tokens, heads), "rows", normed=normed))
        yield Check("full", Case(FULL_FP8, sized(tokens, heads), "e4m3", normed=normed))
    for profile, thresholds, tokens in itertools.product(PROFILES, (None, 0), (17, 4096)):
        for operator, cache in siblings.cases():
            padded = 24 if operator == PADDED else None
            case = Case(operator, sized(tokens, 16, slots="skipping"), cache, padded)
            yield Check("profiles", on(profile, case), profile=profile, thresholds=thresholds)
    for profile, cache, tokens in itertools.product(PROFILES, ("packed", "mx"), (17, 4096)):
        for dtype in (torch.bfloat16, torch.float16):
            case = Case(PADDED, sized(tokens, 1, dtype=dtype, slots="skipping"), cache, 0)
            yield Check("gather", on(profile, case), "gather", profile=profile)
    yield from fault_checks()
    yield from large_checks()


def flag_checks() -> Iterator[Check]:
    """Every combination, of few heads and of many."""
    for cache, normed, rotated, interleaved in itertools.product(("packed", "mx"), *[(True, False)] * 3):
        for tokens, heads, padded in ((17, 8, 16), (17, 5, 7), (2048, 64, 64)):
            yield Check("flags", Case(PADDED, sized(tokens, heads), cache, padded, normed, rotated, interleaved))
        yield Check("flags", Case(PADDED, sized(512, 8), cache, 0, normed, rotated, interleaved))
    for padded in (0, 8):
        yield Check("flags", Case(PADDED, sized(512, 0), padded=padded))


def fault_checks() -> Iterator[Check]:
    """Faults that implementations of these operators have had; the CPU tests tell more of each."""
    for operator, cache in siblings.cases():
        for content, tokens in (("zeros", 9), ("not finite", 9), ("thresholds", 41), ("every value", 146)):
            for dtype, profile in itertools.product((torch.bfloat16, torch.float16), ("nvidia-h200", "generic")):
                problem = Problem(tokens, 2, 16, dtype=dtype, content=content, spread=2)
                case = Case(operator, problem, cache, normed=False, scale=1.0, q_scale=1.0)
                yield Check("faults", case, profile=profile)
        yield Check("faults", Case(operator, Problem(1024, 8, content="identical"), cache), repeats=10)
        yield Check("faults", Case(operator, sized(77, 8, 48, slots="skipping", strided=True), cache))
        yield Check("faults", Case(operator, Problem(0, 3), cache))
        yield Check("faults", Case(operator, Problem(17, 1, 16), cache), "far")
        for tokens in (1, 512):
            yield Check("faults", Case(operator, sized(tokens, 16), cache), "graph")
    for cache in ("packed", "mx"):
        problem = sized(512, 1, inserted=509)
        yield Check("faults", Case(KV, problem, cache), "wild_positions")
        yield Check("faults", Case(PADDED, problem, cache, 0), "wild_positions")


def large_checks() -> Iterator[Check]:
    """Sizes of the benchmark, and more than 2^31 elements of q."""
    for padded, interleaved in ((64, False), (128, False), (64, True)):
        yield Check("large", Case(PADDED, sized(32768, 64), padded=padded, interleaved=interleaved))
    yield Check("large", Case(PADDED, sized(32768, 64), "mx", 64, False, False, True))
    yield Check("large", Case(PADDED, sized(65536, 128), padded=128))
    yield Check("large", Case(PADDED, sized(131072, 8), padded=64))
    yield Check("large", Case(PADDED, sized(65536, 96), "mx", 128, False, True, True))
    yield Check("large", Case(FULL_BF16, sized(65536, 128), "rows"))
    yield Check("large", Case(FULL_FP8, sized(65536, 128), "e4m3"))
    for cache in ("packed", "mx", "rows", "e4m3"):
        yield Check("large", Case(KV, sized(1 << 20, 1), cache))
    for cache in ("packed", "mx"):
        yield Check("large", Case(PADDED, sized(1 << 20, 1), cache, 0), "gather")


def on(profile: str, case: Case) -> Case:
    """The case with the codes of a profile."""
    return siblings.profile_case(case, vendors.load(profile).lowering["e4m3_format"] == "fnuz")


# How a case is called


def share(off: Off) -> str:
    """How many are not the formula's value or code, of those that need not be."""
    return ", ".join(f"{name} {part} of {whole} off" for name, (part, whole) in off.items() if part)


def call(inputs: Inputs, check: Check) -> str:
    return share(siblings.run(inputs, repeats=check.repeats, **check.options()))


def far(inputs: Inputs, check: Check) -> None:
    """The cache's last block begins past 2^31 elements."""
    siblings.run_far(inputs, **check.options())


def gather(inputs: Inputs, check: Check) -> None:
    """What was inserted is read back, to the bit."""
    inputs.call(**check.options())
    siblings.check_gathered(inputs, inputs.made.slot_mapping, **check.options())
    siblings.check_gathered(inputs, inputs.made.slot_mapping.flip(0)[::2], **check.options())


def wild_positions(inputs: Inputs, check: Check) -> str:
    """Rows without a slot have positions outside the table."""
    inputs.made.slot_mapping[3] = -1
    inputs.made.position_ids[3] = 10**9
    inputs.made.position_ids[509:] = -(10**9)
    return call(inputs, check)


def graph(inputs: Inputs, check: Check) -> None:
    """Captured once, replayed twice, both exact."""
    inputs.call(**check.options())
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        returned = inputs.call(**check.options())
    written = []
    for _ in range(2):
        inputs.reset()
        captured.replay()
        siblings.check(inputs, returned)
        written.append(inputs.written(returned))
    check_same("the second replay changed", written[1], written[0])


KINDS = {"call": call, "far": far, "gather": gather, "graph": graph, "wild_positions": wild_positions}


def make(case: Case, device: torch.device) -> Inputs:
    """The inputs of a case, with room for what the call returns."""
    inputs = siblings.make(case, device)
    if case.operator == PADDED:
        inputs.room = torch.empty(case.tokens * case.q_heads * 1024, dtype=torch.uint8, device=device)
    return inputs


def run_check(check: Check) -> Result:
    """A case, judged; never raises."""
    return runner.judged(check, make, KINDS[check.kind], far_bytes=FAR_BYTES)


def main(arguments: Iterable[str] | None = None) -> int:
    return runner.main("checks of the DeepSeek-V4 siblings on a GPU", list(every_check()), run_check, arguments)


if __name__ == "__main__":
    sys.exit(main())
