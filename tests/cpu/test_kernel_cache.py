"""Triton's compiled kernels in Tilewright's cache: kept, verified, by many processes, and nobody else's concern."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from compiled import compiled, launched
from samples import B, sample
from triton.compiler import compiler as triton_compiler

from tilewright import cache, kernel_cache
from tilewright.launch import OPERATORS

ROOT = Path(__file__).resolve().parents[2]
COMPILE = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import hashlib
from compiled import compiled, launched
from samples import B, sample
from tilewright import ops
from tilewright.launch import OPERATORS
module = OPERATORS[B].module("nvidia-h200", False)
(launch,) = launched(module, lambda: getattr(module, B)(*sample("B")[1]))
print(hashlib.sha256(compiled(launch, "sm_90").code).hexdigest())
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache beside an empty one of Triton's."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    kernel_cache.compiler.cache_clear()
    yield tmp_path / "cache"
    kernel_cache.compiler.cache_clear()


def code(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """B's binary for sm_90, of a module that is loaded anew."""
    monkeypatch.setattr(OPERATORS[B], "_modules", {})
    module = OPERATORS[B].module("nvidia-h200", False)
    (launch,) = launched(module, lambda: getattr(module, B)(*sample("B")[1]))
    return compiled(launch, "sm_90").code


def files(base: Path) -> dict[str, Path]:
    (folder,) = (base / "kernels").iterdir()
    return {file.name.removeprefix(f"{B}_kernel"): file for file in folder.iterdir()}


def test_kernels_are_kept_here_and_not_in_tritons_folder(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = code(monkeypatch)
    made = files(base)
    assert {".cubin", ".ptx", ".json", "tilewright.json"} <= made.keys()
    assert made[".cubin"].read_bytes() == first
    assert not (tmp_path / ".triton").exists()
    times = {name: file.stat().st_mtime_ns for name, file in made.items()}
    assert code(monkeypatch) == first
    assert {name: file.stat().st_mtime_ns for name, file in files(base).items()} == times  # read, not made


def test_nobody_elses_compilation_is_changed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(triton_compiler)), triton.knobs.cache.dir, triton.knobs.cache.manager_class
    code(monkeypatch)
    assert (dict(vars(triton_compiler)), triton.knobs.cache.dir, triton.knobs.cache.manager_class) == before


@pytest.mark.parametrize("name", [".cubin", ".json", ".ptx", "tilewright.json"])
@pytest.mark.parametrize("how", ["empty", "gone", "one bit"])
def test_a_damaged_kernel_is_made_again(name: str, how: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = code(monkeypatch)
    file = files(base)[name]
    whole = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(b"" if how == "empty" else bytes([whole[0] ^ 1]) + whole[1:])
    assert not kernel_cache.is_whole(file.parent)
    assert code(monkeypatch) == first
    assert kernel_cache.is_whole(file.parent)
    assert name == "tilewright.json" or file.read_bytes() == whole


def test_eight_processes_at_once(base: Path) -> None:
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(base)}
    command = [sys.executable, "-c", COMPILE]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(8)]
    out = [one.communicate(timeout=300) for one in started]
    assert [error for _, error in out] == [""] * 8
    assert len({digest for digest, _ in out}) == 1
    kernels = [entry for entry in cache.entries() if entry.kind == "kernel"]
    assert [(entry.name, entry.whole) for entry in kernels] == [(f"{B}_kernel", True)]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Kernels go to a folder that ends with the process."""
    (tmp_path / "file").touch()
    (tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "file" / "cache")}
    environment |= {"TRITON_HOME": str(tmp_path), "TMPDIR": str(tmp_path / "scratch")}
    environment.pop("TRITON_CACHE_DIR", None)
    code = COMPILE + "import os, tempfile\nprint([name[:11] for name in os.listdir(tempfile.gettempdir())])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.splitlines()[1], done.stderr) == ("['tilewright-']", "")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / ".triton").exists()


@pytest.mark.parametrize("variable", ["TILEWRIGHT_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_tritons_own_cache_where_ours_is_off_or_another_is_named(
    variable: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "off" if variable.startswith("TILEWRIGHT") else str(tmp_path / "named"))
    code(monkeypatch)
    folder = tmp_path / (".triton/cache" if variable.startswith("TILEWRIGHT") else "named")
    assert len(list(folder.iterdir())) == 1 and not (base / "kernels").exists()


def test_tritons_own_cache_where_the_user_has_a_class(base: Path) -> None:
    with triton.knobs.cache.scope():
        triton.knobs.cache.manager_class = triton.runtime.cache.FileCacheManager
        assert kernel_cache.compiler() is triton_compiler.compile


def test_clear_removes_kernels(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code(monkeypatch)
    assert cache.clear() == 2
    assert list((base / "kernels").iterdir()) == []
