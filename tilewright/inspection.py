"""`python -m tilewright env` and `cache`: what a bug report needs, and what is kept on disk."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import tilewright
from tilewright import cache, vendors
from tilewright.build import operators
from tilewright.environment import VARIABLES, read, triton_cache
from tilewright.errors import TilewrightError

DISTRIBUTIONS = ("torch", "triton", "ninetoothed", "numpy", "sympy")


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `env` and `cache` to the commands."""
    command("env", _env, "print versions, devices, profile and caches, for a bug report")
    made = command("cache", _cache, "list, clear or explain the cache of generated modules and compiled kernels")
    made.add_argument("what", choices=("list", "clear", "explain"))
    made.add_argument("op", nargs="*", metavar="OP", help="for explain: these operators only")
    made.add_argument("--device", default="generic", metavar="NAME", help="for explain: the device")


def _env(options: argparse.Namespace) -> int:
    for name, value in facts():
        print(f"{name:<24} {value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """What of this machine a call depends on, by name."""
    yield "tilewright", f"{tilewright.__version__} in {Path(tilewright.__file__).parent}"
    for name in DISTRIBUTIONS:
        yield name, _version(name)
    yield "python", f"{platform.python_version()} {platform.platform()}"
    for variable in VARIABLES:
        yield variable.name, read(variable.name) or f"unset: {variable.unset}"
    yield from _devices()
    entries = list(cache.entries())
    damaged = sum(not entry.whole for entry in entries)
    size = sum(entry.size for entry in entries)
    yield "cache", cache.status()
    yield "cache entries", f"{len(entries)}, {size} bytes, {damaged} damaged"
    yield "TRITON_CACHE_DIR", triton_cache() or "unset: compiled kernels are in the cache above"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[tuple[str, str]]:
    """Each GPU with the profile that its calls get; the CPU's where there is none."""
    try:
        import torch
    except ImportError:
        yield "devices", "torch cannot be imported"
        return
    built = torch.version.cuda and f"CUDA {torch.version.cuda}" or torch.version.hip and f"HIP {torch.version.hip}"
    yield "torch was built for", built or "the CPU"
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory >> 30} GiB; profile {_profile(index)}"
    if not count:
        yield "devices", f"no GPU; profile {_profile('cpu')}"


def _profile(device: object) -> str:
    try:
        return vendors.detect(device)
    except TilewrightError as error:
        return f"none: {' '.join(str(error).split())}"


def _cache(options: argparse.Namespace) -> int:
    if options.what == "list":
        print(cache.status())
        for entry in cache.entries():
            state = "whole" if entry.whole else "DAMAGED: it will be made again"
            print(f"{entry.kind:<7} {entry.profile or '-':<14} {entry.name}  {entry.size} bytes  {state}")
    elif options.what == "clear":
        print(f"{cache.clear()} entries removed from {cache.status()}")
    else:
        for operator in operators(options.op):
            inputs = operator.inputs(options.device)
            print(f"{operator.name}: {'never kept' if inputs is None else cache.why(operator.name, inputs)}")
    return 0
