"""What the benchmarks share: timing, the copy beside it, host time, and joint sweeps of tilings."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from tilewright import vendors

GIB = 2**30

Config = dict[str, int]
Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call, as the 20th, 50th and 80th percentile."""

    p20_us: float
    p50_us: float
    p80_us: float


def timing(
    call: Callable[[], Any], replayed: bool, rep_ms: int = 0, reset: Callable[[], Any] | None = None
) -> Timing:
    """Time a call, for `rep_ms` or as long as the protocol says.

    Args:
        call: What is timed.
        replayed: In warm graph replays, without launch cost; otherwise from a stream, each call with the L2 flushed.
        rep_ms: Milliseconds of calls; 0: 40 of a graph, 60 of a stream.
        reset: Makes a call's inputs new before each graph or call, outside the time. It may only enqueue work.
    """
    quantiles, rep_ms = (0.2, 0.5, 0.8), rep_ms or (40 if replayed else 60)
    if reset is not None:
        times = (_graph_ms if replayed else _stream_ms)(call, rep_ms, reset)
        cuts = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        times = [cuts[1], statistics.median(times), cuts[7]]
    elif replayed:
        times = triton.testing.do_bench_cudagraph(call, rep=rep_ms, quantiles=quantiles)
    else:
        times = triton.testing.do_bench(call, warmup=20, rep=rep_ms, quantiles=quantiles)
    return Timing(*(1e3 * ms for ms in times))


def _graph_ms(call: Callable[[], Any], rep_ms: int, reset: Callable[[], Any]) -> list[float]:
    """As `triton.testing.do_bench_cudagraph`: ten replays of a graph of as many calls as take `rep_ms`."""
    with torch.cuda.stream(torch.cuda.Stream()):
        reset()
        call()
        count = max(1, int(rep_ms / _span_ms(lambda: [call() for _ in range(5)]) * 5))
        reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        times = []
        for _ in range(10):
            reset()
            times.append(_span_ms(graph.replay) / count)
        return times


def _stream_ms(call: Callable[[], Any], rep_ms: int, reset: Callable[[], Any]) -> list[float]:
    """As `triton.testing.do_bench`: one call after another, the L2 flushed before each."""
    driver = triton.runtime.driver.active
    cache = driver.get_empty_cache_for_benchmark()
    reset()
    call()

    def flushed() -> None:
        for _ in range(5):
            driver.clear_cache(cache)
            call()

    estimate = _span_ms(flushed) / 5
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(max(1, int(rep_ms / estimate)))
    ]
    for _ in range(max(1, int(20 / estimate))):
        call()
    for start, end in events:
        reset()
        # About 60 us each on an H200: the device must not wait for Python between the events, 30 to 120 us a call.
        for _ in range(5):
            driver.clear_cache(cache)
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def _span_ms(work: Callable[[], Any]) -> float:
    """Milliseconds of the device from the first to the last thing that `work` enqueues."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return max(start.elapsed_time(end), 1e-3)


def copy_gbps() -> float:
    """1 GiB from device to device, bytes read plus bytes written."""
    source = torch.randint(256, (GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / timing(lambda: target.copy_(source), replayed=False).p50_us / 1e3


def host_us(call: Callable[[], None], calls: int = 200) -> float:
    """Python's share of a call: the median time until it returns, the queue never full."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if len(times) % 50 == 0:
            torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def words(config: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


# A sweep


def tried(work: Callable[[], Any]) -> str:
    """What went wrong with a call on the device, in words; "" if nothing."""
    try:
        work()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def in_processes(
    tasks: Mapping[str, tuple[Any, ...]], prepare: Callable[..., str], deadline: float, jobs: int
) -> dict[str, str]:
    """`prepare(*task)` of every task in processes, the first ones first.

    Returns:
        What went wrong, by name; a task that the deadline came before is absent.
    """
    done: dict[str, str] = {}
    # Nothing is timed meanwhile: the checks run on the same device.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(prepare, *task): name for name, task in tasks.items()}
        try:
            for future in as_completed(futures, timeout=deadline - time.perf_counter()):
                done[futures[future]] = str(future.exception() or future.result())
        except TimeoutError:
            print(f"out of time: {len(done)} of {len(tasks)} kernels compiled", flush=True)
        pool.shutdown(cancel_futures=True)
    return done


def time_rows(
    title: str, rows: Sequence[Row], time_row: Callable[[Row, int], None], deadline: float, candidates: int
) -> list[Row]:
    """Time the rows that have no "error" until the deadline, the five best again at length; best first.

    Args:
        title: What is timed, for the report.
        rows: One a tiling, with its "config"; the most promising first.
        time_row: Adds to a row its `Timing` of so many milliseconds (0: the protocol's) and its "gbps".
        deadline: Of `time.perf_counter`.
        candidates: How many tilings there are, those included that were never compiled.
    """
    seen = []
    for row in rows:
        if time.perf_counter() > deadline:
            break
        if "error" not in row:
            time_row(row, 10)
        seen.append(row)
    failed = [row for row in seen if "error" in row]
    timed = sorted((row for row in seen if "error" not in row), key=lambda row: row["p50_us"])
    for row in timed[:5]:
        time_row(row, 0)
    timed.sort(key=lambda row: row["p50_us"])
    print(f"{title}: {len(seen)} of {candidates} tilings, {len(failed)} of them failed")
    for row in timed[:10]:
        spread = f"{row['p50_us']:9.2f} us ({row['p20_us']:.2f} to {row['p80_us']:.2f})"
        print(f"  {spread} {row['gbps']:6.0f} GB/s  {words(row['config'])}")
    for row in failed:
        print(f"  FAILED {words(row['config'])}: {row['error'][:300]}")
    sys.stdout.flush()
    return timed + failed


# A run


def by_name(problems: Sequence[Any]) -> Callable[[str], Any]:
    """What reads the name of one of `problems` on a command line."""
    found = {problem.name: problem for problem in problems}

    def parse(name: str) -> Any:
        if name not in found:
            raise argparse.ArgumentTypeError(f"{name}: choose among {', '.join(found)}")
        return found[name]

    return parse


def parser_for(description: str, sizes: Sequence[Any], parse_size: Callable[[str], Any], tiles: Sequence[str]) -> Any:
    """The options that every benchmark has."""

    def parse_config(text: str) -> Config:
        values = [int(value) for value in text.split(",")]
        if len(values) not in (len(tiles) + 1, len(tiles) + 2):
            raise ValueError(text)
        names = (*tiles, "num_warps", "num_stages")
        return dict(zip(names, [*values, 1][: len(names)], strict=True))

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, metavar="TxH")
    parser.add_argument("--profile", help="a vendor profile other than the detected one")
    names = f"{','.join(tiles)},num_warps[,num_stages]"
    parser.add_argument("--config", type=parse_config, metavar=names, help="force a tiling")
    parser.add_argument("--sweep", action="store_true", help="try tilings instead of the rules")
    parser.add_argument("--budget", type=float, default=400, help="seconds that a sweep may take")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile for it")
    parser.add_argument("--json", type=Path, help="write everything here too")
    return parser


