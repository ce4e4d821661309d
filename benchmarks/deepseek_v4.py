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

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from deepseek_v4 import Case, Inputs, make, run  # noqa: E402
from protocol import (  # noqa: E402
    Config,
    Row,
    drive,
    host_us,
    in_processes,
    parser_for,
    time_rows,
    timed_row,
    timing,
    tried,
    words,
)

import tilewright  # noqa: E402
from tilewright import ops  # noqa: E402

REPLAYED = 2048  # tokens up to which a size is timed as graph replays
SIZES = ((1, 64), (17, 64), (128, 64), (512, 64), (2048, 64), (32768, 64), (32768, 128))
# On one NVIDIA H200: at most so many microseconds, at least so many percent of the copy.
MOST_US = {(1, 64): 1.65, (17, 64): 1.95, (128, 64): 4.4, (512, 64): 13.5, (2048, 64): 69.0}
LEAST_PERCENT = {(32768, 64): 97.5, (32768, 128): 98.0}


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


def bound(inputs: Inputs, **options: Any) -> Callable[[], None]:
    arguments = inputs.arguments()
    return lambda: operator(*arguments, **options)


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
    return tried(lambda: run(operator, make(size.case, "cuda"), config=config))


def prepare_all(sizes: Sequence[Size], deadline: float, jobs: int) -> dict[str, str]:
    """`prepare` every tiling of every size in processes, the promising ones first.

    Returns:
        What went wrong, by `key`; a tiling that the deadline came before is absent.
    """
    ranked = [(rank, size, c) for size in sizes for rank, c in enumerate(candidates(size))]
    wanted: dict[str, tuple[Size, Config]] = {}
    for _, size, config in sorted(ranked, key=lambda entry: entry[0]):
        wanted.setdefault(key(size, config), (size.small, config))
    return in_processes(wanted, prepare, deadline, jobs)


def key(size: Size, config: Config) -> str:
    return f"{size.small}: {words(config)}"


def sweep(size: Size, deadline: float, prepared: dict[str, str]) -> list[Row]:
    """Time the prepared tilings until the deadline, the five best again at length; best first."""
    rows: list[Row] = []
    for config in candidates(size):
        wrong = prepared.get(key(size, config))
        if wrong is not None:
            row = {"tokens": size.tokens, "heads": size.heads, "config": config}
            rows.append({**row, "error": wrong} if wrong else row)
    inputs = make(size.case, "cuda")

    def time_row(row: Row, rep_ms: int) -> None:
        timed = timing(bound(inputs, config=row["config"]), size.replayed, rep_ms)
        row |= timed_row(timed, size.useful_bytes)

    return time_rows(str(size), rows, time_row, deadline, len(candidates(size)))


def parse_size(text: str) -> Size:
    tokens, heads = text.lower().split("x")
    return Size(int(tokens), int(heads))


def main(arguments: Iterable[str] | None = None) -> int:
    sizes = [Size(*size) for size in SIZES]
    tiles = ("tokens", "heads", "kv_tokens")
    parser = parser_for("times the DeepSeek-V4 operator on a GPU", sizes, parse_size, tiles)
    options = parser.parse_args(None if arguments is None else list(arguments))
    return drive(
        options,
        options.sizes,
        prepare=lambda deadline: prepare_all(options.sizes, deadline, options.jobs),
        sweep=sweep,
        measure=lambda size: measure(size, profile=options.profile, config=options.config),
        judge=judge,
        print_table=print_table,
    )


if __name__ == "__main__":
    sys.exit(main())
