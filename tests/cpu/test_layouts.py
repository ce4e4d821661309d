"""What a build writes beside plain modules: FlagGems' layout, only what has changed, nothing a device cannot run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import launched

import tilewright
from tilewright import binaries, flaggems, handwritten, vendors
from tilewright import build as building
from tilewright.build import build, operators
from tilewright.errors import BuildError, ProfileError
from tilewright.lint import lint

A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"
GATHER = "dequantize_and_gather_k_cache"
FACT = '{{ value = {}, how = "stated", source = "its manual" }}'
CARD = f"""
name = "card-1"
vendor = "maker"
triton_backend = {FACT.format('"cuda"')}
warp_size = {FACT.format(16)}
max_threads = {FACT.format(256)}
scratch_bytes = {FACT.format(65536)}
grid_limit = {FACT.format([1023, 1, 1])}
num_warps = {FACT.format([1, 2, 4])}
num_stages = {FACT.format([1])}
[support]
"dtype.fp64" = {FACT.format('"unsupported"')}
[lowering]
grid = {FACT.format('"chunked"')}
pair = {FACT.format('"reshape_split_join"')}
index_width = {FACT.format('"i32"')}
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {path.as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*.py")}


# A device of one's own


def test_a_made_up_device_is_one_file(tmp_path: Path) -> None:
    """Generated for all operators, linted, and launched as its facts say."""
    card = tmp_path / "card.toml"
    card.write_text(CARD)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", "build", "--vendor", str(card), "--out", str(out)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    names = [*(operator.name for operator in operators()), *handwritten.MODULES]
    assert {name for name in files(out) if name.endswith(".py")} == {f"card-1/{name}.py" for name in names}
    text = (out / "card-1" / f"{A}.py").read_text()
    assert "for first_program in range(0, programs, 1023):" in text and "tl.reshape(turning, (32, 2))" in text
    profile = vendors.load(str(card))
    assert lint(text, profile) == [] and lint(text.replace("1023", "1024"), profile) != []
    assert vendors.load("card-1") is profile


def test_files_of_profiles_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ProfileError) as caught:
        vendors.load(str(tmp_path / "none.toml"))
    assert str(caught.value) == f"{tmp_path}/none.toml: No such file or directory"
    taken = tmp_path / "taken.toml"
    taken.write_text('name = "metax-c550"\nvendor = "metax"\n')
    with pytest.raises(ProfileError) as caught:
        vendors.load(str(taken))
    assert str(caught.value) == f"{taken}: metax-c550 is taken by a shipped profile"


# A text that its device cannot run is not written


def test_a_violation_stops_the_build(tmp_path: Path) -> None:
    card = tmp_path / "narrow.toml"
    card.write_text(CARD.replace("card-1", "card-2").replace("[1, 2, 4]", "[2, 4]"))
    with pytest.raises(BuildError) as caught:
        list(build([str(card)], tmp_path / "out", [A, GATHER]))
    said = []
    for operator in operators([A, GATHER]):
        lines = operator.source(str(card)).splitlines()
        at = lines.index("RULES = (") + 3  # the configuration stands behind its provenance
        problem = "warps: num_warps = 1 [num_warps = 2, 4: stated, its manual]"
        said.append(f"  card-2/{operator.name}.py: line {at}: {problem}")
    assert str(caught.value).splitlines() == ["texts that their devices cannot run:", *sorted(said)]
    assert not (tmp_path / "out").exists()


# Only what has changed


def test_a_second_build_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(build(["h200", "ascend"], tmp_path, [A, B]))
    before = times(tmp_path), files(tmp_path)
    monkeypatch.setattr(building, "_make", lambda task: pytest.fail(f"{task.file} is made again"))
    assert list(build(["h200", "ascend"], tmp_path, [A, B])) == first
    assert (times(tmp_path), files(tmp_path)) == before


@pytest.mark.parametrize("change", ["source", "text", "entry", "missing", "manifest"])
def test_what_has_changed_is_made_again(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list(build(["h200"], tmp_path, [A, B]))
    wanted = files(tmp_path)
    file, manifest = tmp_path / "nvidia-h200" / f"{A}.py", tmp_path / "manifest.json"
    if change == "source":
        monkeypatch.setattr(building, "sources", lambda: "another text")
    elif change == "text":
        file.write_text("changed by hand")
    elif change == "missing":
        file.unlink()
    elif change == "manifest":
        manifest.write_text("{")
    else:
        entries = json.loads(manifest.read_text())
        entries["modules"][0]["inputs"] = "0"
        manifest.write_text(json.dumps(entries))
    made: list[str] = []
    real = building._make
    monkeypatch.setattr(building, "_make", lambda task: (made.append(task.operator), real(task))[1])
    list(build(["h200"], tmp_path, [A, B]))
    assert made == ([A, B] if change in ("source", "manifest") else [A])
    texts = {name: data for name, data in files(tmp_path).items() if name.endswith(".py")}
    assert texts == {name: data for name, data in wanted.items() if name.endswith(".py")}


def test_the_sources_hash_sees_every_room(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), real(path))[1])
    building.sources.__wrapped__()
    assert {"module.py", "detect.py", "rms_norm.py", "token_heads.py", f"{B}.py"} <= set(read)


def test_processes_make_the_same_bytes(tmp_path: Path) -> None:
    seen: list[None] = []
    list(build(["metax", "cambricon"], tmp_path / "two", [A, B], jobs=2, progress=lambda: seen.append(None)))
    list(build(["metax", "cambricon"], tmp_path / "one", [A, B]))
    assert files(tmp_path / "one") == files(tmp_path / "two") and len(seen) == 4


