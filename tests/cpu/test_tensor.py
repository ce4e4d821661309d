"""Tensors and cuts: every misuse has its message, a tensor can be used twice, axes keep their names."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest
from arrangements_oracle import grid, read

from tilewright.arrange import cut
from tilewright.errors import ArrangementError, TilewrightError
from tilewright.expr import Size, const, simplify_mask
from tilewright.tensor import Tensor

n = Size("n")  # may be 0
m = Size("m", low=1, high=64)
DATA = np.arange(1, 25)  # 0 is the fill


def x() -> Tensor:
    return Tensor("x", "rows lanes", (6, 4))


def y() -> Tensor:
    return Tensor("y", "rows lanes", (n, 4))


def elements(tensor: Tensor, **values: int) -> np.ndarray:
    """What an arranged tensor over DATA reads."""
    return read(tensor, {tensor.source.memory: DATA}, values)


def conditions(tensor: Tensor) -> list[str]:
    """Text of the mask that is left."""
    levels, _, _ = grid(tensor, dict.fromkeys(("n", "m", "num_tokens", "num_heads", "heads"), 1))
    return [str(e) for e in simplify_mask(tensor.locate(*levels)[1])]


# -- misuse
FOREIGN = "x: the new tile is not made from this tensor's own .dtype"
MISUSES: list[tuple[Callable[[], Any], str]] = [
    # a new tensor
    (lambda: Tensor("x", "a b", (1,)), "x: 2 axes are named, 1 sizes are given"),
    (lambda: Tensor("x", "a a", (1, 2)), "x: an axis is named twice in 'a a'"),
    (lambda: Tensor("x", "a b", (1, 2), strides=(1,)), "x: 2 axes are named, 1 strides are given"),
    (lambda: Tensor("x", "a b", (1, -2)), "x: axis b has size -2"),
    (lambda: x().view("v", "r", (3, 3), (3, 1), "uint8"), "v: 1 axes are named, 2 sizes are given"),
    # tile
    (lambda: x().tile((1,)), "x.tile: 1 tile sizes for the 2 axes [rows=6, lanes=4]"),
    (lambda: x().tile((1, 2, 3)), "x.tile: 3 tile sizes for the 2 axes [rows=6, lanes=4]"),
    (lambda: x().tile((1, 2), (1,)), "x.tile: 1 strides for the 2 axes [rows=6, lanes=4]"),
    (lambda: x().tile((1, 2), None, (1, 1, 1)), "x.tile: 3 dilations for the 2 axes [rows=6, lanes=4]"),
    (lambda: x().tile((0, 1)), "x.tile: tile size 0 along axis rows=6 is not known to be >= 1"),
    (lambda: x().tile((1, -2)), "x.tile: tile size -2 along axis lanes=4 is not known to be >= 1"),
    (lambda: x().tile((n, 1)), "x.tile: tile size n along axis rows=6 is not known to be >= 1"),
    (lambda: x().tile((2, 2), (0, 1)), "x.tile: tile stride 0 along axis rows=6 is not known to be >= 1"),
    (lambda: x().tile((2, 2), (-2, 1)), "x.tile: tile stride -2 along axis rows=6 is not known to be >= 1"),
    (lambda: x().tile((2, 2), None, (1, 0)), "x.tile: dilation 0 along axis lanes=4 is not known to be >= 1"),
    (lambda: x().tile((9, 1), (1, 1)), "x.tile: no tile of 9 fits axis rows=6"),
    (lambda: x().tile((7, 1), floor_mode=True), "x.tile: no tile of 7 fits axis rows=6"),
    # expand
    (lambda: x().expand((6, 8)), "x.expand: axis lanes=4 cannot become 8, only 1 can"),
    (lambda: x().expand((1, 4)), "x.expand: axis rows=6 cannot become 1, only 1 can"),
    (lambda: y().expand((5, -1)), "y.expand: axis rows=n cannot become 5, only 1 can"),
    (lambda: x().expand((6,)), "x.expand: 1 sizes for the 2 axes [rows=6, lanes=4]"),
    (lambda: x()[0].unsqueeze(0).expand((0, -1)), "x.expand: axis 1 cannot become 0"),
    (lambda: x()[0].unsqueeze(0).expand((-2, -1)), "x.expand: axis 1 cannot become -2"),
    # unsqueeze, squeeze, permute
    (lambda: x().unsqueeze(3), "x.unsqueeze: axis 3 of 3"),
    (lambda: x().unsqueeze(0, "rows"), "x.unsqueeze: axis rows would be there twice in [rows=1, rows=6, lanes=4]"),
    (lambda: x().squeeze(0), "x.squeeze: axis rows=6 is not of size 1"),
    (lambda: y().squeeze("rows"), "y.squeeze: axis rows=n is not of size 1"),
    (lambda: x().squeeze(2), "x.squeeze: axis 2 of 2"),
    (lambda: x().squeeze(-3), "x.squeeze: axis -3 of 2"),
    (lambda: x().squeeze("cols"), "x.squeeze: there is no axis cols, only [rows=6, lanes=4]"),
    (lambda: x().permute((0, 0)), "x.permute: (0, 0) is no order of the axes [rows=6, lanes=4]"),
    (lambda: x().permute((0, -2)), "x.permute: (0, -2) is no order of the axes [rows=6, lanes=4]"),
    (lambda: x().permute((1,)), "x.permute: (1,) is no order of the axes [rows=6, lanes=4]"),
    (lambda: x().permute(("lanes", "cols")), "x.permute: there is no axis cols, only [rows=6, lanes=4]"),
    (lambda: x().permute((0, 2)), "x.permute: axis 2 of 2"),
    # flatten, pad
    (lambda: x().flatten(1, 1), "x.flatten: axes 1 to 1 are none"),
    (lambda: x().flatten(1, -2), "x.flatten: axes 1 to 0 are none"),
    (lambda: x().flatten(2), "x.flatten: axis 2 of 2"),
    (lambda: x().flatten(0, 3), "x.flatten: axis 3 of 2"),
    (lambda: x().pad(((0, 0),)), "x.pad: 1 pairs for the 2 axes [rows=6, lanes=4]"),
    (lambda: x().pad(((-3, -3), (0, 0))), "x.pad: nothing is left of axis rows=6"),
    # slicing
    (lambda: x()[..., ...], "x[...]: an ellipsis may stand once"),
    (lambda: x()[0, 0, 0], "x[...]: 3 indices for 2 axes [rows=6, lanes=4]"),
    (lambda: x()["rows"], "x[...]: 'rows' is no index, slice or None"),
    (lambda: x()[1.0], "x[...]: 1.0 is no index, slice or None"),
    (lambda: x()[6], "x[...]: 6 is past axis rows=6"),
    (lambda: x()[:, -5], "x[...]: -5 is past axis lanes=4"),
    (lambda: x()[::0], "x[...]: a step of 0 along axis rows=6"),
    (lambda: x()[::m], "x[...]: a step of m along axis rows=6"),
    (lambda: x()[3:3], "x[...]: 3:3:1 along axis rows=6 is empty"),
    (lambda: x()[:, 3:1], "x[...]: 3:1:1 along axis lanes=4 is empty"),
    (lambda: x()[1:3:-1], "x[...]: 1:3:-1 along axis rows=6 is empty"),
    (lambda: y()[:0], "y[...]: 0:0:1 along axis rows=n is empty"),
    # names
    (lambda: x().rename(cols="dim"), "x.rename: there is no axis cols, only [rows=6, lanes=4]"),
    (lambda: x().rename(rows="lanes"), "x.rename: axis lanes would be there twice in [lanes=6, lanes=4]"),
    (lambda: x().split("cols", a=2), "x.split: there is no axis cols, only [rows=6, lanes=4]"),
    (lambda: x().split("lanes", pairs=-1, side=3), "x.split: 1 x 3 is not axis lanes=4"),
    (lambda: x().split("lanes", pairs=3, side=2), "x.split: 3 x 2 is not axis lanes=4"),
    (lambda: x().split("lanes", pairs=0, side=-1), "x.split: pairs=0, side=-1 of axis lanes=4"),
    (lambda: x().split("lanes", pairs=-2, side=-2), "x.split: pairs=-2, side=-2 of axis lanes=4"),
    (lambda: y().split("rows", pairs=-1, side=2), "y.split: n // 2 x 2 is not axis rows=n"),
    (
        lambda: x().split("lanes", rows=2, side=2),
        "x.split: axis rows would be there twice in [rows=6, rows=2, side=2]",
    ),
    (lambda: x().reindex("cols", lambda i: i, a=2), "x.reindex: there is no axis cols, only [rows=6, lanes=4]"),
    (
        lambda: x().reindex("lanes", lambda i: i, rows=2),
        "x.reindex: axis rows would be there twice in [rows=6, rows=2]",
    ),
    # levels
    (lambda: x().tile((2, 2)).with_dtype(x().tile((2, 2)).dtype), FOREIGN),
    (lambda: x().with_dtype(x()), FOREIGN),
    (lambda: x().tile((2, 2)).with_dtype("float16"), FOREIGN),  # type: ignore[arg-type]
    (lambda: x().locate((0,)), "x.locate: (0,) does not index x[rows=6, lanes=4]"),
    (lambda: x().locate((0, 1), (2,)), "x.locate: (0, 1); (2,) does not index x[rows=6, lanes=4]"),
    # cuts
    (lambda: cut([x()], {"cols": 1}), "cut: no tensor has an axis cols"),
    (lambda: cut([x(), y()], {"rows": 1}), "cut: axis rows differs: x 6, y n"),
    (lambda: cut([x(), x()[:3]], {"rows": 1}), "cut: axis rows differs: x 6, x 3"),
    (lambda: cut([x()], {"rows": 0}), "cut: tile size 0 along axis rows is not known to be >= 1"),
    (lambda: cut([x()], {"rows": 1}, {"lanes": -1}), "cut: tile size -1 along axis lanes is not known to be >= 1"),
    (lambda: cut([y()], {"rows": n}), "cut: tile size n along axis rows is not known to be >= 1"),
    (
        lambda: cut([x()], {"rows": 2}, {"rows": 1}),
        "cut: axis rows is cut into programs, it cannot be cut into steps too",
    ),
    (lambda: cut([x().tile((2, 2))], {"rows": 1}), "cut: x[rows=3, lanes=2][rows=2, lanes=2] is cut already"),
]  # fmt: skip


@pytest.mark.parametrize(("misuse", "text"), MISUSES, ids=[text for _, text in MISUSES])
def test_misuse(misuse: Callable[[], Any], text: str) -> None:
    with pytest.raises(ArrangementError) as raised:
        misuse()
    assert str(raised.value) == text


def test_misuse_is_a_value_error() -> None:
    assert issubclass(ArrangementError, ValueError) and issubclass(ArrangementError, TilewrightError)
    with pytest.raises(TypeError, match=r"^2\.5 is no integer expression$"):
        x().tile((2.5, 1))  # type: ignore[list-item]


# -- a tensor can be used twice
def test_forks_of_an_arranged_tensor() -> None:
    """NineToothed 0.26 gives zeros here: both forks share what they evaluate."""
    tiles = Tensor("x", "rows", (4,)).tile((2,))
    a, b = tiles.expand((-1,)), tiles.unsqueeze(0)
    expected = DATA[:4].reshape(2, 2)
    assert np.array_equal(elements(a), expected)
    assert np.array_equal(elements(b), expected[None])
    assert np.array_equal(elements(a), expected) and np.array_equal(elements(tiles), expected)


def test_operations_change_nothing() -> None:
    """Each operation on one tensor, then all of them again: the same elements, and the tensor as it was."""
    base = Tensor("x", "rows one lanes", (6, 1, 4))
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.tile((2, 1, 4)),
        lambda t: t.expand((-1, 3, -1)),
        lambda t: t.unsqueeze(1),
        lambda t: t.squeeze(1),
        lambda t: t.permute((2, 0, 1)),
        lambda t: t.flatten(),
        lambda t: t.tile((2, 1, 2)).ravel(),
        lambda t: t.pad(((1, 2), (0, 0), (0, 1))),
        lambda t: t[1:5, 0, ::-2],
        lambda t: t.filled(7),
        lambda t: t.rename(rows="tokens"),
        lambda t: t.split("lanes", pairs=-1, side=2),
        lambda t: t.reindex("lanes", lambda i: 3 - i, back=4),
        lambda t: t.with_dtype(t.dtype) if len(t.levels) > 1 else t,
    ]
    before, first = elements(base), [elements(operation(base)) for operation in operations]
    for operation, expected in zip(operations, first, strict=True):
        assert np.array_equal(elements(operation(base)), expected)
    assert np.array_equal(elements(base), before) and base.names == ("rows", "one", "lanes")


def test_surgery_on_a_tile_leaves_forks_alone() -> None:
    tiles = x().tile((1, 2))
    fork, twin = tiles.unsqueeze(0), copy(tiles)
    tiles.dtype = tiles.dtype.squeeze(0)
    expected = DATA.reshape(6, 2, 1, 2)
    assert tiles.levels[1] == x().tile((1, 2)).levels[1][1:]
    assert np.array_equal(elements(tiles), expected[:, :, 0])
    assert np.array_equal(elements(fork), expected[None]) and np.array_equal(elements(twin), expected)


def test_surgery_in_one_expression() -> None:
    tiles = x().tile((2, 2))
    turned = tiles.with_dtype(tiles.dtype.permute(("lanes", "rows")))
    expected = DATA.reshape(3, 2, 2, 2).transpose(0, 2, 1, 3)
    assert np.array_equal(elements(turned), expected.swapaxes(2, 3))
    assert np.array_equal(elements(tiles), expected)


def test_surgery_two_levels_down() -> None:
    """`x.dtype.dtype = ...` reaches x, as with NineToothed; a tile taken before is told that it is out of date."""
    tiles = x().tile((1, 2)).tile((3, 2))
    tile = tiles.dtype
    tiles.dtype.dtype = tiles.dtype.dtype.squeeze(0)
    assert [len(level) for level in tiles.levels] == [2, 2, 1]
    assert np.array_equal(elements(tiles), DATA.reshape(2, 3, 1, 2, 2).swapaxes(1, 2))
    tiles.dtype = tiles.dtype.squeeze(1) if tiles.dtype.shape[1] == 1 else tiles.dtype.permute((1, 0))
    assert np.array_equal(elements(tiles), DATA.reshape(2, 1, 3, 2, 2).swapaxes(2, 3))
    with pytest.raises(ArrangementError) as raised:
        tiles.dtype = tile
    assert str(raised.value) == FOREIGN
    again = tiles.dtype
    again.dtype = again.dtype.unsqueeze(0)
    again.dtype = again.dtype.unsqueeze(0)  # through the same tile twice
    assert tiles.levels[2] == again.levels[1] and tiles.levels[2][0].size == 1
    assert np.array_equal(elements(tiles)[:, :, :, :, 0, 0], DATA.reshape(2, 1, 3, 2, 2).swapaxes(2, 3))


def test_the_innermost_dtype_is_the_elements() -> None:
    assert x().dtype == "float32"
    assert x().tile((2, 2)).dtype.dtype == "float32"
    assert Tensor("x", "a", (1,), "like:q").dtype == "like:q"


# -- operations
def test_a_whole_axis_may_be_empty_or_of_any_size() -> None:
    whole = y().tile((1, -1)).tile((-1, 1))
    assert str(whole) == "y[rows=1, lanes=1][rows=n, lanes=1][rows=1, lanes=4]"
    named = y().tile((-1, 2))
    assert str(named) == "y[rows=1, lanes=2][rows=n, lanes=2]" and conditions(named) == []
    assert elements(named, n=5).shape == (1, 2, 5, 2) and elements(named, n=0).shape == (1, 2, 0, 2)


def test_tiles_of_named_sizes() -> None:
    tiles = y().tile((m, 4))
    assert str(tiles) == "y[rows=(m + n - 1) // m, lanes=1][rows=m, lanes=4]"
    assert conditions(tiles) == ["n - i0:program * m - i2:lane - 1"]
    expected = np.zeros((2, 1, 4, 4), int)
    expected[:, 0].reshape(8, 4)[:5] = DATA[:20].reshape(5, 4)
    assert np.array_equal(elements(tiles, n=5, m=4), expected)


def test_flatten_counts_from_the_end() -> None:
    """The end is not included, so -1 leaves the last axis, as in NineToothed."""
    z = Tensor("z", "a b c", (2, 3, 4))
    assert z.flatten(0, -1).shape == (6, 4) and z.flatten(-2).shape == (2, 12) and z.flatten().shape == (24,)
    assert z.flatten(-3, -1).shape == (6, 4) and z.flatten("b").shape == (2, 12)  # type: ignore[arg-type]
    assert z.flatten(1, name="inner").names == ("a", "inner") and z.flatten(1).names == ("a", None)
    assert np.array_equal(elements(z.permute((2, 0, 1)).flatten()), DATA.reshape(2, 3, 4).transpose(2, 0, 1).ravel())


def test_slices() -> None:
    data = DATA.reshape(6, 4)
    assert np.array_equal(elements(x()[1:5:2]), data[1:5:2])
    assert np.array_equal(elements(x()[-2:, -1]), data[-2:, -1])
    assert np.array_equal(elements(x()[..., None, 1]), data[:, None, 1])
    assert np.array_equal(elements(x()[::-2, 2:-1:-1]), data[::-2, 2::-1])
    assert np.array_equal(elements(x()[4:8]), np.concatenate([data[4:], np.zeros((2, 4), int)]))
    assert np.array_equal(elements(y()[m : n.expr - 1], n=6, m=2), data[2:5])
    assert np.array_equal(elements(y()[m], n=6, m=2), data[2])
    assert x()[:].names == ("rows", "lanes") and x()[0].names == ("lanes",)
    assert conditions(y()[:3]) == ["n - i0:lane - 1"]


def test_padding_and_fill() -> None:
    padded = x().pad(((1, 0), (0, 2))).filled(-1)
    expected = np.full((7, 6), -1)
    expected[1:, :4] = DATA.reshape(6, 4)
    assert np.array_equal(elements(padded), expected) and padded.fill == -1
    assert np.array_equal(elements(padded.tile((7, 6)).filled(-1))[0, 0], expected)
    assert np.array_equal(elements(x().pad(((-1, -2), (0, 0)))), DATA.reshape(6, 4)[1:4])
    assert conditions(x().pad(((0, 0), (0, 0)))) == []


# -- names and views
def test_renaming() -> None:
    z = x().rename(rows="tokens")
    assert z.names == ("tokens", "lanes") and str(z) == "x[tokens=6, lanes=4]"
    assert x().rename(rows="lanes", lanes="rows").names == ("lanes", "rows")
    assert x().unsqueeze(1).rename(rows="tokens").names == ("tokens", None, "lanes")
    assert x().tile((2, 2)).rename(rows="r").levels[1] == x().tile((2, 2)).levels[1]


def test_splitting() -> None:
    data = DATA.reshape(6, 4)
    neighbours = x().split("lanes", pairs=-1, side=2)
    halves = x().split("lanes", side=2, pairs=-1)
    assert neighbours.names == ("rows", "pairs", "side") and halves.names == ("rows", "side", "pairs")
    assert np.array_equal(elements(neighbours[:, :, 1]), data[:, 1::2])
    assert np.array_equal(elements(halves[:, 1]), data[:, 2:])
    heads, tile = Size("heads", low=1), Size("tile", "tile", low=1, high=8, divides=(Size("heads", low=1).expr,))
    z = Tensor("z", "heads lanes", (heads, 2)).split("heads", groups=-1, within=tile)
    assert str(z) == "z[groups=heads // tile, within=tile, lanes=2]"
    assert np.array_equal(elements(z, heads=12, tile=3), DATA.reshape(4, 3, 2))


def test_reindexing() -> None:
    z = x().reindex("lanes", lambda side, pair: side * 2 + pair, side=2, pair=2)
    assert z.names == ("rows", "side", "pair")
    assert np.array_equal(elements(z), DATA.reshape(6, 2, 2))


def test_views_over_one_allocation() -> None:
    """A row is 3 codes and a scale; both views find theirs, counted in elements of their own."""
    cache = Tensor("cache", "blocks bytes", (2, n), "uint8", (12, 1))
    codes = cache.view("codes", "blocks rows dim", (2, 3, 3), (12, 3, 1), "uint8")
    scales = cache.view("scales", "blocks rows", (2, 3), (12, 1), "uint8", offset=const(3) * 3)
    blocks = DATA.reshape(2, 12)
    assert np.array_equal(elements(codes), blocks[:, :9].reshape(2, 3, 3))
    assert np.array_equal(elements(scales), blocks[:, 9:])
    assert {t.source.memory for t in (cache, codes, scales)} == {"cache"}
    assert scales.source.name == scales.name == "scales" and scales.source.offset == 9
    assert codes.view("again", "rows", (2,), (12,), "uint8").source.memory == "cache"


# -- cuts by names
def test_tensors_without_an_axis_are_shared_along_it() -> None:
    heads = Tensor("x", "tokens heads dim", (2, 3, 4))
    weight = Tensor("w", "dim", (4,))
    position = Tensor("p", "tokens", (2,))
    grids = cut([heads, weight, position], program={"tokens": 1, "heads": 2})
    assert [str(t) for t in grids] == [
        "x[tokens=2, heads=2][tokens=1, heads=2, dim=4]",
        "w[tokens=2, heads=2][dim=4]",
        "p[tokens=2, heads=2][tokens=1]",
    ]
    got = elements(grids[0])
    padded = np.zeros((2, 4, 4), int)
    padded[:, :3] = DATA.reshape(2, 3, 4)
    assert np.array_equal(got[:, :, 0], padded.reshape(2, 2, 2, 4))
    assert np.array_equal(elements(grids[1]), np.broadcast_to(DATA[:4], (2, 2, 4)))
    assert np.array_equal(elements(grids[2])[..., 0], [[1, 1], [2, 2]])


def test_the_grid_has_the_order_of_the_programs() -> None:
    (z,) = cut([x()], program={"lanes": 2, "rows": 3})
    assert str(z) == "x[lanes=2, rows=2][rows=3, lanes=2]"
    assert np.array_equal(elements(z), DATA.reshape(2, 3, 2, 2).transpose(2, 0, 1, 3))


def test_steps() -> None:
    """A matrix product's operands: a program's rows and columns, and the loop over k."""
    a, b = Tensor("a", "m k", (4, 6)), Tensor("b", "k n", (6, 4))
    out = Tensor("out", "m n", (4, 4))
    a, b, out = cut([a, b, out], program={"m": 2, "n": 2}, steps={"k": 4})
    assert [str(t) for t in (a, b, out)] == [
        "a[m=2, n=2][k=2][m=2, k=4]",
        "b[m=2, n=2][k=2][k=4, n=2]",
        "out[m=2, n=2][m=2, n=2]",
    ]
    left = np.zeros((4, 8), int)
    left[:, :6] = DATA.reshape(4, 6)
    expected = left.reshape(2, 2, 2, 4).transpose(0, 2, 1, 3)  # [m, k, tile_m, tile_k]
    assert np.array_equal(elements(a), np.broadcast_to(expected[:, None], (2, 2, 2, 2, 4)))
    right = np.zeros((8, 4), int)
    right[:6] = DATA.reshape(6, 4)
    expected = right.reshape(2, 4, 2, 2).transpose(2, 0, 1, 3)  # [n, k, tile_k, tile_n]
    assert np.array_equal(elements(b), np.broadcast_to(expected[None], (2, 2, 2, 4, 2)))


def test_named_sizes_align_on_one_grid() -> None:
    tokens, heads = Size("num_tokens"), Size("num_heads", low=1, high=64)
    tile = Size("heads", "tile", low=1, high=8, divides=(heads.expr,))
    q = Tensor("q", "tokens heads dim", (tokens, heads, 2))
    (q,) = cut([q], program={"tokens": m, "heads": tile})
    assert str(q) == "q[tokens=(m + num_tokens - 1) // m, heads=num_heads // heads][tokens=m, heads=heads, dim=2]"
    assert conditions(q) == ["num_tokens - i0:program * m - i2:lane - 1"]  # the tile divides the heads
    got = elements(q, num_tokens=3, num_heads=4, heads=2, m=2)
    expected = np.zeros((4, 4, 2), int)
    expected[:3] = DATA.reshape(3, 4, 2)
    assert np.array_equal(got, expected.reshape(2, 2, 2, 2, 2).transpose(0, 2, 1, 3, 4))
