"""The build of a wheel: every operator's module for every device is generated into it, as `tilewright/generated/`.

Generating needs nothing but Python, so the environment of a build holds setuptools alone. Everything else about the
project is in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

GENERATE = """
from pathlib import Path
from tilewright.build import build
list(build(["all"], Path("tilewright") / "generated"))
"""


class GeneratingBuild(build_py):
    """Copies the packages, then runs the generator from the copy, so that an installed one would write the same."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            library = Path(self.build_lib).resolve()
            shutil.rmtree(library / "tilewright" / "generated", ignore_errors=True)  # of an earlier build's sources
            environment = {**os.environ, "PYTHONPATH": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
            subprocess.run([sys.executable, "-c", GENERATE], cwd=library, env=environment, check=True)


setup(cmdclass={"build_py": GeneratingBuild})
