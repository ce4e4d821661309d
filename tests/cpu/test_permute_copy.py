"""permute_copy, the copy it is made of, and prepare_weights: bits in the right places, and few of the kernels."""

from __future__ import annotations

import itertools
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from compare import fingerprint
from compiled import launched
from moe import guarded

import tilewright
from tilewright import interpret, ops
from tilewright.errors import ContractError, DeviceError, DtypeError, ShapeError
from tilewright.launch import OPERATORS
from tilewright.ops.permute_copy import Axis, PreparedWeights, _arranged, _merged

PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return torch.view_as_real(flat).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)


def random_bits(*shape: int, dtype: torch.dtype = torch.int16, seed: int = 0) -> torch.Tensor:
    """Every bit at random: NaN of every payload too."""
    size = dtype.itemsize
    made = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=made).bool()
    count = 1
    for extent in shape:
        count *= extent
    data = torch.randint(256, (count * size,), generator=made, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def check(x: torch.Tensor, dims: tuple[int, ...], **options: Any) -> torch.Tensor:
    before = fingerprint(bits(x))
    with guarded():
        out = ops.permute_copy(x, dims, **options)
    assert fingerprint(bits(x)) == before
    wanted = x.permute(dims)
    assert (out.shape, out.dtype, out.is_contiguous()) == (wanted.shape, wanted.dtype, True)
    assert torch.equal(bits(out), bits(wanted))
    return out


@pytest.mark.parametrize("dims", list(itertools.permutations(range(4))), ids=str)
def test_every_order_of_four_axes(dims: tuple[int, ...]) -> None:
    check(random_bits(3, 5, 4, 6), dims)
    check(random_bits(6, 5, 4, 6)[::2, :, 1:3, ::3], dims)


@pytest.mark.parametrize("dims", [(4, 3, 2, 1, 0), (2, 0, 4, 1, 3), (0, 2, 1, 4, 3), (1, 3, 0, 2, 4)], ids=str)
def test_five_axes(dims: tuple[int, ...]) -> None:
    check(random_bits(2, 3, 4, 2, 5), dims)


def test_more_axes_that_merge() -> None:
    check(random_bits(2, 3, 2, 2, 3, 2, 2), (4, 5, 6, 0, 1, 2, 3))
    check(random_bits(1, 2, 1, 3, 1, 4, 1), (5, 4, 3, 2, 1, 0, 6))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16,
        torch.int16, torch.float32, torch.int32, torch.float64, torch.int64, torch.complex64, torch.complex128,
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype(dtype: torch.dtype) -> None:
    x = random_bits(3, 33, 18, dtype=dtype)
    for dims in ((0, 2, 1), (1, 0, 2), (0, 1, 2)):
        check(x, dims)


def test_views_that_are_conjugate_or_negative() -> None:
    x = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).view(2, 3)
    assert torch.equal(ops.permute_copy(x.conj(), (1, 0)), x.conj().T.resolve_conj())
    assert torch.equal(ops.permute_copy(x.conj().imag, (1, 0)), -x.imag.T)


def test_scalars_empty_tensors_and_repeated_rows() -> None:
    check(random_bits(), ())
    for shape in ((0,), (3, 0, 2)):
        with interpret.counting() as counts:
            check(random_bits(*shape), tuple(range(len(shape)))[::-1])
        assert counts.programs == 0
    check(random_bits(1, 7).expand(5, 7), (1, 0))
    check(random_bits(40)[None, :].expand(3, 40), (0, 1))


def test_dims_count_from_the_end() -> None:
    x = random_bits(2, 3, 4)
    assert torch.equal(ops.permute_copy(x, [-1, 0, -2]), x.permute(2, 0, 1))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_rule_and_kernel_of_every_profile(profile: str) -> None:
    """Tiles that divide, one too few and one too many along each axis, of 1, 2 and 4 bytes, turned and not."""
    seen, kernels = set(), set()
    for dtype, (rows, columns) in itertools.product(
        (torch.uint8, torch.int16, torch.int32), ((64, 64), (63, 64), (64, 65), (129, 128), (2, 1024), (3, 1030))
    ):
        x = random_bits(2, columns, rows, dtype=dtype)
        for source in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
            check(source, (0, 2, 1), profile=profile)
            last = tilewright.last_launch()
            assert last.profile == profile
            exact = rows % last.config["rows"] == 0 and columns % last.config["columns"] == 0
            if source is x:
                assert last.kernel == ("strided_copy_kernel" if exact else "strided_copy_kernel_masked")
            seen.add(last.rule)
            kernels.add(last.kernel)
    x = random_bits(40, 8, 128)[:, ::2]  # rows apart: they cannot merge into one
    check(x, (1, 0, 2), profile=profile)
    seen.add(tilewright.last_launch().rule)
    assert seen == set(range(len(OPERATORS["strided_copy"].kernel.rules(profile).rules)))
    assert kernels == {"strided_copy_kernel", "strided_copy_kernel_masked"}


