"""The TOML form of a fact: its value, how it is known, and from where.

    warp_size = { value = 64, how = "measured", source = "Torch-FL #125" }

`Reader` checks the facts of one file and keeps every problem it finds.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


def frozen(value: Any) -> Any:
    """The same value in tuples and read-only mappings."""
    if isinstance(value, dict):
        return MappingProxyType({key: frozen(item) for key, item in value.items()})
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


def thawed(value: Any) -> Any:
    """What `json.dumps` needs for the values that it does not know; sets become sorted."""
    return sorted(value) if isinstance(value, frozenset) else dict(value)


class Kind(NamedTuple):
    """What a value may be: in words for messages, as a test, and how it is kept."""

    words: str
    fits: Callable[[Any], bool]
    keep: Callable[[Any], Any] = frozen


Keys = Mapping[str, Kind] | Kind  # of a table: these keys, or any key with values of one kind


def one_of(choices: tuple[str, ...]) -> Kind:
    words = " or ".join([", ".join(choices[:-1]), choices[-1]] if choices[1:] else choices)
    return Kind(words, lambda value: value in choices)


def _list_of(kind: Kind, words: str, length: int | None = None) -> Kind:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, list)
            and bool(value)
            and length in (None, len(value))
            and all(map(kind.fits, value))
        )

    return Kind(f"a list of {words}", fits)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", value))


ANY = Kind("any value", lambda value: True)
TEXT = Kind("a non-empty string", _is_text)
TEXTS = _list_of(TEXT, "non-empty strings")
MODES = Kind(TEXTS.words, TEXTS.fits, frozenset)
NAME = Kind("a name of lower-case letters, digits and hyphens", _is_name)
NAMES = _list_of(NAME, "names of lower-case letters, digits and hyphens")
NUMBER = Kind("a number above 0", lambda value: type(value) in (int, float) and value > 0)
COUNT = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
COUNTS = _list_of(COUNT, "whole numbers above 0")
TRIPLE = _list_of(COUNT, "three whole numbers above 0", 3)
CAPABILITY = _list_of(Kind("", lambda value: type(value) is int and value >= 0), "two numbers", 2)
LANES = Kind(
    'a whole number above 0, or "none" for a device without warps',
    lambda value: value == "none" or COUNT.fits(value),
    lambda value: None if value == "none" else value,
)

_ORIGIN = {"how": one_of(("measured", "stated", "inferred", "known")), "source": TEXT}


class Reader:
    """Reads the facts of one file; `problems` is all that is wrong with them."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.provenance: dict[str, tuple[str, str]] = {}

    def value(self, label: str, value: Any, kind: Kind) -> Any:
        if kind.fits(value):
            return kind.keep(value)
        self.problems.append(f"{label}: {_shown(value)} is not {kind.words}")
        return None

    def fact(self, label: str, entry: Any, kind: Kind) -> Any:
        if not (isinstance(entry, dict) and "value" in entry):
            self.problems.append(
                f"{label}: {_shown(entry)} has no provenance; "
                'write { value = ..., how = "...", source = "..." }'
            )
            return None
        for key in entry:
            if key != "value" and key not in _ORIGIN:
                self.stranger(f"{label}.{key}", key, ("value", *_ORIGIN))
        how, source = (self.required(f"{label}.{key}", entry, _ORIGIN[key]) for key in _ORIGIN)
        self.provenance[label] = (how, source)
        return self.value(label, entry["value"], kind)

    def required(self, label: str, entries: Mapping[str, Any], kind: Kind) -> Any:
        key = label.rpartition(".")[2]
        if key in entries:
            return self.value(label, entries[key], kind)
        self.problems.append(f"{label}: missing; give {kind.words}")
        return None

    def table(self, label: str, entries: Any, keys: Keys) -> Mapping[str, Any]:
        if not isinstance(entries, dict):
            self.problems.append(f"{label}: {_shown(entries)} is not a table of facts")
            return {}
        read = {}
        for key, entry in entries.items():
            if isinstance(keys, Kind):
                read[key] = self.fact(f"{label}.{key}", entry, keys)
            elif key in keys:
                read[key] = self.fact(f"{label}.{key}", entry, keys[key])
            else:
                self.stranger(f"{label}.{key}", key, keys)
        return MappingProxyType(read)

    def stranger(self, label: str, key: str, known: Iterable[str]) -> None:
        near = difflib.get_close_matches(key, list(known), 1)
        cure = f"did you mean {near[0]}?" if near else f"choose among {', '.join(known)}"
        self.problems.append(f"{label}: no such field; {cure}")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
