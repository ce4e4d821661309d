"""`VendorProfile`: what one device is and can do, read from `<device>.toml`.

A file states facts, each with its provenance (schema.py has the form). A fact left out is unknown,
a lowering left out takes its default (lowering.py). Only `name`, `aliases` and `vendor` are plain:
this project gives them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilewright.errors import ProfileError
from tilewright.vendors.lowering import CAPABILITIES, LOWERING, STATES
from tilewright.vendors.schema import (
    ANY,
    CAPABILITY,
    COUNT,
    COUNTS,
    LANES,
    MODES,
    NAME,
    NAMES,
    NUMBER,
    TEXT,
    TEXTS,
    TRIPLE,
    Keys,
    Kind,
    Reader,
    one_of,
    thawed,
)

_EMPTY: Mapping[str, Any] = MappingProxyType({})
_STATES = {name: one_of(STATES) for name in CAPABILITIES}
_FORMS = {name: one_of(axis.values) for name, axis in LOWERING.items()}
_MATCH = {"torch_attr": TEXT, "gcn_arch": TEXTS, "name_contains": TEXTS, "cc": CAPABILITY}


def _named(kind: Kind, default: Any = None) -> Any:
    return field(default=default, metadata={"named": kind})


def _fact(kind: Kind, default: Any = None, why: str = "") -> Any:
    return field(default=default, metadata={"fact": kind, "why": why})


def _table(keys: Keys) -> Any:
    return field(default_factory=lambda: _EMPTY, metadata={"table": keys})


@dataclass(frozen=True, kw_only=True)
class VendorProfile:
    """One device: what it is, its limits, what its compiler can do, and how each of these is known.

    A fact that is None and a key that a table lacks are unknown; `lowering` alone has every key.
    The fields from `name` to `metadata`, `vendor` apart, mean what they mean in NineToothed's
    `PlatformProfile`.
    """

    name: str = _named(NAME)
    aliases: tuple[str, ...] = _named(NAMES, ())
    vendor: str = _named(NAME)
    compute_arch: str | None = _fact(TEXT)  # sm_90, gfx936, ascend910b
    device_types: tuple[str, ...] | None = _fact(TEXTS)  # of torch
    backend_modes: Mapping[str, frozenset[str]] = _table(MODES)
    constraints: Mapping[str, Any] = _table(ANY)
    metadata: Mapping[str, Any] = _table(ANY)  # facts without a field; hazards above all
    match: Mapping[str, Any] = _table(_MATCH)  # how detect() knows the device
    triton_backend: str | None = _fact(TEXT)
    libdevice: str | None = _fact(TEXT)
    toolchain: Mapping[str, str] = _table(TEXT)  # package -> versions
    warp_size: int | None = _fact(LANES)  # None with a provenance: the device has no warps
    max_threads: int | None = _fact(COUNT)  # of one program
    scratch_bytes: int | None = _fact(COUNT)  # of one program: shared memory, LDS, UB or NRAM
    scratch_multibuffer: int = _fact(COUNT, 1, "what to divide scratch_bytes by")
    align_bytes: int = _fact(COUNT, 16, "the widest access of one lane on most devices")
    grid_limit: tuple[int, int, int] | None = _fact(TRIPLE)
    resident_programs: str | None = _fact(TEXT)  # what runs programs: sm, cu, vectorcore, cores
    num_warps: tuple[int, ...] | None = _fact(COUNTS)  # candidates
    num_stages: tuple[int, ...] | None = _fact(COUNTS)  # candidates
    elems_per_lane: int | None = _fact(COUNT)  # 2-byte elements, the best of streaming kernels
    min_dot: tuple[int, int, int] | None = _fact(TRIPLE)
    support: Mapping[str, str] = _table(_STATES)
    lowering: Mapping[str, str] = _table(_FORMS)
    launch_kwargs: Mapping[str, Any] = _table(ANY)
    env: Mapping[str, str] = _table(TEXT)  # what the toolchain reads; nothing here sets it
    copy_gbps: float | None = _fact(NUMBER)  # device to device, bytes read plus written
    launch_us: float | None = _fact(NUMBER)
    provenance: Mapping[str, tuple[str, str]] = field(default_factory=lambda: _EMPTY)

    def __post_init__(self) -> None:
        full = {name: self.lowering.get(name, axis.default) for name, axis in LOWERING.items()}
        object.__setattr__(self, "lowering", MappingProxyType(full))

    def __hash__(self) -> int:
        return hash(self.hash)

    @functools.cached_property
    def hash(self) -> str:
        """Twelve hex digits over every field, provenance included."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        text = json.dumps(values, default=thawed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def supported_capabilities(self) -> frozenset[str]:
        """Those that are native or emulated."""
        return frozenset(name for name, state in self.support.items() if state != "unsupported")

    @property
    def unsupported_capabilities(self) -> frozenset[str]:
        return frozenset(name for name, state in self.support.items() if state == "unsupported")

    def describe(self) -> str:
        """Every fact with its provenance, one a line; what is unknown or a default says so."""
        rows = [("aliases", ", ".join(self.aliases) or "none", ""), ("vendor", self.vendor, "")]
        for label, value, why in self._facts():
            origin = self.provenance.get(label, ("default", why) if why else ())
            shown = _shown(value, missing="none" if label in self.provenance else "unknown")
            rows.append((label, shown, ": ".join(origin)))
        width = max(len(label) for label, _, _ in rows)
        lines = [
            f"  {label:<{width}}  {value:<20}  {origin}".rstrip() for label, value, origin in rows
        ]
        return "\n".join([f"{self.name}  profile {self.hash}", *lines])

    def _facts(self) -> Iterator[tuple[str, Any, str]]:
        """Label, value and, where it has a default, the reason of that."""
        for item in fields(self):
            value = getattr(self, item.name)
            match item.metadata:
                case {"fact": _, "why": why}:
                    yield item.name, value, why
                case {"table": keys}:
                    listed = keys if item.name in ("support", "lowering") else value
                    if not listed:
                        yield item.name, None, ""
                    for key in listed:
                        why = LOWERING[key].why if item.name == "lowering" else ""
                        yield f"{item.name}.{key}", value.get(key), why


