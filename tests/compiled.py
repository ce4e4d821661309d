"""Compiles a generated module's kernels for a device that is not there, and reads the result."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int64: "*i64",
    torch.int32: "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Binary:
    """A compiled kernel."""

    target: str
    kernel: Any

    @cached_property
    def text(self) -> str:
        """PTX, or the AMD assembly."""
        return self.kernel.asm["ptx" if self.target.startswith("sm_") else "amdgcn"]

    @property
    def shared(self) -> int:
        return self.kernel.metadata.shared

    @cached_property
    def widths(self) -> dict[str, list[int]]:
        """Bytes of each global load and store, in order of the text."""
        out: dict[str, list[int]] = {"load": [], "store": []}
        if self.target.startswith("sm_"):
            for kind, name in (("ld", "load"), ("st", "store")):
                for vector, bits in re.findall(rf"{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfus](\d+)", self.text):
                    out[name].append(int(vector or 1) * int(bits) // 8)
            return out
        sizes = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "short_d16": 2, "short_d16_hi": 2, "dword": 4,
                 "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "sbyte": 1, "sshort": 2, "byte_d16_hi": 1, "b32": 4,
                 "b64": 8, "b128": 16}  # fmt: skip
        for kind, size in re.findall(r"(?:global|buffer|flat)_(load|store)_(\w+)", self.text):
            out[kind].append(sizes[size])
        return out

    @cached_property
    def resources(self) -> dict[str, int]:
        """Registers and spilled bytes."""
        if self.target.startswith("sm_"):
            return self._ptxas()
        spills = [int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", self.text)]
        registers = [int(n) for n in re.findall(r"\.vgpr_count:\s*(\d+)", self.text)]
        if not spills or not registers:
            raise AssertionError("no resource usage in the assembly")
        return {"registers": max(registers), "spilled": sum(spills)}

    def _ptxas(self) -> dict[str, int]:
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(self.text)
            arch = re.search(r"\.target (sm_\w+)", self.text)
            assert arch is not None
            run = subprocess.run(
                [ptxas, "-v", f"-arch={arch[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", run.stderr)]
        registers = re.search(r"Used (\d+) registers", run.stderr)
        assert registers is not None and spills
        return {"registers": int(registers[1]), "spilled": sum(spills)}


def module_of(source: str, name: str) -> types.ModuleType:
    """Loads a generated module's text without a device."""
    folder = Path(tempfile.mkdtemp(prefix="tilewright-compile-"))
    file = folder / f"{name}.py"
    file.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module


def launched(module: types.ModuleType, call: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches (kernel, arguments, keywords) that `call()` makes through the module's kernels, none of them run."""
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: Any):
            self.kernel = kernel
            self.__name__ = kernel.__name__

        def __getitem__(self, grid: Any) -> Any:
            return lambda *a, **k: seen.append((self.kernel, a, k))

    originals = {n: v for n, v in vars(module).items() if isinstance(v, triton.JITFunction)}
    try:
        vars(module).update({n: Recorder(v) for n, v in originals.items() if n.endswith(("_kernel", "_kernel_masked"))})
        call()
    finally:
        vars(module).update(originals)
    return seen


def compiled(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], target: str) -> Binary:
    """Compiles a recorded launch as the JIT would specialise it: pointers 16-byte aligned, integers by their value."""
    kernel, args, keywords = launch
    options = {k: v for k, v in keywords.items() if k in ("num_warps", "num_stages", "enable_fp_fusion")}
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in keywords.items() if k not in options}
    plain = set(kernel.do_not_specialize or ())
    signature, constexprs, attributes = {}, {}, {}
    constexpr_names = {p.name for p in kernel.params if p.is_constexpr}
    for index, name in enumerate(names):
        value = values[name]
        if name in constexpr_names or (isinstance(value, int) and value == 1 and name not in plain):
            signature[name], constexprs[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and name not in plain:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, signature, constexprs, attributes)
    return Binary(target, triton.compile(source, target=TARGETS[target], options=options))
