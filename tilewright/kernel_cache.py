"""Triton's compiled kernels of our operators, kept in Tilewright's cache.

`triton.compile` asks its own module for a cache. Ours is a copy of that function with other globals, so nobody else's
kernels are concerned, in this thread or another.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright import cache, environment

DIGESTS = "tilewright.json"  # beside the files of a kernel: their SHA-256 by name


@functools.cache
def compiler() -> Callable[..., Any]:
    """`triton.compile` with our cache; as it is where ours is off, or the user names a folder or class of Triton's."""
    from triton import knobs
    from triton.compiler import compiler as triton_compiler

    compile_ = triton_compiler.compile
    if cache.is_off() or environment.triton_cache() or knobs.cache.manager_class is not None:
        return compile_
    names = {**compile_.__globals__, "get_cache_manager": _manager_class()}
    return types.FunctionType(
        compile_.__code__, names, compile_.__name__, compile_.__defaults__, compile_.__closure__
    )


def entry(key: str) -> Path:
    """The folder of a kernel, made: in the cache, or where that takes nothing, one that ends with the process."""
    base = cache.folder()
    if base is not None:
        kept = base / cache.KERNELS / key
        if is_whole(kept):  # also where nothing can be written
            return kept
        with contextlib.suppress(OSError):
            cache.claim(base)
            kept.mkdir(parents=True, exist_ok=True)
            if cache.is_writable(kept):
                return kept
    made = _own() / key
    made.mkdir(exist_ok=True)
    return made


@functools.cache
def _own() -> Path:
    made = tempfile.mkdtemp(prefix="tilewright-")
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(made, ignore_errors=True) if os.getpid() == owner else None)
    return Path(made)


def is_whole(entry: Path) -> bool:
    """Whether every file of a kernel is as it was written."""
    try:
        digests = json.loads((entry / DIGESTS).read_text())
        return bool(digests) and all(_digest(entry / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.cache
def _manager_class() -> Any:
    from triton.runtime.cache import FileCacheManager

    class Manager(FileCacheManager):
        """The files of one kernel, in a folder of its key; read only if they are whole."""

        def __init__(self, key: str) -> None:
            self.key, self.cache_dir = key, str(entry(key))
            self.lock_path = os.path.join(self.cache_dir, "lock")

        def get_group(self, filename: str) -> Any:
            if not is_whole(Path(self.cache_dir)):
                return None
            return {name: self._make_path(name) for name in json.loads(Path(self.cache_dir, DIGESTS).read_text())}

        def put_group(self, filename: str, group: Any) -> Any:
            digests = {Path(path).name: _digest(Path(path)) for path in group.values()}
            return self.put(json.dumps(digests, indent=1), DIGESTS, binary=False)

    return Manager
