"""How a Triton type is stored in numpy, and every cast between such types."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

_STORAGE = {
    name: np.dtype(storage)
    for name, storage in {
        "int1": "bool",
        **{f"{sign}int{bits}": f"int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")},
        "fp16": "float16",
        "fp32": "float32",
        "fp64": "float64",
        "bf16": "uint16",
        **dict.fromkeys(("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16"), "uint8"),
    }.items()
}
_POINTER = np.dtype("uint64")
_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
NARROW = frozenset(("bf16", *_FP8))  # types that numpy lacks: held as bits, computed in float32


def storage_type(ty: Any) -> np.dtype:
    """The numpy type that holds a scalar of `ty`; integers are signed, whatever `ty` says."""
    if ty.is_ptr():
        return _POINTER
    try:
        return _STORAGE[ty.name]
    except KeyError:
        raise NotImplementedError(f"{ty} is not interpreted") from None


def as_unsigned(data: np.ndarray) -> np.ndarray:
    return data.view(f"u{data.dtype.itemsize}") if data.dtype.kind == "i" else data


def as_signed(data: np.ndarray) -> np.ndarray:
    return data.view(f"i{data.dtype.itemsize}") if data.dtype.kind == "u" else data


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(_FP8[name]).float().numpy()


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """The bits of a bf16 or fp8 type as float32, exactly."""
    if name == "bf16":
        high = data.astype(np.uint32)
        high <<= 16
        return high.view(np.float32)
    return _fp8_values(name)[data]


def encode(data: np.ndarray, name: str) -> np.ndarray:
    """float32 rounded to nearest even to the bits of a bf16 or fp8 type; fp8 saturates."""
    if name == "bf16":
        bits = data.view(np.uint32)
        nearest = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        nan = np.isnan(data)
        return np.where(nan, np.uint16(0x7FFF), nearest) if nan.any() else nearest
    values = torch.from_numpy(np.array(data, dtype=np.float32))
    limit = torch.finfo(_FP8[name]).max
    return values.clamp_(-limit, limit).to(_FP8[name]).view(torch.uint8).numpy()


def wide(data: np.ndarray, ty: Any) -> np.ndarray:
    """Floats of `ty` in float32 at least."""
    if ty.name in NARROW:
        return decode(data, ty.name)
    return data.astype(np.float32) if data.dtype == np.float16 else data


def rounded(data: np.ndarray, ty: Any) -> np.ndarray:
    """Numbers of any width in the storage of `ty`, a floating type."""
    if ty.name in NARROW:
        return encode(data.astype(np.float32, copy=False), ty.name)
    return data.astype(storage_type(ty), copy=False)


def cast(data: np.ndarray, source: Any, target: Any, toward_zero: bool = False) -> np.ndarray:
    """Between floating types, to nearest even or toward zero."""
    exact = wide(data, source)
    out = rounded(exact, target)
    if toward_zero:
        bits = out.view(f"u{out.dtype.itemsize}")
        beyond = np.abs(wide(out, target)) > np.abs(exact)
        out = (bits - beyond.astype(bits.dtype)).view(out.dtype)
    return out


def to_integer(data: np.ndarray, target: np.dtype, signed: bool) -> np.ndarray:
    # As `cvt.rzi`: NaN is 0 and the rest saturates; an 8-bit result is the low half of a 16-bit one.
    info = np.iinfo(f"{'i' if signed else 'u'}{max(2, target.itemsize)}")
    exact = np.where(np.isnan(data), 0.0, data.astype(np.float64))
    over, under = exact >= float(info.max), exact <= float(info.min)
    inside = np.where(over | under, 0.0, exact).astype(info.dtype)
    return as_signed(np.where(over, info.max, np.where(under, info.min, inside)).astype(info.dtype)).astype(target)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """float32 x * y + z as a float64 that rounds to what the exact value rounds to: where it is inexact, it is odd."""
    product = x.astype(np.float64) * y
    addend = z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(even, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)


def poison_value(ty: Any) -> Any:
    """NaN or the largest integer, as `ty` stores it."""
    if ty.name in NARROW:
        return {"bf16": 0x7FFF, "fp8e4nv": 0x7F, "fp8e5": 0x7F}.get(ty.name, 0x80)
    if ty.is_floating():
        return np.nan
    storage = storage_type(ty)
    return True if storage == np.bool_ else np.iinfo(storage).max
