"""Two vendors, one body: kernels of profiles that name the same forms are the same bytes, and change together."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewright import vendors
from tilewright.build import operators
from tilewright.kernel import Kernel, forced
from tilewright.module import module_text

HYGON, METAX = vendors.load("hygon-bw1000"), vendors.load("metax-c550")
A = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
NAMES = [operator.name for operator in operators()]


def body(kernel: Kernel, public: Any, profile: vendors.VendorProfile) -> str:
    """All device code of a module, for the tiling that Hygon's first rule has."""
    text = module_text(kernel, public, profile, forced(kernel.rules(HYGON.name).rules[0].config))
    return text[text.index("import torch\n") : text.index("\nRULES = (")]


def functions(text: str) -> dict[str, str]:
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in found}


def differing(one: vendors.VendorProfile, other: vendors.VendorProfile) -> set[str]:
    return {key for key in one.lowering if one.lowering[key] != other.lowering[key]}


def test_they_differ_in_one_form() -> None:
    assert differing(HYGON, METAX) == {"e4m3_encode"}


@pytest.mark.parametrize("name", NAMES)
def test_the_same_forms_give_the_same_bytes(name: str) -> None:
    (operator,) = operators([name])
    alike = dataclasses.replace(METAX, lowering=HYGON.lowering)
    assert body(operator.kernel, operator.public, HYGON) == body(operator.kernel, operator.public, alike)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_encode_is_the_same(name: str) -> None:
    """Every device function but the encoder is, where its name is read as one; and the encoder is where it is used."""
    (operator,) = operators([name])
    hygon, metax = (functions(body(operator.kernel, operator.public, p)) for p in (HYGON, METAX))
    encoders = hygon.pop("e4m3_int_rne", None), metax.pop("e4m3_cast_select", None)
    assert hygon.keys() == metax.keys() and len(hygon) >= 2
    uses = {f for f in hygon if "e4m3_int_rne(" in hygon[f]}
    assert {f for f in hygon if hygon[f] != metax[f]} == uses
    assert all(encoders) == bool(uses) and (not uses or encoders[0] != encoders[1])
    for function in uses:  # but for where a line is broken
        ours, theirs = (re.sub(r"e4m3_(int_rne|cast_select)\(", "e4m3(", text[function]) for text in (hygon, metax))
        assert ast.unparse(ast.parse(ours)) == ast.unparse(ast.parse(theirs))


def changed(kernel: Kernel, folder: Path) -> Kernel:
    """The kernel with one line of its row application changed."""
    application = kernel.branches[0].application
    text = Path(sys.modules[application.__module__].__file__ or "").read_text()
    line = "    code, scale = quantise_ue8m0(float32(x))\n"
    assert text.count(line) == 1
    file = folder / "changed_application.py"
    file.write_text(text.replace(line, "    code, scale = quantise_ue8m0(float32(x) * 2.0)\n"))
    spec = importlib.util.spec_from_file_location("changed_application", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = dataclasses.replace(kernel.branches[0], application=module.kv_row)
    return dataclasses.replace(kernel, branches=(row, *kernel.branches[1:]))


def test_one_line_of_an_application_changes_both(tmp_path: Path) -> None:
    (operator,) = operators([A])
    other = changed(operator.kernel, tmp_path)
    found = []
    for profile in (HYGON, METAX):
        before, after = (body(k, operator.public, profile).splitlines() for k in (operator.kernel, other))
        lines = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if re.match(r"[-+] ", line)]
        found.append([re.sub(r"e4m3_(int_rne|cast_select)", "e4m3", line) for line in lines])
    assert found[0] == found[1] and any("* 2.0" in line for line in found[0])
