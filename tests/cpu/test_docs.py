"""The code of docs/vllm.md and docs/flaggems.md, run against stand-ins of what it registers with."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
A = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"

# vLLM: an extension that defines operators under `_C`, and modules that load it.
VLLM = '''
import sys, types
import torch

TABLES = "Tensor slot_mapping, Tensor position_ids, Tensor cos_sin_cache"
NEW = (f"{A}(Tensor q_in, Tensor kv, Tensor! k_cache, {TABLES}, int q_head_padded, float eps, int cache_block_size, "
       "bool apply_q_norm=True, bool kv_mxfp8=False, bool apply_q_rope=True, bool is_q_interleaved=False) -> Tensor")
OLD = f"{A}(Tensor! q, Tensor kv, Tensor! k_cache, {TABLES}, float eps, int cache_block_size) -> ()"
QK = ("fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
      "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids, "
      "int forced_token_heads_per_warp=-1) -> ()")

def theirs(*arguments):
    raise RuntimeError("vLLM's own")

def load(schemas):
    """`import vllm._custom_ops`."""
    held = torch.library.Library("_C", "DEF")
    for schema in schemas:
        held.define(schema)
        held.impl(schema.partition("(")[0], theirs, "CPU")
    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]
    return held
'''


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")])}
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("version", "schemas", "sample", "replaced"),
    [
        ("0.33", "NEW, QK", "padded", f"['fused_qk_norm_rope', '{A}']"),
        ("0.21", "OLD, QK", "A", f"['fused_qk_norm_rope', '{A}']"),
        ("0.33, B", "NEW, QK", "B", f"['fused_qk_norm_rope', '{A}']"),
        ("without DeepSeek", "QK,", "B", "['fused_qk_norm_rope']"),
    ],
)
def test_vllm_plugin(version: str, schemas: str, sample: str, replaced: str, tmp_path: Path) -> None:
    """vLLM's name gives Tilewright's results, also compiled, and vLLM's own after `restore`."""
    plugin, _ = blocks("vllm.md", "python")
    (tmp_path / "tilewright_in_vllm.py").write_text(plugin)
    (tmp_path / "stand_in.py").write_text(VLLM.replace("{A}", A))
    returns_nothing = sample != "padded"
    code = f"""
import stand_in, torch
returns_nothing = {returns_nothing}
from stand_in import NEW, OLD, QK
held = stand_in.load([{schemas}])
import tilewright_in_vllm
from samples import cloned, contents, sample
from tilewright import ops
print(tilewright_in_vllm.register("CPU"))
operator, given = sample({sample!r})
name = operator.removesuffix("_padded")
wanted, got, compiled = cloned(given), cloned(given), cloned(given)
expected = contents(getattr(ops, operator)(*wanted), wanted)
print(contents(getattr(torch.ops._C, name)(*got), got) == expected)
if returns_nothing:  # for an operator that returns a tensor vLLM registers a fake
    function = torch.compile(lambda *a: getattr(torch.ops._C, name)(*a), fullgraph=True, backend="aot_eager")
    function(*compiled)
    print(contents(None, compiled) == expected)
tilewright_in_vllm.restore()
try:
    getattr(torch.ops._C, name)(*given)
except RuntimeError as error:
    print(error)
"""
    answers = ["True"] * (1 + returns_nothing)
    assert run(code, tmp_path, "-Wignore::UserWarning").splitlines() == [replaced, *answers, "vLLM's own"]


def test_vllm_entry_point_names_the_plugins_function() -> None:
    (toml,) = blocks("vllm.md", "toml")
    plugin, _ = blocks("vllm.md", "python")
    module, function = re.findall(r'tilewright = "(\w+):(\w+)"', toml)[0]
    assert f"`{module}.py`" in (ROOT / "docs/vllm.md").read_text() and f"def {function}(" in plugin


def test_vllm_prepare_by_metadata(tmp_path: Path) -> None:
    """As written; without a GPU it checks the call."""
    _, prepare = blocks("vllm.md", "python")
    assert run(prepare, tmp_path) == ""
    wrong = prepare.replace("q, k, v, dim, 1e-6", "q, k, v + 1, dim, 1e-6")
    code = f"try:\n    exec({wrong!r})\nexcept ValueError as error:\n    print(str(error).splitlines()[0])"
    expected = "fused_qk_norm_rope: qkv has 4096 columns, 16 + 8 + 9 heads of 128 need 4224\n"
    assert run(code, tmp_path) == expected


# FlagGems-vllm: generic operators, replaced by the plain functions of the vendor's package.
FLAGGEMS = {
    "__init__.py": f"""
import importlib, inspect

def {A}(*arguments):
    raise RuntimeError("the generic one")

ops_deepseek_v4_qnorm_rope_kv_rope_quant_insert = {A}
fused = importlib.import_module("flaggems_vllm.runtime.backend._metax.fused")
globals().update(inspect.getmembers(fused, inspect.isfunction))
""",
    "runtime/__init__.py": "",
    "runtime/backend/__init__.py": "",
    "runtime/backend/_metax/__init__.py": "",
    "runtime/backend/_metax/fused/__init__.py": "",
}


@pytest.fixture
def flaggems(tmp_path: Path) -> Path:
    """The root of a checkout."""
    for name, text in FLAGGEMS.items():
        file = tmp_path / "src" / "flaggems_vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_flaggems_file(flaggems: Path) -> None:
    """The page's commands and line make the vendor's function the generated one, which is right."""
    (commands,) = blocks("flaggems.md", "sh")
    line, _ = blocks("flaggems.md", "python")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-ec", commands], cwd=flaggems, env={**os.environ, "PATH": path}, check=True,
                   capture_output=True)  # fmt: skip
    with (flaggems / "src/flaggems_vllm/runtime/backend/_metax/fused/__init__.py").open("a") as file:
        file.write(line)
    code = f"""
import inspect, sys
from pathlib import Path
import flaggems_vllm
function = flaggems_vllm.{A}
module = sys.modules[function.__module__]
print(module.PROFILE, Path(module.__file__).parent.name, "tilewright" in sys.modules)
from samples import cloned, contents, sample
operator, given = sample("A")
try:
    function(given[0][..., :256], *given[1:])
except ValueError as error:
    print(type(error).__name__, str(error).splitlines()[0])
from tilewright import interpret, ops
loaded = interpret.load(Path(module.__file__).read_text(), "loaded", "<loaded>")
wanted, got = cloned(given), cloned(given)
getattr(ops, operator)(*wanted)
getattr(loaded, operator)(*got)
print(contents(None, got) == contents(None, wanted))
"""
    refusal = f"ContractError {A}: q has dim=256, 512 is needed"
    assert run(code, flaggems / "src").splitlines() == ["metax-c550 fused False", refusal, "True"]


def test_flaggems_package(flaggems: Path) -> None:
    _, replace = blocks("flaggems.md", "python")
    code = f"""{replace}
from samples import cloned, contents, sample
operator, given = sample("A")
try:
    flaggems_vllm.{A}(*given)
except RuntimeError as error:
    print(error)
replace()
wanted = cloned(given)
getattr(ops, operator)(*wanted)
for name in ({A!r}, "ops_deepseek_v4_qnorm_rope_kv_rope_quant_insert"):
    got = cloned(given)
    getattr(flaggems_vllm, name)(*got)
    print(contents(None, got) == contents(None, wanted))
"""
    assert run(code, flaggems / "src").splitlines() == ["the generic one", "True", "True"]


def test_the_index_names_the_pages() -> None:
    index = (ROOT / "docs/index.md").read_text()
    assert "(vllm.md)" in index and "(flaggems.md)" in index