# Merging


def test_merged_axes() -> None:
    def axes(shape: tuple[int, ...], dims: tuple[int, ...]) -> list[Axis]:
        source = torch.empty(shape).permute(dims)
        return _merged(source.shape, source.stride(), torch.empty(source.shape).stride())

    assert axes((2, 3, 4), (0, 1, 2)) == [Axis(24, 1, 1)]
    assert axes((2, 3, 4), (0, 2, 1)) == [Axis(2, 12, 12), Axis(4, 1, 3), Axis(3, 4, 1)]
    assert axes((2, 3, 4, 5), (2, 3, 0, 1)) == [Axis(20, 1, 6), Axis(6, 20, 1)]
    assert axes((2, 1, 4), (2, 1, 0)) == [Axis(4, 1, 2), Axis(2, 4, 1)]
    assert axes((1, 1), (1, 0)) == []


def test_the_last_two_axes_are_those_that_are_contiguous() -> None:
    one = Axis(1, 1, 1)
    assert _arranged([]) == [one] * 5
    assert _arranged([Axis(9, 1, 1)]) == [one] * 4 + [Axis(9, 1, 1)]
    straight = [Axis(4, 60, 12), Axis(3, 20, 48), Axis(12, 1, 1)]
    assert _arranged(straight) == [one, one, *straight]
    turned = [Axis(20, 1, 60), Axis(5, 400, 12), Axis(12, 20, 1)]
    assert _arranged(turned) == [one, one, turned[1], turned[0], turned[2]]


# Past 2^31 elements


def unbacked(size: int) -> torch.Tensor:
    """Bytes of address space; a page takes memory once it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


@pytest.mark.parametrize("strides", [(2**32, 300, 1), (300, 2**32, 1), (300, 1, 2**26), (1, 300, 2**27)], ids=str)
def test_sources_far_apart(strides: tuple[int, ...]) -> None:
    shape = (3, 3, 40) if max(strides) > 2**30 else (3, 40, 33)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    x = unbacked(extent).as_strided(shape, strides)
    assert extent > 2**31
    x.copy_(random_bits(*shape, dtype=torch.uint8))
    with guarded():
        assert torch.equal(ops.permute_copy(x, (0, 2, 1)), x.transpose(1, 2).contiguous())


def test_the_last_program_of_more_than_2_31_elements() -> None:
    """[E, N, K] to [E, K, N] of 2^32 elements, in its last program alone."""
    experts, n, k = 1024, 2048, 2048
    x, out = (unbacked(experts * n * k).view(experts, n, k) for _ in range(2))
    x[-1, -32:, -32:] = random_bits(32, 32, dtype=torch.uint8)
    views = x.transpose(1, 2)[None, None], out[None, None]
    module = OPERATORS["strided_copy"].module("generic", True)
    launches = launched(module, lambda: module.strided_copy(*views))
    assert len(launches) == -(-experts * (n // 32) * (k // 32) // 65535)
    last = launches[-1]
    *arguments, first = last.arguments
    last = replace(last, grid=(1,), arguments=(*arguments, first + last.grid[0] - 1))
    with interpret.counting() as counts:
        last.kernel[last.grid](*last.arguments, **last.keywords)
    assert (counts.programs, counts.bytes_stored) == (1, 1024)
    assert torch.equal(out[-1, -32:, -32:], x[-1, -32:, -32:].T) and bool(x[-1, -32:, -32:].any())


# Weights


def test_prepared_weights() -> None:
    w1 = random_bits(3, 20, 16, dtype=torch.bfloat16)
    w2 = random_bits(3, 16, 12, dtype=torch.bfloat16)[:, :, :10]  # padded rows
    with guarded():
        prepared = ops.prepare_weights(w1, w2)
    assert isinstance(prepared, PreparedWeights)
    for ours, given in zip(prepared, (w1, w2), strict=True):
        assert torch.equal(bits(ours), bits(given)) and ours.shape == given.shape
        experts, n, k = given.shape
        assert ours.stride() == (n * k, 1, n)
    assert (prepared.w1, prepared.w2) == tuple(prepared)
    again = ops.prepare_weights(prepared.w1, prepared.w2)  # of weights that are in the layout already
    assert torch.equal(bits(again.w1), bits(w1)) and again.w1.stride() == prepared.w1.stride()


def test_nothing_is_remembered() -> None:
    """A second call sees what the weights hold then, and the first one's copy stays as it was."""
    w1, w2 = random_bits(2, 8, 4, dtype=torch.float16), random_bits(2, 4, 4, dtype=torch.float16)
    first = ops.prepare_weights(w1, w2)
    before = bits(first.w1).clone()
    w1.zero_()
    second = ops.prepare_weights(w1, w2)
    assert not bool(second.w1.any()) and torch.equal(bits(first.w1), before)
    assert first.w1.data_ptr() != second.w1.data_ptr()


