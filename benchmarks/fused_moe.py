"""Times the fused MoE on a GPU, beside its floor and beside a plain pipeline of the same texts, in the same run.

    python benchmarks/fused_moe.py --json out.json             # the table of 16 shapes
    python benchmarks/fused_moe.py --report --json out.json    # the 24 shapes of a published report, ten times
    python benchmarks/fused_moe.py --sweep --budget 500        # which tiling of each product is best

bfloat16, 256 experts, top 8, hidden 2048, silu; a size is tokens x 2I. Everything is a graph replay of
many copies of the whole operator, so without launch cost. Ids are drawn afresh, distinct in a row, and
three times over; up to 16 tokens eight draws take turns, so that their weights do not sit in the L2.
Results are compared with float64 before they are timed: some tokens, all parts.

The floor is the larger of (weights of the experts that are hit, once, the input and the output, at
4.23 TB/s) and (the products at 790 TFLOP/s). A read alone runs up to 5 % faster than that. The plain
pipeline is our alignment (none up to 8 tokens: a routed row a block), GEMM, activation, GEMM and sum as
passes of their own, with the public tilings for this device; of several, the fastest. A ratio is the
median over the draws of plain over fused. The exit code is 1 where a size misses a goal.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from moe import IDS, Case, Inputs, check, make  # noqa: E402
from protocol import Row, Timing, described, drive, in_processes, parser_for, timing, tried, words, write  # noqa: E402

from tilewright import ops  # noqa: E402
from tilewright.ops.fused_experts_impl import planned  # noqa: E402
from tilewright.ops.moe_reference import exact_experts  # noqa: E402

EXPERTS, TOP_K, HIDDEN = 256, 8, 2048
DEVICE = torch.device("cuda")
BANDWIDTH, FLOPS = 4.23e12, 790e12  # bytes and operations a second
DRAWS, ROTATED, ROTATED_UP_TO = 3, 8, 16
LISTED_UP_TO = 8  # tokens up to which the plain pipeline has no alignment
# Percent of the floor to reach at least, by 2I and tokens.
GOALS = {
    512: {1: 56, 8: 86, 32: 90, 128: 94, 512: 86, 2048: 68, 8192: 44, 16384: 50},
    2048: {1: 84, 8: 93, 32: 100, 128: 101, 512: 96, 2048: 84, 8192: 57, 16384: 64},
}
LEAST_RATIO, LEAST_MEAN = 0.98, 1.15
MOST_PLAIN_ERROR = 1e-2
REPORT = (1, 8, 32, 128, 512, 1036, 2048, 4108, 4435, 13421, 13422, 16384)
# Public tilings of the plain GEMM on this device, by the tokens from which they are tried: rows of a block, then
# columns, block_k, group, num_warps, num_stages.
PLAIN = (
    (2049, ((128, 256, 64, 16, 8, 4),)),
    (2048, ((64, 128, 64, 16, 8, 3), (128, 256, 64, 16, 8, 4))),
    (512, ((32, 64, 64, 1, 4, 3), (32, 128, 64, 1, 4, 3), (64, 128, 64, 16, 8, 3))),
    (32, ((16, 64, 128, 1, 4, 3), (16, 64, 128, 1, 4, 4))),
    (8, ((16, 64, 64, 1, 4, 3),)),
    (1, ((16, 32, 256, 1, 4, 3), (16, 32, 64, 1, 4, 5))),
)
TILES = ("columns", "block_k", "group", "num_warps", "num_stages")

Call = Callable[[], Any]


@dataclass(frozen=True)
class Size:
    tokens: int
    columns: int  # 2I

    @property
    def case(self) -> Case:
        return Case(self.tokens, EXPERTS, TOP_K, HIDDEN, self.columns // 2)

    @property
    def sets(self) -> int:
        """Draws of ids that take turns in a timing."""
        return ROTATED if self.tokens <= ROTATED_UP_TO else 1

    def floor_us(self, hit: float) -> float:
        weights = hit * 3 * self.columns // 2 * HIDDEN * 2
        moved = weights + 2 * self.tokens * HIDDEN * 2
        operations = 2 * self.tokens * TOP_K * 3 * self.columns // 2 * HIDDEN
        return 1e6 * max(moved / BANDWIDTH, operations / FLOPS)

    def __str__(self) -> str:
        return f"{self.tokens}x{self.columns}"


def parse_size(text: str) -> Size:
    tokens, columns = text.split("x")
    return Size(int(tokens), int(columns))


class Problem:
    """A size's inputs on the device, and draws of ids for them."""

    def __init__(self, size: Size):
        self.size = size
        self.inputs: Inputs = inputs_of(size)
        self.random = torch.Generator(DEVICE).manual_seed(size.tokens)

    def draw(self) -> list[torch.Tensor]:
        return [IDS["distinct"](self.size.case, self.random, DEVICE).int()
                for _ in range(self.size.sets)]  # fmt: skip

    def arguments(self, ids: torch.Tensor) -> dict[str, Any]:
        return {**self.inputs.arguments(), "topk_ids": ids}


