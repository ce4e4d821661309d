"""The variables that Tilewright reads: one table, in the code and in the README, and no reader elsewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright import environment, vendors
from tilewright.__main__ import main
from tilewright.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
CODE = [f for room in ("tilewright", "ops", "arrangements", "applications") for f in (ROOT / room).rglob("*.py")]


def test_the_readme_has_the_table() -> None:
    rows = re.findall(r"^\| `(TILEWRIGHT_\w+)` \| (.*) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rows == [(v.name, v.effect, v.unset) for v in VARIABLES]


def reads(tree: ast.AST) -> Iterator[str]:
    """Ways to the environment in a file's code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield ast.unparse(node)


def names(tree: ast.AST) -> set[str]:
    """Variables that a file's code, not its prose, names."""
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if re.fullmatch(r"TILEWRIGHT_\w+", text)}


def test_nobody_else_reads_the_environment() -> None:
    readers = {f.relative_to(ROOT).as_posix(): list(reads(ast.parse(f.read_text()))) for f in CODE}
    assert len(readers) > 40 and len(readers.pop("tilewright/environment.py")) == 4
    assert {file: found for file, found in readers.items() if found} == {}


def test_every_variable_that_the_code_names_is_in_the_table() -> None:
    named = {name for file in CODE for name in names(ast.parse(file.read_text()))}
    assert named == {variable.name for variable in VARIABLES}


def test_another_variable_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_OTHER", "1")
    with pytest.raises(KeyError, match="TILEWRIGHT_OTHER is none of Tilewright's variables"):
        environment.read("TILEWRIGHT_OTHER")


# python -m tilewright env


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["env"]) == 0
    facts = {line[:24].strip(): line[25:] for line in capsys.readouterr().out.splitlines()}
    assert all(facts.values())
    return facts


def test_env_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    facts = printed(capsys)
    assert facts["torch"] == torch.__version__
    assert facts["TILEWRIGHT_DEVICE"] == "unset: detected; `generic` on the CPU"
    assert facts["TILEWRIGHT_CACHE_DIR"] == str(tmp_path / "kept")
    assert facts["devices"] == "no GPU; profile generic"
    assert not (tmp_path / "kept").exists()  # looking makes nothing
    monkeypatch.setenv("TILEWRIGHT_DEVICE", "nowhere")
    assert printed(capsys)["devices"].startswith("no GPU; profile none: TILEWRIGHT_DEVICE: ")


def test_env_names_every_gpu_and_its_profile(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        name, total_memory = "NVIDIA H200", 150 << 30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(vendors, "detect", lambda index: ["nvidia-h200", "generic"][index])
    facts = printed(capsys)
    assert facts["cuda:0"] == "NVIDIA H200, 150 GiB; profile nvidia-h200"
    assert facts["cuda:1"] == "NVIDIA H200, 150 GiB; profile generic"
