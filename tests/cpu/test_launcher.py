"""What a repeat launches with: the C function behind launchers as Triton 3.6 and 3.7 have them, or the launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.launcher import launcher

ARGUMENTS = [None, None, 17, 2.5, True]
HOOKS = (None, None, None)


class Launching:
    """A launcher that gives its C function what `order` says, and remembers what that got."""

    def __init__(self, global_size: int = 0):
        self.global_scratch_size, self.profile_scratch_size = global_size, 0
        self.got: list[tuple[Any, ...]] = []
        self.launch = self.record

    def record(self, *given: Any) -> None:
        self.got.append(given)


class Spread(Launching):
    """As Triton 3.6: the kernel's arguments one by one."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *args)


class Together(Launching):
    """As Triton 3.7: the kernel's arguments as a tuple behind everything else."""

    def __call__(
        self, x: int, y: int, z: int, stream: Any, function: Any, metadata: Any, launched: Any, enter: Any, leave: Any,
        *args: Any,
    ) -> None:  # fmt: skip
        scratch = (None, None)
        self.launch(x, y, z, stream, function, False, True, metadata, launched, enter, leave, *scratch, "n", "s", args)


class Odd(Launching):
    """One that adds an argument of its own, from the stream."""

    def __call__(self, x: int, y: int, z: int, stream: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, *args[:5], stream, *args[5:])


class Adding(Together):
    def __call__(self, *args: Any) -> None:
        super().__call__(*args, "added")


class Failing(Launching):
    def __call__(self, *args: Any) -> None:
        raise RuntimeError("another protocol")


def compiled(run: Any) -> Any:
    return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


def launched(run: Any) -> tuple[bool, tuple[Any, ...]]:
    """Whether the launcher's own Python was left out, and what its C function got from a launch of real values."""
    found = launcher(compiled(run), 7, ARGUMENTS)
    assert run.got == []  # asking launches nothing
    values = ("q", "k", 17, 2.5, True)
    found.function(7, 1, 1, "stream", *found.middle, *(values if found.spread else (values,)))
    return found.function == run.record, run.got[0]


@pytest.mark.parametrize("kind", [Spread, Together])
def test_the_c_function_gets_what_the_launcher_would_give_it(kind: type[Launching]) -> None:
    through, alone = kind(), kind()
    through(7, 1, 1, "stream", "function", "metadata", *HOOKS, "q", "k", 17, 2.5, True)
    assert launched(alone) == (True, through.got[0])


@pytest.mark.parametrize("run", [Spread(8), Odd(), Adding(), Failing()], ids=lambda run: type(run).__name__)
def test_what_is_not_understood_is_called_as_it_is(run: Launching) -> None:
    found = launcher(compiled(run), 7, ARGUMENTS)
    assert found == (run, ("function", "metadata", *HOOKS), True)
    assert run.got == []


def test_a_launcher_that_is_a_function() -> None:
    def run(*args: Any) -> None:
        raise AssertionError("called")

    assert launcher(compiled(run), 7, ARGUMENTS).function is run
