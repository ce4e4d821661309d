"""Checks on a GPU that operators can be called for real, and prints one line a check.

    python tests/gpu/check_calling.py                    # everything; on two GPUs, what needs two as well
    python tests/gpu/check_calling.py --match graph      # the checks whose name has this
    python tests/gpu/check_calling.py --json out.json

torch.library and torch.compile, CUDA graphs, streams, threads, forks, devices, memory. Results are compared to the
bit with those of a plain first call on equal inputs; that these are right is what the other checks are for. The exit
code is 1 where a check fails or none ran; what cannot run here says why and is neither passed nor failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from samples import KV, SAMPLES, A, B, cloned, contents, sample  # noqa: E402

import tilewright  # noqa: E402
from tilewright import ops  # noqa: E402
from tilewright.errors import CaptureError, DeviceError  # noqa: E402
from tilewright.launch import OPERATORS  # noqa: E402

PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
LONG = 400_000_000  # cycles of a kernel that keeps a stream busy, about 0.2 s
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")
SANITIZER_S = 200
Check = Callable[[], str | None]


class Skip(Exception):
    """Why a check cannot run here."""


def forget(operator: str) -> None:
    """As in a process that never called the operator: no module, no kernel, no kind of call."""
    OPERATORS[operator]._modules.clear()
    OPERATORS[operator].call.__globals__["_kinds"].clear()


def function_of(operator: str) -> Callable[..., Any]:
    return getattr(ops, operator)  # type: ignore[no-any-return]


def of_torch(operator: str) -> Any:
    return getattr(torch.ops.tilewright, operator)


def wanted(name: str, seed: int = 0, device: str = "cuda:0") -> list[bytes]:
    """What a first call gives, with the tensors' device current."""
    operator, given = sample(name, device, seed)
    with torch.cuda.device(device):
        result = contents(OPERATORS[operator](*given), given)
    return result


def equal(name: str, got: list[bytes], seed: int = 0, device: str = "cuda:0") -> None:
    expected = wanted(name, seed, device)
    different = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b]
    if different:
        raise AssertionError(f"tensors {different} differ from a first call's")


def same(name: str, actual: Any, expected: Any) -> None:
    if actual != expected:
        raise AssertionError(f"{name}: {actual}, not {expected}")


# torch.library and torch.compile


def opcheck(name: str) -> None:
    operator, given = sample(name, "cuda")
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(a.dtype == torch.float8_e4m3fn for a in given if isinstance(a, torch.Tensor)):
        tests.remove("test_schema")  # it computes with its copies, and torch has no arithmetic in float8
    torch.library.opcheck(of_torch(operator).default, tuple(given), test_utils=tests)


def through_torch(name: str) -> None:
    """First and repeated calls of torch's operator."""
    operator, _ = sample(name)
    forget(operator)
    for seed in (0, 1):
        _, given = sample(name, "cuda", seed)
        equal(name, contents(of_torch(operator)(*given), given), seed)


def compiled(name: str, backend: str) -> None:
    operator, _ = sample(name)
    function = function_of(operator)
    torch._dynamo.reset()
    made = torch.compile(lambda *given: function(*given), fullgraph=True, backend=backend)
    for seed in (0, 1):
        _, given = sample(name, "cuda", seed)
        equal(name, contents(made(*given), given), seed)


