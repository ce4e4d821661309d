"""Compiles the texts of profiles with another Triton, for sm_90: many compilers are forks of an older one.

    python tests/compile/other_triton.py --python OTHER/bin/python     # one that has triton, and needs no torch

This Triton says what each kernel is specialised on; the other one compiles the same text from that. One line a kernel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from compiled import module_of  # noqa: E402

from tilewright import binaries  # noqa: E402
from tilewright.build import operators  # noqa: E402
from tilewright.ops import problems  # noqa: E402

COMPILE = """
import importlib.util, json, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # a module's host text alone needs it
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for job in json.load(open(sys.argv[1])):
    spec = importlib.util.spec_from_file_location("module", job["file"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, job["kernel"])
    names = list(kernel.arg_names)
    constants = {(names.index(name),): value for name, value in job["constants"].items()}
    if "index_type" in names:
        constants[names.index("index_type"),] = getattr(triton.language, job["constants"]["index_type"])
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in job["aligned"]}
    source = ASTSource(kernel, job["signature"], constants, attrs)
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.asm["cubin"].startswith(b"\\x7fELF")
    words = (job["profile"], job["kernel"], job["problem"])
    print(f"Triton {triton.__version__}: {' '.join(words)}: {len(made.asm['cubin'])} bytes")
"""


def jobs(profile: str, folder: Path) -> list[dict[str, Any]]:
    """What to compile: each kernel that the operators' problems launch under the profile's rules."""
    found = []
    for operator in operators():
        text = operator.source(profile)
        file = folder / f"{profile}_{operator.name}.py"
        file.write_text(text)
        module: Any = module_of(text, f"{operator.name}_{profile}".replace("-", "_"))
        configs = {json.dumps(config): config for _, config in module.RULES}.values()
        with binaries.stand_in("sm_90"):
            for problem, arguments in problems.problems(operator.name):
                for config in configs:
                    for name, kernel, values in binaries._warmed(module, operator.name, arguments, config):
                        signature = dict(kernel.src.signature)
                        names = list(signature)
                        constants = {n: values.get(n, 1) for n, kind in signature.items() if kind == "constexpr"}
                        aligned = [names[i[0]] for i, facts in kernel.src.attrs.items() if facts]
                        found.append({
                            "profile": profile, "kernel": name, "problem": problem, "file": str(file),
                            "signature": signature, "constants": constants, "aligned": aligned,
                            "num_warps": config["num_warps"], "num_stages": config["num_stages"],
                        })  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter with another Triton")
    parser.add_argument("--profiles", nargs="+", default=["hygon-bw1000", "metax-c550"])
    options = parser.parse_args()
    problems.HEADS, problems.HEAD_DIMS = (64,), (128,)  # a size is as good as another
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        todo = [job for profile in options.profiles for job in jobs(profile, folder)]
        (folder / "jobs.json").write_text(json.dumps(todo, default=str))
        (folder / "compile.py").write_text(COMPILE)
        done = subprocess.run([options.python, str(folder / "compile.py"), str(folder / "jobs.json")])
    print(f"{len(todo)} kernels, exit code {done.returncode}")
    return done.returncode or int(not todo)


if __name__ == "__main__":
    sys.exit(main())
