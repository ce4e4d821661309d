"""Texts that were generated when this package was built: `generated/<device>/<operator>.py` of a wheel."""

from __future__ import annotations

from pathlib import Path

from tilewright.kernel import Kernel
from tilewright.vendors import VendorProfile

FOLDER = Path(__file__).parent / "generated"


def text(kernel: Kernel, profile: VendorProfile) -> str | None:
    """The packaged text of an operator for a device, None where there is none of this profile and these applications.

    A source checkout has none, and a profile or an application that was changed after the build is generated anew.
    """
    path = FOLDER / profile.name / f"{kernel.name}.py"
    try:
        found = path.read_text()
    except OSError:
        return None
    header = found.partition('"""')[0]
    made_of = (f"# profile       {profile.name} {profile.hash}\n", f"# applications  {kernel.application_hash()}\n")
    return found if all(line in header for line in made_of) else None
