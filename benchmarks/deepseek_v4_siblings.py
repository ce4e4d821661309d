"""Times the operators around DeepSeek-V4's fused insert on a GPU, beside a copy in the same run.

    python benchmarks/deepseek_v4_siblings.py --json out.json                      # the table
    python benchmarks/deepseek_v4_siblings.py --sizes kv kv-mx                     # some of it
    python benchmarks/deepseek_v4_siblings.py --sweep --sizes interleaved kv --budget 300

Every problem is checked against float64 before it is timed, on fewer tokens where it has many. Sizes up to 2048 tokens
are warm graph replays, larger ones run from a stream with the L2 flushed. Useful bytes are all of q, kv and cache rows
that is read or written, and a slot, a position and one row of the cos/sin table, each token; what the padded contract
returns is allocated outside the time, by torch's caching allocator. The copy is 1 GiB from device to device, bytes read
plus bytes written, before and after; the faster of the two counts. The exit code is 1 where a problem misses its goal,
or a tiling of a sweep fails.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import deepseek_v4_siblings as siblings  # noqa: E402
from deepseek_v4 import Case as Problem  # noqa: E402
from deepseek_v4_siblings import FULL_BF16, FULL_FP8, GATHER, KV, PADDED, Case  # noqa: E402
from protocol import (  # noqa: E402
    Config,
    Row,
    by_name,
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

REPLAYED = 2048  # tokens up to which a problem is timed as graph replays
ROW = {"packed": 584, "mx": 528, "rows": 1024, "e4m3": 512}  # bytes of a cache row
PADDED_GOAL, Q_GOAL, KV_GOAL = 100 / 1.05, 96.0, 85.0  # percent of the copy on one NVIDIA H200


@dataclass(frozen=True)
class Timed:
    """A problem: what it moves, how it is timed, and its goal in percent of the copy."""

    name: str
    operator: str
    tokens: int
    heads: int = 64
    cache: str = "packed"
    padded: int | None = None
    flags: tuple[bool, bool, bool] = (True, True, False)  # norm, rotation, interleaved
    goal: float | None = None

    @property
    def case(self) -> Case:
        position = max(self.tokens, 4096)
        problem = Problem(self.tokens, self.heads, slots="ordered", spread=0, max_position=position)
        operator = PADDED if self.operator == GATHER else self.operator
        return Case(operator, problem, self.cache, self.padded, *self.flags)

    @property
    def small(self) -> Timed:
        """A problem that compiles to the same kernels and is quick to check."""
        return replace(self, tokens=min(self.tokens, 2048))

    @property
    def has_q(self) -> bool:
        return self.operator not in (KV, GATHER) and self.padded != 0

    @property
    def replayed(self) -> bool:
        return self.tokens <= REPLAYED

    @property
    def useful_bytes(self) -> int:
        row, head, index = ROW[self.cache], 1024, 16 + 256
        if self.operator == GATHER:
            return self.tokens * (row + head + 8)
        padded = self.heads if self.padded is None else self.padded
        q = {PADDED: self.heads + padded if padded else 0, FULL_BF16: 2 * self.heads, FULL_FP8: 1.5 * self.heads}
        return int(self.tokens * (q.get(self.operator, 0) * head + head + row + index))

    def __str__(self) -> str:
        return f"{self.name} {self.tokens}x{self.heads}"


def named(name: str, cache: str, flags: Sequence[bool]) -> str:
    """`padded-mx-unnormed`: what is not the plain choice."""
    normed, rotated, interleaved = flags
    words = {"mx": cache == "mx", "unnormed": not normed, "unrotated": not rotated, "interleaved": interleaved}
    return "-".join([name, *(word for word, said in words.items() if said)])


def problems() -> list[Timed]:
    """What is timed: the goals' sizes, and small ones for the record."""
    large, rows, copy = 32768, 1 << 20, (False, False, True)
    made = [
        *(
            Timed(named("padded", cache, flags), PADDED, large, cache=cache, flags=tuple(flags), goal=PADDED_GOAL)
            for *flags, cache in itertools.product((True, False), (True, False), (False, True), ("packed", "mx"))
        ),
        Timed("padded-to-128", PADDED, large, padded=128, goal=PADDED_GOAL),
        Timed("padded-8-to-64", PADDED, large, 8, padded=64, goal=PADDED_GOAL),
        Timed("copied-8-to-64", PADDED, large, 8, cache="mx", padded=64, flags=copy, goal=PADDED_GOAL),
        Timed("full-bf16", FULL_BF16, large, cache="rows", goal=Q_GOAL),
        Timed("full-bf16-unnormed", FULL_BF16, large, cache="rows", flags=(False, True, False), goal=Q_GOAL),
        Timed("full-fp8", FULL_FP8, large, cache="e4m3", goal=Q_GOAL),
        Timed("kv", KV, rows, 1, goal=KV_GOAL),
        Timed("kv-mx", KV, rows, 1, cache="mx", goal=KV_GOAL),
        Timed("kv-rows", KV, rows, 1, cache="rows", goal=KV_GOAL),
        Timed("kv-e4m3", KV, rows, 1, cache="e4m3", goal=KV_GOAL),
        Timed("padded-kv", PADDED, rows, 1, padded=0, goal=KV_GOAL),
        Timed("gather", GATHER, rows, 1, padded=0),
        Timed("gather-mx", GATHER, rows, 1, cache="mx", padded=0),
    ]
    for tokens in (1, 17, 128, 512, 2048):
        made += [
            Timed(f"padded-{tokens}", PADDED, tokens),
            Timed(f"copied-{tokens}", PADDED, tokens, cache="mx", flags=copy),
            Timed(f"kv-{tokens}", KV, tokens, 1),
        ]
    return made


