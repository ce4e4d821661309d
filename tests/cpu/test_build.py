"""The command line: standalone modules and their manifest, and generation where torch and Triton are missing."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4 import Case, make, run

import tilewright
from tilewright import handwritten, interpret, vendors
from tilewright.build import build, operators
from tilewright.errors import BuildError, ProfileError
from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator

NAME = operator.__name__
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
TESTS = Path(__file__).parents[1]


def python(arguments: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **variables}, timeout=120
    )


def cli(*arguments: str, **variables: str) -> str:
    """What a command prints; it must succeed, and say nothing else."""
    done = python(["-m", "tilewright", *arguments], **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    cli("build", "--vendor", *SHIPPED, "--out", str(out))
    return out


# What is written


def test_files(built: Path) -> None:
    texts = {op.name: op.source for op in operators()} | {
        name: functools.partial(handwritten.source, name) for name in handwritten.MODULES
    }
    names = list(texts)
    assert NAME in names and "moe_align_block_size" in names
    assert set(files(built)) == {"manifest.json", *(f"{device}/{name}.py" for device in SHIPPED for name in names)}
    for device in SHIPPED:
        for name in names:
            path = built / device / f"{name}.py"
            assert path.read_text() == texts[name](device)
            assert path.stat().st_mode & 0o777 == 0o644


def test_manifest(built: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    assert set(manifest) == {"tilewright", "layout", "modules"}
    assert (manifest["tilewright"], manifest["layout"]) == (tilewright.__version__, "plain")
    assert len(manifest["modules"]) == len(files(built)) - 1
    for entry in manifest["modules"]:
        text, by_hand = (built / entry["file"]).read_bytes(), entry["operator"] in handwritten.MODULES
        kernel = None if by_hand else OPERATORS[entry["operator"]].kernel
        assert len(entry.pop("inputs")) == 64
        assert entry == {
            "operator": entry["operator"],
            "device": entry["device"],
            "file": f"{entry['device']}/{entry['operator']}.py",
            "text": hashlib.sha256(text).hexdigest(),
            "profile": vendors.load(entry["device"]).hash,
            "arrangements": kernel.arrangement_hash() if kernel else "",
            "applications": kernel.application_hash() if kernel else "",
            "status": kernel.rules(entry["device"]).status if kernel else handwritten.STATUS,
            "linted": 0 if kernel else None,
        }
        assert f"profile       {entry['device']} {entry['profile']}\n" in text.decode()
        assert by_hand or f"applications  {entry['applications']}\n" in text.decode()
        assert f"status        {entry['status']}\n" in text.decode()


def test_paths_and_status_are_printed(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    printed = cli("build", "--vendor", "h200", "generic", "--op", NAME, "--out", str(out))
    status = {device: OPERATORS[NAME].kernel.rules(device).status for device in ("nvidia-h200", "generic")}
    assert printed == "".join(f"{out}/{device}/{NAME}.py  ({text})\n" for device, text in status.items())
    assert set(files(out)) == {"manifest.json", f"nvidia-h200/{NAME}.py", f"generic/{NAME}.py"}


def test_a_second_build_replaces_the_first(tmp_path: Path) -> None:
    (tmp_path / "generic").mkdir()
    (tmp_path / "generic" / f"{NAME}.py").write_text("old")
    for _ in range(2):
        cli("build", "--vendor", "generic", "--op", NAME, "--out", str(tmp_path))
        assert (tmp_path / "generic" / f"{NAME}.py").read_text() == OPERATORS[NAME].source("generic")
    assert set(files(tmp_path)) == {"manifest.json", f"generic/{NAME}.py"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vendor", "h200", "h300"], "ProfileError: "),
        (["--vendor", "h200", "--op", "nothing"], "BuildError: unknown operator nothing; known are "),
    ],
)
def test_mistakes_write_nothing(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = python(["-m", "tilewright", "build", *arguments, "--out", str(tmp_path)])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message) and "Traceback" not in done.stderr
    assert files(tmp_path) == {}


# The same bytes


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_bytes_do_not_depend_on_the_hash_seed(seed: str, built: Path, tmp_path: Path) -> None:
    cli("build", "--vendor", *SHIPPED, "--out", str(tmp_path), PYTHONHASHSEED=seed)
    assert files(tmp_path) == files(built)


def test_bytes_do_not_depend_on_what_was_generated_before(built: Path, tmp_path: Path) -> None:
    """Other texts first, in this process, and the profiles in another order."""
    config = {"tokens": 4, "heads": 8, "kv_tokens": 2, "num_warps": 4, "num_stages": 1}
    for device in vendors.names():
        OPERATORS[NAME].source(device, config)
    OPERATORS[NAME].module("generic", True, config)
    type(OPERATORS[NAME])._text.cache_clear()
    written = list(build(SHIPPED[::-1], tmp_path))
    assert {entry.file: (tmp_path / entry.file).read_bytes() for entry in written} == {
        name: data for name, data in files(built).items() if name != "manifest.json"
    }


def test_source_prints_the_module(built: Path) -> None:
    assert cli("source", NAME, "--device", "metax") == (built / "metax-c550" / f"{NAME}.py").read_text()
    config = {"tokens": 2, "heads": 4, "kv_tokens": 1, "num_warps": 2, "num_stages": 1}
    text = ",".join(f"{name}={value}" for name, value in config.items())
    assert cli("source", NAME, "--config", text) == OPERATORS[NAME].source("generic", config)


# A module is all there is to copy


@pytest.mark.parametrize("device", SHIPPED)
def test_imports(device: str, built: Path) -> None:
    for path in (built / device).glob("*.py"):
        found = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            assert not isinstance(node, ast.ImportFrom)
        assert found == ["torch", "triton", "triton.language"]
        assert "__import__" not in path.read_text() and "importlib" not in path.read_text()


@pytest.mark.parametrize("device", SHIPPED)
def test_copy_runs_on_the_cpu(device: str, built: Path, tmp_path: Path) -> None:
    copy = shutil.copy(built / device / f"{NAME}.py", tmp_path / "elsewhere.py")
    module = interpret.load(Path(copy).read_text(), "elsewhere", str(copy))
    with interpret.poison():
        run(getattr(module, NAME), make(Case(9, 3, 16, slots="skipping", inserted=7)), repeats=1)
        run(getattr(module, NAME), make(Case(9, 2, 16, dtype=torch.float16)), thresholds=0)
    assert module.PROFILE == device
    inputs = make(Case(3, 2, 16))
    with pytest.raises(module.DtypeError) as caught:
        getattr(module, NAME)(inputs.q, inputs.kv.half(), *inputs.arguments()[2:])
    assert isinstance(caught.value, module.ContractError) and isinstance(caught.value, ValueError)
    assert module.ContractError is not tilewright.errors.ContractError


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)

sys.meta_path.insert(0, Blocked())
"""
ALONE = """
sys.path[:0] = [{folder!r}, {tests!r}]
import inspect, torch, elsewhere
from compiled import compiled, launched

function = getattr(elsewhere, {name!r})
print(inspect.signature(function))
assert inspect.getdoc(function).startswith("q = rotate(rms_norm(q)) in place")
q = torch.zeros(5, 8, 512, dtype=torch.bfloat16)
arguments = [q, q[:, 0].contiguous(), torch.zeros(2, 9344, dtype=torch.uint8), torch.arange(5), torch.arange(5)]
arguments += [torch.zeros(8, 64), 1e-6, 16]
(launch,) = launched(elsewhere, lambda: function(*arguments))
assert compiled(launch, {target!r}).code.startswith(b"\\x7fELF")
try:
    function(q.float(), *arguments[1:])
except elsewhere.DtypeError as error:
    print(str(error).splitlines()[0])
assert not [name for name in sys.modules if name.partition(".")[0] in ("tilewright", "ninetoothed")]
"""


