"""Times the host's share of a call on a GPU, beside the barest launch of the same compiled kernel in the same run.

    python benchmarks/host_cost.py --json out.json

Per operator: (a) the barest launch, the compiled kernel's launcher called with grid, stream and addresses at hand, and
beside it what a repeat launches with, the C function behind that launcher where it can be called alone; (b) the eager
call; (c) the call through `torch.ops.tilewright`; and where the time of (b) goes, each part timed alone. Times are
those of loops of 100 calls with an idle device before each, so that no call waits for a full queue; the calls take
turns, and the median of all turns counts. Goals, for A in place and for B: (b) at most 3 us over (a); and on an H200's
machine at most 13 us for A and 9 us for B. A call of an operator in place must allocate nothing. The exit code is 1
where one of these fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from samples import KV, PADDED, A, B  # noqa: E402

from tilewright import ops, repeat  # noqa: E402
from tilewright.launch import OPERATORS  # noqa: E402

LOOP, TURNS = 100, 60
OVER_US = 3.0  # above the barest launch
MOST_US = {A: 13.0, B: 9.0}  # on an H200's machine
Row = dict[str, Any]


def problems(tokens: int = 17, heads: int = 64) -> dict[str, tuple[str, list[Any]]]:
    """The calls that are timed, by name: decode steps, whose kernels take less time than their launch."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    q, kv, cache = normal(tokens, heads, 512), normal(tokens, 512), torch.zeros(4, 64 * 584, device="cuda").byte()
    slots = torch.arange(tokens, device="cuda")
    index = [slots, slots.clone(), torch.randn(4096, 64, device="cuda")]
    weights, table = [normal(128), normal(128)], torch.randn(4096, 128, device="cuda")
    qkv = normal(tokens, 32 * 128)
    return {
        "A in place": (A, [q, kv, cache, *index, 1e-6, 64]),
        "B": (B, [qkv, 16, 8, 8, 128, 1e-6, *weights, table, True, slots.clone()]),
        "padded": (PADDED, [q, kv, cache, *index, heads, 1e-6, 64]),
        "kv insert": (KV, [kv, cache.view(4, 64, 584), *index, 64]),
    }


def recorded(operator: str) -> tuple[Any, ...]:
    """What a repeat of the last first call uses."""
    kinds = OPERATORS[operator].call.__globals__["_kinds"]
    made = [kind for key, found in kinds.items() if key is not None for kind in found]
    if len(made) != 1:
        raise RuntimeError(f"{operator}: {len(made)} kinds were recorded, not one")
    return made[0]


def barest(
    kernel: tuple[Any, ...], compiled: Any, arguments: Sequence[Any], operator: str
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Triton's launcher with everything at hand, and what a repeat launches with. Addresses are numbers."""
    _, _, index, run, grid, middle, spread, pick, rest, outputs, _ = kernel
    tensors = [a for a, _ in zip(arguments, OPERATORS[operator].kernel.arguments, strict=False)]
    of = {a.name: i for i, a in enumerate(OPERATORS[operator].kernel.arguments)}
    own = [tensors[of[t.name]] if of[t.name] < len(tensors) else None for t in OPERATORS[operator].kernel.tensors]
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in outputs]
    addresses = [0 if t is None else t.data_ptr() for t in (*own, *made)]
    values = ((*addresses, *rest) if pick is None else (*pick((*addresses, None)), *rest))
    stream = torch._C._cuda_getCurrentRawStream(index)
    launcher, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    last = values if spread else (values,)

    def launch(made: Any = made) -> None:  # made: what is launched on stays alive
        launcher(grid, 1, 1, stream, function, metadata, None, None, None, *values)

    def direct(made: Any = made) -> None:
        run(grid, 1, 1, stream, *middle, *last)

    return launch, direct


def loop_us(call: Callable[[], Any], calls: int = LOOP) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def medians(calls: dict[str, Callable[[], Any]], turns: int = TURNS, loop: int = LOOP) -> dict[str, float]:
    """Microseconds of each, which take turns, so that none has the machine's best moment to itself."""
    for call in calls.values():
        loop_us(call, loop)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(loop_us(call, loop))
    return {name: statistics.median(own) for name, own in times.items()}


