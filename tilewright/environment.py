"""The environment variables that Tilewright reads: all of them, and nowhere else.

README.md holds this table; a test compares the two and looks for readers elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One variable: what it does, and what holds where it is unset or empty."""

    name: str
    effect: str
    unset: str


VARIABLES = tuple(
    Variable(*row)
    for row in (
        (
            "TILEWRIGHT_DEVICE",
            "the vendor profile to use, by name (`nvidia-h200`, `generic`, ...). On a GPU it is read when an operator "
            "first gets a kind of call.",
            "detected; `generic` on the CPU",
        ),
        (
            "TILEWRIGHT_CHECK_SLOTS",
            "`1`: each call of an operator with slots compares them with the cache's capacity first and names the "
            "first one beyond it; it waits for the device. Read when an operator first runs.",
            "slots are the caller's word",
        ),
        (
            "TILEWRIGHT_CACHE_DIR",
            "the folder that keeps generated modules and, unless `TRITON_CACHE_DIR` names another, compiled kernels; "
            "`off`: none. Read when an operator first runs.",
            "`$XDG_CACHE_HOME/tilewright`, else `~/.cache/tilewright`",
        ),
    )
)


def read(name: str) -> str:
    """The value of one of `VARIABLES`, "" where it is unset."""
    if name not in {variable.name for variable in VARIABLES}:
        raise KeyError(f"{name} is none of Tilewright's variables")
    return os.environ.get(name, "")


def is_on(name: str) -> bool:
    """Whether one of `VARIABLES` is set to something other than 0."""
    return read(name) not in ("", "0")


def triton_cache() -> str:
    """The folder that the user names for Triton's compiled kernels, "" where none is named."""
    return os.environ.get("TRITON_CACHE_DIR", "")


def user_cache() -> str:
    """$XDG_CACHE_HOME, else ~/.cache; "" where neither is there, as for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # the standard: another is to be ignored
        return named
    home = os.environ.get("HOME", "")
    return os.path.join(home, ".cache") if os.path.isabs(home) else ""