def split_call_view() -> None:
    def step(hidden: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        qkv = hidden * 2
        before = qkv.view(-1, 7, 64)[:, :4]
        ops.fused_qk_norm_rope(qkv, *rest)
        q, k, v = qkv.split([256, 128, 64], dim=-1)
        return before, q.view(-1, 4, 64), k, v + 1, qkv

    torch._dynamo.reset()
    made = torch.compile(step, fullgraph=True)
    for tokens in (5, 3, 64):
        given = sample("B", "cuda", tokens, tokens)[1]
        same(f"{tokens} tokens", contents(made(*given), []) == contents(step(*given), []), True)


# CUDA graphs


def graph(name: str, tensors: bool) -> None:
    """Prepared by tensors, or by metadata alone; captured with no call before; replayed with other contents."""
    operator, held = sample(name, "cuda")
    function = function_of(operator)
    forget(operator)
    before = tilewright.last_launch()
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in held]
    launch = function.prepare(*(held if tensors else meta))  # type: ignore[attr-defined]
    same("prepare's operator", launch.operator, operator)
    same("the last launch", tilewright.last_launch(), before)
    same("what prepare left", contents(None, held), contents(None, sample(name, "cuda")[1]))
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        result = function(*held)
    for seed in (0, 1, 2):
        for own, other in zip(held, sample(name, "cuda", seed)[1], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(other)
        made.replay()
        torch.cuda.synchronize()
        equal(name, contents(result, held), seed)


def capture_of_what_is_not_compiled(name: str) -> None:
    """A clear error, and what else is captured is whole."""
    operator, given = sample(name, "cuda")
    forget(operator)
    x, made, caught = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph(), ""
    before = contents(None, given)
    with torch.cuda.graph(made):
        y = x + 1
        try:
            function_of(operator)(*given)
        except CaptureError as error:
            caught = str(error)
        z = y * 2
    made.replay()
    torch.cuda.synchronize()
    same("the graph's result", z.tolist(), [4.0] * 8)
    same("what was written", contents(None, given), before)
    if not caught.startswith(f"{operator}: a CUDA graph is being captured and the kernel of this call"):
        raise AssertionError(f"no CaptureError, but {caught!r}")
    equal(name, contents(function_of(operator)(*given), given))  # and the operator works afterwards


def graph_of_compiled_model() -> None:
    """torch.compile's own graphs."""
    _, given = sample("B", "cuda")

    def step(qkv: torch.Tensor) -> torch.Tensor:
        out = qkv * 1
        ops.fused_qk_norm_rope(out, *given[1:])
        return out

    torch._dynamo.reset()
    made = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = sample("B", "cuda", seed)[1][0]
        torch.compiler.cudagraph_mark_step_begin()
        same(f"call {seed}", contents(made(x), []), contents(step(x), []))


# Streams, threads, forks


def side_stream(name: str) -> None:
    """Inputs that only the side stream waits for: a first call, and a repeat."""
    operator, _ = sample(name)
    forget(operator)
    stream = torch.cuda.Stream()
    for seed in (0, 1):
        _, source = sample(name, "cuda", seed)
        given = cloned(source)
        for a in given:
            if isinstance(a, torch.Tensor) and a.is_floating_point() and a.element_size() > 1:
                a.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG)
            for own, other in zip(given, source, strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(other)
            result = function_of(operator)(*given)
        stream.synchronize()
        equal(name, contents(result, given), seed)


def nothing_waits(name: str) -> str:
    """Calls return while the device is busy, and torch sees no synchronisation."""
    operator, given = sample(name, "cuda")
    function = function_of(operator)
    function(*given)
    calls: dict[str, Callable[[], Any]] = {
        "repeat": lambda: function(*given),
        "torch.ops": lambda: of_torch(operator)(*given),
        "slow": lambda: OPERATORS[operator](*given),
    }
    calls["torch.ops"]()
    spent = []
    for kind, call in calls.items():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(LONG)
            begin = time.perf_counter()
            call()
            took = time.perf_counter() - begin
            busy = not torch.cuda.current_stream().query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not busy:
            raise AssertionError(f"{kind}: returned after {1e3 * took:.1f} ms, when the device was idle")
        spent.append(f"{kind} {1e6 * took:.0f} us")
    return ", ".join(spent)


def threads(devices: tuple[str, ...]) -> None:
    """First calls and repeats of two threads at once, each on a stream of its own."""
    names = list(SAMPLES)
    for name in names:
        forget(SAMPLES[name][0])
    barrier, errors = threading.Barrier(len(devices)), []

    def run(number: int, device: str) -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                for name in names:
                    barrier.wait(60)
                    for seed in (0, 1, 2):
                        operator, given = sample(name, device, seed)
                        result = function_of(operator)(*given)
                        torch.cuda.current_stream().synchronize()
                        got[number, name, seed] = contents(result, given)
        except BaseException:
            errors.append(traceback.format_exc())
            barrier.abort()

    got: dict[tuple[int, str, int], list[bytes]] = {}
    started = [threading.Thread(target=run, args=place) for place in enumerate(devices)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise AssertionError(errors[0])
    for (number, name, seed), result in got.items():
        equal(name, result, seed, devices[number])


FORKED = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
from samples import contents, sample
from tilewright import ops
import torch
operator, given = sample("B")
getattr(ops, operator)(*given)  # on the CPU; the parent has no CUDA context yet
def run():
    operator, given = sample("B", "cuda")
    for _ in range(2):
        getattr(ops, operator)(*given)
    return contents(None, given)
children = []
for _ in range(2):
    read, write = os.pipe()
    if os.fork() == 0:
        import hashlib
        os.write(write, hashlib.sha256(b"".join(run())).hexdigest().encode())
        os._exit(0)
    children.append(read)
digests = [os.read(read, 64).decode() for read in children]
for _ in children:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
import hashlib
assert digests == [hashlib.sha256(b"".join(run())).hexdigest()] * 2, digests
print("the same")
"""


def forks() -> None:
    text = FORKED.format(root=str(ROOT), tests=str(ROOT / "tests"))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    same("forked workers", (done.stdout, done.returncode), ("the same\n", 0))


# Memory


def allocates_nothing(name: str) -> str:
    operator, given = sample(name, "cuda")
    function, key = function_of(operator), "allocation.all.allocated"
    function(*given)
    counts = []
    for call in (function, OPERATORS[operator], of_torch(operator)):
        call(*given)
        before = torch.cuda.memory_stats()[key]
        for _ in range(10):
            call(*given)
        counts.append(torch.cuda.memory_stats()[key] - before)
    outputs = len(OPERATORS[operator].kernel.outputs)
    # torch counts no allocation for an empty output.
    if outputs and function(*given).numel():
        same("allocations of 10 calls", counts, [10 * outputs] * 3)
        return "its output alone"
    same("allocations of 10 calls", counts, [0] * 3)
    return "none"


GUARD = 4096  # bytes on either side of a tensor


def guarded(name: str, profile: str) -> None:
    """Every tensor in memory of its own between guards, which stay as they are; what is read there is NaN."""
    operator, source = sample(name, "cuda")
    memories, given = [], []
    for a in source:
        if isinstance(a, torch.Tensor):
            memory = torch.full((a.nbytes + 2 * GUARD,), 0xFF, dtype=torch.uint8, device="cuda")
            inner = memory[GUARD : GUARD + a.nbytes].view(a.dtype).view(a.shape)
            inner.copy_(a)
            memories.append(memory)
            a = inner
        given.append(a)
    result = contents(function_of(operator)(*given, profile=profile), given)
    for memory in memories:
        same("guards", bool((memory[:GUARD] == 0xFF).all() and (memory[-GUARD:] == 0xFF).all()), True)
    plain = contents(function_of(operator)(*source, profile=profile), source)
    same("the result between guards", result == plain, True)


def sanitizer(tool: str) -> str:
    """compute-sanitizer over a small call of every operator with every profile's text."""
    program = next((found for found in map(shutil.which, SANITIZERS) if found), None)
    if program is None:
        raise Skip("compute-sanitizer is not on this machine; the guards above stand for it")
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--small"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_S)
    except subprocess.TimeoutExpired:
        raise Skip(f"compute-sanitizer took more than {SANITIZER_S} s here") from None
    text = done.stdout + done.stderr
    clean = "ERROR SUMMARY: 0 errors" in text or "RACECHECK SUMMARY: 0 hazards" in text
    if done.returncode == 0 and clean and "every text ran" in text:
        return "no findings"
    if "every text ran" not in text and "SUMMARY" not in text:
        raise Skip(f"compute-sanitizer does not run here: {' '.join(text.split())[-200:]}")
    raise AssertionError(text[-2000:])


def small() -> int:
    """One small call of every operator with every profile's text."""
    for name in SAMPLES:
        for profile in PROFILES:
            operator, given = sample(name, "cuda")
            function_of(operator)(*given, profile=profile)
    torch.cuda.synchronize()
    print("every text ran")
    return 0


# Two GPUs


def another_device(name: str) -> None:
    """Tensors on cuda:1 while cuda:0 is current: prepared, first, repeated, captured; cuda:0 stays current."""
    operator, _ = sample(name)
    function = function_of(operator)
    forget(operator)
    for seed in (0, 1, 2):
        _, given = sample(name, "cuda:1", seed)
        if seed == 0:
            function.prepare(*given)  # type: ignore[attr-defined]
        result = function(*given)
        same("the current device", torch.cuda.current_device(), 0)
        equal(name, contents(result, given), seed, "cuda:1")
    for device in ("cuda:0", "cuda:1"):  # and both in turn
        _, given = sample(name, device)
        equal(name, contents(function(*given), given), 0, device)
    with torch.cuda.device(1):
        for seed in (0, 1):
            _, given = sample(name, "cuda:1", seed)
            equal(name, contents(function(*given), given), seed, "cuda:1")


def through_torch_on_another_device() -> None:
    for name in ("A", "B", "padded"):
        operator, given = sample(name, "cuda:1")
        equal(name, contents(of_torch(operator)(*given), given), 0, "cuda:1")
        same("the current device", torch.cuda.current_device(), 0)


def mixed_devices() -> None:
    for name, argument in (("A", 1), ("B", 6), ("kv", 2)):
        operator, given = sample(name, "cuda:0")
        kernel = OPERATORS[operator].kernel
        given[argument] = given[argument].to("cuda:1")
        first, moved = kernel.tensors[0].name, kernel.arguments[argument].name
        before = contents(None, given)
        try:
            function_of(operator)(*given)
        except DeviceError as error:
            line = str(error).splitlines()[0]
            same("the message", line, f"{operator}: {moved} is on cuda:1, {first} on cuda:0")
        else:
            raise AssertionError(f"{operator}: no error")
        same("what was written", contents(None, given), before)


def checks() -> Iterator[tuple[str, Check]]:
    two = torch.cuda.device_count() > 1
    for name in SAMPLES:
        yield f"torch.library.opcheck: {name}", lambda name=name: opcheck(name)  # type: ignore[misc]
        yield f"torch.ops: {name}", lambda name=name: through_torch(name)  # type: ignore[misc]
        backend = "inductor" if SAMPLES[name][0] in (A, B, KV) else "aot_eager"
        yield f"torch.compile, {backend}: {name}", lambda n=name, b=backend: compiled(n, b)  # type: ignore[misc]
    yield "torch.compile: split, call, return a view", split_call_view
    for name in SAMPLES:
        yield f"graph, prepared by tensors: {name}", lambda name=name: graph(name, True)  # type: ignore[misc]
        yield f"graph, prepared by metadata: {name}", lambda name=name: graph(name, False)  # type: ignore[misc]
        yield (
            f"graph, capture of what is not compiled: {name}",
            lambda name=name: capture_of_what_is_not_compiled(name),  # type: ignore[misc]
        )
    yield "graph, of torch.compile", graph_of_compiled_model
    for name in SAMPLES:
        yield f"side stream: {name}", lambda name=name: side_stream(name)  # type: ignore[misc]
        yield f"nothing waits: {name}", lambda name=name: nothing_waits(name)  # type: ignore[misc]
        yield f"allocations: {name}", lambda name=name: allocates_nothing(name)  # type: ignore[misc]
    yield "two threads at once", lambda: threads(("cuda:0", "cuda:0"))
    yield "forked workers", forks
    for name in SAMPLES:
        for profile in PROFILES:
            yield f"guards: {name}, {profile}", lambda n=name, p=profile: guarded(n, p)  # type: ignore[misc]
    def needs_two(check: Check) -> Check:
        def skip() -> str:
            raise Skip("needs two GPUs")

        return check if two else skip

    for name in SAMPLES:
        yield f"tensors on cuda:1, cuda:0 current: {name}", needs_two(lambda name=name: another_device(name))
    yield "torch.ops on cuda:1", needs_two(through_torch_on_another_device)
    yield "tensors on two devices", needs_two(mixed_devices)
    yield "two threads on two devices", needs_two(lambda: threads(("cuda:0", "cuda:1")))
    for tool in ("memcheck", "racecheck"):
        yield f"compute-sanitizer {tool}", lambda tool=tool: sanitizer(tool)  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="only checks whose name has this in it")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--small", action="store_true", help="only call every text once, for compute-sanitizer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False")
        return 1
    if options.small:
        return small()
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    rows = []
    for name, check in checks():
        if options.match not in name:
            continue
        begin, status, words = time.perf_counter(), "PASS", ""
        try:
            words = check() or ""
        except Skip as reason:
            status, words = "SKIP", str(reason)
        except Exception as error:
            status, words = "FAIL", f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - begin
        rows.append({"check": name, "status": status, "seconds": round(seconds, 2), "words": words})
        print(f"{status} {name:<64} {seconds:6.2f} s  {words}", flush=True)
        if options.json:  # after each, in case there is no time for all
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        if "CUDA error" in words:
            break  # the device is lost to this process
    count = {status: sum(row["status"] == status for row in rows) for status in ("PASS", "FAIL", "SKIP")}
    print(", ".join(f"{number} {status}" for status, number in count.items()), os.environ.get("TILEWRIGHT_DEVICE", ""))
    return int(count["FAIL"] > 0 or count["PASS"] == 0)


if __name__ == "__main__":
    sys.exit(main())
