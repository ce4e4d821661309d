"""The ways in which generated code may differ between two devices, and what a device can do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Axis(NamedTuple):
    """One choice a generator makes for a device: its values, the default and why it is that."""

    values: tuple[str, ...]
    default: str
    why: str


# A profile that does not state an axis gets its default, the form that works in most places.
LOWERING: Mapping[str, Axis] = MappingProxyType(
    {
        "grid": Axis(
            ("direct", "chunked", "persistent"),
            "chunked",
            "some launchers refuse more than 65,535 programs",
        ),
        "e4m3_encode": Axis(
            ("cast", "int_rne"),
            "int_rne",
            "int32 arithmetic gives the same bytes and compiles everywhere",
        ),
        "e4m3_decode": Axis(
            ("cast", "bits_to_fp16"),
            "bits_to_fp16",
            "some compilers reject the type or do not know it",
        ),
        "e4m3_format": Axis(
            ("fn", "fnuz"), "fn", "only gfx942 stores the other: no -0, a bias of 8, 224 at most"
        ),
        "nan_max": Axis(
            ("ignored", "select"), "select", "which operand tl.max yields for a NaN is the compiler's affair"
        ),
        "reciprocal": Axis(
            ("refined", "div_rn"), "refined", "some compilers lack div_rn; their division may be an ulp off"
        ),
        "pair": Axis(
            ("reshape_split_join", "pair_address"),
            "pair_address",
            "some compilers cannot reshape [64] to [32, 2]",
        ),
        "ptr_recast": Axis(
            ("in_kernel", "wrapper_view"),
            "wrapper_view",
            "some compilers cannot cast a pointer's element type",
        ),
        "tail": Axis(("mask", "exact"), "mask", "right for any size; exact tiles limit the sizes"),
        "subtile": Axis(
            ("none", "inner_loop"), "none", "only tiles above scratch_bytes need the loop"
        ),
        "dot": Axis(
            ("native", "pad16", "upcast_fp16", "none"),
            "pad16",
            "some matrix units fail on fewer than 16 rows, or silently leave them to FMA",
        ),
        "index_width": Axis(("i32", "i64"), "i64", "right for any size; i32 needs a proven bound"),
        "branch": Axis(
            ("positive_if", "separate"), "positive_if", "some compilers abort on an early return"
        ),
    }
)

CAPABILITIES = (
    "cast.e4m3",
    "dot.e4m3",
    "dot.fp64",
    "dtype.bf16",
    "dtype.fp64",
    "dtype.i64",
    "op.div_rn",
    "op.gather",
    "op.inline_asm",
    "op.load_options",
    "op.min",
    "op.pow",
    "op.reshape_pair",
    "op.sort",
)
STATES = ("native", "emulated", "unsupported")  # a capability that a profile lacks is unknown
