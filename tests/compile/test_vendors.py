"""Every operator's text of every profile, compiled for the device itself or, where Triton lacks it, for a stand-in."""

from __future__ import annotations

from typing import Any

import pytest
from compiled import compiled, launched, module_of

from tilewright import binaries, vendors
from tilewright.build import operators
from tilewright.ops import problems

SMALL = {"tokens": 1, "heads": 2, "kv_tokens": 1, "num_warps": 1, "num_stages": 1}
STAND_INS = ("sm_90", "gfx942")


@pytest.mark.parametrize("profile", vendors.names())
@pytest.mark.parametrize("name", sorted(problems.LISTS))
def test_compiles(name: str, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that a form is compiled rather than a size; each kernel that a call launches."""
    monkeypatch.setattr(problems, "HEADS", (8,))
    monkeypatch.setattr(problems, "HEAD_DIMS", (64,))
    (operator,) = operators([name])
    config = {key: SMALL[key] for key in (*operator.kernel.tiles, "num_warps", "num_stages")}
    module: Any = module_of(operator.source(profile, config), f"{name}_{profile}".replace("-", "_"))
    own = binaries.target(vendors.load(profile))
    separate = vendors.load(profile).lowering["branch"] == "separate"
    e4m3 = f"float8_e4m3{module.LOWERINGS['e4m3_format']}"
    for _, arguments in problems.problems(name, e4m3):
        made = launched(module, lambda a=arguments: getattr(module, name)(*a, config=config))
        kinds = {launch.kernel.fn.__name__ for launch in made}
        assert len(kinds) == (2 if separate and len(operator.kernel.branches) > 1 else 1)
        for launch in made[:1] + made[-1:]:
            for target in (own,) if own else STAND_INS:
                binary = compiled(launch, target)
                assert binary.code.startswith(b"\x7fELF")
                room = vendors.load(profile).scratch_bytes
                assert room is None or binary.shared <= room
