"""Checks fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert on a GPU and prints one line a case.

    python tests/gpu/check_deepseek_v4.py                     # everything
    python tests/gpu/check_deepseek_v4.py --groups q kv       # some groups
    python tests/gpu/check_deepseek_v4.py --match 131072      # the cases whose name has this

Every result is compared with float64 in slices of tokens, bytes and untouched memory exactly, and
called again on equal inputs for equal bits. Beyond the operator's own tensors a case may take
2 GiB. Small cases run in several processes, because compiling is most of their time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from deepseek_v4 import Case, Inputs, check_cache, check_q, check_same, make, run, run_far  # noqa: E402

import tilewright  # noqa: E402
from tilewright import ops, vendors  # noqa: E402

GIB = 2**30
MEMORY = 2 * GIB  # what a case may take beyond the operator's own tensors
SMALL = GIB  # the operator's own bytes up to which a case runs beside others

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


@dataclass(frozen=True)
class Result:
    check: str
    status: str  # PASS, FAIL or SKIP
    seconds: float = 0.0
    extra_gib: float = 0.0
    launch: str = ""
    message: str = ""

    def line(self) -> str:
        took = f"{self.seconds:6.2f} s  +{self.extra_gib:.2f} GiB  {self.launch}"
        text = f"{self.status} {self.check:<66} {took if self.status != 'SKIP' else ''}"
        return text.rstrip() + (f"\n     {self.message}" if self.message else "")


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
    device = torch.device("cuda", 1 if check.kind == "other_device" else 0)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free, needed = torch.cuda.mem_get_info(device)[0] + unused, check.own_bytes() + MEMORY
    if free < needed:
        message = f"needs {needed / GIB:.1f} GiB of device memory, {free / GIB:.1f} GiB free"
        return Result(str(check), "SKIP", message=message)
    if unused and torch.cuda.mem_get_info(device)[0] < needed:
        torch.cuda.empty_cache()
    begin, extra, launch = time.perf_counter(), 0.0, ""
    try:
        inputs = make(check.case, device)
        torch.cuda.synchronize(device)
        own = torch.cuda.memory_allocated(device) + (4 * GIB if check.kind == "far" else 0)
        torch.cuda.reset_peak_memory_stats(device)
        KINDS[check.kind](inputs, check)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - own
        extra = max(0, peak) / GIB
        launch = launched(check)
        if peak > MEMORY:
            raise AssertionError(f"took {extra:.2f} GiB beyond the operator's own tensors")
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return Result(str(check), "FAIL", time.perf_counter() - begin, extra, launch, message)
    return Result(str(check), "PASS", time.perf_counter() - begin, extra, launch)


def launched(check: Check) -> str:
    """What ran last, in words; raises where another profile ran than the one asked for."""
    if check.case.tokens == 0:
        return "nothing to launch"
    launch = tilewright.last_launch()
    expected = check.profile or vendors.detect()
    if launch.profile != expected:
        raise AssertionError(f"profile {launch.profile} ran, not {expected}")
    if check.thresholds == 0 and launch.rule != 0:
        raise AssertionError(f"rule {launch.rule} ran, not the first")
    config = " ".join(f"{name}={value}" for name, value in launch.config.items())
    return f"{launch.profile} rule {launch.rule}: {config}"


def results(checks: list[Check], jobs: int) -> Iterator[Result]:
    """Small cases first, beside each other; then the large ones, one by one."""
    small = [check for check in checks if check.own_bytes() <= SMALL]
    large = [check for check in checks if check.own_bytes() > SMALL]
    if jobs > 1 and len(small) > jobs:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for future in as_completed([pool.submit(run_check, check) for check in small]):
                yield future.result()
    else:
        large = small + large
    for check in large:
        result = run_check(check)
        yield result
        if "CUDA error" in result.message or "Triton Error [CUDA]" in result.message:
            return  # the device is lost to this process


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="checks of the DeepSeek-V4 operator on a GPU")
    checks = list(every_check())
    groups = list(dict.fromkeys(check.group for check in checks))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--match", default="", help="only cases whose name has this in it")
    parser.add_argument("--jobs", type=int, default=8, help="processes for the small cases")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args(None if arguments is None else list(arguments))

    checks = [c for c in checks if c.group in options.groups and options.match in str(c)]
    if options.list:
        print("\n".join(map(str, checks)))
        return 0
    if not checks:
        print("no case selected")
        return 1
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1

    properties, begin = torch.cuda.get_device_properties(0), time.perf_counter()
    print(f"{torch.cuda.device_count()} x {properties.name}, torch {torch.__version__}, ", end="")
    print(f"profile {vendors.detect()}", flush=True)
    done = []
    for result in results(checks, options.jobs):
        done.append(result)
        print(result.line(), flush=True)
    seconds = time.perf_counter() - begin
    count = {status: sum(r.status == status for r in done) for status in ("PASS", "FAIL", "SKIP")}
    for result in done:
        if result.status == "FAIL":
            print(result.line())
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped, ", end="")
    print(f"{len(checks) - len(done)} not run; {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in done], indent=1) + "\n")
    return int(count["FAIL"] > 0 or len(done) < len(checks) or count["PASS"] == 0)


if __name__ == "__main__":
    sys.exit(main())
