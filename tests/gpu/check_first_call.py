"""Measures an operator's first call in a new process, with and without the binaries of a build.

    python tests/gpu/check_first_call.py            # builds with this machine's Triton, then calls

A build's `triton-cache` holds what the launch would compile. With TRITON_CACHE_DIR set to it a first call must compile
nothing: the check fails where a kernel is added to the cache, or where the call is not faster for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope")
CALL = """
import sys, time
sys.path.insert(0, {root!r})
import torch
from tilewright import ops, vendors
from tilewright.ops.problems import problems

arguments = next(arguments for name, arguments in problems({operator!r}) if {match!r} in name)
arguments = [a.cuda().zero_() if isinstance(a, torch.Tensor) else a for a in arguments]
torch.cuda.synchronize()
begin = time.perf_counter()
getattr(ops, {operator!r})(*arguments)
torch.cuda.synchronize()
print((time.perf_counter() - begin) * 1e3)
"""


def first_call_ms(operator: str, cache: Path) -> float:
    code = CALL.format(root=str(ROOT), operator=operator, match="64_heads" if "deepseek" in operator else "64_8_8")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TILEWRIGHT_CACHE_DIR": "off"}  # texts are made anew
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.splitlines()[-1])


def kernels(cache: Path) -> set[str]:
    return {path.relative_to(cache).as_posix() for path in cache.rglob("*.cubin")}


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from tilewright import vendors

    device, failed = vendors.detect(), 0
    with tempfile.TemporaryDirectory() as folder:
        built, empty = Path(folder) / "built", Path(folder) / "empty"
        command = [sys.executable, "-m", "tilewright", "build", "--vendor", device, "--binaries", "--out", str(built)]
        subprocess.run([*command, "--op", *OPERATORS], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        cache = built / "triton-cache"
        for operator in OPERATORS:
            before = kernels(cache)
            warm, cold = first_call_ms(operator, cache), first_call_ms(operator, empty / operator)
            added = kernels(cache) - before
            passed = bool(before) and not added and warm < cold
            failed += not passed
            times = f"first call {warm:.1f} ms with binaries, {cold:.1f} without"
            print(f"{'PASS' if passed else 'FAIL'} {operator}: {times}; {len(added)} kernels compiled")
    print(f"{len(OPERATORS) - failed} passed, {failed} failed; {torch.cuda.get_device_name()}, profile {device}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
