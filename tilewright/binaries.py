"""Binaries of a module's kernels, compiled for a device that is not here, and what a C++ caller launches them by.

A kernel is compiled as a call would compile it, with the alignment of its arguments, so Triton's cache of a build
serves later calls too: with `TRITON_CACHE_DIR` set to the build's `triton-cache`, a first call compiles nothing.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import BuildError
from tilewright.vendors import VendorProfile

# What upstream Triton compiles for: backend, architecture, lanes of a warp.
TARGETS: Mapping[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32), "sm_86": ("cuda", 86, 32), "sm_89": ("cuda", 89, 32), "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32), "sm_120": ("cuda", 120, 32), "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64), "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}  # fmt: skip


def target(profile: VendorProfile) -> str | None:
    """The target of a device that upstream Triton reaches, None for the others."""
    arch = profile.compute_arch or ""
    reached = arch in TARGETS and TARGETS[arch][0] == profile.triton_backend
    return arch if reached else None


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: its name among its operator's, the ELF file, and how to launch it."""

    name: str
    code: bytes
    launch: Mapping[str, Any]

    @property
    def suffix(self) -> str:
        return "cubin" if self.launch["target"].startswith("sm_") else "hsaco"

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.code + self.text.encode()).hexdigest()

    @property
    def text(self) -> str:
        return json.dumps(self.launch, indent=1) + "\n"


def toolchain() -> str:
    """`Triton 3.7.1`.

    Raises:
        BuildError: Triton or torch cannot be imported.
    """
    try:
        import torch  # noqa: F401
        import triton
    except ImportError as error:
        raise BuildError(f"--binaries compiles with triton and torch: {error}") from error
    return f"Triton {triton.__version__}"


def compiled(operator: str, text: str, arch: str, cache: Path) -> Iterator[Binary]:
    """The kernels that an operator's listed problems launch under each configuration of the module's rules.

    Args:
        text: a plain module; it is written to `cache`, for Triton reads kernels from files.
        arch: a name of `TARGETS`.
    """
    from triton import knobs

    from tilewright.ops.problems import problems

    cache.mkdir(parents=True, exist_ok=True)
    file = cache / f"{operator}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"  # two devices may share a target
    file.write_text(text)
    module: Any = types.ModuleType(operator)
    module.__file__ = str(file)
    exec(compile(text, str(file), "exec"), module.__dict__)
    seen: set[str] = set()
    with knobs.cache.scope(), stand_in(arch):
        knobs.cache.dir = str(cache)
        configs = {json.dumps(config): config for _, config in module.RULES}
        for problem, arguments in problems(operator, f"float8_e4m3{module.LOWERINGS['e4m3_format']}"):
            for number, config in enumerate(configs.values()):
                for name, kernel, launch in _warmed(module, operator, arguments, config):
                    if kernel.hash not in seen:
                        seen.add(kernel.hash)
                        code = kernel.asm["cubin" if arch.startswith("sm_") else "hsaco"]
                        facts = {"problem": problem, "config": dict(config), **_launch(kernel, launch, text, operator)}
                        yield Binary(f"{name.removeprefix(operator + '_')}.{problem}.config_{number}", code, facts)


def _warmed(
    module: types.ModuleType, operator: str, arguments: tuple[Any, ...], config: Mapping[str, int]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """The kernels that one call launches, compiled and not run: name, kernel, values of its parameters."""
    found: list[tuple[str, Any, dict[str, Any]]] = []

    class Warm:
        def __init__(self, name: str, kernel: Any) -> None:
            self.__name__, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **keywords: Any) -> None:
                values = dict(zip(self.kernel.arg_names, args, strict=False)) | keywords
                found.append((self.__name__, self.kernel.warmup(*args, grid=grid, **keywords), values))

            return launch

    kernels = {name: value for name, value in vars(module).items() if re.match(rf"{operator}_kernel(_|$)", name)}
    try:
        vars(module).update({name: Warm(name, kernel) for name, kernel in kernels.items()})
        getattr(module, operator)(*arguments, config=dict(config))
    finally:
        vars(module).update(kernels)
    return found


def _launch(kernel: Any, values: Mapping[str, Any], text: str, operator: str) -> dict[str, Any]:
    """What a caller needs: symbol, arguments in order, constants, grid, shared bytes, threads."""
    signature, metadata = kernel.src.signature, kernel.metadata
    arguments = [{"name": name, "type": kind} for name, kind in signature.items() if kind != "constexpr"]
    is_cuda = metadata.target.backend == "cuda"
    scratch = _parameters(kernel.asm["ptx" if is_cuda else "amdgcn"], metadata.name, is_cuda) - len(arguments)
    arguments += [{"name": f"scratch_{i}", "type": "*u8", "value": "null"} for i in range(scratch)]
    constants = {n: _plain(values.get(n, 1)) for n, kind in signature.items() if kind == "constexpr"}
    aligned = [
        list(signature)[index[0]] for index, facts in kernel.src.attrs.items() if ["tt.divisibility", 16] in facts
    ]
    return {
        "symbol": metadata.name,
        "target": ("sm_" if is_cuda else "") + str(metadata.target.arch),
        "arguments": arguments,
        "constants": constants,
        "divisible_by_16": aligned,
        "grid": _grid_text(text, operator),
        "shared_bytes": metadata.shared,
        "num_warps": metadata.num_warps,
        "threads": metadata.num_warps * metadata.target.warp_size,
        "triton": metadata.triton_version,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _parameters(assembly: str, name: str, is_cuda: bool) -> int:
    """How many parameters the compiled entry has: Triton adds pointers to scratch memory."""
    if is_cuda:
        return len(re.findall(rf"\.param [^,)]*{name}_param_\d+", assembly.split(".visible .entry")[1].split(")")[0]))
    arguments = assembly.split(".args:")[1].split(".group_segment_fixed_size")[0]
    return len(re.findall(r"\.offset:", arguments)) - len(re.findall(r"\.value_kind:\s+hidden", arguments))


def _grid_text(text: str, operator: str) -> dict[str, Any]:
    """The number of programs along x as host text, and where its sizes come from."""
    functions = {n.name: n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
    assigned = {
        name: {
            node.targets[0].id: ast.unparse(node.value)
            for node in reversed([n for n in ast.walk(functions[name]) if isinstance(n, ast.Assign)])
            if isinstance(node.targets[0], ast.Name)
        }
        for name in (operator, "_launch")
    }
    programs = assigned["_launch"]["programs"]
    used = {n.id for n in ast.walk(ast.parse(programs)) if isinstance(n, ast.Name)}
    return {"x": programs, "sizes": {n: v for n, v in sorted(assigned[operator].items()) if n in used}}


@contextlib.contextmanager
def stand_in(arch: str) -> Iterator[None]:
    """A driver with one device of the target, which nothing can run on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    number = list(TARGETS).index(arch)  # a kernel keeps what it compiled by the device's number
    device = types.SimpleNamespace(
        get_current_device=lambda: number,
        get_current_target=lambda: GPUTarget(*TARGETS[arch]),
        get_current_stream=lambda device: 0,
    )
    before = driver._active
    driver.set_active(device)
    try:
        yield
    finally:
        driver._active = before
