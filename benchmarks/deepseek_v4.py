"""Times fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert on a GPU, beside a copy in the same run.

    python benchmarks/deepseek_v4.py --json out.json          # the table
    python benchmarks/deepseek_v4.py --sweep --budget 300     # which tiling is best, and by how much

Every size is checked against float64 before it is timed. Sizes up to 2048 tokens are warm graph
replays (no launch cost; data up to the size of the L2 stays in it), larger ones run from a stream
with the L2 flushed. Useful bytes are q read and written, kv read, 584 bytes of cache written, and
a slot, a position and one row of the cos/sin table, each token. The copy is 1 GiB from device to
device, bytes read plus bytes written, before and after; the faster of the two counts. The exit
code is 1 where a size misses its goal, or a tiling of a sweep fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from deepseek_v4 import Case, Inputs, make, run  # noqa: E402

import tilewright  # noqa: E402
from tilewright import ops, vendors  # noqa: E402

GIB = 2**30
REPLAYED = 2048  # tokens up to which a size is timed as graph replays
SIZES = ((1, 64), (17, 64), (128, 64), (512, 64), (2048, 64), (32768, 64), (32768, 128))
# On one NVIDIA H200: at most so many microseconds, at least so many percent of the copy.
MOST_US = {(1, 64): 1.65, (17, 64): 1.95, (128, 64): 4.4, (512, 64): 13.5, (2048, 64): 69.0}
LEAST_PERCENT = {(32768, 64): 97.5, (32768, 128): 98.0}

Config = dict[str, int]


def operator(*arguments: Any, **options: Any) -> None:
    return ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(*arguments, **options)


@dataclass(frozen=True)
class Size:
    """A problem: what it moves, and how it is timed."""

    tokens: int
    heads: int

    @property
    def case(self) -> Case:
        position = max(self.tokens, 4096)
        return Case(self.tokens, self.heads, slots="ordered", spread=0, max_position=position)

    @property
    def small(self) -> Size:
        """A problem that compiles to the same kernel and is quick to check."""
        return Size(min(self.tokens, 512), self.heads)

    @property
    def replayed(self) -> bool:
        return self.tokens <= REPLAYED

    @property
    def useful_bytes(self) -> int:
        q, kv, cache, indices, table = 2 * self.heads * 1024, 1024, 584, 16, 256
        return self.tokens * (q + kv + cache + indices + table)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}"


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call, as the 20th, 50th and 80th percentile."""

    p20_us: float
    p50_us: float
    p80_us: float


def timing(call: Callable[[], Any], replayed: bool, rep_ms: int = 0) -> Timing:
    """Time a call, for `rep_ms` or as long as the protocol says."""
    quantiles = (0.2, 0.5, 0.8)
    if replayed:
        bench = triton.testing.do_bench_cudagraph
        times = bench(call, rep=rep_ms or 40, quantiles=quantiles)
    else:
        times = triton.testing.do_bench(call, warmup=20, rep=rep_ms or 60, quantiles=quantiles)
    return Timing(*(1e3 * ms for ms in times))


