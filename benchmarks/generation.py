"""Times the generation of an operator's modules for four devices, in fresh processes.

    python benchmarks/generation.py                   # the DeepSeek operator
    python benchmarks/generation.py --op NAME --runs 9 --json out.json

A run is `python -m tilewright build` from start to end: starting Python, importing, generating, writing. "generated" is
the part between the import and the last text. The exit code is 1 where the median run takes longer than the goal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
OPERATOR = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
GOAL_S = 5.0

GENERATE = """
import sys, time
from tilewright.build import operators
(operator,) = operators([sys.argv[1]])
for device in sys.argv[2:]:
    start = time.perf_counter()
    operator.source(device)
    print(time.perf_counter() - start)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default=OPERATOR)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    build_s(options.op)  # bytecode is written, files are cached
    whole_s, generated_s = [], []
    for _ in range(options.runs):
        whole_s.append(build_s(options.op))
        times = run(["-c", GENERATE, options.op, *DEVICES]).split()
        generated_s.append([float(seconds) for seconds in times])

    result = {
        "operator": options.op,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "whole_s": [round(seconds, 3) for seconds in whole_s],
        "generated_ms": {
            device: round(1e3 * statistics.median(column), 1)
            for device, column in zip(DEVICES, zip(*generated_s, strict=True), strict=True)
        },
    }
    print(f"{options.op}, Python {result['python']}, {result['cores']} cores, {options.runs} runs")
    for device, milliseconds in result["generated_ms"].items():
        print(f"  generated {device:<14} {milliseconds:8.1f} ms")
    median = statistics.median(whole_s)
    print(f"  build, all four   {median:13.3f} s  (from {min(whole_s):.3f} to {max(whole_s):.3f}, goal {GOAL_S} s)")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(median > GOAL_S)


def build_s(operator: str) -> float:
    """Seconds of one build, the start of Python included."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run(["-m", "tilewright", "build", "--vendor", *DEVICES, "--op", operator, "--out", folder])
        return time.perf_counter() - start


def run(arguments: list[str]) -> str:
    """What Python prints; anything that fails stops the benchmark."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
