"""The comparison rules themselves: what they round to, what they let pass, what they say."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from compare import check_bytes, check_close, check_rounding, fingerprint, round_once, ulps_apart

HALVES = [torch.bfloat16, torch.float16]


def every(dtype: torch.dtype) -> torch.Tensor:
    """Every finite value of a 16-bit dtype, ascending, float64; one zero."""
    values = torch.arange(1 << 16).to(torch.int16).view(dtype).double()
    return values[values.isfinite()].unique()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_value_rounds_to_itself_and_midpoints_to_even(dtype: torch.dtype) -> None:
    values = every(dtype)
    assert torch.equal(round_once(values, dtype).double(), values)
    middle = (values[:-1] + values[1:]) / 2
    rounded = round_once(middle, dtype)
    assert bool((rounded.view(torch.int16) % 2 == 0).all())
    below, above = middle.nextafter(values[:-1]), middle.nextafter(values[1:])
    assert torch.equal(round_once(below, dtype).double(), values[:-1])
    assert torch.equal(round_once(above, dtype).double(), values[1:])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_past_the_largest_value(dtype: torch.dtype) -> None:
    largest = every(dtype)[-1]
    step = largest - every(dtype)[-2]
    assert round_once((largest + step / 2).nextafter(largest), dtype) == largest
    assert round_once(largest + step / 2, dtype) == math.inf
    assert round_once(torch.tensor(-math.inf, dtype=torch.float64), dtype) == -math.inf
    assert bool(round_once(torch.tensor(math.nan, dtype=torch.float64), dtype).isnan())


def test_torch_rounds_float64_twice() -> None:
    """Why `round_once` exists: 1 + 2^-8 + 2^-40 lies above the middle of two bfloat16."""
    value = torch.tensor(float(1 + Fraction(1, 2**8) + Fraction(1, 2**40)), dtype=torch.float64)
    assert value.to(torch.bfloat16) == 1.0
    assert round_once(value, torch.bfloat16) == 1.0078125


def test_steps_between_values() -> None:
    a = torch.tensor([0.0, -0.0, 1.0, -(2.0**-133), math.inf], dtype=torch.bfloat16)
    b = torch.tensor([-0.0, 2.0**-133, 0.99609375, 2.0**-133, 3.3895e38], dtype=torch.bfloat16)
    assert ulps_apart(a, b).tolist() == [0, 1, 1, 2, 1]


def check(actual: torch.Tensor, exact: torch.Tensor, ulps: int = 2, floor: float = 0.0) -> int:
    axes, floors = "token lane", torch.full((1,), floor, dtype=torch.float64)
    return check_close("q", actual, exact, ulps=ulps, floor=floors, axes=axes)


def test_close_counts_what_is_not_correctly_rounded() -> None:
    exact = torch.tensor([[1.0, 2.0, math.nan, -math.inf]], dtype=torch.float64)
    assert check(exact.bfloat16(), exact) == 0
    assert check(torch.tensor([[1.0, 2.015625, math.nan, -math.inf]]).bfloat16(), exact) == 1


@pytest.mark.parametrize("wrong", [1.0234375, math.nan, math.inf, -1.0])
def test_close_names_the_worst_element(wrong: float) -> None:
    exact = torch.ones((3, 4), dtype=torch.float64)
    actual = exact.bfloat16()
    actual[2, 1] = wrong
    actual[0, 3] = 1.0234375  # 3 ulp; the same or less wrong
    place = "token=0, lane=3" if wrong == 1.0234375 else "token=2, lane=1"
    with pytest.raises(AssertionError, match=rf"^q\[{place}\]: got .*; 2 of 12 elements beyond"):
        check(actual, exact)


def test_close_text() -> None:
    exact = torch.full((1, 2), 1.001, dtype=torch.float64)
    actual = torch.tensor([[1.0, 1.0234375]]).bfloat16()
    with pytest.raises(AssertionError) as error:
        check_close(
            "q",
            actual,
            exact,
            ulps=2,
            floor=torch.zeros(1, dtype=torch.float64),
            axes="token lane",
            first_axis=torch.tensor([40]),
        )
    assert str(error.value) == (
        "q[token=40, lane=1]: got 1.0234375, expected 1.0 (exact 1.001), 3 ulp of bfloat16 apart; "
        "1 of 2 elements beyond max(2 ulp, floor), here 0.015625"
    )


def test_close_floor_allows_cancellation() -> None:
    exact = torch.tensor([[1e-9, 1.0]], dtype=torch.float64)
    actual = torch.tensor([[3e-7, 1.0]]).bfloat16()
    with pytest.raises(AssertionError, match="lane=0"):
        check(actual, exact)
    assert check(actual, exact, floor=2.0**-20) == 1


def test_close_refuses_a_finite_value_for_an_infinite_one() -> None:
    largest = torch.tensor([[65504.0]], dtype=torch.float16)
    with pytest.raises(AssertionError):
        check(largest, torch.tensor([[math.inf]], dtype=torch.float64), floor=1e9)
    with pytest.raises(AssertionError):
        check(largest, torch.tensor([[70000.0]], dtype=torch.float64))
    assert check(largest * 2, torch.tensor([[70000.0]], dtype=torch.float64)) == 0


def test_rounding_limit() -> None:
    check_rounding("q", 2, 10)
    check_rounding("q", 5, 10_000)
    with pytest.raises(AssertionError) as error:
        check_rounding("q", 6, 10_000)
    assert str(error.value) == (
        "q: 6 of 10000 elements are not the correctly rounded value, at most 5 may be"
    )


def test_bytes_text() -> None:
    expected = torch.full((8,), 0xAB, dtype=torch.uint8)
    actual = expected.clone()
    check_bytes("k_cache", actual, expected, "byte {}".format)
    actual[3], actual[6] = 0, 1
    with pytest.raises(AssertionError) as error:
        check_bytes("k_cache", actual, expected, "byte {}".format)
    assert str(error.value) == "k_cache: byte 3: got 0x00, expected 0xAB; 2 of 8 bytes differ"


@pytest.mark.parametrize("size", [1, 7, 8, 4096, (1 << 24) + 24])
def test_fingerprint_sees_any_bit(size: int) -> None:
    data = torch.arange(size).to(torch.uint8)
    first = fingerprint(data)
    assert fingerprint(data.clone()) == first
    for at in {0, size // 2, size - 1}:
        data[at] ^= 0x80
        assert fingerprint(data) != first
        data[at] ^= 0x80
    assert fingerprint(data) == first


def test_fingerprint_sees_an_exchange_and_nan_bits() -> None:
    assert fingerprint(torch.tensor([1, 2])) != fingerprint(torch.tensor([2, 1]))
    nan = torch.tensor([0x7FC0, 0x7FC1, 0x7FC0, 0x7FC0], dtype=torch.int16)
    assert fingerprint(nan.view(torch.bfloat16)) == fingerprint(nan.clone().view(torch.bfloat16))
    assert fingerprint(nan.view(torch.bfloat16)) != fingerprint(nan.flip(0).view(torch.bfloat16))
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0, dtype=torch.int64))
