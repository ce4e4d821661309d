"""Checks the fused MoE on a GPU and prints one line a case.

    python tests/gpu/check_moe.py                            # everything but the full grid
    python tests/gpu/check_moe.py --groups full              # vLLM's published grid, up to 40,000 tokens
    python tests/gpu/check_moe.py --match swigluoai          # the cases whose name has this

Results are compared with float64: each element within the spread of its roundings (far below
vLLM's 2e-2 at these sizes), the whole by its Frobenius norm, rows that nobody routes exactly, and
equal inputs again for equal bits. What a call allocates is poisoned and lies between guards. Cases
of many tokens compare 512 of them, those at both ends and about 32,768 included. Small cases run
in several processes, because compiling is most of their time.
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
from compare import fingerprint  # noqa: E402
from moe import ACTIVATIONS, FAULTS, IDS, SMALL, Case, Inputs, check, guarded, make, run  # noqa: E402
from runner import Result  # noqa: E402

from tilewright import ops  # noqa: E402
from tilewright.ops.fused_experts_impl import planned  # noqa: E402

PROFILES = ("nvidia-h200", "nvidia-a100", "hygon-bw1000", "metax-c550", "generic")
BLOCKS = (1, 16, 32, 64, 128, 256)
# vLLM's grid: tokens, inner, hidden; and what it crosses them with.
PUBLISHED = ((1, 128, 128), (1, 2048, 128), (33, 2048, 128), (32768, 2048, 511), (40000, 1024, 1024))
LISTED = ((1, 128, 128), (1, 2048, 128), (2, 2048, 128), (2, 2048, 511))
REDUCED = {32768: 222, 40000: 333}  # tokens of the grid's large shapes in its reduced form
COMPARED = 512  # tokens of a large case that are compared


@dataclass(frozen=True)
class Check:
    """A case and how it is called; `kind` names a function of `KINDS`."""

    group: str
    case: Case
    kind: str = "call"
    block: int | None = None
    repeats: int = 1
    profile: str | None = None
    thresholds: int | None = None  # rules of blocks have none to replace

    def options(self) -> dict[str, Any]:
        return {"block_size": self.block, "profile": self.profile}

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors, those included that it allocates and a check casts to float64."""
        case, size = self.case, self.case.dtype.itemsize
        weights = 3 * case.local_experts * case.inner * (case.hidden + case.padding) * size
        routed = case.tokens * case.top_k * (case.hidden + case.inner) * size
        return weights * (3 if self.kind == "turned" else 1) + routed + 2 * case.tokens * case.hidden * size

    def __str__(self) -> str:
        words = [self.group, str(self.case)]
        words += [self.profile] if self.profile else []
        words += [f"block{self.block}"] if self.block else []
        words += [self.kind] if self.kind != "call" else []
        words += [f"{self.repeats}_repeats"] if self.repeats > 1 else []
        return " ".join(words)


# The cases


def every_check() -> Iterator[Check]:
    for case, block in itertools.product((*SMALL, *FAULTS.values()), (None, *BLOCKS)):
        yield Check("small", case, block=block)
    yield from published("reduced", (8, 64), REDUCED)
    yield from published("full", (8, 64, 192), {})
    for (tokens, inner, hidden), experts, top_k in itertools.product(LISTED, (128, 256), (1, 2)):
        yield Check("listed", Case(tokens, experts, top_k, hidden, inner))
    for dtype, activation, block in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), ACTIVATIONS, (1, 16, 64, 128)
    ):
        for more in ({}, {"bias": True, "on_input": True}):
            case = Case(70, 8, 2, 512, 256, dtype=dtype, activation=activation, **more)
            yield Check("dtypes", case, block=block)
    for profile, block in itertools.product(PROFILES, (1, 16, 32, 64)):
        for case in (Case(70, 8, 4, 512, 256), Case(70, 8, 3, 500, 96, bias=True)):
            yield Check("profiles", case, block=block, profile=profile)
    yield from fault_checks()
    yield from large_checks()


def published(group: str, experts: tuple[int, ...], smaller: dict[int, int]) -> Iterator[Check]:
    """vLLM's grid: experts, slots, expert parallelism and padded rows of weights, crossed."""
    for size, e, top_k, ep, padding in itertools.product(PUBLISHED, experts, (2, 6), (1, 4), (0, 128)):
        tokens, inner, hidden = size
        case = Case(smaller.get(tokens, tokens), e, top_k, hidden, inner, parallel=ep, padding=padding)
        yield Check(group, case, "large" if case.tokens > 4096 else "call")


def fault_checks() -> Iterator[Check]:
    """Faults that implementations of this operator have had; the CPU tests tell more of each."""
    for tokens in (1, 8, 17, 300, 2048):
        yield Check("faults", Case(tokens, 64, 8, 1024, 256), "graph")
    for ids in ("half missing", "past", "missing", "first", "duplicates"):
        for tokens in (2, 33, 1000):
            yield Check("faults", Case(tokens, 64, 6, 512, 128, ids=ids))
    for tokens in (1, 40, 2000):
        yield Check("faults", Case(tokens, 64, 8, 2048, 512), repeats=20)
        yield Check("faults", Case(tokens, 32, 4, 512, 256), "turned")
        yield Check("faults", Case(tokens, 32, 4, 512, 256, activation="swigluoai"), "apart")
    if torch.cuda.device_count() > 1:
        for tokens in (2, 33):
            yield Check("faults", Case(tokens, 8, 2, 128, 64), "other_device")


