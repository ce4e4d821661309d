"""Every kernel of fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert, compiled for devices that are not there.

The last lines of a run list what was compiled: registers, shared memory, and the bytes of each kind of access.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled import LANES, Binary, Launched, compiled, launched, module_of
from deepseek_v4 import Case, Inputs, make
from triton.compiler.errors import CompilationError

from tilewright import vendors
from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator

NAME = operator.__name__
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
DTYPES = (torch.bfloat16, torch.float16)
OWN = {"nvidia-h200": "sm_90", "hygon-bw1000": "gfx942", "metax-c550": "gfx942"}  # as many lanes to a warp
H200_SHARED = 232448  # bytes of shared memory of a program

# Elements of a program's tile by what is loaded or stored, for each token and head of the program, and their bytes.
# A row's 64 turning lanes and their angles are less than 16 bytes a lane at every tiling of the rules: not among these.
MAIN = {
    "q_head": {"x": (512, 2), "cos": (256, 4), "sin": (256, 4)},
    "kv_row": {"x": (512, 2), "codes": (512, 1)},
}


@functools.cache
def module(profile: str) -> Any:
    return module_of(OPERATORS[NAME].source(profile), f"compiled_{profile.replace('-', '_')}")


def configs(profile: str) -> Iterator[dict[str, int]]:
    """The configurations of a profile's rules, each once."""
    seen = []
    for rule in OPERATORS[NAME].kernel.rules(profile).rules:
        if dict(rule.config) not in seen:
            seen.append(dict(rule.config))
            yield seen[-1]


def name_of(config: dict[str, int]) -> str:
    return ".".join(str(config[key]) for key in ("tokens", "heads", "kv_tokens", "num_warps"))


def launch(profile: str, config: dict[str, int] | None, inputs: Inputs, **changes: Any) -> Launched:
    """The one launch of a call."""
    names = ("q", "kv", "k_cache", "slot_mapping", "position_ids", "cos_sin_cache", "eps", "cache_block_size")
    arguments = {**dict(zip(names, inputs.arguments(), strict=True)), **changes}
    call = functools.partial(getattr(module(profile), NAME), **arguments, config=config)
    (only,) = launched(module(profile), call)
    return only


