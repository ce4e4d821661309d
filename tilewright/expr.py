"""Integer expressions over sizes, indices and loaded values, and the prover that removes masks.

An `Expr` is a polynomial with integer coefficients over atoms, kept in one normal form, so equal expressions are equal
objects by value. Division and remainder floor, as in Python. `nonnegative(e)` proves `e >= 0` from the ranges of the
atoms; when in doubt it says no, and the mask stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

INT32 = 2**31 - 1
PROOF_STEPS = 50  # bounds tried for one proof: an operator's take 3, all but 4 of 5,000 of random arrangements 50


@dataclass(frozen=True)
class Atom:
    """A symbol of a polynomial; subclasses say what it stands for."""

    @cached_property
    def key(self) -> tuple[int, str]:
        """Order of atoms inside a product."""
        return (RANK[type(self)], self.label)

    @property
    def label(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.label

    def __lt__(self, other: Atom) -> bool:
        if self.key == other.key:  # alike in name, yet apart
            return repr(self) < repr(other)
        return self.key < other.key

    @cached_property
    def expr(self) -> Expr:
        return Expr({(self,): 1})


@dataclass(frozen=True)
class Size(Atom):
    """A size: `kind` is "runtime", "constexpr" (a contract's size) or "tile" (a parameter of the arrangement).

    `low` and `high` bound its value; `high` may name another size (`num_inserted <= num_tokens`). `divides` names
    sizes that are multiples of this one, a condition that dispatch checks.
    """

    name: str
    kind: str = "runtime"
    low: int = 0
    high: Expr | int = INT32
    divides: tuple[Expr, ...] = ()

    @property
    def label(self) -> str:
        return self.name


@dataclass(frozen=True)
class Index(Atom):
    """A variable in `[0, size)`: a program id, a lane of a tile or a step. Two of one name and role are one."""

    name: str
    size: Expr = field(compare=True)
    role: str = "lane"

    @property
    def label(self) -> str:
        return f"{self.name}:{self.role}"


@dataclass(frozen=True)
class Div(Atom):
    """`floor(num / den)`, with `den > 0`, after everything divisible has been taken out of `num`."""

    num: Expr
    den: Expr

    @property
    def label(self) -> str:
        return f"({self.num})//({self.den})"


@dataclass(frozen=True)
class Mod(Atom):
    """`num - den * floor(num / den)`."""

    num: Expr
    den: Expr

    @property
    def label(self) -> str:
        return f"({self.num})%({self.den})"


@dataclass(frozen=True)
class Test(Atom):
    """1 where `num >= 0`, else 0: an index that picks one of two."""

    num: Expr

    @property
    def label(self) -> str:
        return f"({self.num} >= 0)"


@dataclass(frozen=True)
class Loaded(Atom):
    """The element of an integer tensor at `index`; `mask` are the conditions under which it exists.

    Where it does not exist it reads as `fill`. `guarded` says that a negative value means "skip", so whoever uses the
    value carries the test `value >= 0`, and may then rely on it.
    """

    source: Any
    index: tuple[Expr, ...]
    mask: tuple[Expr, ...]
    fill: int
    guarded: bool
    name: str

    @property
    def label(self) -> str:
        return f"{self.name}[{','.join(map(str, self.index))}]"


@dataclass(frozen=True)
class Named(Atom):
    """A variable of the generated text; `limit` bounds its value, None if unknown (then it is 64 bits wide)."""

    name: str
    limit: int | None = None

    @property
    def label(self) -> str:
        return self.name


RANK: dict[type[Atom], int] = {Named: 0, Index: 0, Loaded: 1, Div: 2, Mod: 3, Test: 4, Size: 5}
Term = tuple[Atom, ...]


class Expr:
    """A polynomial: `{product of atoms: coefficient}`. Immutable and hashable."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Term, int]):
        kept = [(t, c) for t, c in terms.items() if c]
        self.terms: dict[Term, int] = dict(sorted(kept, key=_term_order) if len(kept) > 1 else kept)
        self._hash = hash(frozenset(self.terms.items()))

    # -- identity
    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self == const(other)
        return isinstance(other, Expr) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return render(self)

    # -- arithmetic
    def __add__(self, other: Any) -> Expr:
        terms = dict(self.terms)
        for t, c in wrap(other).terms.items():
            terms[t] = terms.get(t, 0) + c
        return Expr(terms)

    def __neg__(self) -> Expr:
        return Expr({t: -c for t, c in self.terms.items()})

    def __sub__(self, other: Any) -> Expr:
        return self + -wrap(other)

    def __rsub__(self, other: Any) -> Expr:
        return wrap(other) + -self

    def __mul__(self, other: Any) -> Expr:
        terms: dict[Term, int] = {}
        for a, x in self.terms.items():
            for b, y in wrap(other).terms.items():
                t = tuple(sorted(a + b))
                terms[t] = terms.get(t, 0) + x * y
        return _with_facts(Expr(terms))

    __radd__ = __add__
    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Expr:
        return floordiv(self, wrap(other))

    def __rfloordiv__(self, other: Any) -> Expr:
        return floordiv(wrap(other), self)

    def __mod__(self, other: Any) -> Expr:
        return modulo(self, wrap(other))

    # -- looking
    @property
    def value(self) -> int | None:
        """The integer this is, or None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms:
            return self.terms[()]
        return None

    @property
    def single(self) -> Atom | None:
        """The atom this is, or None."""
        if len(self.terms) == 1:
            (term, coefficient), = self.terms.items()
            if len(term) == 1 and coefficient == 1:
                return term[0]
        return None

    def atoms(self, deep: bool = True) -> list[Atom]:
        """All atoms, each once, in order of appearance; `deep` looks into divisions and the indices of loads."""
        found: dict[Atom, None] = {}

        def visit(e: Expr) -> None:
            for term in e.terms:
                for atom in term:
                    if atom in found:
                        continue
                    if deep:
                        for inner in _children(atom):
                            visit(inner)
                    found[atom] = None

        visit(self)
        return list(found)

    def coefficient(self, atom: Atom) -> Expr | None:
        """What multiplies `atom` if this is linear in it (outside divisions), else None."""
        out: dict[Term, int] = {}
        for term, c in self.terms.items():
            n = term.count(atom)
            if n > 1:
                return None
            if n:
                rest = list(term)
                rest.remove(atom)
                out[tuple(rest)] = c
        return Expr(out)

    def substitute(self, values: Mapping[Atom, Expr | int]) -> Expr:
        """Replaces atoms everywhere, inside divisions and loads too."""
        if not values:
            return self
        out = const(0)
        for term, c in self.terms.items():
            product = const(c)
            for atom in term:
                product = product * _substitute_atom(atom, values)
            out = out + product
        return out

    def evaluate(self, env: Mapping[str, Any], loaded: Callable[[Loaded], Any] | None = None) -> Any:
        """The number this is when atoms have the values of `env` (by name; indices as `name:role`)."""
        total: Any = 0
        for term, c in self.terms.items():
            product: Any = c
            for atom in term:
                product = product * _evaluate_atom(atom, env, loaded)
            total = total + product
        return total


def _term_order(item: tuple[Term, int]) -> tuple[int, list[tuple[int, str]]]:
    return (-len(item[0]), [a.key for a in item[0]])


def _children(atom: Atom) -> Iterable[Expr]:
    if isinstance(atom, Div | Mod):
        return (atom.num, atom.den)
    if isinstance(atom, Test):
        return (atom.num,)
    if isinstance(atom, Loaded):
        return atom.index + atom.mask
    return ()


def _substitute_atom(atom: Atom, values: Mapping[Atom, Expr | int]) -> Expr:
    if atom in values:
        return wrap(values[atom])
    if isinstance(atom, Div):
        return floordiv(atom.num.substitute(values), atom.den.substitute(values))
    if isinstance(atom, Mod):
        return modulo(atom.num.substitute(values), atom.den.substitute(values))
    if isinstance(atom, Test):
        return at_least(atom.num.substitute(values), 0)
    if isinstance(atom, Loaded):
        index = tuple(i.substitute(values) for i in atom.index)
        mask = tuple(m.substitute(values) for m in atom.mask)
        if (index, mask) != (atom.index, atom.mask):
            return replace(atom, index=index, mask=mask).expr
    if isinstance(atom, Index):
        size = atom.size.substitute(values)
        if size != atom.size:
            return Index(atom.name, size, atom.role).expr
    return atom.expr


def _evaluate_atom(
    atom: Atom, env: Mapping[str, Any], loaded: Callable[[Loaded], Any] | None
) -> Any:
    if isinstance(atom, Div):
        return atom.num.evaluate(env, loaded) // atom.den.evaluate(env, loaded)
    if isinstance(atom, Mod):
        return atom.num.evaluate(env, loaded) % atom.den.evaluate(env, loaded)
    if isinstance(atom, Test):
        return 1 * (atom.num.evaluate(env, loaded) >= 0)
    if isinstance(atom, Loaded):
        if loaded is None:
            raise KeyError(atom.label)
        return loaded(atom)
    return env[atom.label]


@cache
def const(value: int) -> Expr:
    """The expression of an integer."""
    return Expr({(): value})


def wrap(value: Any) -> Expr:
    """An `Expr` of an int, an atom or an `Expr`."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Atom):
        return value.expr
    if isinstance(value, int):
        return const(value)
    raise TypeError(f"{value!r} is no integer expression")


def at_least(value: Any, limit: Any) -> Expr:
    """1 where `value >= limit`, else 0."""
    e = condition(wrap(value) - limit)
    if nonnegative(e):
        return const(1)
    if nonnegative(-e - 1):
        return const(0)
    return Test(e).expr


# -- facts: a tile that divides a size
def _with_facts(e: Expr) -> Expr:
    """Rewrites `tile * (size // tile)` to `size` where the tile is declared to divide the size."""
    for term, c in e.terms.items():
        for atom in term:
            if isinstance(atom, Div):
                tile = atom.den.single
                if isinstance(tile, Size) and atom.num in tile.divides and tile in term:
                    rest = list(term)
                    rest.remove(atom)
                    rest.remove(tile)
                    others = Expr({t: k for t, k in e.terms.items() if t != term})
                    return _with_facts(others + Expr({tuple(rest): c}) * atom.num)
    return e


def _is_exact(div: Div) -> bool:
    """Is this the number of tiles of a size that the tile is declared to divide?"""
    tile = div.den.single
    return isinstance(tile, Size) and div.num in tile.divides


def _take_multiples(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """`num = quotient * den + rest`, taking the sizes that the tile `den` is declared to divide."""
    tile = den.single
    if not isinstance(tile, Size):
        return const(0), num
    quotient = const(0)
    for size in tile.divides:
        atom = size.single
        factor = num.coefficient(atom) if atom is not None else None
        if factor is not None and factor.terms:
            quotient = quotient + factor * Div(size, den).expr
            num = num - factor * size
    return quotient, num


# -- division
def floordiv(num: Expr, den: Expr) -> Expr:
    """`num // den` in normal form, floored; `den` is positive."""
    if den.value is not None:
        if den.value <= 0:
            raise ZeroDivisionError(f"{num} // {den}")
        if num.value is not None:
            return const(num.value // den.value)
        if den.value == 1:
            return num
    multiples, num = _take_multiples(num, den)
    quotient, rest = _split(num, den)
    quotient = quotient + multiples
    if not rest.terms or below(rest, den):
        return quotient
    if den.value is not None:  # the constant part becomes 0 <= c < den
        c = rest.terms.get((), 0)
        quotient, rest = quotient + c // den.value, rest - c + c % den.value
        if below(rest, den):
            return quotient
        reduced = _reduce(rest, den.value)
        if reduced is not None:
            return quotient + floordiv(*reduced)
    elif rest.terms.get((), 0) < 0 and nonnegative(rest + den):
        # floor((x - 1) / d) = floor((x - 1 + d) / d) - 1: never negative, so no one has to truncate
        quotient, rest = quotient - 1, rest + den
        if below(rest, den):
            return quotient
    if any(c < 0 for c in rest.terms.values()) and not nonnegative(rest) and nonnegative(den - 1 - rest):
        return quotient - floordiv(den - 1 - rest, den)  # floor(-x / d) = -floor((x + d - 1) / d)
    c = rest.terms.get((), 0)
    inner = (rest - c).single
    if isinstance(inner, Div):  # (x // a + c) // b = (x + c * a) // (a * b)
        return quotient + floordiv(inner.num + c * inner.den, inner.den * den)
    return quotient + Div(rest, den).expr


def modulo(num: Expr, den: Expr) -> Expr:
    """`num % den` in normal form."""
    if den.value is not None:
        if den.value <= 0:
            raise ZeroDivisionError(f"{num} % {den}")
        if num.value is not None:
            return const(num.value % den.value)
        if den.value == 1:
            return const(0)
    _, rest = _split(_take_multiples(num, den)[1], den)
    if den.value is not None:
        c = rest.terms.get((), 0)
        rest = rest - c + c % den.value
    if not rest.terms or below(rest, den):
        return rest
    reduced = None if den.value is None else _reduce(rest, den.value)
    if den.value is not None and reduced is not None:  # (4 * p + a) % 64 = p % 16 * 4 + a
        g = den.value // (reduced[1].value or 1)
        return g * modulo(*reduced) + (rest - g * reduced[0])
    return Mod(rest, den).expr


def _split(num: Expr, den: Expr) -> tuple[Expr, Expr]:
    """`num = quotient * den + rest`, taking every term that `den`, a single product, divides."""
    if len(den.terms) != 1:
        return (const(1), const(0)) if num == den else (const(0), num)
    (divisor, k), = den.terms.items()
    quotient: dict[Term, int] = {}
    rest: dict[Term, int] = {}
    for term, c in num.terms.items():
        left = list(term)
        try:
            for atom in divisor:
                left.remove(atom)
        except ValueError:
            rest[term] = c
            continue
        if c % k == 0:
            quotient[tuple(left)] = c // k
        else:
            rest[term] = c
    return Expr(quotient), Expr(rest)


def _reduce(num: Expr, den: int) -> tuple[Expr, Expr] | None:
    """`(g * s + r) // (g * m)` is `s // m` when `0 <= r < g`; tries each g that divides `den` and a coefficient."""
    for g in sorted({math.gcd(c, den) for t, c in num.terms.items() if t} - {1}, reverse=True):
        divisible = Expr({t: c // g for t, c in num.terms.items() if c % g == 0})
        rest = Expr({t: c for t, c in num.terms.items() if c % g})
        if () in rest.terms:
            whole = rest.terms[()] // g
            divisible, rest = divisible + whole, rest - whole * g
        if below(rest, const(g)):
            return divisible, const(den // g)
    return None


# -- ranges
def below(e: Expr, limit: Expr) -> bool:
    """Proves `0 <= e < limit`."""
    return nonnegative(e) and nonnegative(limit - e - 1)


@lru_cache(maxsize=100_000)
def nonnegative(e: Expr) -> bool:
    """Proves `e >= 0` from the ranges of its atoms; False means "not proven"."""
    waiting, seen = [e], {e}
    for _ in range(PROOF_STEPS):
        if not waiting:
            return False
        e = waiting.pop()
        if all(c >= 0 and all(map(_atom_low, t)) for t, c in e.terms.items()):
            return True
        ends = [end for end in _worst(e) if end not in seen]
        seen.update(ends)
        waiting += reversed(ends)
    return False


def _worst(e: Expr) -> list[Expr]:
    """Lower bounds of `e` with one atom replaced by an end of its range.

    Indices and loads go before sizes, and what pulls `e` down before what lifts it, so that a size that bounds another
    is still there when that one is replaced; the order is fixed, which keeps the search short.
    """
    lifting: list[Expr] = []
    for atom in sorted(e.atoms(deep=False), key=lambda a: (isinstance(a, Size), a.key)):
        slope = e.coefficient(atom)
        if slope is None:
            continue
        rest = e - slope * atom.expr
        if nonnegative(-slope):
            if downs := [slope * high + rest for high in _highs(atom)] + [d + rest for d in _div_ends(atom, slope, -1)]:
                return downs
        elif not lifting and nonnegative(slope):
            ups = [slope * low for low in _lows(atom)] + _div_ends(atom, slope, 1)
            lifting = [up + rest for up in ups if up + rest != e]
            if lifting and not isinstance(atom, Size):
                return lifting
    return lifting


def _atom_low(atom: Atom) -> bool:
    """Is the atom never negative by itself?"""
    if isinstance(atom, Size):
        return atom.low >= 0
    if isinstance(atom, Index | Mod | Test | Named):
        return True
    if isinstance(atom, Div):
        return nonnegative(atom.num)
    return isinstance(atom, Loaded)


def _lows(atom: Atom) -> list[Expr]:
    if isinstance(atom, Size):
        return [const(atom.low)]
    if isinstance(atom, Div):
        return [const(0)] if nonnegative(atom.num) else []
    if isinstance(atom, Index | Mod | Test | Loaded):
        return [const(0)]
    return []


def _highs(atom: Atom) -> list[Expr]:
    if isinstance(atom, Size):
        return [wrap(atom.high)]
    if isinstance(atom, Index):
        return [atom.size - 1]
    if isinstance(atom, Mod):
        return [atom.den - 1]
    if isinstance(atom, Test):
        return [const(1)]
    if isinstance(atom, Div):
        highs = []
        top = _top(atom.num)
        if top is not None and atom.den.value is not None:
            highs.append(const(top // atom.den.value))
        for inner in atom.num.atoms(deep=False):
            slope = atom.num.coefficient(inner)
            if isinstance(inner, Size | Index | Mod) and slope is not None and nonnegative(slope):
                for high in _highs(inner):
                    highs.append(floordiv(atom.num + slope * (high - inner.expr), atom.den))
        if nonnegative(atom.num):
            highs.append(atom.num)
        return highs
    return []


def _div_ends(atom: Atom, slope: Expr, sign: int) -> list[Expr]:
    """`d * (n // d)` lies between `n - d + 1` and `n`: the lower bound of `k * d * (n // d)`, k of that sign."""
    if not isinstance(atom, Div):
        return []
    k, rest = _split(slope, atom.den)
    if rest.terms:
        return []
    return [k * (atom.num - atom.den + 1 if sign > 0 else atom.num)]


@lru_cache(maxsize=100_000)
def _top(e: Expr) -> int | None:
    """A number that `e` never exceeds, from interval arithmetic; None if unknown."""
    total = 0
    for term, c in e.terms.items():
        if c < 0:
            if not all(_atom_low(a) for a in term):
                return None
            continue
        product = c
        for atom in term:
            high = atom_top(atom)
            if high is None or not _atom_low(atom):
                return None
            product *= high
        total += product
    return total


def atom_top(atom: Atom) -> int | None:
    """The largest number an atom can be."""
    if isinstance(atom, Div):
        top = _top(atom.num)
        return None if top is None else max(top, 0) // (atom.den.value or 1)
    if isinstance(atom, Loaded):
        return None
    if isinstance(atom, Named):
        return atom.limit
    return max((t for h in _highs(atom) if (t := _top(h)) is not None), default=None)


def top(e: Expr) -> int | None:
    """A number that `e` never exceeds, or None."""
    return _top(e)


# -- conditions: an Expr that must be >= 0
def condition(e: Expr) -> Expr:
    """An equivalent condition without an outer division: `n // d + k >= 0` is `n + k * d >= 0`."""
    divs = [(t, c) for t, c in e.terms.items() if any(isinstance(a, Div) and not _is_exact(a) for a in t)]
    if len(divs) == 1 and len(divs[0][0]) == 1 and abs(divs[0][1]) == 1:
        (term, c), = divs
        div = term[0]
        if isinstance(div, Div) and nonnegative(div.den - 1):
            k = e - c * div.expr
            if c == 1:
                return condition(div.num + k * div.den)
            return condition((k + 1) * div.den - 1 - div.num)
    if (coarser := _coarser(e)) is not None:
        return condition(coarser)
    if e.terms:  # common factor
        g = math.gcd(*(abs(c) for t, c in e.terms.items() if t)) if any(e.terms) else 1
        if g > 1:
            e = Expr({t: (c // g) for t, c in e.terms.items()})
    return e


def _coarser(e: Expr) -> Expr | None:
    """`64 * group + lane >= 448` is `group >= 7` where the lane is below 64."""
    grains = [const(g) for g in sorted({abs(c) for t, c in e.terms.items() if t and abs(c) > 1}, reverse=True)]
    grains += [a.expr for a in e.atoms(deep=False) if isinstance(a, Size) and a.kind == "tile"]
    for grain in grains:
        multiples, rest = _take_multiples(e, grain)
        whole, rest = _split(rest, grain)
        whole = whole + multiples
        if grain.value is not None:
            k = rest.terms.get((), 0)
            whole, rest = whole + k // grain.value, rest - k + k % grain.value
        if not whole.atoms() or not rest.atoms():
            continue
        for steps in (0, 1):
            if below(rest + steps * grain, grain):
                return whole - steps
    return None


def simplify_mask(conditions: Iterable[Expr]) -> tuple[Expr, ...]:
    """The conditions that cannot be proven and that no other implies, each once, in order."""
    kept: list[Expr] = []
    for e in map(condition, conditions):
        if e not in kept and (is_guard(e) or not nonnegative(e)):
            kept.append(e)
    for e in list(kept):
        others = [o for o in kept if o is not e]
        if any(implies(o, e) for o in others):
            kept.remove(e)
    return tuple(kept)


def is_guard(e: Expr) -> bool:
    """The test of a skipping index is what makes its value non-negative, so it is never proven from that."""
    value = e.single
    return isinstance(value, Loaded) and value.guarded


def implies(given: Expr, wanted: Expr) -> bool:
    """Does `given >= 0` prove `wanted >= 0`?"""
    if is_guard(wanted):
        return False
    if nonnegative(wanted - given):
        return True
    value = given.single  # a skipped element fails its own test, so the test vouches for its load too
    if isinstance(value, Loaded) and value.guarded and value.fill < 0:
        return any(m == wanted or implies(m, wanted) for m in map(condition, value.mask))
    return False


# -- text
def render(e: Expr, name: Callable[[Atom], str] | None = None) -> str:
    """Python text of an expression; `name` gives the text of atoms other than divisions."""
    name = name or (lambda a: a.label)

    def atom_text(a: Atom) -> str:
        if isinstance(a, Div):
            return f"{group(a.num)} // {group(a.den)}"
        if isinstance(a, Mod):
            return f"{group(a.num)} % {group(a.den)}"
        return name(a)

    def group(x: Expr) -> str:
        text = render(x, name)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def product(term: Term, c: int) -> str:
        parts = [f"({atom_text(a)})" if isinstance(a, Div | Mod) and len(term) + (c != 1) > 1 else atom_text(a)
                 for a in term]
        if c != 1 or not parts:
            parts.append(str(c))
        return " * ".join(parts)

    out = ""
    positive_first = sorted(e.terms.items(), key=lambda item: item[1] < 0)
    for term, c in positive_first:
        if not out:
            text = product(term, abs(c))
            is_division = len(term) == 1 and abs(c) == 1 and isinstance(term[0], Div | Mod)
            out = text if c > 0 else f"-({text})" if is_division else f"-{text}"
        else:
            out += (" - " if c < 0 else " + ") + product(term, abs(c))
    return out or "0"