def copy_gbps() -> float:
    """1 GiB from device to device, bytes read plus bytes written."""
    source = torch.randint(256, (GIB,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / timing(lambda: target.copy_(source), replayed=False).p50_us / 1e3


def bound(inputs: Inputs, **options: Any) -> Callable[[], None]:
    arguments = inputs.arguments()
    return lambda: operator(*arguments, **options)


def host_us(call: Callable[[], Any], calls: int = 200) -> float:
    """Python's share of a call: the median time until it returns, the queue never full."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        if len(times) % 50 == 0:
            torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


# The table


def measure(size: Size, **options: Any) -> dict[str, Any]:
    """Check a size, then time it."""
    run(operator, make(size.case, "cuda"), **options)
    call = bound(make(size.case, "cuda"), **options)
    timed = timing(call, size.replayed)
    launch = tilewright.last_launch()
    return {
        "tokens": size.tokens,
        "heads": size.heads,
        "protocol": "graph" if size.replayed else "stream",
        **asdict(timed),
        "gbps": size.useful_bytes / timed.p50_us / 1e3,
        "host_us": host_us(call) if size.replayed else None,
        "profile": launch.profile,
        "rule": launch.rule,
        "config": dict(launch.config),
    }


def judge(row: dict[str, Any], copy: float) -> None:
    """Add the share of the copy, and whether the size's goal is met."""
    size = (row["tokens"], row["heads"])
    row["percent_of_copy"] = 100 * row["gbps"] / copy
    if size in MOST_US:
        row["goal"], row["met"] = f"<= {MOST_US[size]} us", row["p50_us"] <= MOST_US[size]
    elif size in LEAST_PERCENT:
        row["goal"] = f">= {LEAST_PERCENT[size]} %"
        row["met"] = row["percent_of_copy"] >= LEAST_PERCENT[size]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print("tokens x heads      p20       p50       p80 us    GB/s  % copy   host us  goal")
    for row in rows:
        host = "-" if row["host_us"] is None else f"{row['host_us']:.1f}"
        goal = f"{row['goal']} {'met' if row['met'] else 'MISSED'}" if "goal" in row else ""
        print(
            f"{row['tokens']:>6} x {row['heads']:<4} {row['p20_us']:9.2f} {row['p50_us']:9.2f} "
            f"{row['p80_us']:9.2f} {row['gbps']:9.0f} {row['percent_of_copy']:7.1f} {host:>9}  "
            f"{goal:<17} rule {row['rule']}: {words(row['config'])}"
        )


def words(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


# The sweep


def candidates(size: Size) -> list[Config]:
    """Tilings worth trying, the most promising first."""
    found = []
    powers = (1, 2, 4, 8)
    for tokens, heads, kv_tokens, warps in itertools.product(powers, repeat=4):
        per_warp = (tokens * heads * 512 / warps, kv_tokens * 512 / warps)
        if size.heads % heads or not all(256 <= elements <= 4096 for elements in per_warp):
            continue
        if max(tokens, kv_tokens) > 2 * size.tokens:
            continue  # more than half of every tile would lie past the end
        # H200, 32768 x 64: 1024 elements a warp on one warp reach 99.1 % of the copy, 512 79.5 %.
        distance = sum(abs(math.log2(elements / 1024)) for elements in per_warp)
        tiles = {"tokens": tokens, "heads": heads, "kv_tokens": kv_tokens}
        config = {**tiles, "num_warps": warps, "num_stages": 1}
        found.append((distance + math.log2(warps), len(found), config))
    return [config for _, _, config in sorted(found, key=lambda entry: entry[:2])]


def prepare(size: Size, config: Config) -> str:
    """Compile a tiling into the cache on disk and check its result; returns what went wrong."""
    try:
        run(operator, make(size.case, "cuda"), config=config)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def prepare_all(sizes: Sequence[Size], deadline: float, jobs: int) -> dict[str, str]:
    """`prepare` every tiling of every size in processes, the promising ones first.

    Returns:
        What went wrong, by `key`; a tiling that the deadline came before is absent.
    """
    ranked = [(rank, size, c) for size in sizes for rank, c in enumerate(candidates(size))]
    wanted = {}
    for _, size, config in sorted(ranked, key=lambda entry: entry[0]):
        wanted.setdefault(key(size, config), (size.small, config))
    done: dict[str, str] = {}
    # Nothing is timed meanwhile: the checks run on the same device.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(prepare, *task): name for name, task in wanted.items()}
        try:
            for future in as_completed(futures, timeout=deadline - time.perf_counter()):
                done[futures[future]] = str(future.exception() or future.result())
        except TimeoutError:
            print(f"out of time: {len(done)} of {len(wanted)} kernels compiled", flush=True)
        pool.shutdown(cancel_futures=True)
    return done


def key(size: Size, config: Config) -> str:
    return f"{size.small}: {words(config)}"


def sweep(size: Size, deadline: float, prepared: dict[str, str]) -> list[dict[str, Any]]:
    """Time the prepared tilings until the deadline, the five best again at length; best first."""
    configs = [config for config in candidates(size) if key(size, config) in prepared]
    rows: list[dict[str, Any]] = []
    inputs = make(size.case, "cuda")

    def time_row(row: dict[str, Any], rep_ms: int) -> None:
        row |= asdict(timing(bound(inputs, config=row["config"]), size.replayed, rep_ms))
        row["gbps"] = size.useful_bytes / row["p50_us"] / 1e3

    for config in configs:
        if time.perf_counter() > deadline:
            break
        row: dict[str, Any] = {"tokens": size.tokens, "heads": size.heads, "config": config}
        if prepared[key(size, config)]:
            row["error"] = prepared[key(size, config)]
        else:
            time_row(row, rep_ms=10)
        rows.append(row)
    failed = [row for row in rows if "error" in row]
    timed = sorted((row for row in rows if "error" not in row), key=lambda row: row["p50_us"])
    for row in timed[:5]:
        time_row(row, rep_ms=0)
    timed.sort(key=lambda row: row["p50_us"])
    print(f"{size}: {len(rows)} of {len(candidates(size))} tilings, {len(failed)} of them failed")
    for row in timed[:10]:
        spread = f"{row['p50_us']:9.2f} us ({row['p20_us']:.2f} to {row['p80_us']:.2f})"
        print(f"  {spread} {row['gbps']:6.0f} GB/s  {words(row['config'])}")
    for row in failed:
        print(f"  FAILED {words(row['config'])}: {row['error'][:300]}")
    sys.stdout.flush()
    return timed + failed


def parse_size(text: str) -> Size:
    tokens, heads = text.lower().split("x")
    return Size(int(tokens), int(heads))


def parse_config(text: str) -> Config:
    names = ("tokens", "heads", "kv_tokens", "num_warps", "num_stages")
    values = [int(value) for value in text.split(",")]
    if len(values) not in (4, 5):
        raise ValueError(text)
    return dict(zip(names, [*values, 1][:5], strict=True))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="times the DeepSeek-V4 operator on a GPU")
    sizes = [Size(*size) for size in SIZES]
    parser.add_argument("--sizes", type=parse_size, nargs="+", default=sizes, metavar="TxH")
    parser.add_argument("--profile", help="a vendor profile other than the detected one")
    tiles = "tokens,heads,kv_tokens,num_warps[,num_stages]"
    parser.add_argument("--config", type=parse_config, metavar=tiles, help="force a tiling")
    parser.add_argument("--sweep", action="store_true", help="try tilings instead of the rules")
    parser.add_argument("--budget", type=float, default=400, help="seconds that a sweep may take")
    parser.add_argument("--jobs", type=int, default=14, help="processes that compile for it")
    parser.add_argument("--json", type=Path, help="write everything here too")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1

    begin = time.perf_counter()
    device = torch.cuda.get_device_properties(0).name
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    report: dict[str, Any] = {"device": device, "profile": vendors.detect(), **versions}
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    first_copy = copy_gbps()
    if options.sweep:
        report["sweep"] = []
        prepared = prepare_all(options.sizes, begin + 0.6 * options.budget, options.jobs)
        print(f"{len(prepared)} kernels after {time.perf_counter() - begin:.0f} s", flush=True)
        for done, size in enumerate(options.sizes):
            now = time.perf_counter()
            share = (begin + options.budget - now) / (len(options.sizes) - done)
            report["sweep"] += sweep(size, now + share, prepared)
        failed = any("error" in row for row in report["sweep"])
    else:
        call_options = {"profile": options.profile, "config": options.config}
        rows = [measure(size, **call_options) for size in options.sizes]
        report["results"] = rows
        failed = False
    copies = (first_copy, copy_gbps())
    report["copy_gbps"] = copies
    print(f"copy of 1 GiB: {copies[0]:.0f} GB/s before, {copies[1]:.0f} after")
    if not options.sweep:
        for row in rows:
            judge(row, max(copies))
        print_table(rows)
        failed = not all(row.get("met", True) for row in rows)
    print(f"{time.perf_counter() - begin:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
