"""Binaries of a build, compiled for devices that are not there, and the facts that a caller launches them by."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compiled import launched, module_of

from tilewright import binaries, vendors
from tilewright import build as building
from tilewright.build import Built, build, operators
from tilewright.launch import OPERATORS
from tilewright.ops import problems

A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"
TARGETS = {"nvidia-h200": "sm_90", "nvidia-a100": "sm_80", "amd-mi300x": "gfx942"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Built]]:
    """Few head counts of a few devices; hygon-bw1000 is none that upstream Triton compiles for."""
    out = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "HEADS", (8, 32))
        patch.setattr(problems, "HEAD_DIMS", (64,))
        return out, list(build([*TARGETS, "hygon"], out, [A, B], with_binaries=True))


def facts(out: Path, entry: Built) -> list[tuple[Path, dict[str, Any]]]:
    return [(out / name, json.loads((out / name).with_suffix(".json").read_text())) for name in entry.binaries]


def test_every_reached_device_has_binaries(built: tuple[Path, list[Built]]) -> None:
    out, entries = built
    for entry in entries:
        target = TARGETS.get(entry.device)
        assert entry.compiled == (f"{target}, Triton {triton.__version__}" if target else "")
        assert bool(entry.binaries) == bool(target)
        for path, launch in facts(out, entry):
            assert path.parent == out / "binaries" / entry.device / entry.operator
            assert path.suffix == (".cubin" if target.startswith("sm_") else ".hsaco")
            assert path.read_bytes().startswith(b"\x7fELF") and launch["symbol"].encode() in path.read_bytes()
            assert (launch["target"], launch["triton"]) == (target, triton.__version__)
    per_rule = {name: sum(e.device == "nvidia-h200" and e.operator == name for e in entries) for name in (A, B)}
    assert per_rule == {A: 1, B: 1}


def test_arguments_are_the_kernels_in_order(built: tuple[Path, list[Built]]) -> None:
    out, entries = built
    seen = 0
    for entry in entries:
        body = ast.parse((out / entry.file).read_text()).body
        functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        for _, launch in facts(out, entry):
            seen += 1
            names = [argument["name"] for argument in launch["arguments"]]
            own = [a.arg for a in functions[launch["symbol"]].args.args]
            assert [name for name in names if not name.startswith("scratch_")] == [
                name for name in own if name not in launch["constants"]
            ]
            types = {argument["name"]: argument["type"] for argument in launch["arguments"]}
            expected = {"eps": "fp32", "num_tokens": "i32", "position_ids": "*i64"}
            expected |= {"q": "*bf16", "k_cache": "*u8"} if entry.operator == A else {"qkv": "*bf16"}
            assert {name: types[name] for name in expected} == expected
            assert launch["threads"] == launch["num_warps"] * (64 if launch["target"].startswith("gfx") else 32)
            room = vendors.load(entry.device).scratch_bytes
            assert room is not None and launch["shared_bytes"] <= room
    assert seen > 10


def test_the_grid_is_that_of_a_call(built: tuple[Path, list[Built]]) -> None:
    """The formula, over the arguments and the constants, is the number of programs that the module launches."""
    out, entries = built
    for entry in entries:
        module = module_of((out / entry.file).read_text(), f"of_{entry.device}_{entry.operator}".replace("-", "_"))
        names = [parameter.name for parameter in _parameters(entry.operator)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(problems, "HEADS", (8, 32))
            patch.setattr(problems, "HEAD_DIMS", (64,))
            calls = dict(problems.problems(entry.operator))
        for _, launch in facts(out, entry):
            arguments = calls[launch["problem"]]
            call = functools.partial(getattr(module, entry.operator), *arguments, config=launch["config"])
            (made,) = launched(module, call)
            space = {**dict(zip(names, arguments, strict=False)), **launch["config"], **launch["constants"]}
            space |= {name: eval(text, {}, space) for name, text in launch["grid"]["sizes"].items()}
            assert made.grid == (eval(launch["grid"]["x"], {}, space),)


def _parameters(name: str) -> list[Any]:
    return list(inspect.signature(OPERATORS[name].public).parameters.values())


def test_a_second_build_compiles_nothing(built: tuple[Path, list[Built]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, entries = built
    monkeypatch.setattr(building, "_make", lambda task: pytest.fail(f"{task.file} is made again"))
    assert list(build([*TARGETS, "hygon"], out, [A, B], with_binaries=True)) == entries


def test_a_changed_binary_is_made_again(built: tuple[Path, list[Built]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, entries = built
    entry = next(e for e in entries if e.device == "amd-mi300x" and e.operator == A)
    path, _ = facts(out, entry)[0]
    before = path.read_bytes()
    path.write_bytes(b"changed")
    monkeypatch.setattr(problems, "HEADS", (8, 32))
    assert list(build(["mi300x"], out, [A], with_binaries=True)) == [entry]
    assert path.read_bytes() == before


def test_a_call_finds_what_a_build_compiled(
    built: tuple[Path, list[Built]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the build's cache the package's own launch, on a stand-in for an H200, adds no kernel to it."""
    from triton import knobs

    out, _ = built
    cache = out / "triton-cache"
    before = {path for path in cache.rglob("*.cubin")}
    assert before
    monkeypatch.setattr(problems, "HEADS", (8, 32))
    _, arguments = next(problems.problems(A))
    module = OPERATORS[A]._loaded("nvidia-h200", OPERATORS[A].source("nvidia-h200"), False)
    found = []
    with knobs.cache.scope(), binaries.stand_in("sm_90"):
        knobs.cache.dir = str(cache)
        for launch in launched(module, lambda: getattr(module, A)(*arguments)):
            kernel = launch.kernel
            found.append(kernel.warmup(*launch.arguments, grid=launch.grid, **launch.keywords))
    assert len(found) == 1 and found[0].asm["cubin"].startswith(b"\x7fELF")
    assert {path for path in cache.rglob("*.cubin")} == before


def test_operators_have_problems() -> None:
    """Head counts and head dims of the contract, and the profile's own float8; none yet of the mixture of experts."""
    without = {operator.name for operator in operators()} - set(problems.LISTS)
    assert all(name.startswith("moe_") for name in without - {"strided_copy"}) and "strided_copy" in without
    for operator in operators(list(problems.LISTS)):
        names = [name for name, _ in problems.problems(operator.name)]
        assert names and len(set(names)) == len(names), operator.name
    assert [name for name, _ in problems.problems(A)] == [f"{n}_heads" for n in (8, 16, 32, 64, 128)]
    assert len(list(problems.problems(B))) == 15
    name = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"
    (_, arguments), *_ = problems.problems(name, "float8_e4m3fnuz")
    assert arguments[2].dtype == torch.float8_e4m3fnuz
    assert list(problems.problems("nothing")) == []
