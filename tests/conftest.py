"""What every test shares: the environment it starts in, and the table that ends a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[None]:
    """No TILEWRIGHT_* variable of the caller's reaches a test, and no test the cache; one that needs it sets it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TILEWRIGHT_")]:
            patch.delenv(name)
        patch.setenv("TILEWRIGHT_CACHE_DIR", "off")
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The rows that tests recorded with `record_property("row", ...)`, as a table."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    rows = [value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "row"]
    if rows:
        terminalreporter.section("compiled")
        for row in sorted(set(rows)):
            terminalreporter.write_line(str(row))
