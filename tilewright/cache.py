"""The cache of generated modules and compiled kernels: one folder, files written whole, each verified when read.

    <folder>/modules/<profile>/<operator>.<key>.py    the text, what it was made from, and its digest
    <folder>/kernels/<key>/                           what Triton makes of a kernel (`kernel_cache.py`)

Nothing here is needed: where the folder is missing, read-only or damaged, texts are generated again. Processes need no
lock, since a file appears under its name only when it is complete and two processes write the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright import environment, files

VARIABLE = "TILEWRIGHT_CACHE_DIR"
MODULES, KERNELS = "modules", "kernels"
TAG = "CACHEDIR.TAG"
SIGNATURE = """Signature: 8a477f597d28d172789f06886806bc55
# A cache of Tilewright's, which `python -m tilewright cache clear` empties.
"""
_NAME = re.compile(r"(?P<operator>\w+)\.(?P<key>[0-9a-f]{16})\.py")


@dataclass(frozen=True)
class Entry:
    """One module or kernel of the cache; `inputs` says what a module was made from, None where it is damaged."""

    path: Path
    kind: str
    name: str
    profile: str
    size: int
    whole: bool
    inputs: Mapping[str, str] | None = None


def is_off() -> bool:
    """Whether the user wants nothing kept."""
    return environment.read(VARIABLE) == "off"


def folder() -> Path | None:
    """The cache's folder, which need not exist; None where it is off or there is no home to put it in."""
    if is_off():
        return None
    named = environment.read(VARIABLE)
    if named:
        return Path(named).absolute()
    home = environment.user_cache()
    return Path(home) / "tilewright" if home else None


def is_writable(path: Path) -> bool:
    """Whether files could be written in a folder, which need not be there yet; nothing is."""
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


# -- modules
def source(operator: str, inputs: Mapping[str, str] | None, make: Callable[[], str]) -> str:
    """The text of a module: the cache's, or that of `make`, which is then kept.

    Args:
        operator: Its name.
        inputs: What the text depends on, "profile" included; None: never kept.
        make: Generates the text.
    """
    base = folder()
    if inputs is None or base is None:
        return make()
    path = _module_path(base, operator, inputs)
    kept = _read(path)
    if kept is not None and kept[1] == inputs:
        return kept[0]
    text = make()
    with contextlib.suppress(OSError):  # read-only, full, or no folder at all
        claim(base)
        files.write(path, _sealed(text, inputs))
    return text


def inputs_of(
    public: Callable[..., Any], profile: str, profile_hash: str, config: Mapping[str, int] | None
) -> dict[str, str] | None:
    """What the text of an operator's module depends on, by name; None for operators that are not in the package.

    A user's own operator may depend on anything, so its text is generated in each process.
    """
    if not public.__module__.startswith("tilewright.ops."):
        return None
    engine, operators = _digests()
    return {
        "profile": profile,
        "profile's content": profile_hash,
        "engine": engine,
        "operators and rules": operators,
        "configuration": "" if config is None else json.dumps(dict(sorted(config.items()))),
        "Python": ".".join(map(str, sys.version_info[:2])),
    }


@functools.cache
def _digests() -> tuple[str, str]:
    """Digests of the engine's files, and of those of arrangements, applications, operators and rules."""
    engine = Path(__file__).parent
    packages = [importlib.import_module(f"tilewright.{room}") for room in ("arrangements", "applications", "ops")]
    rooms = [Path(package.__path__[0]) for package in packages]
    return (
        _digest([*engine.glob("*.py"), *(engine / "vendors").glob("*.py")]),
        _digest([file for room in rooms for pattern in ("*.py", "configs/*.toml") for file in room.glob(pattern)]),
    )


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _module_path(base: Path, operator: str, inputs: Mapping[str, str]) -> Path:
    key = hashlib.sha256(json.dumps(dict(inputs)).encode()).hexdigest()[:16]
    return base / MODULES / inputs["profile"] / f"{operator}.{key}.py"


def _sealed(text: str, inputs: Mapping[str, str]) -> str:
    body = f"{text}# made from {json.dumps(dict(inputs))}\n"
    return f"{body}# sha256 {hashlib.sha256(body.encode()).hexdigest()}\n"


def _read(path: Path) -> tuple[str, dict[str, str]] | None:
    """The text of an entry and what it was made from; None where it is missing or not as it was written."""
    try:
        body, mark, digest = path.read_bytes().decode().rpartition("# sha256 ")
        if not mark or hashlib.sha256(body.encode()).hexdigest() != digest.strip():
            return None
        text, _, made = body.rpartition("# made from ")
        return text, json.loads(made)
    except (OSError, ValueError):
        return None


# -- looking at it
def entries() -> Iterator[Entry]:
    """Everything in the cache, in order of its paths."""
    base = folder()
    if base is None:
        return
    for path in sorted((base / MODULES).glob("*/*.py")):
        named = _NAME.fullmatch(path.name)
        if named:
            kept = _read(path)
            profile, size = path.parent.name, path.stat().st_size
            yield Entry(path, "module", named["operator"], profile, size, kept is not None, kept and kept[1])
    from tilewright import kernel_cache

    for path in sorted((base / KERNELS).glob("*")):
        parts = [file for file in path.glob("*") if file.is_file()] if path.is_dir() else []
        if parts:
            facts = (file for file in parts if file.suffix == ".json" and file.name != kernel_cache.DIGESTS)
            name = next((file.stem for file in facts), "?")
            size = sum(file.stat().st_size for file in parts)
            yield Entry(path, "kernel", name, "", size, kernel_cache.is_whole(path))


def clear() -> int:
    """Removes every entry; returns how many there were. Other files of the folder stay."""
    base, count = folder(), 0
    if base is None or not (base / TAG).exists():
        return 0
    for entry in list(entries()):
        if entry.kind == "module":
            entry.path.unlink(missing_ok=True)
        else:
            shutil.rmtree(entry.path, ignore_errors=True)
        count += 1
    return count


def why(operator: str, inputs: Mapping[str, str]) -> str:
    """Whether a module would come from the cache, and if not, what is in the way."""
    base = folder()
    if base is None:
        return "miss: there is no cache here"
    path = _module_path(base, operator, inputs)
    if path.exists():
        return f"hit: {path}" if _read(path) is not None else f"miss: {path} is damaged; it will be written again"
    others = [
        {name: value for name, value in inputs.items() if (entry.inputs or {}).get(name) != value}
        for entry in entries()
        if entry.kind == "module" and entry.name == operator and entry.profile == inputs["profile"] and entry.inputs
    ]
    if not others:
        return f"miss: no module of {operator} for {inputs['profile']} was kept yet"
    fewest = min(others, key=lambda changed: len(changed))
    return f"miss: since a module was kept, this has changed: {', '.join(fewest)}"


def claim(base: Path) -> None:
    """Marks the folder as a cache, so that backups leave it out and `clear` knows it."""
    if not (base / TAG).exists():
        files.write(base / TAG, SIGNATURE)


def status() -> str:
    """Where the cache is and whether it can be used, in words."""
    base = folder()
    if is_off():
        return f"off: {VARIABLE}=off"
    if base is None:
        return f"none: neither {VARIABLE}, XDG_CACHE_HOME nor HOME names a folder"
    return f"{base}" if is_writable(base) else f"{base}, where nothing can be written"
