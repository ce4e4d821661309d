"""Dispatch rules: which configuration a problem gets on a device, read from `ops/configs/<device>.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from tilewright.errors import ProfileError

LAUNCH = ("num_warps", "num_stages")
HOW = ("measured", "stated", "inferred", "known")


@dataclass(frozen=True)
class Rule:
    """`config` is used where every quantity of `least` is at least its threshold; the first rule that fits counts."""

    least: Mapping[str, int]
    config: Mapping[str, int]
    how: str
    source: str


@dataclass(frozen=True)
class Rules:
    """The rules of one operator on one device, in order, and what has been seen of them there.

    The status is the file's, or the operator's own: `[operator] status = "..."`.
    """

    rules: tuple[Rule, ...]
    status: str


def load(
    operator: str, device: str, parameters: Sequence[str], quantities: Sequence[str], launches: bool = True
) -> Rules:
    """The rules of `operator` on `device`; a device without a file of its own has generic's.

    A file that says `like = "<device>"` takes the rules of operators it does not have from that device, as inferred.
    One that launches nothing itself has parameters alone, no num_warps and num_stages.

    Raises:
        ProfileError: unknown fields, a missing parameter, no provenance, or no rule that always fits.
    """
    text = _text(device)
    if text is None:
        rules = load(operator, "generic", parameters, quantities, launches)
        return replace(rules, status="only generated, with generic's rules")
    data = tomllib.loads(text)
    if "like" not in data or operator in data:
        wanted = (*parameters, *(LAUNCH if launches else ()))
        return parse(text, f"configs/{device}.toml", operator, wanted, quantities)
    other = load(operator, data["like"], parameters, quantities, launches)
    inferred = (replace(r, how="inferred", source=f"as {data['like']}: {r.source}") for r in other.rules)
    return Rules(tuple(inferred), data["status"])


def _text(device: str) -> str | None:
    """The text of a device's own file, if it has one."""
    file = resources.files("tilewright.ops") / "configs" / f"{device}.toml"
    return file.read_text() if file.is_file() else None


def parse(text: str, where: str, operator: str, parameters: Sequence[str], quantities: Sequence[str]) -> Rules:
    """As `load`, from a file's text."""
    data = tomllib.loads(text)
    problems: list[str] = []
    status = data.get("status")
    if not isinstance(status, str):
        problems.append('status = "..." is missing: what was run, compiled or only generated')
    own = data.get(operator, {})
    given = own.get("rules", [])
    rules = tuple(_rule(f"{operator} rule {i + 1}", r, parameters, quantities, problems) for i, r in enumerate(given))
    if not rules or rules[-1].least:
        problems.append(f"{operator}: its last rule must have no threshold, so that one always fits")
    if problems:
        raise ProfileError(f"{where}:\n" + "\n".join(f"  {p}" for p in problems))
    return Rules(rules, str(own.get("status", status)))


def _rule(
    name: str, data: Mapping[str, Any], parameters: Sequence[str], quantities: Sequence[str], problems: list[str]
) -> Rule:
    least, config = data.get("least", {}), data.get("config", {})
    for key in sorted(set(data) - {"least", "config", "how", "source"}):
        problems.append(f"{name}: unknown field {key}")
    for key in sorted(set(least) - set(quantities)):
        problems.append(f"{name}: unknown quantity {key}, known are {', '.join(quantities)}")
    wanted = set(parameters)
    for key in sorted(wanted - set(config)):
        problems.append(f"{name}: config lacks {key}")
    for key in sorted(set(config) - wanted):
        problems.append(f"{name}: config has an unknown parameter {key}")
    for key, value in config.items():
        if not isinstance(value, int) or value < 1 or (key != "num_stages" and value & (value - 1)):
            kind = "whole number above 0" if key == "num_stages" else "power of two"
            problems.append(f"{name}: {key} = {value!r} is no {kind}")
    if data.get("how") not in HOW or not data.get("source"):
        problems.append(f"{name}: how = one of {', '.join(HOW)} and source are needed")
    return Rule(dict(least), dict(config), str(data.get("how")), str(data.get("source")))
