"""A launch: what its programs share, the memory they may touch, and what is counted."""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass
class Counts:
    """What interpreted launches did: bytes moved by unmasked lanes, and programs run.

    A lane counts each time it is loaded or stored, also where several lanes hold one address; an atomic counts as both.
    """

    bytes_loaded: int = 0
    bytes_stored: int = 0
    programs: int = 0


_poison: contextvars.ContextVar[bool | None] = contextvars.ContextVar("poison", default=None)
_poison_default = False
_every_lane: contextvars.ContextVar[bool] = contextvars.ContextVar("every_lane", default=False)
_counters: contextvars.ContextVar[tuple[Counts, ...]] = contextvars.ContextVar("counters", default=())
_running: contextvars.ContextVar[Launch | None] = contextvars.ContextVar("running", default=None)


@contextlib.contextmanager
def poison(enabled: bool = True) -> Iterator[None]:
    """Within it, in this thread, masked lanes of a `tl.load` without `other` read NaN, or the largest integer.

    A GPU leaves such lanes undefined, so a result that changes under poison is wrong. `poison(False)` reads 0.
    """
    token = _poison.set(enabled)
    try:
        yield
    finally:
        _poison.reset(token)


@contextlib.contextmanager
def every_lane() -> Iterator[None]:
    """Within it, in this thread, the addresses of masked lanes must lie in a tensor too, as exact tails promise."""
    token = _every_lane.set(True)
    try:
        yield
    finally:
        _every_lane.reset(token)


def set_poison_default(enabled: bool) -> None:
    """Says whether launches outside any `poison` block are poisoned, in every thread; at first they are not."""
    global _poison_default
    _poison_default = enabled


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Yields a `Counts` that sums the interpreted launches made within it, in this thread."""
    counts = Counts()
    token = _counters.set((*_counters.get(), counts))
    try:
        yield counts
    finally:
        _counters.reset(token)


class Storage(NamedTuple):
    """Memory that a kernel was given."""

    start: int
    size: int
    name: str  # of the argument


class Launch:
    """One run of a kernel over a grid, and where it is.

    Attributes:
        program: the ids of the program that runs.
        poisoned: whether masked lanes read poison.
        every_lane: whether masked lanes must have addresses within a tensor.
        foreign: whether an address was made from an integer, so that any may be meant.
    """

    def __init__(self, kernel: str, grid: tuple[int, int, int], storages: list[Storage]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.program = (0, 0, 0)
        enabled = _poison.get()
        self.poisoned = _poison_default if enabled is None else enabled
        self.foreign = False
        self.every_lane = _every_lane.get()
        self._counts = Counts()
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []
        for start, size, name in sorted(storages, key=lambda storage: storage.start):
            if self._ends and start < self._ends[-1]:  # storages that overlap are one
                self._ends[-1] = max(self._ends[-1], start + size)
                self._names[-1] += f", {name}"
            else:
                self._starts.append(start)
                self._ends.append(start + size)
                self._names.append(name)

    def run(self, program: Callable[[], object]) -> None:
        """Calls `program` at every place of the grid, one after the other."""
        x, y, z = self.grid
        token = _running.set(self)
        try:
            with np.errstate(all="ignore"):
                for self.program in itertools.product(range(x), range(y), range(z)):
                    program()
                    self._counts.programs += 1
        except Exception as error:
            error.add_note(f"in program {self.program} of {self.kernel}")
            raise
        finally:
            _running.reset(token)
            for counts in _counters.get():
                counts.bytes_loaded += self._counts.bytes_loaded
                counts.bytes_stored += self._counts.bytes_stored
                counts.programs += self._counts.programs

    def touch(self, addresses: np.ndarray, size: int, verb: str) -> None:
        """Checks and counts an access of `size` bytes at each address; `verb` is reads, writes or updates."""
        if addresses.size and not self.foreign:
            self._check(addresses, size, verb)
        if verb != "writes":
            self._counts.bytes_loaded += addresses.size * size
        if verb != "reads":
            self._counts.bytes_stored += addresses.size * size

    def check_masked(self, addresses: np.ndarray, size: int, verb: str) -> None:
        """Checks the addresses of all lanes, where that is asked for; counts nothing."""
        if self.every_lane and addresses.size and not self.foreign:
            self._check(addresses, size, f"with a masked lane, {verb}")

    def _check(self, addresses: np.ndarray, size: int, verb: str) -> None:
        at = self._at_or_before(int(addresses.min()))
        if at >= 0 and int(addresses.max()) + size <= self._ends[at]:
            return
        for address in addresses.ravel().tolist():
            at = self._at_or_before(address)
            if at < 0 or address + size > self._ends[at]:
                where = "before every tensor it was given"
                if at >= 0:
                    length = self._ends[at] - self._starts[at]
                    where = f"at byte {address - self._starts[at]} of {self._names[at]}, whose storage has {length}"
                raise IndexError(f"{self.kernel}, program {self.program}: {verb} {size} bytes {where}")

    def _at_or_before(self, address: int) -> int:
        """The last storage that starts at or before an address; -1 where none does."""
        return bisect.bisect_right(self._starts, address) - 1


def current() -> Launch:
    """The launch that runs in this thread."""
    launch = _running.get()
    if launch is None:
        raise RuntimeError("a @triton.jit function runs only within a launch: kernel[grid](...)")
    return launch
