"""docs/vendors.md says what is so: its table is the generated one, its forms are those of the schema."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tilewright import binaries, lint, vendors
from tilewright.build import operators
from tilewright.ops.problems import LISTS
from tilewright.vendors.lowering import LOWERING

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("vendor_table", ROOT / "docs" / "vendor_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(script: Any) -> None:
    """Made again from the results, the linter, and the targets with the toolchain that the page names."""
    page = (ROOT / "docs" / "vendors.md").read_text()
    shown = page.split(script.BEGIN)[1].split(script.END)[0].strip()
    (toolchain,) = re.findall(r"^Compiled with (Triton \S+)\.$", shown, re.M)
    made = {
        (operator.name, name): f"{target}, {toolchain}"
        for operator in operators() for name in vendors.names()
        if (target := binaries.target(vendors.load(name))) and operator.name in LISTS
    }  # fmt: skip
    assert shown == script.table(made, script.runs())


def test_a_cell_tells_runs_compilations_and_violations(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = operators()[0].name
    broken = [lint.Violation("word", 1, "tl.sort", "a fact")]
    monkeypatch.setattr(script, "lint", lambda text, profile: broken if profile.name == "generic" else [])
    text = script.table({(first, "nvidia-h200"): "sm_90, Triton 9.9"}, Counter({(first, "nvidia-h200"): 3}))
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in text.splitlines() if " | " in line}
    assert rows["nvidia-h200"] == "run 3, compiled sm_90, linted"
    assert (rows["generic"], rows["metax-c550"]) == ("1 violations", "linted")
    assert text.endswith("\n\nCompiled with Triton 9.9.")


def test_runs_count_what_passed(script: Any, tmp_path: Path) -> None:
    def results(*checks: tuple[str, str, str]) -> None:
        rows = [{"check": c, "status": s, "launch": f"{p} rule 0: tokens=1"} for c, s, p in checks]
        (tmp_path / "vendors_checks_h200.json").write_text(json.dumps(rows))

    results(
        ("insert ascend-910b 17x3", "PASS", "ascend-910b"), ("qk generic 17x16.8.8x128", "PASS", "generic"),
        ("siblings generic kv_rope_insert-17x16-packed fused_deepseek_v4_kv_rope_insert", "PASS", "generic"),
        ("insert generic 0x8", "PASS", "nothing to launch"),
    )  # fmt: skip
    assert script.runs(tmp_path) == {
        (script.A, "ascend-910b"): 1, (script.B, "generic"): 1, ("fused_deepseek_v4_kv_rope_insert", "generic"): 1,
    }  # fmt: skip
    results(("insert generic 17x3", "FAIL", "generic"))
    with pytest.raises(ValueError, match="insert generic 17x3: FAIL"):
        script.runs(tmp_path)
    results(("another generic 17x3", "PASS", "generic"))
    with pytest.raises(ValueError, match="of which operator"):
        script.runs(tmp_path)


def test_the_page_names_every_form() -> None:
    page = (ROOT / "docs" / "vendors.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert set(LOWERING) <= set(rows)
    for key, axis in LOWERING.items():
        forms, default = rows[key].split("|")[2:4]
        assert {f"`{form}`" for form in axis.values} <= set(re.findall(r"`\w+`", forms)), key
        assert default.strip().startswith(f"`{axis.default}`"), key