def large_checks() -> Iterator[Check]:
    """No seam past 32,768 tokens, and offsets past 2^31 elements."""
    for tokens in (32767, 32768, 32769, 40000, 65536):
        yield Check("large", Case(tokens, 8, 2, 256, 128), "large")
    yield Check("large", Case(56000, 8, 8, 7168, 128), "large")  # 3.2e9 elements of routed rows
    yield Check("large", Case(64, 512, 8, 4096, 1024), "large")  # 4.3e9 of w1
    yield Check("large", Case(4, 512, 8, 4096, 1024), "large")
    yield Check("large", Case(16, 4, 4, 256, 128, padding=1 << 22), "large")  # rows of weights far apart


# How a case is called


def close(inputs: Inputs, out: torch.Tensor, tokens: torch.Tensor | None = None) -> str:
    """Compares with float64; the error in words."""
    return f"relative error {check(inputs, out, tokens):.1e}"


def call(inputs: Inputs, case: Check) -> str:
    run(ops.fused_experts_impl, inputs, repeats=case.repeats, **case.options())
    return f"block {block_of(case)}"


def large(inputs: Inputs, case: Check) -> str:
    """Some of the tokens, and all of them for equal bits."""
    with guarded():
        out = ops.fused_experts_impl(**inputs.arguments(), **case.options())
    first = fingerprint(out)
    count = case.case.tokens
    ends = [t for t in (0, 1, 32766, 32767, 32768, 32769, count - 2, count - 1) if 0 <= t < count]
    spread = torch.linspace(0, count - 1, min(COMPARED, count), device=out.device).long()
    tokens = torch.cat((torch.tensor(ends, device=out.device), spread)).unique()
    words = close(inputs, out, tokens)
    if not bool(out.isfinite().all()):
        raise AssertionError("out holds what is not finite")
    del out
    if fingerprint(ops.fused_experts_impl(**inputs.arguments(), **case.options())) != first:
        raise AssertionError("a second call on equal inputs gave other bits")
    return f"{words} of {len(tokens)} tokens, block {block_of(case)}"


def graph(inputs: Inputs, case: Check) -> str:
    """Captured once; replayed with the ids of the capture, with others, and with none that is routed."""
    arguments = {**inputs.arguments(), **case.options()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.fused_experts_impl(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = ops.fused_experts_impl(**arguments)
    words = ""
    for seed, ids in enumerate(("distinct", "duplicates", "half missing", "missing", "distinct")):
        random = torch.Generator(out.device).manual_seed(100 + seed)
        inputs.topk_ids.copy_(IDS[ids](case.case, random, out.device))
        out.fill_(torch.nan)
        captured.replay()
        words = close(inputs, out)
        if ids == "missing" and int(torch.count_nonzero(out)):
            raise AssertionError("a replay in which nothing is routed left something")
    return words


def turned(inputs: Inputs, case: Check) -> str:
    """Weights in the layout [experts, k, n]."""
    prepared = ops.prepare_weights(inputs.w1, inputs.w2)
    out = ops.fused_experts_impl(**{**inputs.arguments(), "w1": prepared.w1, "w2": prepared.w2}, **case.options())
    return close(inputs, out)


def apart(inputs: Inputs, case: Check) -> str:
    """The activation as a pass of its own, between two plain GEMMs."""
    tokens, slots, block = case.case.tokens, case.case.top_k, 16
    tables = ops.moe_align_block_size(
        inputs.topk_ids, block, case.case.experts, inputs.expert_map, pad_sorted_ids=True, ignore_invalid_experts=True
    )
    rows = [inputs.hidden_states.new_full((tokens * slots, n), torch.nan) for n in
            (2 * case.case.inner, case.case.inner, case.case.hidden)]  # fmt: skip
    weights = (inputs.topk_weights, *tables)
    ops.moe_gemm(inputs.hidden_states, inputs.w1, inputs.w1_bias, *weights, rows[0], block, False)
    ops.moe_activate(rows[0], rows[1], case.case.activation)
    ops.moe_gemm(rows[1], inputs.w2, inputs.w2_bias, *weights, rows[2], block, True)
    out = torch.full_like(inputs.hidden_states, torch.nan)
    ops.moe_sum(rows[2].view(tokens, slots, -1), out)
    return close(inputs, out)


def block_of(case: Check) -> int:
    c = case.case
    routed = c.tokens * c.top_k // c.local_experts
    return case.block or planned(c.tokens, routed, torch.device("cuda"), case.profile)


KINDS = {"call": call, "large": large, "graph": graph, "turned": turned, "apart": apart, "other_device": call}


def run_check(case: Check) -> Result:
    """A case, judged; never raises."""
    def called(inputs: Inputs, judged: Check) -> str:
        return KINDS[judged.kind](inputs, judged)

    if case.kind == "large":  # what it allocates itself is its own: `far` is what the runner calls that
        far = replace(case, kind="far")
        return runner.judged(far, make, lambda inputs, _: large(inputs, case), far_bytes=2 * case.own_bytes())
    return runner.judged(case, make, called)


def main(arguments: Iterable[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    checks = [c for c in every_check() if c.group != "full" or "full" in given]
    return runner.main("checks of the fused MoE on a GPU", checks, run_check, given)


if __name__ == "__main__":
    sys.exit(main())