ELSEWHERE = [("nvidia-h200", "sm_90"), ("hygon-bw1000", "gfx942"), ("generic", "sm_80")]


@pytest.mark.parametrize(("device", "target"), ELSEWHERE)
def test_copy_needs_torch_and_triton_alone(device: str, target: str, built: Path, tmp_path: Path) -> None:
    """Imported, checked and compiled by a Python that cannot import this project."""
    shutil.copy(built / device / f"{NAME}.py", tmp_path / "elsewhere.py")
    script = BLOCKED.format(names=("tilewright", "ninetoothed", "sympy", "rich"))
    script += ALONE.format(folder=str(tmp_path), tests=str(TESTS), name=NAME, target=target)
    done = python(["-I", "-c", script])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "(q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, *, "
        "config=None, thresholds=None)",
        f"{NAME}: q is float32, bfloat16 or float16 is needed",
    ]


# Where torch, Triton and NineToothed are missing

MISSING = ("torch", "triton", "ninetoothed")
COMMANDS: dict[str, list[str]] = {
    "ops": ["ops"],
    "devices": ["devices"],
    "device": ["devices", "h200"],
    "source": ["source", NAME, "--device", "h200"],
    "explain": ["explain", NAME, "--device", "metax"],
}
MAIN = "from tilewright.__main__ import main\nsys.exit(main(sys.argv[1:]))"