def parts(operator: str, kernel: tuple[Any, ...], arguments: list[Any]) -> dict[str, Callable[[], Any]]:
    """What a repeated call does, one part each; an empty call beside them says what timing itself takes."""
    same, _, index, _, _, _, _, pick, rest, outputs, _ = kernel
    pick = pick or (lambda found: found[:-1])
    made = OPERATORS[operator].kernel
    given = [*arguments, *[None] * (len(made.arguments) - len(arguments))]
    own = [a for a, of in zip(given, made.arguments, strict=True) if of in made.tensors]
    present = [repeat._absent(t.name) if a is None else a for a, t in zip(own, made.tensors, strict=True)]
    numbers = tuple(a for a, of in zip(given, made.arguments, strict=True) if of not in made.tensors)
    kinds, space = {(present[0].shape, *numbers): 1}, OPERATORS[operator].call.__globals__
    hooks, device, stream = space["_hooks"], space["_device"], space["_stream"]
    tracing, pointers = space["_tracing"], tuple(range(len(present) + len(outputs))) + (None,)
    result: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "is torch.compile tracing": lambda: tracing(),
        "look up shape and numbers": lambda: kinds.get((present[0].shape, *numbers)),
        "compare metadata": lambda: same(*present),
        "addresses": lambda: [tensor.data_ptr() for tensor in present],
        "current device and stream": lambda: (device(), stream(index)),
        "hooks": lambda: hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls,
        "arguments in order": lambda: (*pick(pointers), *rest),
    }
    if outputs:
        result["outputs"] = lambda: [torch.empty(s, dtype=t, device=d) for s, t, d in outputs]
    return result


def allocated(call: Callable[[], Any]) -> int:
    """Allocations of device memory that 10 calls ask for."""
    key = "allocation.all.allocated"
    before = torch.cuda.memory_stats()[key]
    for _ in range(10):
        call()
    return torch.cuda.memory_stats()[key] - before


def measured(name: str, operator: str, arguments: list[Any], turns: int) -> Row:
    function, of_torch = getattr(ops, operator), getattr(torch.ops.tilewright, operator)
    OPERATORS[operator].call.__globals__["_kinds"].clear()
    seen: list[Any] = []
    original = repeat.launcher
    repeat.launcher = lambda compiled, *more: seen.append(compiled) or original(compiled, *more)
    try:
        function(*arguments)
    finally:
        repeat.launcher = original
    kernel = recorded(operator)
    barest_launch, direct_launch = barest(kernel, seen[0], arguments, operator)
    calls = {
        "barest_us": barest_launch,
        "direct_us": direct_launch,
        "eager_us": lambda: function(*arguments),
        "torch_ops_us": lambda: of_torch(*arguments),
    }
    row: Row = {"name": name, "operator": operator, **medians(calls, turns)}
    row["over_us"] = row["eager_us"] - row["barest_us"]
    row["allocations"] = allocated(calls["eager_us"])
    row["parts_us"] = medians(parts(operator, kernel, arguments), max(turns // 3, 3))
    goals = []
    if operator in MOST_US:
        goals += [row["over_us"] <= OVER_US, row["eager_us"] <= MOST_US[operator]]
    if not OPERATORS[operator].kernel.outputs:
        goals += [row["allocations"] == 0]
    row["met"] = all(goals)
    return row


def printed(row: Row) -> None:
    most = f"at most {OVER_US} over, {MOST_US[row['operator']]} in all" if row["operator"] in MOST_US else "no goal"
    print(
        f"{row['name']:<11} barest {row['barest_us']:6.2f}  alone {row['direct_us']:6.2f}  "
        f"eager {row['eager_us']:6.2f} ({row['over_us']:+.2f})  "
        f"torch.ops {row['torch_ops_us']:6.2f} us  {row['allocations']} allocations  {most}: "
        f"{'met' if row['met'] else 'MISSED'}"
    )
    nothing = row["parts_us"]["nothing"]
    for part, spent in row["parts_us"].items():
        if part != "nothing":
            print(f"            {part:<28} {spent - nothing:6.2f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--turns", type=int, default=TURNS, help="of each call; a loop of 100 calls a turn")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1
    import triton

    machine = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "processor": _processor(),
    }  # fmt: skip
    print("  ".join(machine.values()), flush=True)
    rows = []
    for name, (operator, arguments) in problems().items():
        rows.append(measured(name, operator, arguments, options.turns))
        printed(rows[-1])
    if options.json:
        options.json.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")
    return int(not all(row["met"] for row in rows))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main())