def bound(problem: Timed, **options: Any) -> Callable[[], Any]:
    """The call that is timed, its inputs ready."""
    inputs = siblings.make(problem.case, "cuda")
    if problem.operator == GATHER:
        inputs.call()
        slots, cache, is_mx = inputs.made.slot_mapping, inputs.k_cache, problem.cache == "mx"
        out = torch.empty((problem.tokens, 512), dtype=torch.bfloat16, device="cuda")
        operator = getattr(ops, GATHER)
        return lambda: operator(out, cache, slots, problem.case.problem.block_size, is_mx, **options)
    return lambda: inputs.call(**options)


def checked(problem: Timed, **options: Any) -> None:
    inputs = siblings.make(problem.small.case, "cuda")
    if problem.operator == GATHER:
        inputs.call()
        siblings.check_gathered(inputs, inputs.made.slot_mapping, **options)
    else:
        siblings.run(inputs, **options)


# The table


def measure(problem: Timed, config: Config | None, profile: str | None) -> Row:
    """Check a problem, then time it."""
    options = {"config": own_tiles(problem, config), "profile": profile}
    checked(problem, **options)
    call = bound(problem, **options)
    timed = timing(call, problem.replayed)
    launch = tilewright.last_launch()
    return {
        **asdict(problem),
        "protocol": "graph" if problem.replayed else "stream",
        **timed_row(timed, problem.useful_bytes),
        "host_us": host_us(call) if problem.replayed else None,
        "profile": launch.profile,
        "rule": launch.rule,
        "config": dict(launch.config),
    }


def own_tiles(problem: Timed, config: Config | None) -> Config | None:
    """A forced tiling without what an operator on rows alone does not have."""
    if config is None or problem.operator not in (KV, GATHER):
        return config
    return {name: value for name, value in config.items() if name not in ("tokens", "heads")}


def judge(row: Row, copy: float) -> None:
    """Add the share of the copy, and whether the goal is met."""
    row["percent_of_copy"] = 100 * row["gbps"] / copy
    if row["goal"] is not None:
        row["met"] = row["percent_of_copy"] >= row["goal"]


