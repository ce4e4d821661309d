"""Standalone modules: one file an operator and device, and a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tilewright
from tilewright import handwritten, vendors
from tilewright.errors import BuildError
from tilewright.files import write
from tilewright.launch import OPERATORS, Operator


@dataclass(frozen=True)
class Built:
    """One written module; `file` is relative to the output folder, the hashes are of SHA-256.

    A module written by hand has no arrangements and no applications.
    """

    operator: str
    device: str
    file: str
    text: str
    profile: str
    arrangements: str
    applications: str
    status: str


def operators(names: Sequence[str] = ()) -> list[Operator]:
    """The operators of these names, all if none is given, in order of their names."""
    _ = tilewright.ops  # declares them
    unknown = sorted(set(names) - set(OPERATORS))
    if unknown:
        raise BuildError(f"unknown operator {', '.join(unknown)}; known are {', '.join(sorted(OPERATORS))}")
    return [OPERATORS[name] for name in sorted(names or OPERATORS)]


def chosen(names: Sequence[str] = ()) -> tuple[list[Operator], list[str]]:
    """The operators of these names, and which of the names are modules written by hand; all if none is given."""
    by_hand = [name for name in handwritten.MODULES if not names or name in names]
    rest = [name for name in names if name not in by_hand]
    return operators(rest) if rest or not names else [], by_hand


def build(devices: Sequence[str], out: Path, names: Sequence[str] = ()) -> Iterator[Built]:
    """Writes `out/<device>/<operator>.py` for each operator and device, then `out/manifest.json`.

    Yields each module as it is written. Every text is made before the first is written, so nothing is left half done;
    the same input gives the same bytes.

    Raises:
        BuildError: an unknown operator.
        ProfileError: an unknown device.
    """
    profiles = [vendors.load(device) for device in devices]
    generated, by_hand = chosen(names)
    modules: list[tuple[Built, str]] = []
    for profile in profiles:
        for op in generated:
            kernel, status = op.kernel, op.kernel.rules(profile.name).status
            hashes = kernel.arrangement_hash(), kernel.application_hash()
            modules.append(_built(op.name, profile, op.source(profile.name), *hashes, status))
        for name in by_hand:
            modules.append(_built(name, profile, handwritten.source(name, profile.name), "", "", handwritten.STATUS))
    built: list[Built] = []
    for entry, text in modules:
        write(out / entry.file, text)
        built.append(entry)
        yield entry
    manifest = {"tilewright": tilewright.__version__, "modules": [asdict(entry) for entry in built]}
    write(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _built(
    operator: str, profile: vendors.VendorProfile, text: str, arrangements: str, applications: str, status: str
) -> tuple[Built, str]:
    file = (Path(profile.name) / f"{operator}.py").as_posix()
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Built(operator, profile.name, file, digest, profile.hash, arrangements, applications, status), text