@functools.lru_cache(maxsize=2)
def weights_of(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = make(Case(1, EXPERTS, TOP_K, HIDDEN, columns // 2), DEVICE)
    return inputs.w1, inputs.w2


def inputs_of(size: Size) -> Inputs:
    """As the tests make them, with weights that all sizes of a 2I share."""
    inputs = make(Case(size.tokens, 1, 1, HIDDEN, 16), DEVICE)
    w1, w2 = weights_of(size.columns)
    shape = (size.tokens, TOP_K)
    weights = torch.rand(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)) + 0.25
    ids = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    return Inputs(size.case, inputs.hidden_states, w1, w2, weights, ids, None, None, None, {})


# The pipelines


def fused(problem: Problem, ids: torch.Tensor) -> torch.Tensor:
    return ops.fused_experts_impl(**problem.arguments(ids))


def tables_of(ids: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    return ops.moe_align_block_size(ids, block, EXPERTS, pad_sorted_ids=True, ignore_invalid_experts=True)


def rows_as_listed(ids: torch.Tensor, block: int) -> tuple[torch.Tensor, ...]:
    """Tables with a block for each routed row, of which only the first row is one."""
    numel = ids.numel()
    rows = torch.full((numel, block), numel, dtype=torch.int32, device=ids.device)
    rows[:, 0] = torch.arange(numel, dtype=torch.int32, device=ids.device)
    count = torch.full((1,), numel * block, dtype=torch.int32, device=ids.device)
    return rows.view(-1), ids.reshape(-1).contiguous(), count


def plain(problem: Problem, ids: torch.Tensor, tiling: Sequence[int], listed: tuple[torch.Tensor, ...] | None) -> Any:
    """Alignment, GEMM, activation, GEMM and sum."""
    inputs, size = problem.inputs, problem.size
    block, config = tiling[0], dict(zip(TILES, tiling[1:], strict=True))
    tables = (inputs.topk_weights, *(listed or tables_of(ids, block)))
    new, numel = inputs.hidden_states.new_empty, ids.numel()
    gate_up, product, routed = new((numel, size.columns)), new((numel, size.columns // 2)), new((numel, HIDDEN))
    out = torch.empty_like(inputs.hidden_states)
    ops.moe_gemm(inputs.hidden_states, inputs.w1, None, *tables, gate_up, block, False, config=config)
    ops.moe_activate(gate_up, product, "silu")
    ops.moe_gemm(product, inputs.w2, None, *tables, routed, block, True, config=config)
    ops.moe_sum(routed.view(size.tokens, TOP_K, HIDDEN), out)
    return out


def plain_tilings(tokens: int) -> tuple[tuple[int, ...], ...]:
    return next(tilings for least, tilings in PLAIN if tokens >= least)


def parts(problem: Problem, ids: Sequence[torch.Tensor]) -> Iterator[tuple[str, list[Call]]]:
    """Each launch of the fused operator alone, on the draws of ids."""
    inputs, size = problem.inputs, problem.size
    block = planned(size.tokens, size.tokens * TOP_K // EXPERTS, DEVICE)
    new, numel = inputs.hidden_states.new_empty, size.tokens * TOP_K
    product, routed, out = new((numel, size.columns // 2)), new((numel, HIDDEN)), torch.empty_like(inputs.hidden_states)
    x, w1, w2, weights = inputs.hidden_states, inputs.w1, inputs.w2, inputs.topk_weights
    if block == 1:
        yield "gemv1", [functools.partial(ops.moe_gemv_gated, x, w1, None, weights, i, None, product, "silu", False)
                        for i in ids]  # fmt: skip
        yield "gemv2", [functools.partial(ops.moe_gemv_combine, product, w2, None, weights, i, None, out, True)
                        for i in ids]  # fmt: skip
        return
    tables = [tables_of(i, block) for i in ids]
    yield "align", [functools.partial(tables_of, i, block) for i in ids]
    yield "gemm1", [functools.partial(ops.moe_gemm_gated, x, w1, None, weights, *t, product, block, "silu", False)
                    for t in tables]  # fmt: skip
    yield "gemm2", [functools.partial(ops.moe_gemm, product, w2, None, weights, *t, routed, block, True)
                    for t in tables]  # fmt: skip
    yield "sum", [functools.partial(ops.moe_combine, routed, i, None, EXPERTS, out) for i in ids]


# The table


def each(calls: Sequence[Call], rep_ms: int = 0) -> Timing:
    """Of one of `calls`, in graph replays of all of them in turn."""
    timed = timing(lambda: [call() for call in calls], replayed=True, rep_ms=rep_ms)
    return Timing(*(us / len(calls) for us in (timed.p20_us, timed.p50_us, timed.p80_us)))


def checked(problem: Problem, ids: torch.Tensor, out: torch.Tensor) -> float:
    """The relative error of some tokens against float64, by the rules of the tests."""
    problem.inputs.topk_ids = ids
    return check(problem.inputs, out, some(problem))


def checked_plain(problem: Problem, ids: torch.Tensor, out: torch.Tensor) -> float:
    """As `checked`, by the whole alone: the plain pipeline rounds once more."""
    inputs, rows = problem.inputs, some(problem)
    exact = exact_experts(inputs.hidden_states[rows], inputs.w1, inputs.w2, inputs.topk_weights[rows], ids[rows]).value
    relative = float((out[rows].double() - exact).norm() / exact.norm())
    if not relative <= MOST_PLAIN_ERROR:
        raise AssertionError(f"plain pipeline: relative error {relative:.2e}, at most {MOST_PLAIN_ERROR} is allowed")
    return relative


def some(problem: Problem) -> torch.Tensor:
    """Tokens to compare, both ends included."""
    tokens = problem.size.tokens
    return torch.linspace(0, tokens - 1, min(16, tokens), device=DEVICE).long().unique()


def plain_calls(problem: Problem, ids: Sequence[torch.Tensor], tiling: Sequence[int]) -> list[Call]:
    few = problem.size.tokens <= LISTED_UP_TO
    return [functools.partial(plain, problem, i, tiling, rows_as_listed(i, tiling[0]) if few else None) for i in ids]


def measure(size: Size) -> Row:
    """Check a size, then time the fused operator, the plain one and the parts, on draws of ids."""
    problem = Problem(size)
    draws = [problem.draw() for _ in range(DRAWS)]
    hit = [statistics.mean(len(ids.unique()) for ids in draw) for draw in draws]
    errors = [checked(problem, draws[0][0], fused(problem, draws[0][0]))]
    tilings = list(plain_tilings(size.tokens))
    for tiling in tilings:
        errors.append(checked_plain(problem, draws[0][0], plain_calls(problem, draws[0][:1], tiling)[0]()))
    if len(tilings) > 1:
        tilings.sort(key=lambda tiling: each(plain_calls(problem, draws[0], tiling)).p50_us)
    ours, theirs = [], []
    for draw in draws:
        ours.append(each([functools.partial(fused, problem, ids) for ids in draw]))
        theirs.append(each(plain_calls(problem, draw, tilings[0])))
    ratios = [b.p50_us / a.p50_us for a, b in zip(ours, theirs, strict=True)]
    floors = [size.floor_us(h) for h in hit]
    return {
        "tokens": size.tokens,
        "columns": size.columns,
        "floor_us": statistics.median(floors),
        "fused_us": statistics.median(t.p50_us for t in ours),
        "percent_of_floor": statistics.median(100 * f / t.p50_us for f, t in zip(floors, ours, strict=True)),
        "plain_us": statistics.median(t.p50_us for t in theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "parts_us": {name: each(calls).p50_us for name, calls in parts(problem, draws[0])},
        "plain_tiling": tilings[0],
        "experts_hit": hit,
        "relative_errors": errors,
    }


def judge(row: Row, copy: float) -> None:
    """Add the size's goals, with whether each is met."""
    least = GOALS.get(row["columns"], {}).get(row["tokens"])
    goals = {f"plain over fused >= {LEAST_RATIO}": row["ratio"] >= LEAST_RATIO}
    if least is not None:
        goals[f">= {least} % of the floor"] = row["percent_of_floor"] >= least
    row["goals"], row["met"] = goals, all(goals.values())


def print_table(rows: list[Row]) -> None:
    print(" tokens x   2I     floor     fused us  % floor    plain us  ratio  parts us")
    for row in rows:
        part = "  ".join(f"{name} {us:.1f}" for name, us in row["parts_us"].items())
        missed = "; ".join(goal for goal, met in row["goals"].items() if not met)
        print(
            f"{row['tokens']:>7} x {row['columns']:>4} {row['floor_us']:9.1f} {row['fused_us']:12.2f} "
            f"{row['percent_of_floor']:8.1f} {row['plain_us']:11.2f} {row['ratio']:6.2f}  {part}"
            + (f"  MISSED {missed}" if missed else "")
        )
    mean = math.exp(statistics.mean(math.log(row["ratio"]) for row in rows))
    print(f"geometric mean of the ratios {mean:.3f}, at least {LEAST_MEAN} over all 16 sizes")
    if len(rows) == 16 and mean < LEAST_MEAN:
        rows[-1]["met"] = False


# The published report's shapes and figures


def report(options: Any, runs: int = 10) -> int:
    """Ratios of its 24 shapes, each run with ids of its own, and the summary of each run."""
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1
    out, sizes = described(), [Size(tokens, columns) for columns in (512, 2048) for tokens in REPORT]
    best: dict[Size, tuple[int, ...]] = {}
    rows: list[list[float]] = []
    out["shapes"], out["runs"], out["summaries"] = [str(s) for s in sizes], rows, []
    for run in range(runs):
        ratios = []
        for size in sizes:
            problem = Problem(size)
            problem.random.manual_seed(1000 * run + size.tokens)
            ids = problem.draw()
            tilings = [best[size]] if size in best else list(plain_tilings(size.tokens))
            timed = {t: each(plain_calls(problem, ids, t), 20).p50_us for t in tilings}
            best[size] = min(timed, key=lambda t: timed[t])
            ratios.append(timed[best[size]] / each([functools.partial(fused, problem, i) for i in ids], 20).p50_us)
        rows.append(ratios)
        tokens = [s.tokens for s in sizes]
        summary = {
            "token_weighted_mean": sum(r * t for r, t in zip(ratios, tokens, strict=True)) / sum(tokens),
            "minimum": min(ratios), "maximum": max(ratios), "at_or_above_1": sum(r >= 1.0 for r in ratios),
        }  # fmt: skip
        out["summaries"].append(summary)
        print(f"run {run}: " + ", ".join(f"{name} {value:.3f}" for name, value in summary.items()), flush=True)
    for size, *ratios in zip(sizes, *rows, strict=True):
        print(f"{str(size):>10}  median {statistics.median(ratios):.3f}  {min(ratios):.3f} to {max(ratios):.3f}")
    write(out, options.json)
    return 0


# A sweep of the tilings of each product


def candidates(size: Size) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Part, rows of a block (1: listed), tiling."""
    if size.tokens <= ROTATED_UP_TO:
        for columns, block_k, warps in itertools.product((1, 2, 4), (256, 512, 1024, 2048), (1, 2, 4)):
            if 256 <= 2 * columns * block_k // warps <= 4096:
                yield "gemv1", 1, dict(columns=columns, block_k=block_k, num_warps=warps, num_stages=1)
        for columns, block_k, warps in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024), (2, 4, 8)):
            if block_k <= size.columns // 2 and 512 <= 8 * columns * block_k // warps <= 4096:
                yield "gemv2", 1, dict(columns=columns, block_k=block_k, num_warps=warps, num_stages=1)
    per_expert = size.tokens * TOP_K // EXPERTS
    blocks = [b for b in (16, 32, 64, 128) if max(16, per_expert // 2) <= b <= max(16, 2 * per_expert)] or [128]
    for part, block in itertools.product(("gemm1", "gemm2"), blocks):
        for columns, block_k, warps, stages in itertools.product((64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5)):
            wide = columns * (2 if part == "gemm1" else 1)
            shared = (block + wide) * block_k * 2 * stages
            lanes = block * wide // (32 * warps)
            if wide <= 256 and shared <= 220_000 and 8 <= lanes <= 128:
                yield part, block, dict(columns=columns, block_k=block_k, group=1, num_warps=warps, num_stages=stages)


def part_calls(problem: Problem, part: str, block: int, config: Mapping[str, int], ids: Sequence[Any]) -> list[Call]:
    inputs, size = problem.inputs, problem.size
    new, numel = inputs.hidden_states.new_empty, size.tokens * TOP_K
    product, routed, out = new((numel, size.columns // 2)).normal_(), new((numel, HIDDEN)), new((size.tokens, HIDDEN))
    x, w1, w2, weights = inputs.hidden_states, inputs.w1, inputs.w2, inputs.topk_weights
    options = {"config": dict(config)}
    if part == "gemv1":
        return [functools.partial(ops.moe_gemv_gated, x, w1, None, weights, i, None, product, "silu", False, **options)
                for i in ids]  # fmt: skip
    if part == "gemv2":
        return [functools.partial(ops.moe_gemv_combine, product, w2, None, weights, i, None, out, True, **options)
                for i in ids]  # fmt: skip
    tables = [tables_of(i, block) for i in ids]
    if part == "gemm1":
        gated = functools.partial(ops.moe_gemm_gated, **options)
        return [functools.partial(gated, x, w1, None, weights, *t, product, block, "silu", False) for t in tables]
    return [functools.partial(ops.moe_gemm, product, w2, None, weights, *t, routed, block, True, **options)
            for t in tables]  # fmt: skip


def compile_one(size: Size, part: str, block: int, config: Mapping[str, int]) -> str:
    """Runs a tiling once on few tokens and few experts, which leaves its binary in the cache; what went wrong."""
    global EXPERTS
    EXPERTS = 16  # weights of this process: a kernel does not depend on how many experts there are
    problem = Problem(Size(4 if block == 1 else 64, size.columns))
    return tried(part_calls(problem, part, block, config, problem.draw()[:1])[0])


def compile_all(sizes: Sequence[Size], jobs: int, deadline: float) -> dict[str, str]:
    tasks = {}
    for size in sizes:
        for part, block, config in candidates(size):
            tasks.setdefault(f"{size.columns} {part} {block} {words(config)}", (size, part, block, config))
    return in_processes(tasks, compile_one, deadline, jobs)


def sweep(size: Size, deadline: float, compiled: Mapping[str, str]) -> list[Row]:
    problem = Problem(size)
    ids, rows = problem.draw(), []
    for part, block, config in candidates(size):
        error = compiled.get(f"{size.columns} {part} {block} {words(config)}")
        if error is None or time.perf_counter() > deadline:
            continue
        row: Row = {"size": str(size), "part": part, "block": block, "config": config}
        rows.append(row)
        if error:
            row["error"] = error
        else:
            row["p50_us"] = each(part_calls(problem, part, block, config, ids), 10).p50_us
    for part in dict.fromkeys(row["part"] for row in rows):
        timed = sorted((r for r in rows if r["part"] == part and "error" not in r), key=lambda r: r["p50_us"])
        print(f"{size} {part}: {len(timed)} tilings")
        for row in timed[:6]:
            print(f"  {row['p50_us']:9.2f} us  block {row['block']:>3}  {words(row['config'])}", flush=True)
    for row in rows:
        if "error" in row:
            print(f"  FAILED {row['part']} {row['block']} {words(row['config'])}: {row['error'][:200]}")
    return rows


def main() -> int:
    sizes = [Size(tokens, columns) for columns in GOALS for tokens in GOALS[columns]]
    parser = parser_for(str(__doc__).splitlines()[0], sizes, parse_size, ("columns", "block_k", "group"))
    parser.add_argument("--report", action="store_true", help="the 24 shapes of a published report, ten times")
    options = parser.parse_args()
    if options.config or options.profile:
        parser.error("the fused MoE has several kernels: --sweep forces their tilings, --config and --profile do not")
    if options.report:
        return report(options)
    return drive(
        options, options.sizes, lambda deadline: compile_all(options.sizes, options.jobs, deadline), sweep, measure,
        judge, print_table,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