def without(arguments: Sequence[str], code: str = MAIN) -> subprocess.CompletedProcess[str]:
    return python(["-c", BLOCKED.format(names=MISSING) + code, *arguments])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_without_torch_and_triton(command: str) -> None:
    done = without(COMMANDS[command])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == cli(*COMMANDS[command])
    assert len(done.stdout.splitlines()) >= 2


def test_build_without_torch_and_triton(built: Path, tmp_path: Path) -> None:
    done = without(["build", "--vendor", *SHIPPED, "--out", str(tmp_path)])
    assert (done.returncode, done.stderr) == (0, "")
    assert files(tmp_path) == files(built)


def test_the_block_blocks() -> None:
    for name in MISSING:
        done = without([], code=f"import {name}")
        assert done.returncode == 1 and "(blocked)" in done.stderr


def test_importing_loads_none_of_them_and_opens_nothing() -> None:
    """Not even the profiles and rules, which are read when somebody asks for a device."""
    code = f"""
import sys
opened = []
def hook(event, arguments):
    if event == "open" and not str(arguments[0]).endswith((".py", ".pyc")) and "__pycache__" not in str(arguments[0]):
        opened.append(str(arguments[0]))
    if event.startswith(("subprocess", "os.exec", "os.fork", "os.posix_spawn", "socket")):
        opened.append(event)
import importlib.metadata, importlib.resources, json, tomllib
sys.addaudithook(hook)
import tilewright
import tilewright.ops
print([name for name in {(*MISSING, "sympy", "numpy")!r} if name in sys.modules], opened)
"""
    done = python(["-c", code])
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] []\n", "")


def test_generating_loads_none_of_them() -> None:
    code = f"""
import sys
from tilewright.__main__ import main
main(["source", {NAME!r}])
main(["explain", {NAME!r}])
main(["devices"])
print([name for name in {MISSING!r} if name in sys.modules])
"""
    assert python(["-c", code]).stdout.splitlines()[-1] == "[]"


def test_a_module_written_by_hand_alone(tmp_path: Path) -> None:
    printed = cli("build", "--vendor", "metax-c550", "--op", "moe_align_block_size", "--out", str(tmp_path))
    assert printed == f"{tmp_path}/metax-c550/moe_align_block_size.py  ({handwritten.STATUS})\n"
    assert set(files(tmp_path)) == {"manifest.json", "metax-c550/moe_align_block_size.py"}
    text = (tmp_path / "metax-c550" / "moe_align_block_size.py").read_text()
    assert cli("source", "moe_align_block_size", "--device", "metax") == text


# The library behind the command


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        list(build(["generic"], tmp_path, ["rope", "norm"]))
    known = ", ".join(op.name for op in operators())
    assert str(caught.value) == f"unknown operator norm, rope; known are {known}"
    with pytest.raises(ProfileError):
        list(build(["generic", "h300"], tmp_path))
    assert files(tmp_path) == {}


def test_explain_names_the_programs_and_masks() -> None:
    config: dict[str, Any] = {"tokens": 1, "heads": 4, "kv_tokens": 1, "num_warps": 2, "num_stages": 1}
    printed = cli("explain", NAME, "--device", "h200", "--config", ",".join(f"{k}={v}" for k, v in config.items()))
    assert printed.startswith(
        f"{NAME} on nvidia-h200: tokens = 1, heads = 4, kv_tokens = 1, num_warps = 2, num_stages = 1\n"
    )
    for line in (
        "kv_row: applications.deepseek_v4",
        "q_head: applications.deepseek_v4",
        "  mask      load cos: pair >= 224",
        "  mask      store codes: lane < 448 and slot >= 0",
        "  mask      load x: none",
        "  grid      tokens num_tokens x heads num_heads // 4",
    ):
        assert f"{line}\n" in printed
