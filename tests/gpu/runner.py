"""What the checks on a GPU share: how a case is judged, run beside others, and reported."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

import tilewright
from tilewright import vendors

GIB = 2**30
MEMORY = 2 * GIB  # what a case may take beyond the operator's own tensors
SMALL = GIB  # the operator's own bytes up to which a case runs beside others


class Check(Protocol):
    """A case and how it is called; its text is its name."""

    group: str
    case: Any
    kind: str
    profile: str | None
    thresholds: int | None

    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors."""
        ...


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


def judged(
    check: Check, make: Callable[..., Any], call: Callable[[Any, Any], str | None], far_bytes: int = 0
) -> Result:
    """A case, judged; never raises.

    Args:
        check: What is judged.
        make: The inputs of its case on a device.
        call: Calls the operator on them and raises where it is wrong; may return words for the report.
        far_bytes: What a check of the kind "far" has of its own beyond `make`.
    """
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
        own = torch.cuda.memory_allocated(device) + (far_bytes if check.kind == "far" else 0)
        torch.cuda.reset_peak_memory_stats(device)
        words = call(inputs, check)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - own
        extra = max(0, peak) / GIB
        launch = "; ".join(filter(None, (launched(check), words)))
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


def results(checks: Sequence[Any], run_check: Callable[[Any], Result], jobs: int) -> Iterator[Result]:
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


def main(
    description: str,
    checks: Sequence[Any],
    run_check: Callable[[Any], Result],
    arguments: Iterable[str] | None = None,
) -> int:
    """A run over the checks that the options choose: one line a case, and a summary; the exit code."""
    parser = argparse.ArgumentParser(description=description)
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
    for result in results(checks, run_check, options.jobs):
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
