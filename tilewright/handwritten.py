"""A module that is written by hand, where an arrangement and an application cannot say what it does."""

from __future__ import annotations

import functools
import types
from importlib import resources
from typing import Any

from tilewright import launch, vendors

# Module names and their files beside this one: the exceptions, each with its reason in docs/design-notes.md.
MODULES = {"moe_align_block_size": "moe_align.py"}
WARPS = 8  # what the texts have
STATUS = "run on the CPU, interpreted; compiled for sm_80, sm_90 and gfx942"


def source(name: str, profile: str) -> str:
    """The module's text for a device: the same kernels for all, on as many warps as a program may have there."""
    loaded = vendors.load(profile)
    warps = min(WARPS, (loaded.max_threads or WARPS * 32) // (loaded.warp_size or 32))
    header = [
        f"{name} for {loaded.name}", "Written by hand in Tilewright; the same kernels for every device.", "",
        f"profile       {loaded.name} {loaded.hash}", f"status        {STATUS}",
    ]  # fmt: skip
    return "".join(f"# {line}".rstrip() + "\n" for line in header) + _text(name).replace(
        f'"num_warps": {WARPS}', f'"num_warps": {warps}', 1
    )


@functools.cache
def _text(name: str) -> str:
    text = (resources.files("tilewright") / MODULES[name]).read_text()
    return text.removeprefix("# mypy: ignore-errors\n")


@functools.cache
def module(name: str, profile: str, interpreted: bool) -> types.ModuleType:
    """The loaded module, for a GPU or interpreted."""
    loaded: Any = launch.load(name, profile, source(name, profile), interpreted)
    loaded.PROFILE, loaded.LOWERINGS = profile, {}
    return loaded


def call(
    name: str, function: str, first_name: str, first: Any, *arguments: Any, profile: str | None = None, **options: Any
) -> Any:
    """`function(first, *arguments, **options)` of a module, for the device that the tensor `first` is on.

    Raises:
        DeviceError: `first` is where nothing can run.
    """
    device_name, interpreted = launch.placed(function, first_name, first, profile)
    loaded: Any = module(name, device_name, interpreted)
    loaded.last_launch = None
    result = getattr(loaded, function)(first, *arguments, **options)
    launch.note(function, loaded, not interpreted)
    return result
