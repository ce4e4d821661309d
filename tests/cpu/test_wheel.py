"""What a wheel holds, and that an installed package uses it: the modules of every device, made when it is built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tilewright import handwritten, vendors
from tilewright.build import operators

ROOT = Path(__file__).parents[2]
A = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
ROOMS = ("tilewright", "arrangements", "applications", "ops")


def python(code: str, folder: Path, **variables: str) -> str:
    """What a Python prints that sees the packages of this environment, but not this project's own."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of what a build reads."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for room in ROOMS:
        skipped = shutil.ignore_patterns("__pycache__", "generated", *(ROOMS if room == "tilewright" else ()))
        shutil.copytree(ROOT / room, copy / room, ignore=skipped)
    return copy


@pytest.fixture(scope="module")
def sdist(tree: Path) -> Path:
    name = python("from setuptools import build_meta; print(build_meta.build_sdist('made'))", tree).splitlines()[-1]
    with tarfile.open(tree / "made" / name) as archive:
        archive.extractall(tree / "made", filter="data")
    (folder,) = [path for path in (tree / "made").iterdir() if path.is_dir()]
    return folder


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    code = "from setuptools import build_meta; print(build_meta.build_wheel('made'))"
    return sdist / "made" / python(code, sdist).splitlines()[-1]


def test_a_wheel_holds_every_module(wheel: Path) -> None:
    found = contents(wheel)
    generated = {name for name in found if name.startswith("tilewright/generated/")}
    expected = {f"tilewright/generated/{device}/{op.name}.py" for device in vendors.names() for op in operators()}
    by_hand = {f"tilewright/generated/{device}/{n}.py" for device in vendors.names() for n in handwritten.MODULES}
    assert generated == {"tilewright/generated/manifest.json", *expected, *by_hand}
    for name in sorted(expected):
        device = name.split("/")[2]
        (operator,) = operators([Path(name).stem])
        assert found[name].decode() == operator.source(device)


def test_the_sdist_builds_the_same_wheel(tree: Path, wheel: Path) -> None:
    code = "from setuptools import build_meta; print(build_meta.build_wheel('again'))"
    direct = contents(tree / "again" / python(code, tree).splitlines()[-1])
    assert contents(wheel) == direct


def test_an_installed_package_uses_them(wheel: Path, tmp_path: Path) -> None:
    """Nothing is generated, and importing opens none of them; another profile of that name is generated for."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    code = f"""
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
import tilewright, tilewright.launch
from tilewright import ops, vendors
assert tilewright.__file__.startswith({str(tmp_path)!r}), tilewright.__file__
assert not [name for name in opened if "generated" in name]
def refuse(*arguments): raise AssertionError("generated")
tilewright.launch.module_text = refuse
operator = tilewright.launch.OPERATORS[{A!r}]
print(len({{operator.source(name) for name in vendors.names()}}))
import dataclasses
other = dataclasses.replace(vendors.load("h200"), max_threads=512)
tilewright.launch.vendors.load = lambda name: other
operator._text.cache_clear() if hasattr(operator._text, "cache_clear") else type(operator)._text.cache_clear()
try:
    operator.source("another")
except AssertionError as error:
    print(error)
"""
    lines = python(code, tmp_path, PYTHONPATH=str(tmp_path / "site")).splitlines()
    assert lines == [str(len(vendors.names())), "generated"]
