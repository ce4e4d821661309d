"""Writes the table of docs/vendors.md: operators by profiles, what was run, compiled and linted, and with what.

    python docs/vendor_table.py --built generated       # a folder of `build --all --binaries`, for its toolchain

Runs are those of the results in benchmarks/results/: checks that passed on a GPU under the profile. Compiled is what
the build's manifest says. Linted is done here and now; a text with violations would be named.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tilewright import vendors
from tilewright.build import operators
from tilewright.lint import lint

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "vendors.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table: python docs/vendor_table.py -->", "<!-- end of table -->"
A, B = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"
GATHER = "dequantize_and_gather_k_cache"
OWN = {"deepseek_v4_checks_h200.json": A, "qk_norm_rope_checks_h200.json": B}  # results of one operator


def runs(folder: Path = RESULTS) -> Counter[tuple[str, str]]:
    """How many checks passed by operator and profile.

    Raises:
        ValueError: a result of a check that did not pass, or of no known operator.
    """
    found: Counter[tuple[str, str]] = Counter()
    for file in sorted(folder.glob("*_checks_*.json")):
        for result in json.loads(file.read_text()):
            if result["status"] != "PASS":
                raise ValueError(f"{file.name}: {result['check']}: {result['status']}")
            profile = result["launch"].split()[0]
            if profile in vendors.names():
                found[OWN.get(file.name) or _operator(file.name, result["check"]), profile] += 1
    return found


def _operator(file: str, check: str) -> str:
    """The operator of a check: named by a word, by the beginning of its case's, or by its group."""
    words, names = check.split(), [operator.name for operator in operators()]
    if words[-1] in names:
        return words[-1]
    if "gather" in words:
        return GATHER
    for name in names:
        if any(word.startswith(name.removeprefix("fused_deepseek_v4_") + "-") for word in words):
            return name
    named = {"insert": A, "qk": B}.get(words[0])
    if named is None:
        raise ValueError(f"{file}: {check}: of which operator?")
    return named


def compiled(manifest: Mapping[str, object]) -> dict[tuple[str, str], str]:
    """Target and toolchain by operator and profile."""
    modules = manifest["modules"]
    assert isinstance(modules, list)
    return {(m["operator"], m["device"]): m["compiled"] for m in modules if m.get("compiled")}


def table(made: Mapping[tuple[str, str], str], passed: Counter[tuple[str, str]]) -> str:
    """The table, one row a profile."""
    listed = operators()
    short = [re.sub(r"^fused_(deepseek_v4_)?", "", operator.name) for operator in listed]
    rows = ["| profile | " + " | ".join(f"`{name}`" for name in short) + " |", "|---" * (len(short) + 1) + "|"]
    for name in vendors.names():
        cells = []
        for operator in listed:
            count, target = passed[operator.name, name], made.get((operator.name, name), "")
            broken = lint(operator.source(name), vendors.load(name))
            words = [f"run {count}"] if count else []
            words += [f"compiled {target.split(',')[0]}"] if target else []
            words.append(f"{len(broken)} violations" if broken else "linted")
            cells.append(", ".join(words))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    tools = sorted({target.split(", ", 1)[1] for target in made.values()})
    return "\n".join([*rows, "", f"Compiled with {' and '.join(tools) or 'nothing'}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--built", type=Path, required=True, metavar="DIR", help="a folder of `build --all --binaries`")
    options = parser.parse_args()
    made = compiled(json.loads((options.built / "manifest.json").read_text()))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(made, runs())}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
