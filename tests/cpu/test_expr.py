"""The normal form and the prover, against brute force over every value that sizes and indices can take.

A random expression is built twice: as an `Expr`, and as a numpy array with one entry for each assignment in
`TABLE`. The two must agree, and what the prover claims must hold in the whole table.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewright.expr import (
    Atom,
    Div,
    Expr,
    Index,
    Loaded,
    Mod,
    Size,
    _coarser,
    _top,
    at_least,
    atom_top,
    below,
    condition,
    const,
    floordiv,
    implies,
    modulo,
    nonnegative,
    render,
    simplify_mask,
    top,
    wrap,
)
from tilewright.tensor import Tensor

n = Size("n", low=1, high=5)
m = Size("m", high=n.expr)  # at most n
t = Size("t", "tile", low=1, high=5, divides=(n.expr,))
u = Size("u", "tile", low=1, high=3)
row = Index("row", n.expr)
program = Index("row", (n.expr + t.expr - 1) // t.expr, "program")
lane = Index("lane", t.expr)
block = Index("block", (n.expr + u.expr - 1) // u.expr, "program")
place = Index("place", u.expr)
four = Index("four", const(4))
many = Index("many", const(12))

SLOTS = np.array([3, -1, 0, 7, -1])  # by row
PAGES = np.array([2, -1, 5, 0])  # by slot, where the slot is below 4
POSITIONS = np.array([4, 0, 2, 9, 1])  # by row, never negative

slots = Tensor("slots", "rows", (m,), "int64").source
pages = Tensor("pages", "slots", (4,), "int64").source
positions = Tensor("positions", "rows", (m,), "int64").source
slot = Loaded(slots, (row.expr,), (m.expr - 1 - row.expr,), -1, True, "slot")
page = Loaded(pages, (slot.expr,), (slot.expr, 3 - slot.expr), -1, True, "page")
position = Loaded(positions, (row.expr,), (m.expr - 1 - row.expr,), 0, False, "position")

ATOMS: list[Atom] = [n, m, t, u, row, program, lane, block, place, four, many]
LOADED: list[Atom] = [slot, page, position]
GUARDS = {slot: [slot.expr], page: [page.expr, slot.expr], position: []}


def assignments() -> dict[str, np.ndarray]:
    """Every assignment within the ranges, thinned to a few thousand, one column for each atom."""
    rows = [
        (n_, m_, t_, u_, row_, program_, lane_, block_, place_, (row_ + lane_) % 4, many_)
        for n_ in range(1, 6)
        for m_ in range(n_ + 1)
        for t_ in range(1, n_ + 1)
        if n_ % t_ == 0
        for u_ in range(1, 4)
        for row_ in range(n_)
        for program_ in range(n_ // t_)
        for lane_ in range(t_)
        for block_ in range(-(-n_ // u_))
        for place_ in range(u_)
        for many_ in (0, 3, 4, 11)
    ]
    columns = np.array(rows)[::7].T
    table = {atom.label: column for atom, column in zip(ATOMS, columns, strict=True)}
    exists = table["row:lane"] < table["m"]
    table["slot"] = np.where(exists, SLOTS[table["row:lane"]], -1)
    paged = (table["slot"] >= 0) & (table["slot"] < 4)
    table["page"] = np.where(paged, PAGES[np.where(paged, table["slot"], 0)], -1)
    table["position"] = np.where(exists, POSITIONS[table["row:lane"]], 0)
    return table


TABLE = assignments()
COUNT = len(TABLE["n"])


def value(e: Expr, rows: Any = slice(None)) -> np.ndarray:
    """The value of an expression in every row of the table."""
    env = {name: column[rows] for name, column in TABLE.items()}
    number = e.evaluate(env, lambda atom: env[atom.name])
    return np.broadcast_to(number, env["n"].shape)


Both = tuple[Expr, np.ndarray]


class Draw:
    """Random expressions with their values."""

    def __init__(self, seed: int, atoms: list[Atom]):
        self.random = random.Random(seed)
        self.atoms = atoms

    def leaf(self) -> Both:
        if self.random.random() < 0.25:
            number = self.random.randint(-6, 12)
            return const(number), np.full(COUNT, number)
        atom = self.random.choice(self.atoms)
        return atom.expr, value(atom.expr)

    def positive(self) -> Both:
        """A divisor."""
        e = self.random.choice([const(self.random.randint(1, 8)), n.expr, t.expr, u.expr, 2 * t.expr, n.expr + 1])
        return e, value(e)

    def tree(self, depth: int) -> Both:
        if depth == 0:
            return self.leaf()
        operation = self.random.choice("++--**//%%>")
        left, l_value = self.tree(depth - 1)
        if operation in "/%":
            right, r_value = self.positive()
            if operation == "/":
                return left // right, l_value // r_value
            return left % right, l_value % r_value
        if operation == "*":
            right, r_value = self.leaf()
            return left * right, l_value * r_value
        right, r_value = self.tree(depth - 1)
        if operation == "+":
            return left + right, l_value + r_value
        if operation == "-":
            return left - right, l_value - r_value
        return at_least(left, right), (l_value >= r_value).astype(int)

    def linear(self) -> Both:
        """A sum of atoms and divisions with coefficients, as offsets and masks are."""
        e, number = const(0), np.zeros(COUNT, dtype=int)
        for _ in range(self.random.randint(1, 4)):
            c = self.random.choice((-8, -4, -2, -1, 1, 1, 2, 4, 8))
            term, t_value = self.tree(1) if self.random.random() < 0.6 else self.leaf()
            e, number = e + c * term, number + c * t_value
        return e, number


CHUNKS = pytest.mark.parametrize("chunk", range(4))


# -- the normal form
@CHUNKS
def test_value_of_the_normal_form(chunk: int) -> None:
    for seed in range(chunk * 500, chunk * 500 + 500):
        for e, expected in (Draw(seed, ATOMS).tree(3), Draw(seed, ATOMS).linear()):
            assert np.array_equal(value(e), expected), (seed, e)


@CHUNKS
def test_text_reads_back_as_the_same_number(chunk: int) -> None:
    names = {atom.label: f"a{i}" for i, atom in enumerate(ATOMS)}
    scope = {names[atom.label]: TABLE[atom.label] for atom in ATOMS}
    for seed in range(chunk * 300, chunk * 300 + 300):
        e, expected = Draw(seed, ATOMS).tree(3)
        if any(a.label not in names and not isinstance(a, Div | Mod) for a in e.atoms()):
            continue  # a test has its text from the generator
        for sign, number in ((e, expected), (-e, -expected)):
            text = render(sign, lambda atom: names[atom.label])
            assert np.array_equal(np.broadcast_to(eval(text, scope), COUNT), number), (seed, text)


@CHUNKS
def test_substitution(chunk: int) -> None:
    for seed in range(chunk * 200, chunk * 200 + 200):
        draw = Draw(seed, ATOMS)
        e, _ = draw.tree(3)
        atom = draw.random.choice([row, program, lane, four, many])
        replacement = draw.random.choice([const(0), const(3), n.expr - 1, n.expr * 2 + four.expr])
        env = {**TABLE, atom.label: value(replacement)}
        assert np.array_equal(
            value(e.substitute({atom: replacement})), np.broadcast_to(e.evaluate(env), COUNT)
        ), (seed, e, atom)


def test_substituted_sizes_reach_the_indices() -> None:
    """Binding a size to a literal leaves one variable of a name, not two."""
    bound = (row.expr + n.expr).substitute({n: 5})
    assert bound == Index("row", const(5)).expr + 5
    assert row.expr.substitute({n: 5}) == Index("row", const(5)).expr


@pytest.mark.parametrize("seed", range(0, 400, 100))
def test_equal_expressions_are_equal_objects(seed: int) -> None:
    for number in range(seed, seed + 100):
        draw = Draw(number, ATOMS)
        (a, _), (b, _), (c, _) = draw.tree(2), draw.tree(2), draw.leaf()
        k = draw.random.randint(1, 8)
        d = draw.random.choice([const(k), n.expr, t.expr, u.expr, 2 * u.expr, n.expr * u.expr])
        s, _ = Draw(number, [n, m, t, u]).tree(2)
        i = draw.random.choice([row.expr, row.expr + lane.expr, four.expr * 2 + place.expr])
        pairs = [
            (a + b, b + a),
            (a * b, b * a),
            ((a + b) * c, a * c + b * c),
            (a - a, const(0)),
            (a * d // d, a),
            ((i + s * d) // d, s + i // d),
            (a * d % d, const(0)),
            ((i + s * d) % d, i % d),
            ((a + k * 3) // k, a // k + 3),
            ((c // 2 + k) // 3, (c + 2 * k) // 6),
        ]
        for left, right in pairs:
            assert left == right and hash(left) == hash(right), (number, left, right)


def test_atoms_of_one_label_are_kept_apart() -> None:
    """Two loads of one place under other masks: products and sums of them do not depend on their order."""
    other = Loaded(slots, (row.expr,), (), -1, True, "slot")
    assert slot.label == other.label and slot != other
    assert slot.expr * other.expr == other.expr * slot.expr
    total = slot.expr + 2 * other.expr
    assert hash(total) == hash(2 * other.expr + slot.expr) and total == 2 * other.expr + slot.expr


@pytest.mark.parametrize(
    ("e", "text"),
    [
        ((n.expr + 3) // 4, "(n + 3) // 4"),
        ((n.expr - 1) // 4 + 1, "(n + 3) // 4"),
        ((many.expr * 4 + four.expr) // 16, "(many:lane) // 4"),
        ((many.expr * 4 + four.expr) % 16, "four:lane + ((many:lane) % 4) * 4"),
        ((many.expr * 4 + four.expr) // 4, "many:lane"),
        ((many.expr * 4 + four.expr) % 4, "four:lane"),
        (many.expr // 12, "0"),
        (many.expr % 12, "many:lane"),
        (many.expr % 1, "0"),
        (-(n.expr // 4), "-(n // 4)"),
        (-(n.expr % 4), "-(n % 4)"),
        (-4 * (n.expr // 4), "-(n // 4) * 4"),
        (7 - n.expr // 4, "7 - n // 4"),
        (-n.expr - 1, "-n - 1"),
        (n.expr * (m.expr // 2), "(m // 2) * n"),
        (const(0), "0"),
        (const(-3), "-3"),
        (at_least(n, m.expr + 1) * 2, "(n - m - 1 >= 0) * 2"),
        (slot.expr // 4, "(slot[row:lane]) // 4"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_text(e: Expr, text: str) -> None:
    assert str(e) == text


@pytest.mark.parametrize(
    ("num", "den", "text"),
    [
        (n.expr - 1, u.expr, "(n + u - 1) // u - 1"),
        (n.expr - 4, u.expr * 4, None),
        (m.expr - 1, u.expr, "(m + u - 1) // u - 1"),
        (m.expr - 5, const(4), "(m + 3) // 4 - 2"),
        (3 - m.expr, const(4), "-(m // 4)"),
        (-m.expr, const(4), "-((m + 3) // 4)"),
        (-m.expr, u.expr, "-((m + u - 1) // u)"),
    ],
)
def test_no_division_of_a_negative_number(num: Expr, den: Expr, text: str | None) -> None:
    """Triton truncates where Python floors, so a numerator that can be made non-negative is."""
    e = num // den
    if text is not None:
        assert str(e) == text
        assert all(nonnegative(a.num) for a in e.atoms() if isinstance(a, Div))
    assert np.array_equal(value(e), value(num) // value(den))


def test_facts_about_a_tile() -> None:
    tiles = n.expr // t.expr
    assert (n.expr + t.expr - 1) // t.expr == tiles
    assert tiles * t.expr == n.expr
    assert t.expr * tiles * 2 + t.expr * tiles * u.expr == 2 * n.expr + n.expr * u.expr
    assert t.expr * (tiles + tiles * u.expr) == n.expr + n.expr * u.expr
    assert n.expr % t.expr == 0
    assert (program.expr * t.expr + lane.expr) // t.expr == program.expr
    assert (program.expr * t.expr + lane.expr) % t.expr == lane.expr
    assert n.expr // u.expr * u.expr != n.expr


@pytest.mark.parametrize("den", [0, -1, -4])
def test_a_divisor_is_positive(den: int) -> None:
    with pytest.raises(ZeroDivisionError, match=rf"^n // {den}$"):
        floordiv(n.expr, const(den))
    with pytest.raises(ZeroDivisionError, match=rf"^n % {den}$"):
        modulo(n.expr, const(den))
    with pytest.raises(ZeroDivisionError, match=rf"^7 // {den}$"):
        const(7) // den
    with pytest.raises(ZeroDivisionError, match=rf"^7 % {den}$"):
        const(7) % den


def test_numbers_and_atoms_become_expressions() -> None:
    assert wrap(3) == 3 and wrap(n) == n.expr and 7 // const(2) == 3
    assert const(3).value == 3 and n.expr.value is None and const(0).value == 0
    assert n.expr.single == n and (n.expr * 2).single is None and (n.expr + 1).single is None
    with pytest.raises(TypeError, match=r"^1\.5 is no integer expression$"):
        wrap(1.5)
    assert (n.expr * 3 + n.expr * m.expr + 5).coefficient(n) == m.expr + 3
    assert (n.expr * n.expr).coefficient(n) is None
    with pytest.raises(KeyError, match="slot"):
        slot.expr.evaluate(TABLE)


def test_values_past_31_bits() -> None:
    row = Index("row", const(1 << 33), "program")
    e = (row.expr * 4096 + many.expr) // 64 * 128 + row.expr % 64
    rows = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 33) - 1], dtype=np.int64)
    got = e.evaluate({"row:program": rows, "many:lane": np.int64(11)})
    expected = [(int(r) * 4096 + 11) // 64 * 128 + int(r) % 64 for r in rows]
    assert got.dtype == np.int64 and got.tolist() == expected and max(expected) > 1 << 45
    assert top(row.expr * 4096) == ((1 << 33) - 1) * 4096
    assert nonnegative((1 << 33) * 4096 - 1 - row.expr * 4096) and not nonnegative((1 << 31) - 1 - row.expr)


# -- the prover
@CHUNKS
def test_what_is_proven_holds(chunk: int) -> None:
    """Every expression is shifted until its least value is 0, so that one more would be false."""
    proven = 0
    for seed in range(chunk * 300, chunk * 300 + 300):
        for e, number in (Draw(seed, ATOMS).linear(), Draw(seed, ATOMS).tree(2)):
            least, most = int(number.min()), int(number.max())
            proven += nonnegative(e - least)
            assert not nonnegative(e - least - 1), (seed, e, least)
            assert not nonnegative(most - 1 - e), (seed, e, most)
            assert not below(e - least, const(most - least)), (seed, e)
            bound = top(e)
            assert bound is None or bound >= most, (seed, e, bound, most)
            for atom in e.atoms():
                limit = atom_top(atom)
                assert limit is None or limit >= value(atom.expr).max(), (seed, atom, limit)
    assert proven > 200  # of 600 exact bounds


@CHUNKS
def test_an_equivalent_condition(chunk: int) -> None:
    changed = coarser = 0
    for seed in range(chunk * 500, chunk * 500 + 500):
        e, number = Draw(seed, ATOMS).linear()
        simpler = condition(e)
        changed += simpler != e
        assert np.array_equal(value(simpler) >= 0, number >= 0), (seed, e, simpler)
        coarse = _coarser(e)
        if coarse is not None:
            coarser += 1
            assert np.array_equal(value(coarse) >= 0, number >= 0), (seed, e, coarse)
    assert changed > 50 and coarser > 4


@CHUNKS
def test_a_simplified_mask_is_the_same_mask(chunk: int) -> None:
    """With loads too: who uses a skipping index carries its test."""
    dropped = kept = 0
    for seed in range(chunk * 150, chunk * 150 + 150):
        draw = Draw(seed, ATOMS + LOADED * 2)
        wanted: list[Expr] = []
        for _ in range(draw.random.randint(1, 5)):
            e, number = draw.linear()
            wanted.append(e - draw.random.choice((0, int(number.min()), int(np.median(number)))))
        used = {a: None for e in wanted for a in e.atoms() if isinstance(a, Loaded)}
        guards = [g for atom in used for g in GUARDS[atom]]
        draw.random.shuffle(guards)
        if draw.random.random() < 0.5 and page in used:
            guards = [page.expr]  # it vouches for its own slot
        wanted = [*guards, *wanted] if draw.random.random() < 0.5 else [*wanted, *guards]
        left = simplify_mask(wanted)
        assert np.array_equal(holds(wanted), holds(left)), (seed, wanted, left)
        dropped, kept = dropped + len(wanted) - len(left), kept + len(left)
    assert dropped > 100 and kept > 100


def holds(conditions: Any) -> np.ndarray:
    """Where all conditions hold."""
    return np.logical_and.reduce([value(e) >= 0 for e in conditions] or [np.ones(COUNT, bool)])


@CHUNKS
def test_an_implied_condition_holds(chunk: int) -> None:
    found = 0
    for seed in range(chunk * 400, chunk * 400 + 400):
        draw = Draw(seed, ATOMS)
        (given, g), (extra, x) = draw.linear(), draw.linear()
        wanted, w = draw.random.choice([(given + extra - int(x.min()), g + x - int(x.min())), (extra, x)])
        if implies(given, wanted):
            found += 1
            assert (w[g >= 0] >= 0).all(), (seed, given, wanted)
    assert found > 30


big, inserted = Size("num_tokens"), Size("num_inserted", high=Size("num_tokens").expr)
tile = Size("tile", "tile", low=1, high=64)
heads = Size("heads", "tile", low=1, high=64, divides=(Size("num_heads", low=1).expr,))
num_heads = Size("num_heads", low=1)
rows_of = Index("tokens", (big.expr + tile.expr - 1) // tile.expr, "program")
lane_of = Index("tokens", tile.expr)
heads_of = Index("heads", (num_heads.expr + heads.expr - 1) // heads.expr, "program")
head_lane = Index("heads", heads.expr)
pair = Index("pairs", const(32))
side = Index("side", const(2))
group = Index("groups", const(8))
sixty_four = Index("dim", const(64))


@pytest.mark.parametrize(
    "e",
    [
        const(0),
        big.expr,
        INTERVAL := 511 - 64 * group.expr - 2 * pair.expr - side.expr,
        63 - (2 * pair.expr + side.expr),
        (big.expr + tile.expr - 1) // tile.expr * tile.expr - 1 - (rows_of.expr * tile.expr + lane_of.expr),
        (big.expr + 3) // 4 * 4 - 1
        - (Index("p", (big.expr + 3) // 4, "program").expr * 4 + Index("l", const(4)).expr),
        num_heads.expr - 1 - (heads_of.expr * heads.expr + head_lane.expr),
        big.expr - inserted.expr,
        big.expr - 1 - Index("i", inserted.expr).expr,
        big.expr - big.expr // 2,
        big.expr // 2 * 2 - big.expr + 1,
        big.expr // tile.expr * tile.expr - big.expr + tile.expr - 1,
        big.expr - big.expr // tile.expr * tile.expr,
        tile.expr - 1 - big.expr % tile.expr,
        7 - sixty_four.expr // 8,
        num_heads.expr // heads.expr - 1 - heads_of.expr,
        (num_heads.expr - 1) // 4 - Index("h", num_heads.expr).expr // 4,
        position.expr // 4 * 576 + position.expr % 4,
        at_least(big, inserted.expr + 1),
        1 - at_least(big, inserted.expr + 1),
    ],
    ids=str,
)
def test_what_must_be_proven(e: Expr) -> None:
    assert nonnegative(e)


@pytest.mark.parametrize(
    "e",
    [
        const(-1),
        big.expr - 1,
        INTERVAL - 1,
        inserted.expr - big.expr,
        big.expr - 1 - (rows_of.expr * tile.expr + lane_of.expr),
        num_heads.expr - 2 - (heads_of.expr * heads.expr + head_lane.expr),
        big.expr // 2 * 2 - big.expr,
        7 - position.expr,
    ],
    ids=str,
)
def test_what_must_not_be_proven(e: Expr) -> None:
    assert not nonnegative(e)


@pytest.mark.parametrize(
    ("e", "simpler"),
    [
        ((many.expr // 4) - 2, many.expr - 8),
        (1 - many.expr // 4, 7 - many.expr),
        (64 * group.expr + sixty_four.expr - 448, group.expr - 7),
        (447 - 64 * group.expr - sixty_four.expr, 6 - group.expr),
        (64 * group.expr + sixty_four.expr - 440, 64 * group.expr + sixty_four.expr - 440),
        (4 * n.expr - 10, n.expr - 3),
        (10 - 4 * n.expr, 2 - n.expr),
        (slot.expr // u.expr, slot.expr),
        ((big.expr + tile.expr - 1) // tile.expr - 1 - n.expr, big.expr - 1 - n.expr * tile.expr),
    ],
    ids=str,
)
def test_a_condition_is_stated_without_division(e: Expr, simpler: Expr) -> None:
    assert condition(e) == simpler


def test_masks_that_imply_each_other() -> None:
    token = rows_of.expr * tile.expr + lane_of.expr
    inside, inserted_only = big.expr - 1 - token, inserted.expr - 1 - token
    assert simplify_mask([token, inside, inserted_only, inside]) == (inserted_only,)
    assert simplify_mask([inserted_only, token, inside]) == (inserted_only,)
    assert simplify_mask([inside]) == (inside,)
    assert simplify_mask([]) == ()
    assert simplify_mask([const(-1)]) == (const(-1),)


def test_a_guard_is_kept_and_vouches_for_its_load() -> None:
    """A slot that does not exist reads as -1, so `slot >= 0` says that it exists."""
    exists = m.expr - 1 - row.expr
    assert simplify_mask([exists, slot.expr, slot.expr // 4]) == (slot.expr,)
    assert simplify_mask([slot.expr]) == (slot.expr,)
    assert simplify_mask([page.expr, slot.expr, 3 - slot.expr, exists]) == (page.expr, slot.expr)
    assert simplify_mask([exists, position.expr]) == (exists,)


def test_a_load_that_reads_zero_vouches_for_nothing() -> None:
    zero = Loaded(slots, (row.expr,), (m.expr - 1 - row.expr,), 0, True, "slot")
    assert simplify_mask([m.expr - 1 - row.expr, zero.expr]) == (m.expr - 1 - row.expr, zero.expr)


def test_an_index_deep_in_a_division_has_no_single_worst_end() -> None:
    """`i + 3 * (i % 2)` is largest at i = 3, not at i = 4."""
    i = Index("i", const(5))
    width = Size("width", low=1, high=8)
    e = (i.expr + 3 * (i.expr % 2)) // width.expr
    assert nonnegative(7 - e) and not nonnegative(5 - e) and not nonnegative(4 - e)


def test_searching_for_a_proof_ends() -> None:
    """Twelve unrelated variables: no proof, found quickly."""
    e = const(-1)
    for number in range(12):
        e = e + (-1) ** number * Index(f"i{number}", Size(f"s{number}").expr).expr
    assert not nonnegative(e)


def test_a_wrong_prover_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests can fail: a prover that looks at constants alone is caught."""
    monkeypatch.setattr("tilewright.expr.nonnegative", lambda e: e.terms.get((), 0) >= 0)
    tests: list[Callable[[int], None]] = [test_value_of_the_normal_form, test_a_simplified_mask_is_the_same_mask]
    for test in tests:
        with pytest.raises(AssertionError):
            test(0)
    _top.cache_clear()  # bounds found meanwhile