def described() -> Row:
    """The device and the versions that a report is about; also printed."""
    device = torch.cuda.get_device_properties(0).name
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    return {"device": device, "profile": vendors.detect(), **versions}


def between_copies(report: Row, work: Callable[[], None]) -> float:
    """Run `work` between two timings of the copy; the faster of the two, in GB/s."""
    first = copy_gbps()
    work()
    copies = (first, copy_gbps())
    report["copy_gbps"] = copies
    print(f"copy of 1 GiB: {copies[0]:.0f} GB/s before, {copies[1]:.0f} after")
    return max(copies)


def write(report: Row, path: Path | None) -> None:
    """As JSON, a row of a table on a line."""
    if path is None:
        return
    parts = []
    for name, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        parts.append(f"{json.dumps(name)}: {text}")
    path.write_text("{" + ",\n ".join(parts) + "}\n")


def drive(
    options: argparse.Namespace,
    problems: Sequence[Any],
    prepare: Callable[[float], Mapping[Any, Any]],
    sweep: Callable[[Any, float, Any], Sequence[Row]],
    measure: Callable[[Any], Row],
    judge: Callable[[Row, float], None],
    print_table: Callable[[list[Row]], None],
) -> int:
    """Sweep or measure between two timings of the copy, report, and return the exit status: 1 for a miss or no GPU.

    `prepare` compiles for a sweep until a deadline; `sweep` takes one of `problems`, a deadline and what `prepare`
    gave; `measure` takes one of the sizes asked for. Deadlines are times of `time.perf_counter`, in seconds.
    """
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1
    begin, report = time.perf_counter(), described()
    rows: list[Row] = []

    def swept() -> None:
        prepared = prepare(begin + 0.6 * options.budget)
        print(f"{len(prepared)} kernels after {time.perf_counter() - begin:.0f} s", flush=True)
        for done, problem in enumerate(problems):
            now = time.perf_counter()
            share = (begin + options.budget - now) / (len(problems) - done)
            rows.extend(sweep(problem, now + share, prepared))

    def measured() -> None:
        rows.extend(measure(size) for size in options.sizes)

    report["sweep" if options.sweep else "results"] = rows
    copy = between_copies(report, swept if options.sweep else measured)
    if options.sweep:
        failed = any("error" in row for row in rows)
    else:
        for row in rows:
            judge(row, copy)
        print_table(rows)
        failed = not all(row.get("met", True) for row in rows)
    print(f"{time.perf_counter() - begin:.0f} s")
    write(report, options.json)
    return int(failed)


def timed_row(timed: Timing, useful_bytes: int) -> Row:
    """A timing's columns, with the useful bytes of a second."""
    return {**asdict(timed), "gbps": useful_bytes / timed.p50_us / 1e3}