def _shown(value: Any, missing: str) -> str:
    if value is None:
        return missing
    if isinstance(value, Mapping):
        return json.dumps(value, default=thawed)
    if isinstance(value, tuple | frozenset):
        return ", ".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
    return str(value)


_RULES = {item.name: item.metadata for item in fields(VendorProfile) if item.metadata}


def parse(text: str, where: str) -> VendorProfile:
    """Reads the TOML form of a profile; `where` is the file as messages name it.

    Raises:
        ProfileError: All problems of the file, each with its field and cure.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{where}: not TOML: {error}") from None
    reader = Reader()
    values = {name: reader.required(name, data, NAME) for name in ("name", "vendor")}
    for name, entry in data.items():
        if name in values:
            continue
        match _RULES.get(name):
            case {"named": kind}:
                values[name] = reader.value(name, entry, kind)
            case {"fact": kind}:
                values[name] = reader.fact(name, entry, kind)
            case {"table": keys}:
                values[name] = reader.table(name, entry, keys)
            case _:
                reader.stranger(name, name, _RULES)
    if reader.problems:
        count = f"{len(reader.problems)} problem{'s' if reader.problems[1:] else ''}"
        raise ProfileError("\n  ".join([f"{where}: {count}", *reader.problems]))
    return VendorProfile(**values, provenance=MappingProxyType(reader.provenance))


@functools.cache
def _shipped() -> Mapping[str, VendorProfile]:
    """Every profile of this folder, under its name and its aliases."""
    found: dict[str, VendorProfile] = {}
    for path in sorted(resources.files("tilewright.vendors").iterdir(), key=lambda path: path.name):
        if not path.name.endswith(".toml"):
            continue
        profile = parse(path.read_text(encoding="utf-8"), str(path))
        if path.name != f"{profile.name}.toml":
            raise ProfileError(f"{path}: name: the file must be called {profile.name}.toml")
        for name in (profile.name, *profile.aliases):
            if name in found:
                raise ProfileError(f"{path}: {name} is taken by {found[name].name}")
            found[name] = profile
    return found


def names() -> tuple[str, ...]:
    """Names of the shipped profiles, without aliases."""
    return tuple(name for name, profile in _shipped().items() if name == profile.name)


_read: dict[str, VendorProfile] = {}  # profiles of files outside this folder, by name


def _from_file(path: Path) -> VendorProfile:
    try:
        profile = parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    if profile.name in _shipped():
        raise ProfileError(f"{path}: {profile.name} is taken by a shipped profile")
    if _read.get(profile.name) != profile:
        _read[profile.name] = profile
    return _read[profile.name]


def load(name: str) -> VendorProfile:
    """The profile of a name or an alias, or of a file `card.toml`; one object however often a name is asked for.

    A file's profile is then known by its name too, in this process.

    Raises:
        ProfileError: Nothing has this name, or the file is none or malformed.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    profile = _read.get(name) or _shipped().get(name.strip().lower().replace("_", "-"))
    if profile is None:
        known = [f"{one:<18} {', '.join(load(one).aliases)}".rstrip() for one in names()]
        title = f"no vendor profile is called {name!r}; names and aliases are"
        raise ProfileError("\n  ".join([title, *known]))
    return profile