# Errors


def zeros(*shape: int, dtype: torch.dtype = torch.float16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


SEVEN = "2 (1 apart), 2 (2 apart), 2 (4 apart), 2 (8 apart), 2 (16 apart), 2 (32 apart), 2 (64 apart)"
PERMUTE = {
    "no tensor": ([1.0], (0,), DtypeError, "x is of type list, a tensor is needed"),
    "dims no sequence": (zeros(2, 3), 1, DtypeError, "dims is 1, a sequence of ints is needed"),
    "dims no ints": (zeros(2, 3), (0, True), DtypeError, "dims is (0, True), a sequence of ints is needed"),
    "an axis twice": (zeros(2, 3), (0, 0), ShapeError, "dims (0, 0) is no order of the 2 axes of x [2, 3]"),
    "an axis left out": (zeros(2, 3), (1,), ShapeError, "dims (1,) is no order of the 2 axes of x [2, 3]"),
    "past the axes": (zeros(2, 3), (0, 2), ShapeError, "dims (0, 2) is no order of the 2 axes of x [2, 3]"),
    "far below 0": (zeros(2, 3), (1, -4), ShapeError, "dims (1, -4) is no order of the 2 axes of x [2, 3]"),
    "too many axes": (
        zeros(2, 2, 2, 2, 2, 2, 2), (6, 5, 4, 3, 2, 1, 0), ShapeError,
        "dims (6, 5, 4, 3, 2, 1, 0) of x [2, 2, 2, 2, 2, 2, 2] leave 7 axes that do not lie side by side, "
        f"at most 5 are supported: {SEVEN}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PERMUTE)
def test_permute_copy_refuses(name: str) -> None:
    x, dims, kind, text = PERMUTE[name]
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        ops.permute_copy(x, dims)
    assert (type(caught.value), str(caught.value)) == (kind, f"permute_copy: {text}")
    assert counts.programs == 0


WEIGHTS = {
    "no tensors": (
        None, 3, DtypeError, "w1 is of type NoneType, a tensor is needed\nw2 is of type int, a tensor is needed",
    ),
    "ranks": (
        zeros(6, 4), zeros(2, 4, 3, 1), ShapeError,
        "w1 has rank 2, 3 is needed: [experts, 2 * inner, hidden]\n"
        "w2 has rank 4, 3 is needed: [experts, hidden, inner]",
    ),
    "sizes": (
        zeros(2, 6, 4), zeros(3, 5, 2), ShapeError,
        "w2 has experts=3, w1 has 2\nw2 has hidden=5, w1 has 4\nw2 has 2 * inner=4, w1 has 6",
    ),
    "dtypes": (
        zeros(2, 6, 4), zeros(2, 4, 3, dtype=torch.int8), DtypeError,
        "w2 is int8, a floating dtype is needed\nw2 is int8, w1 is float16: they must agree",
    ),
    "devices": (zeros(2, 6, 4), zeros(2, 4, 3, device="meta"), DeviceError, "w2 is on meta, w1 on cpu"),
    "everything": (
        zeros(2, 6, 4, dtype=torch.int16), zeros(2, 3, 3), ContractError,
        "w1 is int16, a floating dtype is needed\nw2 has hidden=3, w1 has 4\n"
        "w2 is float16, w1 is int16: they must agree",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_prepare_weights_refuses(name: str) -> None:
    w1, w2, kind, text = WEIGHTS[name]
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        ops.prepare_weights(w1, w2)
    assert (type(caught.value), str(caught.value)) == (kind, f"prepare_weights: {text}")
    assert counts.programs == 0
