"""Comparison rules of the tests: exact bytes, or units in the last place around the exact result.

The oracle is a float64 result on the same rounded inputs. `round_once` takes it to the output's
dtype in one rounding; torch's own float64 -> bfloat16 or float16 goes through float32 and so
rounds twice. Everything is vectorised and runs on any device and on slices of large tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.ops.rounding import round_once, spacing

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
WORDS = 1 << 21  # 8-byte words that `fingerprint` takes at a time


def ulps_apart(a: Tensor, b: Tensor) -> Tensor:
    """How many steps between neighbours lie from `a` to `b`; -0.0 and 0.0 are none apart."""

    def ordinal(x: Tensor) -> Tensor:
        bits = x.view(BITS[x.dtype]).long()
        return torch.where(bits < 0, -(bits & torch.iinfo(BITS[x.dtype]).max), bits)

    return (ordinal(a) - ordinal(b)).abs()


def check_close(
    name: str,
    actual: Tensor,
    exact: Tensor,
    *,
    ulps: int,
    floor: Tensor,
    axes: str,
    first_axis: Tensor | None = None,
) -> int:
    """Each element is the correctly rounded value, or within max(ulps units, floor) of `exact`.

    Args:
        name: What is compared, for the message.
        actual: The operator's values, in their dtype.
        exact: float64, same shape; where it is NaN, any NaN is right.
        ulps: Units in the last place of `actual`'s dtype, in the exact value's binade.
        floor: float64, broadcastable: an error allowed whatever the unit is. NaN allows none.
        axes: Names of the axes, for the message.
        first_axis: What to call the indices of the first axis, where they are a selection.

    Returns:
        How many elements are not the correctly rounded value.

    Raises:
        AssertionError: Names the worst element by its axes, both values and their distance.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}")
    rounded = round_once(exact, actual.dtype)
    right = (actual == rounded) | (actual.isnan() & rounded.isnan())
    error = (actual.double() - exact).abs_()
    allowed = torch.fmax(ulps * spacing(exact, actual.dtype), floor)
    wrong = ~(right | (error <= allowed))
    if bool(wrong.any()):
        excess = torch.where(wrong, (error / allowed).nan_to_num_(nan=torch.inf), -1.0)
        at = torch.unravel_index(excess.argmax(), excess.shape)
        place = [int(index) for index in at]
        if first_axis is not None:
            place[0] = int(first_axis[place[0]])
        where = ", ".join(f"{axis}={i}" for axis, i in zip(axes.split(), place, strict=True))
        got, want = actual[at], rounded[at]
        raise AssertionError(
            f"{name}[{where}]: got {float(got)!r}, expected {float(want)!r} "
            f"(exact {float(exact[at])!r}), {int(ulps_apart(got, want))} ulp of "
            f"{str(actual.dtype).removeprefix('torch.')} apart; {int(wrong.sum())} of "
            f"{wrong.numel()} elements beyond max({ulps} ulp, floor), here {float(allowed[at])!r}"
        )
    return int((~right).sum())


def check_rounding(name: str, off: int, elements: int, share: float = 5e-4, least: int = 2) -> None:
    """At most max(`least`, `share` of the elements) are not the correctly rounded value."""
    most = max(least, int(share * elements))
    if off > most:
        raise AssertionError(
            f"{name}: {off} of {elements} elements are not the correctly rounded value, "
            f"at most {most} may be"
        )


def check_bytes(
    name: str, actual: Tensor, expected: Tensor, describe: Callable[[int], str]
) -> None:
    """Two flat uint8 tensors are equal; `describe` names the place of an offset."""
    parts = (t.split(1 << 27) for t in (actual, expected))  # torch.equal takes as much memory as it compares
    if actual.numel() == expected.numel() and all(torch.equal(a, e) for a, e in zip(*parts, strict=True)):
        return
    wrong = actual != expected
    at = int(wrong.to(torch.uint8).argmax())
    raise AssertionError(
        f"{name}: {describe(at)}: got 0x{int(actual[at]):02X}, "
        f"expected 0x{int(expected[at]):02X}; {int(wrong.sum())} of {wrong.numel()} bytes differ"
    )


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit number of a tensor's bits; a change of any one 8-byte word changes it."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # of one element or none too, which `contiguous` leaves as it is
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8:  # `pad` copies
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    words = flat.view(torch.int64)
    # Odd weights, a different one for each word of a chunk, modulo 2^64.
    weights = torch.arange(min(WORDS, words.numel()), device=tensor.device)
    weights = weights * -0x61C8864680B583EA + 1
    sums = [(chunk * weights[: chunk.numel()]).sum() for chunk in words.split(WORDS)]
    total = 0
    for part in torch.stack(sums).tolist():
        total = (total * 0x5DEECE66D + part) % 2**64
    return total
