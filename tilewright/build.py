"""Standalone modules: one file an operator and device, and a manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tilewright
from tilewright import vendors
from tilewright.errors import BuildError
from tilewright.files import write
from tilewright.launch import OPERATORS, Operator


@dataclass(frozen=True)
class Built:
    """One written module; `file` is relative to the output folder, the hashes are of SHA-256."""

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


def build(devices: Sequence[str], out: Path, names: Sequence[str] = ()) -> Iterator[Built]:
    """Writes `out/<device>/<operator>.py` for each operator and device, then `out/manifest.json`.

    Yields each module as it is written. Every text is made before the first is written, so nothing is left half done;
    the same input gives the same bytes.

    Raises:
        BuildError: an unknown operator.
        ProfileError: an unknown device.
    """
    profiles = [vendors.load(device) for device in devices]
    texts = [(op, profile, op.source(profile.name)) for profile in profiles for op in operators(names)]
    built: list[Built] = []
    for op, profile, text in texts:
        file = Path(profile.name) / f"{op.name}.py"
        write(out / file, text)
        built.append(
            Built(
                operator=op.name,
                device=profile.name,
                file=file.as_posix(),
                text=hashlib.sha256(text.encode()).hexdigest(),
                profile=profile.hash,
                arrangements=op.kernel.arrangement_hash(),
                applications=op.kernel.application_hash(),
                status=op.kernel.rules(profile.name).status,
            )
        )
        yield built[-1]
    manifest = {"tilewright": tilewright.__version__, "modules": [asdict(entry) for entry in built]}
    write(out / "manifest.json", json.dumps(manifest, indent=1) + "\n")
