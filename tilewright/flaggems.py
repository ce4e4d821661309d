"""The layout of FlagGems' back ends: `_<vendor>/fused/<operator>.py`, and the lines that register what is there.

FlagGems imports `_<vendor>.fused` on a card of the vendor and replaces the operators of the names it exports, so each
module is listed in its package's `__init__.py`; a module that nothing lists is never used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilewright.errors import BuildError
from tilewright.vendors import VendorProfile

COLUMNS = 88
# FlagGems has one folder a vendor. Of several profiles this one stands for its vendor where all are built.
STANDS_FOR = {"nvidia": "nvidia-h200", "amd": "amd-mi300x"}


def folder(profile: VendorProfile) -> str:
    """`_hygon/fused`; of generic the folder that all vendors fall back to."""
    return "fused" if profile.vendor == "generic" else f"_{profile.vendor}/fused"


def one_a_vendor(profiles: Sequence[VendorProfile], all_devices: bool) -> list[VendorProfile]:
    """The profiles to build, one for each vendor.

    Raises:
        BuildError: two profiles of one vendor were asked for by name.
    """
    if all_devices:
        profiles = [p for p in profiles if STANDS_FOR.get(p.vendor, p.name) == p.name]
    for vendor in dict.fromkeys(p.vendor for p in profiles):
        names = list(dict.fromkeys(p.name for p in profiles if p.vendor == vendor))
        if len(names) > 1:
            raise BuildError(f"--layout flaggems has one folder for {vendor}: choose among {', '.join(names)}")
    return list(profiles)


def formatted(text: str) -> str:
    """`text` as black writes it, at FlagGems' width."""
    black = _black()
    formatted: str = black.format_str(text, mode=black.Mode(line_length=COLUMNS))
    return formatted


def formatter() -> str:
    """`black 26.5.1`."""
    return f"black {_black().__version__}"


def _black() -> Any:
    """The formatter, an extra of this project.

    Raises:
        BuildError: it is not installed.
    """
    try:
        import black
    except ImportError as error:
        raise BuildError("--layout flaggems is formatted by black: pip install 'tilewright[flaggems]'") from error
    return black


def registration(operators: Iterable[str]) -> str:
    """The text of a package that exports one function from each module of its name."""
    names = sorted(operators)
    imports = "".join(f"from .{name} import {name}\n" for name in names)
    return imports + "\n__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
