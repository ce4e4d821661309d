"""The cache of generated modules: where it is, what it keeps, many processes at once, and damage."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from samples import B, contents, sample

from tilewright import cache, ops
from tilewright.__main__ import main
from tilewright.launch import OPERATORS, Operator

ROOT = Path(__file__).resolve().parents[2]
CALL = f"""
import hashlib, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from samples import contents, sample
from tilewright import cache, ops
operator, given = sample("B")
getattr(ops, operator)(*given)
print(hashlib.sha256(b"".join(contents(None, given))).hexdigest(), cache.folder())
"""


def process(code: str = CALL, **environment: str) -> subprocess.Popen[str]:
    kept = {n: v for n, v in os.environ.items() if n not in ("HOME", "XDG_CACHE_HOME", "TILEWRIGHT_CACHE_DIR")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=kept | environment, stdout=pipe, stderr=pipe, text=True)


def finished(started: subprocess.Popen[str]) -> list[str]:
    out, error = started.communicate(timeout=300)
    assert (started.returncode, error) == (0, "")
    return out.split()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in which no module of this process is loaded yet."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(OPERATORS[B], "_modules", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def right() -> str:
    """Digest of what a call gives without a cache."""
    _, given = sample("B")
    ops.fused_qk_norm_rope(*given)
    return hashlib.sha256(b"".join(contents(None, given))).hexdigest()


def call() -> str:
    """The same digest, of a call whose module is loaded anew."""
    OPERATORS[B]._modules.clear()
    _, given = sample("B")
    ops.fused_qk_norm_rope(*given)
    return hashlib.sha256(b"".join(contents(None, given))).hexdigest()


def only_module(base: Path) -> Path:
    (file,) = (base / "modules").rglob("*.*")
    return file


# Where it is


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TILEWRIGHT_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/tilewright"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/tilewright"),
        ({"TILEWRIGHT_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/tilewright"),
        ({"HOME": ""}, None),
        ({}, None),
        ({"TILEWRIGHT_CACHE_DIR": "off", "HOME": "/h"}, None),
    ],
    ids=str,
)
def test_folder(variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TILEWRIGHT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.folder() == (None if expected is None else Path(expected))


def test_it_is_where_xdg_says(tmp_path: Path, right: str) -> None:
    assert finished(process(HOME=str(tmp_path))) == [right, str(tmp_path / ".cache/tilewright")]
    assert only_module(tmp_path / ".cache/tilewright").suffix == ".py"


def test_without_a_home_nothing_is_kept(right: str) -> None:
    assert finished(process()) == [right, "None"]


@pytest.mark.parametrize("folder", ["file/cache", "/proc/tilewright"], ids=["below a file", "read-only"])
def test_where_nothing_can_be_written(folder: str, tmp_path: Path, right: str) -> None:
    (tmp_path / "file").touch()
    where = str(tmp_path / folder)
    assert finished(process(TILEWRIGHT_CACHE_DIR=where)) == [right, where]


def test_a_cache_that_can_only_be_read_is_read(
    base: Path, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call() == right
    monkeypatch.setattr(cache.files, "write", _refuse)
    monkeypatch.setattr(Operator, "source", _refuse)
    assert call() == right


def _refuse(*_: object) -> None:
    raise OSError("Read-only file system")


# What it keeps


def test_the_second_process_generates_nothing(base: Path, right: str) -> None:
    assert call() == right
    code = f"from tilewright.launch import Operator\nOperator.source = None\n{CALL}"
    assert finished(process(code, TILEWRIGHT_CACHE_DIR=str(base)))[0] == right


def test_what_is_kept_is_what_source_gives(base: Path) -> None:
    call()
    text, _, _ = only_module(base).read_text().rpartition("# made from ")
    assert text == OPERATORS[B].source("generic")
    assert (base / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_a_forced_configuration_is_kept_apart(base: Path) -> None:
    config = {"tokens": 2, "heads": 2, "num_warps": 1, "num_stages": 1}
    for _ in range(2):
        OPERATORS[B]._modules.clear()
        ops.fused_qk_norm_rope(*sample("B")[1], config=config, profile="nvidia-h200")
    assert len(list((base / "modules" / "nvidia-h200").iterdir())) <= 2
    inputs = OPERATORS[B].inputs("nvidia-h200", config)
    assert inputs is not None and inputs != OPERATORS[B].inputs("nvidia-h200")


def test_operators_of_others_are_not_kept() -> None:
    def public() -> None: ...

    assert cache.inputs_of(public, "generic", "hash", None) is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[: len(data) // 2],
    "without its last line": lambda data: data[: data.rstrip().rfind(b"\n") + 1],
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "no text": lambda data: b"\xff" * len(data),
    "another file": lambda data: b"raise SystemExit('executed')\n",
    "sealed, made from something else": lambda data: cache._sealed("raise SystemExit\n", {"engine": "0"}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_module_is_made_again(base: Path, right: str, damage: Callable[[bytes], bytes]) -> None:
    call()
    file = only_module(base)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert call() == right
    assert file.read_bytes() == whole


def test_eight_processes_at_once(base: Path, right: str) -> None:
    """Into an empty cache, then into one whose module is damaged."""
    for _ in range(2):
        started = [process(TILEWRIGHT_CACHE_DIR=str(base)) for _ in range(8)]
        assert [finished(one)[0] for one in started] == [right] * 8
        assert [entry.whole for entry in cache.entries()] == [True]
        assert sorted(p.name for p in base.iterdir()) == ["CACHEDIR.TAG", "modules"]
        file = only_module(base)  # and no file that somebody began
        file.write_bytes(file.read_bytes()[:1000])


# Looking at it


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_list(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "cache", "list") == [str(base)]
    call()
    file = only_module(base)
    size = file.stat().st_size
    assert printed(capsys, "cache", "list") == [str(base), f"module  generic        {B}  {size} bytes  whole"]
    file.write_text("")
    (line,) = printed(capsys, "cache", "list")[1:]
    assert line == f"module  generic        {B}  0 bytes  DAMAGED: it will be made again"


def test_explain(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def why() -> str:
        (line,) = printed(capsys, "cache", "explain", B)
        return line

    assert why() == f"{B}: miss: no module of {B} for generic was kept yet"
    call()
    file = only_module(base)
    assert why() == f"{B}: hit: {file}"
    _, operators = cache._digests()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_digests", lambda: ("changed", operators))
        assert why() == f"{B}: miss: since a module was kept, this has changed: engine"
    file.write_text("")
    assert why() == f"{B}: miss: {file} is damaged; it will be written again"
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", "off")
    assert why() == f"{B}: miss: there is no cache here"


def test_clear_removes_entries_and_nothing_else(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call()
    own = [base / "modules" / "generic" / "notes.txt", base / "mine.py"]
    for file in own:
        file.write_text("mine")
    assert printed(capsys, "cache", "clear") == [f"1 entries removed from {base}"]
    assert all(file.exists() for file in own)
    assert list(cache.entries()) == []


def test_clear_leaves_a_folder_that_is_no_cache(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call()
    (base / "CACHEDIR.TAG").unlink()
    assert printed(capsys, "cache", "clear") == [f"0 entries removed from {base}"]
    assert only_module(base).exists()
