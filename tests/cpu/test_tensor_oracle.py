"""Our tensors mean what NineToothed's do: 2,400 random arrangements, every element of each.

Offsets and masks are compared with `ninetoothed.Tensor.eval`, for sizes that are numbers and for sizes with names that
get their values afterwards. The mask that is left after the prover must be the same mask.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("ninetoothed", reason="NineToothed is the oracle here; it has wheels for Linux alone")

from arrangements_oracle import OPERATIONS, Arrangement, Evaluated, Generator, evaluate  # noqa: E402

CHUNK = 200
CONCRETE = range(0, 1400, CHUNK)
SYMBOLIC = range(10_000, 11_000, CHUNK)


def draw(first: int, symbolic: bool) -> list[Arrangement]:
    """One chunk of arrangements."""
    return [Generator(seed, symbolic).draw() for seed in range(first, first + CHUNK)]


def check(arrangement: Arrangement) -> list[Evaluated]:
    """The two agree about an arrangement, and so do the mask before and the mask after the prover."""
    results = list(evaluate(arrangement))
    for result in results:
        assert result.theirs.shape == result.ours.shape, arrangement
        assert np.array_equal(result.theirs, result.ours), arrangement
        assert result.remaining.all(), f"a needed condition was dropped: {arrangement}"
    return results


@pytest.mark.parametrize("first", CONCRETE)
def test_sizes_that_are_numbers(first: int) -> None:
    conditions = left = masked = 0
    for arrangement in draw(first, symbolic=False):
        (result,) = check(arrangement)
        assert result.needless == 0, f"a condition that always holds was kept: {arrangement}"
        conditions, left = conditions + result.conditions, left + result.left
        masked += bool((result.ours < 0).any())
    assert masked > CHUNK // 4  # of the arrangements have elements that do not exist
    assert left < 0.2 * conditions, f"{left} of {conditions} conditions are left"


@pytest.mark.parametrize("first", SYMBOLIC)
def test_sizes_that_have_names(first: int) -> None:
    conditions = left = evaluated = 0
    for arrangement in draw(first, symbolic=True):
        results = check(arrangement)
        evaluated += len(results)
        conditions, left = conditions + results[0].conditions, left + results[0].left
    assert evaluated > 1.5 * CHUNK  # most are evaluated at two sets of sizes
    assert left < 0.3 * conditions, f"{left} of {conditions} conditions are left"


def test_the_arrangements_are_varied() -> None:
    """Every operation at every depth, up to three levels, and facts about sizes."""
    for symbolic, chunks in ((False, CONCRETE), (True, SYMBOLIC)):
        arrangements = [a for first in chunks for a in draw(first, symbolic)]
        steps = Counter((step.name, step.depth) for a in arrangements for step in a.steps)
        for name in set(OPERATIONS):
            for depth in range(2 if name in ("tile", "ravel") else 3):
                assert steps[name, depth] >= 3, (name, depth, symbolic)
        levels = Counter(len(a.ours().levels) for a in arrangements)
        assert set(levels) == {1, 2, 3} and min(levels.values()) > 100
        tiles = [step.arguments for a in arrangements for step in a.steps if step.name == "tile"]
        for position in (1, 2):
            assert sum(arguments[position] is not None for arguments in tiles) > 100
        assert sum(arguments[3] for arguments in tiles) > 50  # floor mode
        assert len({str(a) for a in arrangements}) > 0.95 * len(arrangements)
        if symbolic:
            assert sum(bool(a.divides) for a in arrangements) > 100


def test_an_arrangement_does_not_depend_on_what_came_before() -> None:
    alone = Generator(17, symbolic=True).draw()
    draw(0, symbolic=True)
    assert Generator(17, symbolic=True).draw() == alone


def test_a_wrong_tensor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: without the bounds of a tile, or with a prover that believes everything."""
    arrangements = draw(0, symbolic=False)[:60]
    module = sys.modules["tilewright.tensor"]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_inside", lambda index, axes: ())
        with pytest.raises(AssertionError):
            for arrangement in arrangements:
                check(arrangement)
    with monkeypatch.context() as patch:
        patch.setattr("arrangements_oracle.simplify_mask", lambda conditions: ())
        with pytest.raises(AssertionError, match="a needed condition was dropped"):
            for arrangement in arrangements:
                check(arrangement)
