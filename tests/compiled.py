"""Compiles a generated module's kernels for a device that is not there, and reads the result."""

from __future__ import annotations

import ast
import contextlib
import re
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
LANES = {name: target.warp_size for name, target in TARGETS.items()}
AMD_BYTES = {
    "ubyte": 1, "sbyte": 1, "byte": 1, "ubyte_d16": 1, "ubyte_d16_hi": 1, "byte_d16_hi": 1, "ushort": 2, "sshort": 2,
    "short": 2, "short_d16": 2, "short_d16_hi": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4,
    "b64": 8, "b128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Access:
    """One load or store of global memory: the line of the module it comes from, and its bytes."""

    kind: str
    line: int
    size: int


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, and the file of the module that it is in."""

    target: str
    kernel: Any
    file: Path

    @property
    def is_nvidia(self) -> bool:
        return self.target.startswith("sm_")

    @cached_property
    def text(self) -> str:
        """PTX, or the AMD assembly."""
        return self.kernel.asm["ptx" if self.is_nvidia else "amdgcn"]

    @property
    def code(self) -> bytes:
        """What a device would load: an ELF file."""
        return self.kernel.asm["cubin" if self.is_nvidia else "hsaco"]

    @property
    def shared(self) -> int:
        """Bytes of shared memory, of which Triton compiles more than a device has without a word."""
        return self.kernel.metadata.shared

    @cached_property
    def accesses(self) -> list[Access]:
        """Every global load and store in the order of the text."""
        instruction = (
            r"(?P<kind>ld|st)\.global(?:\.(?!v\d)\w+)*?(?:\.v(?P<vector>\d))?\.[bfus](?P<bits>\d+)"
            if self.is_nvidia
            else r"^\s*(?:global|buffer|flat)_(?P<kind>load|store)_(?P<name>\w+)"
        )
        number, found, line = "", [], 0
        for text in self.text.splitlines():
            place = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", text)
            if place:
                number = number or place[1]  # the first is the kernel's own file
                line = int(place[2]) if place[1] == number else 0
            access = re.search(instruction, text.split("//")[0])
            if not access:
                continue
            kind = {"ld": "load", "st": "store"}.get(access["kind"], access["kind"])
            if self.is_nvidia:
                size = int(access["vector"] or 1) * int(access["bits"]) // 8
            else:
                size = AMD_BYTES[access["name"]]
            found.append(Access(kind, line, size))
        return found

    @cached_property
    def widths(self) -> dict[str, list[int]]:
        """Bytes of the accesses by what they load or store, as `q_head load x`, in order of the text.

        LLVM may move a scalar load of an index to the line that uses it: `elsewhere load`.
        """
        named = _accesses_by_line(self.file.read_text())
        out: dict[str, list[int]] = {}
        for access in self.accesses:
            name = named.get((access.kind, access.line), f"elsewhere {access.kind}")
            out.setdefault(name, []).append(access.size)
        return dict(sorted(out.items()))

    @cached_property
    def resources(self) -> dict[str, int]:
        """Registers of a lane, and the bytes (NVIDIA) or registers (AMD) that do not fit and go to memory."""
        if self.is_nvidia:
            return self._ptxas()
        spills = [int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", self.text)]
        spills += [int(n) for n in re.findall(r"\.private_segment_fixed_size:\s*(\d+)", self.text)]
        registers = [int(n) for n in re.findall(r"\.vgpr_count:\s*(\d+)", self.text)]
        if len(spills) < 3 or not registers:
            raise AssertionError("no resource usage in the assembly")
        return {"registers": max(registers), "spilled": sum(spills)}

    def _ptxas(self) -> dict[str, int]:
        arch = re.search(r"\.target (sm_\w+)", self.text)
        if arch is None:
            raise AssertionError("no target in the PTX")
        # Triton has a ptxas of its own for each generation.
        blackwell = "-blackwell" if TARGETS[self.target].arch >= 100 else ""
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / f"ptxas{blackwell}"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.text)
            run = subprocess.run(
                [ptxas, "-v", f"-arch={arch[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        spills = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", run.stderr)]
        registers = re.search(r"Used (\d+) registers", run.stderr)
        if registers is None or len(spills) < 3:
            raise AssertionError(f"no resource usage in {run.stderr}")
        return {"registers": int(registers[1]), "spilled": sum(spills)}


def _accesses_by_line(source: str) -> dict[tuple[str, int], str]:
    """What the loads and stores of a module's device functions are, by kind and line."""
    named: dict[tuple[str, int], str] = {}
    for function in ast.parse(source).body:
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.load", "tl.store")):
                continue
            assert isinstance(function, ast.FunctionDef)
            kind, where = ast.unparse(call.func).removeprefix("tl."), call.args[0]
            while isinstance(where, ast.BinOp):
                where = where.left
            name = f"{function.name} {kind} {ast.unparse(where).removesuffix('_ptrs')}"
            for line in range(call.lineno, (call.end_lineno or call.lineno) + 1):
                named[kind, line] = name
    return named


def module_of(source: str, name: str) -> types.ModuleType:
    """Loads a generated module's text, its kernels compiled and not interpreted, without a device."""
    file = Path(tempfile.mkdtemp(prefix="tilewright-compile-")) / f"{name}.py"
    file.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(file)
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


@dataclass(frozen=True)
class Launched:
    """A launch that was recorded and not run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def launched(module: types.ModuleType, call: Callable[[], object]) -> list[Launched]:
    """The launches that `call()` makes through the module's kernels, compiled or interpreted; none of them runs."""
    seen: list[Launched] = []

    class Recorder:
        def __init__(self, kernel: Any):
            self.kernel = kernel.kernel if _is_recorder(kernel) else kernel
            self.__name__ = kernel.__name__

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **keywords: seen.append(Launched(self.kernel, grid, arguments, keywords))

    kernels = {
        name: value
        for name, value in vars(module).items()
        if (isinstance(value, KernelInterface) or _is_recorder(value)) and re.search(r"_kernel(_|$)", name)
    }
    try:
        vars(module).update({name: Recorder(kernel) for name, kernel in kernels.items()})
        call()
    finally:
        vars(module).update(kernels)
    return seen


def _is_recorder(kernel: Any) -> bool:
    """Is this what stands for a kernel in the package, to record its launch for repeats?"""
    return hasattr(kernel, "recorded")


def compiled(launch: Launched, target: str) -> Binary:
    """Compiles a recorded launch as the JIT would there: it looks at each argument's alignment and value."""
    with _device(target):
        kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.keywords)
    return Binary(target, kernel, Path(launch.kernel.fn.__code__.co_filename))


@contextlib.contextmanager
def _device(target: str) -> Iterator[None]:
    """A driver with one device of the target, which nothing can run on."""
    number = list(TARGETS).index(target)  # a kernel keeps what it compiled by the device's number
    stand_in = types.SimpleNamespace(
        get_current_device=lambda: number,
        get_current_target=lambda: TARGETS[target],
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver._active = before
