"""Checks fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert on a GPU and prints one line a case.

    python tests/gpu/check_deepseek_v4.py                     # everything
    python tests/gpu/check_deepseek_v4.py --groups q kv       # some groups
    python tests/gpu/check_deepseek_v4.py --match 131072      # the cases whose name has this

Every result is compared with float64 in slices of tokens, bytes and untouched memory exactly, and
called again on equal inputs for equal bits. Beyond the operator's own tensors a case may take
2 GiB. Small cases run in several processes, because compiling is most of their time.
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

import runner  # noqa: E402
from deepseek_v4 import Case, Inputs, check_cache, check_q, check_same, make, run, run_far  # noqa: E402
from runner import GIB, Result  # noqa: E402

from tilewright import ops  # noqa: E402

FEW = (1, 4, 17, 64)
MANY = (8192, 32768, 65536, 98304, 131072)
EDGES = (511, 512, 777, 1000, 4096)  # around the thresholds of the profiles' rules
PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
WIDE = {"tokens": 8, "heads": 1, "kv_tokens": 8, "num_warps": 4, "num_stages": 1}


@dataclass(frozen=True)
class Check:
    """A case and how it is called; `kind` names a function of `KINDS`."""

    group: str
    case: Case
    kind: str = "call"
    repeats: int = 1
    profile: str | None = None
    thresholds: int | None = None
    wide: bool = False

    def options(self) -> dict[str, Any]:
        options = {"profile": self.profile, "thresholds": self.thresholds}
        return {**options, "config": WIDE if self.wide else None}

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors."""
        return self.case.own_bytes + (4 * GIB if self.kind == "far" else 0)

    def __str__(self) -> str:
        words = [self.group, str(self.case)]
        words += [self.profile] if self.profile else []
        words += ["first_rule"] if self.thresholds == 0 else []
        words += ["wide"] if self.wide else []
        words += [self.kind] if self.kind != "call" else []
        words += [f"{self.repeats}_repeats"] if self.repeats > 1 else []
        return " ".join(words)


# The cases


def sized(tokens: int, heads: int, block_size: int, **more: Any) -> Case:
    return Case(tokens, heads, block_size, max_position=max(tokens, 4096), **more)


def q_cases() -> Iterator[Case]:
    return (sized(tokens, heads, 64) for tokens in FEW for heads in (8, 64))


def kv_cases() -> Iterator[Case]:
    return (sized(tokens, 8, block_size) for tokens in FEW for block_size in (16, 64))


def padding_cases() -> Iterator[Case]:
    """Tokens that are not inserted, after those that are."""
    for tokens, padding, block_size in itertools.product((4, 17), (1, 5), (16, 64)):
        yield sized(tokens + padding, 8, block_size, inserted=tokens)


def both_cases() -> Iterator[Case]:
    for tokens, heads, block_size in itertools.product((*FEW, *MANY), (64, 128), (16, 64)):
        yield sized(tokens, heads, block_size)


def every_check() -> Iterator[Check]:
    groups = {"q": q_cases, "kv": kv_cases, "padding": padding_cases, "both": both_cases}
    for (group, cases), thresholds in itertools.product(groups.items(), (None, 0)):
        for case in cases():
            yield Check(group, case, thresholds=thresholds)
    for profile, thresholds, tokens in itertools.product(PROFILES, (None, 0), EDGES):
        yield Check("profiles", sized(tokens, 64, 64), profile=profile, thresholds=thresholds)
    yield from fault_checks()


def fault_checks() -> Iterator[Check]:
    """Faults that implementations of this operator have had; the CPU tests tell more of each."""
    half = torch.float16
    # Two writers of one address race: identical rows show it best, and only over many calls.
    for content, thresholds in itertools.product(("identical", "normal"), (None, 0)):
        case = sized(1024, 8, 64, content=content)
        yield Check("faults", case, repeats=10, thresholds=thresholds)
    yield Check("faults", Case(17, 8, 16), "far")
    for profile, dtype in itertools.product(PROFILES, (torch.bfloat16, half)):
        for tokens, content in ((9, "not finite"), (9, "zeros"), (41, "thresholds")):
            case = Case(tokens, 8, dtype=dtype, content=content)
            yield Check("faults", case, profile=profile)
        case = Case(146, 1, dtype=dtype, content="every value")
        yield Check("faults", case, profile=profile, wide=True)
    yield Check("faults", Case(19, 1, content="binade"))
    for slots in ("skipping", "skipped", "ordered"):
        yield Check("faults", Case(77, 8, 48, slots=slots, strided=True))
    for tokens, heads in ((0, 64), (7, 1), (64, 3), (777, 64)):
        case = sized(tokens, heads, 16, dtype=half, slots="skipping", block_stride=16 * 584)
        yield Check("faults", case)
    for tokens in (1, 17, 512):
        yield Check("faults", sized(tokens, 64, 64), "graph")
    if torch.cuda.device_count() > 1:
        yield Check("faults", Case(17, 8, 16), "other_device")


# How a case is called


def operator(*arguments: Any, **options: Any) -> None:
    return ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*arguments, **options)


def call(inputs: Inputs, check: Check) -> None:
    run(operator, inputs, repeats=check.repeats, **check.options())


def far(inputs: Inputs, check: Check) -> None:
    """The cache's last block begins past 2^31 bytes."""
    run_far(operator, inputs, **check.options())


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
        check_q(inputs)
        check_cache(inputs)
        written.append(inputs.written())
    check_same("the second replay changed", written[1], written[0])


KINDS = {"call": call, "far": far, "graph": graph, "other_device": call}


def run_check(check: Check) -> Result:
    """A case, judged; never raises."""
    return runner.judged(check, make, KINDS[check.kind], far_bytes=4 * GIB)


def main(arguments: Iterable[str] | None = None) -> int:
    return runner.main("checks of the DeepSeek-V4 operator on a GPU", list(every_check()), run_check, arguments)


if __name__ == "__main__":
    sys.exit(main())