def test_all_is_every_device(tmp_path: Path) -> None:
    made = list(build(["all"], tmp_path, [B]))
    assert [entry.device for entry in made] == list(vendors.names())


# FlagGems


def test_one_folder_a_vendor() -> None:
    assert flaggems.folder(vendors.load("hygon")) == "_hygon/fused"
    assert flaggems.folder(vendors.load("generic")) == "fused"
    everything = [vendors.load(name) for name in vendors.names()]
    kept = flaggems.one_a_vendor(everything, True)
    assert [p.name for p in kept] == [
        "amd-mi300x", "ascend-910b", "cambricon-mlu590", "generic", "hygon-bw1000", "metax-c550", "mthreads-s5000",
        "nvidia-h200", "thead-zw810e",
    ]  # fmt: skip
    with pytest.raises(BuildError) as caught:
        flaggems.one_a_vendor(everything, False)
    assert str(caught.value) == "--layout flaggems has one folder for amd: choose among amd-mi300x, amd-mi355x"
    assert flaggems.one_a_vendor([vendors.load("h100")], False) == [vendors.load("h100")]


def test_black_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "black", None)
    with pytest.raises(BuildError) as caught:
        list(build(["hygon"], tmp_path, [A], layout="flaggems"))
    assert str(caught.value) == "--layout flaggems is formatted by black: pip install 'tilewright[flaggems]'"
    assert files(tmp_path) == {}


def test_flaggems_layout(tmp_path: Path) -> None:
    black = pytest.importorskip("black", reason="the layout is formatted by black")
    list(build(["hygon", "metax", "generic"], tmp_path, [A, B], layout="flaggems"))
    folders = ("_hygon/fused", "_metax/fused", "fused")
    names = [f"{folder}/{name}.py" for folder in folders for name in (A, B, "__init__")]
    assert set(files(tmp_path)) == {"manifest.json", *names}
    for name, data in files(tmp_path).items():
        if name.endswith(".py"):
            text = data.decode()
            assert black.format_str(text, mode=black.Mode(line_length=88)) == text
    assert json.loads((tmp_path / "manifest.json").read_text())["layout"] == "flaggems"
    again = list(build(["hygon", "metax", "generic"], tmp_path, [A, B], layout="flaggems"))
    assert [entry.file for entry in again] == [name for name in names if not name.endswith("__init__.py")]


class Registrar:
    """What FlagGems does: the functions that a vendor's `fused` package exports replace those of their names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fused = types.SimpleNamespace()

    def register(self, vendor: str) -> Any:
        spec = importlib.util.spec_from_file_location(
            f"backend_{vendor}", self.root / f"_{vendor}" / "fused" / "__init__.py",
            submodule_search_locations=[str(self.root / f"_{vendor}" / "fused")],
        )  # fmt: skip
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = package
        spec.loader.exec_module(package)
        for name in package.__all__:
            vars(self.fused)[name] = getattr(package, name)
        return package


@pytest.mark.parametrize(("vendor", "device", "wide"), [("hygon", "hygon-bw1000", 0), ("metax", "metax-c550", 1)])
def test_a_registered_override_is_what_runs(vendor: str, device: str, wide: int, tmp_path: Path) -> None:
    """The device's own rules choose: 255 programs a token reach Hygon's threshold, 65 tokens not MetaX's 512."""
    folder = tmp_path / f"_{vendor}" / "fused"
    folder.mkdir(parents=True)
    for operator in operators([A, B]):
        (folder / f"{operator.name}.py").write_text(operator.source(device))
    (folder / "__init__.py").write_text(flaggems.registration([B, A]))
    registrar = Registrar(tmp_path)
    try:
        package = registrar.register(vendor)
        assert set(vars(registrar.fused)) == {A, B}
        module = sys.modules[f"{package.__name__}.{A}"]
        q = torch.empty(65, 254, 512, dtype=torch.bfloat16)
        arguments = [q, q[:, 0].contiguous(), torch.empty(5, 9344, dtype=torch.uint8), torch.arange(65)]
        arguments += [torch.arange(65), torch.empty(128, 64)]
        (launch,) = launched(module, lambda: vars(registrar.fused)[A](*arguments, 1e-6, 16))
    finally:
        for name in [name for name in sys.modules if name.startswith("backend_")]:
            del sys.modules[name]
    rule, config, kernel, _ = module.last_launch
    assert (module.PROFILE, rule, kernel) == (device, wide, f"{A}_kernel")
    assert dict(config) == dict(operators([A])[0].kernel.rules(device).rules[wide].config)
    assert launch.kernel.fn.__module__ == module.__name__


# Which devices upstream Triton compiles for


def test_targets() -> None:
    found = {name: binaries.target(vendors.load(name)) for name in vendors.names()}
    assert {name: target for name, target in found.items() if target} == {
        "nvidia-a100": "sm_80", "nvidia-h100": "sm_90", "nvidia-h200": "sm_90", "nvidia-b200": "sm_100",
        "amd-mi300x": "gfx942", "amd-mi355x": "gfx950",
    }  # fmt: skip


def test_binaries_need_triton(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tilewright.__main__ import main\n"
        f"sys.exit(main(['build', '--vendor', 'h200', '--binaries', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("BuildError: --binaries compiles with triton and torch: ")
    assert files(tmp_path) == {} and tilewright.__version__
