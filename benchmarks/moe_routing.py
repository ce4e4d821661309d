"""Times moe_align_block_size, expert_rows, moe_sum and permute_copy on a GPU, beside a copy in the same run.

    python benchmarks/moe_routing.py --json out.json                     # the table
    python benchmarks/moe_routing.py --sizes align-16384 permute-w1      # some of it
    python benchmarks/moe_routing.py --sweep --budget 300                # which configuration is best

Every problem is checked before it is timed: tables to the bit, sums against float64, copies to the bit. Tables of ids
are graph replays of a call, allocation included, on random distinct experts; sums and copies run from a stream with the
L2 flushed. Useful bytes are what a sum or a copy reads and writes. The copy is 1 GiB from device to device, bytes read
plus bytes written, before and after; the faster of the two counts. --config forces the tiles of copies alone. The exit
code is 1 where a problem misses its goal, or a configuration of a sweep fails.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from compare import check_close  # noqa: E402
from moe import check_aligned  # noqa: E402
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
from tilewright.ops import moe_reference as reference  # noqa: E402
from tilewright.ops.moe_align_block_size import expert_rows  # noqa: E402

TILES = {"sum": ("tokens", "columns"), "permute": ("rows", "columns")}


@dataclass(frozen=True)
class Problem:
    """What is timed.

    Attributes:
        sizes: (tokens, top_k, experts, block), (tokens, top_k, columns), or the shape that `dims` permutes.
        most_us: goal on one NVIDIA H200.
        least_percent: goal on one NVIDIA H200, of the copy.
    """

    name: str
    operator: str
    sizes: tuple[int, ...]
    dims: tuple[int, ...] = ()
    most_us: float | None = None
    least_percent: float | None = None

    @property
    def is_table(self) -> bool:
        return self.operator in ("align", "rows")

    @property
    def useful_bytes(self) -> int:
        if self.is_table:
            return 8 * self.sizes[0] * self.sizes[1]  # ids read, indices written
        count = 2
        for size in self.sizes:
            count *= size
        return 2 * count if self.operator == "permute" else count + count // self.sizes[1]

    def __str__(self) -> str:
        return self.name


def problems() -> list[Problem]:
    made = []
    for tokens in (16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384):
        goal = 22.0 if tokens == 16384 else None
        made.append(Problem(f"align-{tokens}", "align", (tokens, 8, 256, 64), most_us=goal))
    made += [Problem(f"rows-{tokens}", "rows", (tokens, 8, 256)) for tokens in (16, 32, 64, 128, 256, 512)]
    made += [
        Problem("sum-128", "sum", (128, 8, 2048)),
        Problem("sum-2048", "sum", (2048, 8, 2048)),
        Problem("sum-16384", "sum", (16384, 8, 2048), least_percent=95.0),
        Problem("sum-16384x6x7168", "sum", (16384, 6, 7168)),
        Problem("permute-w1", "permute", (256, 1024, 2048), (0, 2, 1), least_percent=85.0),
        Problem("permute-w2", "permute", (256, 2048, 512), (0, 2, 1), least_percent=85.0),
        Problem("permute-heads", "permute", (4096, 32, 8, 128), (1, 0, 2, 3)),
    ]
    return made


def inputs(problem: Problem, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    if problem.is_table:
        tokens, top_k, experts = problem.sizes[:3]
        order = torch.rand((tokens, experts), generator=random, device="cuda")
        return order.argsort(1)[:, :top_k].int().contiguous()
    return torch.randn(problem.sizes, generator=random, device="cuda", dtype=torch.bfloat16)


def bound(problem: Problem, x: torch.Tensor, **options: Any) -> Callable[[], Any]:
    """The call that is timed."""
    if problem.operator == "align":
        return lambda: ops.moe_align_block_size(x, problem.sizes[3], problem.sizes[2], **options)
    if problem.operator == "rows":
        return lambda: expert_rows(x, problem.sizes[2], **options)
    if problem.operator == "permute":
        return lambda: ops.permute_copy(x, problem.dims, **options)
    out = torch.empty((x.shape[0], x.shape[2]), dtype=x.dtype, device="cuda")

    def summed() -> torch.Tensor:
        ops.moe_sum(x, out, **options)
        return out

    return summed


def checked(problem: Problem, **options: Any) -> None:
    """One call on inputs of this problem, right in all of its tables, or in all of its elements."""
    x = inputs(problem, seed=1)
    result = bound(problem, x, **options)()
    if problem.operator == "align":
        check_aligned(result, x, problem.sizes[3], problem.sizes[2])
    elif problem.operator == "rows":
        rows, starts = result
        counts = torch.bincount(x.reshape(-1).long(), minlength=problem.sizes[2])
        assert torch.equal(rows.long(), x.reshape(-1).sort(stable=True).indices)
        assert torch.equal(starts[1:].long(), counts.cumsum(0)) and int(starts[0]) == 0
    elif problem.operator == "permute":
        wanted = x.permute(problem.dims)
        assert result.is_contiguous()
        for start in range(0, len(wanted), 64):
            ours, theirs = (t[start : start + 64].contiguous().view(torch.int16) for t in (result, wanted))
            assert torch.equal(ours, theirs), f"other bits from {start} on"
    else:
        for start in range(0, len(x), 1024):
            part = x[start : start + 1024]
            floor = part.abs().sum(1, dtype=torch.float64) * 2.0**-22
            exact = reference.moe_sum(part)
            check_close("output", result[start : start + 1024], exact, ulps=1, floor=floor, axes="token column")


# The table


def measure(problem: Problem, config: Config | None, profile: str | None) -> Row:
    """Check a problem, then time it."""
    options = {"config": own_config(problem, config), "profile": profile}
    checked(problem, **options)
    call = bound(problem, inputs(problem), **options)
    timed = timing(call, problem.is_table)
    launch = tilewright.last_launch()
    return {
        **asdict(problem),
        "protocol": "graph" if problem.is_table else "stream",
        **timed_row(timed, problem.useful_bytes),
        "host_us": host_us(call) if problem.is_table else None,
        "profile": launch.profile,
        "kernel": launch.kernel,
        "rule": launch.rule,
        "config": dict(launch.config),
    }


def own_config(problem: Problem, config: Config | None) -> Config | None:
    """A forced configuration, for the operators that have its parameters."""
    names = TILES.get(problem.operator, ())
    return config if config and names and set(names) <= set(config) else None


def judge(row: Row, copy: float) -> None:
    """Add the share of the copy, and whether the goal is met."""
    row["percent_of_copy"] = 100 * row["gbps"] / copy
    if row["most_us"] is not None:
        row["met"] = row["p50_us"] <= row["most_us"]
    if row["least_percent"] is not None:
        row["met"] = row["percent_of_copy"] >= row["least_percent"]


def print_table(rows: Sequence[Row]) -> None:
    print("problem                  p20       p50       p80 us    GB/s  % copy  host us  goal")
    for row in rows:
        host = "-" if row["host_us"] is None else f"{row['host_us']:.1f}"
        goal = ""
        if "met" in row:
            wanted = f"<= {row['most_us']} us" if row["most_us"] is not None else f">= {row['least_percent']} %"
            goal = f"{wanted} {'met' if row['met'] else 'MISSED'}"
        print(
            f"{row['name']:<18} {row['p20_us']:9.2f} {row['p50_us']:9.2f} {row['p80_us']:9.2f} {row['gbps']:9.0f} "
            f"{row['percent_of_copy']:7.1f} {host:>8}  {goal:<16} {row['kernel']}: {words(row['config'])}"
        )


# The sweep


def candidates(problem: Problem) -> list[Config]:
    """Configurations worth trying, the most promising first."""
    if problem.is_table:
        few = problem.sizes[0] * problem.sizes[1] <= 4096
        many = [
            {"few": 0, "ids": ids, "scan": scan, "num_warps": warps}
            for ids, scan, warps in itertools.product((128, 64, 256), (4, 2, 1, 8), (8, 4))
        ]
        return [{"few": 8192, "num_warps": warps} for warps in (8, 4, 2) if few] + many
    first, second = TILES[problem.operator]
    if problem.operator == "sum":
        sizes = itertools.product((1, 2), (2048, 1024, 512, 256), (4, 8, 2, 1))
        kept = [s for s in sizes if 64 <= s[0] * s[1] // s[2] <= 1024]
    else:
        sizes = itertools.product((64, 32, 128, 16), (64, 128, 32, 256), (4, 8, 2))
        kept = [s for s in sizes if 512 <= s[0] * s[1] // s[2] <= 4096]
    return [{first: a, second: b, "num_warps": warps, "num_stages": 1} for a, b, warps in kept]


def prepare(problem: Problem, config: Config) -> str:
    """Compile a configuration into the cache on disk and check its result; returns what went wrong."""
    return tried(lambda: checked(problem, config=config))


def prepare_all(chosen: Sequence[Problem], deadline: float, jobs: int) -> dict[str, str]:
    """`prepare` every configuration of every problem in processes, the promising ones first."""
    ranked = [(rank, problem, c) for problem in chosen for rank, c in enumerate(candidates(problem))]
    wanted = {f"{p}: {words(c)}": (p, c) for _, p, c in sorted(ranked, key=lambda entry: entry[0])}
    return in_processes(wanted, prepare, deadline, jobs)


def sweep(problem: Problem, deadline: float, prepared: dict[str, str]) -> list[Row]:
    """Time the prepared configurations until the deadline, the five best again at length; best first."""
    rows: list[Row] = []
    for config in candidates(problem):
        wrong = prepared.get(f"{problem}: {words(config)}")
        if wrong is not None:
            rows.append({"name": problem.name, "config": config, **({"error": wrong} if wrong else {})})
    x = inputs(problem)

    def time_row(row: Row, rep_ms: int) -> None:
        call = bound(problem, x, config=row["config"])
        row |= timed_row(timing(call, problem.is_table, rep_ms), problem.useful_bytes)

    return time_rows(problem.name, rows, time_row, deadline, len(candidates(problem)))


def main(arguments: Iterable[str] | None = None) -> int:
    parser = parser_for("times the routing operators on a GPU", problems(), by_name(problems()), ("rows", "columns"))
    parser.set_defaults(jobs=6)  # processes that hold a gigabyte of weights each
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