def print_table(rows: Sequence[Row]) -> None:
    print("problem               tokens x heads      p20       p50       p80 us    GB/s  % copy  host us  goal")
    for row in rows:
        host = "-" if row["host_us"] is None else f"{row['host_us']:.1f}"
        goal = "" if row["goal"] is None else f">= {row['goal']:.1f} % {'met' if row['met'] else 'MISSED'}"
        print(
            f"{row['name']:<20} {row['tokens']:>7} x {row['heads']:<4} {row['p20_us']:9.2f} {row['p50_us']:9.2f} "
            f"{row['p80_us']:9.2f} {row['gbps']:9.0f} {row['percent_of_copy']:7.1f} {host:>8}  "
            f"{goal:<16} rule {row['rule']}: {words(row['config'])}"
        )


# The sweep


def candidates(problem: Timed) -> list[Config]:
    """Tilings worth trying, the most promising first."""
    found = []
    powers = (1, 2, 4, 8)
    for tokens, heads, kv_tokens, warps in itertools.product(powers, (*powers, 16), powers, powers):
        per_warp = [kv_tokens * 512 / warps] + ([tokens * heads * 512 / warps] if problem.has_q else [])
        if not problem.has_q and (tokens, heads) != (1, 1):
            continue
        if problem.heads % heads or not all(256 <= elements <= 4096 for elements in per_warp):
            continue
        if problem.has_q and kv_tokens > 4 * tokens:  # kv rows are few beside the heads
            continue
        distance = sum(abs(math.log2(elements / 1024)) for elements in per_warp)
        config = {"tokens": tokens, "heads": heads, "kv_tokens": kv_tokens, "num_warps": warps, "num_stages": 1}
        found.append((distance + math.log2(warps), len(found), own_tiles(problem, config)))
    return [config for _, _, config in sorted(found, key=lambda entry: entry[:2])]


def prepare(problem: Timed, config: Config) -> str:
    """Compile a tiling into the cache on disk and check its result; returns what went wrong."""
    return tried(lambda: checked(problem, config=config))


def key(problem: Timed, config: Config) -> str:
    return f"{problem.name}: {words(config)}"


def prepare_all(chosen: Sequence[Timed], deadline: float, jobs: int) -> dict[str, str]:
    """`prepare` every tiling of every problem in processes, the promising ones first."""
    ranked = [(rank, problem, c) for problem in chosen for rank, c in enumerate(candidates(problem))]
    wanted = {key(p, config): (p, config) for _, p, config in sorted(ranked, key=lambda entry: entry[0])}
    return in_processes(wanted, prepare, deadline, jobs)


def sweep(problem: Timed, deadline: float, prepared: dict[str, str]) -> list[Row]:
    """Time the prepared tilings until the deadline, the five best again at length; best first."""
    rows: list[Row] = []
    for config in candidates(problem):
        wrong = prepared.get(key(problem, config))
        if wrong is not None:
            row = {"name": problem.name, "tokens": problem.tokens, "heads": problem.heads, "config": config}
            rows.append({**row, "error": wrong} if wrong else row)
    inputs = siblings.make(problem.case, "cuda") if problem.operator != GATHER else None

    def time_row(row: Row, rep_ms: int) -> None:
        if inputs is None:
            call = bound(problem, config=row["config"])
        else:
            call = lambda: inputs.call(config=row["config"])  # noqa: E731
        row |= timed_row(timing(call, problem.replayed, rep_ms), problem.useful_bytes)

    return time_rows(str(problem), rows, time_row, deadline, len(candidates(problem)))


def main(arguments: Iterable[str] | None = None) -> int:
    tiles = ("tokens", "heads", "kv_tokens")
    parser = parser_for("times the DeepSeek-V4 siblings on a GPU", problems(), by_name(problems()), tiles)
    options = parser.parse_args(None if arguments is None else list(arguments))
    return drive(
        options,
        options.sizes,
        prepare=lambda deadline: prepare_all(options.sizes, deadline, options.jobs),
        sweep=sweep,
        measure=lambda problem: measure(problem, options.config, options.profile),
        judge=judge,
        print_table=print_table,
    )


if __name__ == "__main__":
    sys.exit(main())