def share(name: str, config: dict[str, int], target: str) -> int:
    """Bytes that each lane has to load or store of a tile, one access at least."""
    branch, _, what = name.split()
    elements, size = MAIN[branch.removesuffix("_masked")][what]
    if branch == "kv_row":
        elements *= config["kv_tokens"]
    else:
        elements *= config["tokens"] * (config["heads"] if what == "x" else 1)
    return max(size, elements * size // (config["num_warps"] * LANES[target]))


def main_widths(binary: Binary) -> dict[str, list[int]]:
    """Those of whole rows and tables; a slot or a position is one number."""
    return {
        name: widths
        for name, widths in binary.widths.items()
        if name.split()[2:] and name.split()[2] in MAIN.get(name.split()[0].removesuffix("_masked"), ())
    }


def row(binary: Binary, *titles: str) -> str:
    """A line of the table that ends a run."""
    widths = [
        f"{branch.removesuffix('_masked')}.{what} {kind} "
        + "+".join(f"{sizes.count(size)}x{size}" for size in sorted(set(sizes), reverse=True))
        for (branch, kind, what), sizes in ((name.split(), sizes) for name, sizes in main_widths(binary).items())
        if what in ("x", "codes")
    ]
    use = f"{binary.resources['registers']:>3} registers {binary.shared:>5} bytes shared"
    return f"{' '.join(titles)} {binary.target:<6} {use}  {', '.join(widths)}"


def variants() -> Iterator[Any]:
    for profile in SHIPPED:
        for config in configs(profile):
            kernels = ["exact"] if module(profile).FIXED.get("heads") == 1 else ["exact", "masked"]
            for kernel in kernels:
                for dtype in DTYPES:
                    for target in ("sm_90", "gfx942"):
                        words = (profile, name_of(config), kernel, str(dtype).removeprefix("torch."), target)
                        yield pytest.param(profile, config, kernel, dtype, target, id="-".join(words))


@pytest.mark.parametrize(("profile", "config", "kernel", "dtype", "target"), list(variants()))
def test_compiles(
    profile: str, config: dict[str, int], kernel: str, dtype: torch.dtype, target: str,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    inputs = make(Case(17, 64 if kernel == "exact" else 3, dtype=dtype))
    recorded = launch(profile, config, inputs)
    binary = compiled(recorded, target)
    record_property("row", row(binary, f"{profile:<12} {name_of(config):<7} {kernel:<6}", f"{dtype}"[6:].ljust(8)))
    assert binary.code.startswith(b"\x7fELF")
    assert recorded.kernel.__name__ == f"{NAME}_kernel" + ("_masked" if kernel == "masked" else "")
    assert recorded.keywords["enable_fp_fusion"] is True
    assert recorded.keywords["num_warps"] == config["num_warps"]

    assert binary.resources["spilled"] == 0
    scratch = vendors.load(profile).scratch_bytes
    assert binary.shared <= min(scratch or H200_SHARED, H200_SHARED)

    widths, split = main_widths(binary), vendors.load(profile).lowering["pair"] == "reshape_split_join"
    assert {name.split()[0].removesuffix("_masked") for name in widths} == {"kv_row", "q_head"}
    if split:  # as wide as a lane's share lets it be, all of it
        wanted = {name: [min(16, part)] * max(1, part // 16) for name, part in shares(widths, config, target).items()}
        assert widths == wanted
    else:
        assert {name.replace("_masked", ""): sizes for name, sizes in widths.items()} == ADDRESSED[target]
    if split and target == OWN[profile]:
        rows = [name for name in widths if name.split()[2] == "x"]
        assert len(rows) == 3
        assert {size for name in rows for size in widths[name]} == {16}


def shares(widths: dict[str, list[int]], config: dict[str, int], target: str) -> dict[str, int]:
    return {name: share(name, config, target) for name in widths}


# Where the two sides of a pair are an axis of the tile, a lane gets pairs: 4 bytes, and 2 of codes.
ADDRESSED = {
    "sm_90": {
        "kv_row load x": [4] * 8,
        "kv_row store codes": [2] * 8,
        "q_head load cos": [16] * 2,
        "q_head load sin": [16] * 2,
        "q_head load x": [4] * 8,
        "q_head store x": [4] * 8,
    },
    "gfx942": {
        "kv_row load x": [4] * 4,
        "kv_row store codes": [2] * 4,
        "q_head load cos": [16],
        "q_head load sin": [16],
        "q_head load x": [4] * 4,
        "q_head store x": [4] * 4,
    },
}


# The fp8 type, and devices without it


@pytest.mark.parametrize("profile", SHIPPED)
def test_sm_80_takes_the_integer_encoder_alone(profile: str, record_property: Callable[[str, object], None]) -> None:
    for config in configs(profile):
        recorded = launch(profile, config, make(Case(17, 64)))
        if vendors.load(profile).lowering["e4m3_encode"] == "cast":
            with pytest.raises(CompilationError) as refused:
                compiled(recorded, "sm_80")
            assert "type fp8e4nv not supported in this architecture" in "".join(causes(refused.value))
            continue
        binary = compiled(recorded, "sm_80")
        record_property("row", row(binary, f"{profile:<12} {name_of(config):<7} exact ", "bfloat16"))
        assert binary.code.startswith(b"\x7fELF")
        assert binary.resources["spilled"] == 0
        assert binary.shared <= 166912


def causes(error: BaseException | None) -> Iterator[str]:
    while error:
        yield str(error)
        error = error.__cause__


@pytest.mark.parametrize("profile", SHIPPED)
def test_only_the_cast_converts_to_fp8(profile: str) -> None:
    text = compiled(launch(profile, None, make(Case(17, 64))), "sm_90").text
    assert ("cvt.rn.satfinite.e4m3x2" in text) == (vendors.load(profile).lowering["e4m3_encode"] == "cast")


# Sizes that are part of the text


@pytest.mark.parametrize(("heads", "block_size"), [(8, 16), (128, 48), (2, 64), (64, 256)])
def test_other_sizes_are_as_wide(heads: int, block_size: int) -> None:
    binary = compiled(launch("nvidia-h200", None, make(Case(4, heads, block_size))), "sm_90")
    rows = {name: sizes for name, sizes in main_widths(binary).items() if name.split()[2] in ("x", "codes")}
    assert {size for sizes in rows.values() for size in sizes} == {16}
    assert binary.resources["spilled"] == 0


# The helpers see what they are asked to find


def test_an_unaligned_q_is_seen() -> None:
    inputs = make(Case(17, 64))
    q = torch.empty(inputs.q.numel() + 1, dtype=inputs.q.dtype)[1:].view_as(inputs.q)
    widths = compiled(launch("nvidia-h200", None, inputs, q=q), "sm_90").widths
    assert set(widths["q_head load x"]) == set(widths["q_head store x"]) == {2}
    assert set(widths["kv_row load x"]) == {16}


def test_a_block_stride_of_no_16_bytes_is_seen() -> None:
    """Right all the same: what is known of an address is what the compiler may rely on."""
    inputs = make(Case(17, 64, block_stride=64 * 584 + 2))
    widths = compiled(launch("nvidia-h200", None, inputs), "sm_90").widths
    assert max(widths["kv_row store codes"]) < 16 and max(widths["kv_row store tail"]) < 16
    assert set(widths["kv_row load x"]) == set(widths["q_head store x"]) == {16}


@pytest.mark.parametrize(("target", "option"), [("sm_90", {"maxnreg": 40}), ("gfx942", {"tokens": 64})])
def test_spills_are_seen(target: str, option: dict[str, int]) -> None:
    """With fewer registers than the kernel wants, or a tile that wants more than there are."""
    recorded = launch("hygon-bw1000", next(configs("hygon-bw1000")), make(Case(1, 64)))
    starved = replace(recorded, keywords={**recorded.keywords, **option, "num_warps": 1})
    assert compiled(starved, target).resources["spilled"] > 0
