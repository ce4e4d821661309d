"""Gathers against numpy: every element that an arranged tensor reads, and nothing outside its allocation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arrangements_oracle import grid, read

from tilewright.arrange import cut
from tilewright.arrangements.paged_rows import paged_rows
from tilewright.errors import ArrangementError
from tilewright.expr import Loaded, Size, at_least, const, simplify_mask
from tilewright.tensor import Axis, Tensor, computed, stack

ROWS, LANES, TOKENS = 10, 4, 7
X = np.arange(1, 1 + ROWS * LANES).reshape(ROWS, LANES)  # 0 is the fill
IDS = np.array([3, -1, 9, 0, 10, 3, -7])  # 10 is past the end
VALID = (IDS >= 0) & (IDS < ROWS)
FOUND = np.where(VALID[:, None], X[np.clip(IDS, 0, ROWS - 1)], 0)  # [tokens=7, lanes]

num_tokens = Size("num_tokens", low=1, high=100)
num_rows = Size("num_rows", low=1, high=100)


def rows(name: str = "x", count: Any = ROWS) -> Tensor:
    return Tensor(name, "rows lanes", (count, LANES), "int64")


def ids(name: str = "ids", axis: str = "tokens", count: Any = TOKENS) -> Tensor:
    return Tensor(name, axis, (count,), "int64")


@pytest.fixture(params=[False, True], ids=["numbers", "names"])
def sizes(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Sizes as numbers, or as names that get the same values afterwards."""
    if request.param:
        return {"tokens": num_tokens, "rows": num_rows, "values": {"num_tokens": len(IDS), "num_rows": ROWS}}
    return {"tokens": len(IDS), "rows": ROWS, "values": {}}


MEMORY = {"x": X, "ids": IDS}


def tiled(found: np.ndarray, tile: int) -> np.ndarray:
    """[tokens, lanes] as [programs, tile, lanes], zeros past the end."""
    programs = -(-len(found) // tile)
    padded = np.zeros((programs * tile, *found.shape[1:]), found.dtype)
    padded[: len(found)] = found
    return padded.reshape(programs, tile, *found.shape[1:])


# -- one gather
def test_rows_by_an_index(sizes: dict[str, Any]) -> None:
    x = rows(count=sizes["rows"]).gather("rows", ids(count=sizes["tokens"]))
    assert x.names == ("tokens", "lanes")
    assert np.array_equal(read(x, MEMORY, sizes["values"]), FOUND)


def test_before_a_tile(sizes: dict[str, Any]) -> None:
    x = rows(count=sizes["rows"]).gather("rows", ids(count=sizes["tokens"])).tile((2, LANES)).squeeze("lanes")
    assert np.array_equal(read(x, MEMORY, sizes["values"]), tiled(FOUND, 2))


def test_before_a_cut_by_names(sizes: dict[str, Any]) -> None:
    x = rows(count=sizes["rows"]).gather("rows", ids(count=sizes["tokens"]))
    (x,) = cut([x], program={"tokens": 4})
    assert np.array_equal(read(x, MEMORY, sizes["values"]), tiled(FOUND, 4))


def test_after_a_tile_whole_tiles_move() -> None:
    """Program p works on the tile that the index names."""
    which = np.array([4, 0, -1, 5, 2])
    x = rows().tile((2, LANES)).squeeze("lanes").gather("rows", ids("which", "programs", 5))
    assert x.names == ("programs",)
    tiles = X.reshape(5, 2, LANES)
    valid = (which >= 0) & (which < 5)
    expected = np.where(valid[:, None, None], tiles[np.clip(which, 0, 4)], 0)
    assert np.array_equal(read(x, {"x": X, "which": which}, {}), expected)


def test_after_a_tile_that_passes_the_end() -> None:
    """The last of the tiles of 4 is half outside."""
    which = np.array([2, 0, 3])
    x = rows().tile((4, LANES)).squeeze("lanes").gather("rows", ids("which", "programs", 3))
    tiles = tiled(X, 4)
    expected = np.stack([tiles[2], tiles[0], np.zeros((4, LANES), int)])
    assert np.array_equal(read(x, {"x": X, "which": which}, {}), expected)


def test_inside_a_tile() -> None:
    """Each tile of 5 rows is permuted by one small table; two of its entries name no row."""
    order = np.array([4, 0, -1, 2, 5, 1])
    x = rows().tile((5, LANES)).squeeze("lanes")
    x.dtype = x.dtype.gather("rows", ids("order", "picked", 6))
    assert [axis.name for axis in x.levels[1]] == ["picked", "lanes"]
    tiles = X.reshape(2, 5, LANES)
    valid = (order >= 0) & (order < 5)
    expected = np.where(valid[:, None], tiles[:, np.clip(order, 0, 4)], 0)
    assert np.array_equal(read(x, {"x": X, "order": order}, {}), expected)


def test_by_an_index_of_two_axes() -> None:
    table = np.array([[1, -1, 3], [9, 12, 0]])
    x = rows().gather("rows", Tensor("table", "seqs pages", (2, 3), "int64"))
    assert x.names == ("seqs", "pages", "lanes")
    valid = (table >= 0) & (table < ROWS)
    expected = np.where(valid[..., None], X[np.clip(table, 0, 9)], 0)
    assert np.array_equal(read(x, {"x": X, "table": table}, {}), expected)


def test_along_the_last_axis_and_with_a_fill() -> None:
    x = Tensor("x", "lanes rows", (LANES, ROWS), "int64", (1, LANES)).gather("rows", ids()).filled(-5)
    assert x.names == ("lanes", "tokens")
    assert np.array_equal(read(x, MEMORY, {}), np.where(VALID[:, None], FOUND, -5).T)


def test_a_strided_index_and_an_offset_view() -> None:
    spread = np.full(3 * len(IDS), 99)
    spread[::3] = IDS
    index = Tensor("ids", "tokens", (len(IDS),), "int64", (3,))
    tail = rows().view("tail", "rows lanes", (ROWS, 2), (LANES, 1), "int64", offset=2)
    assert np.array_equal(read(tail.gather("rows", index), {"x": X, "ids": spread}, {}), FOUND[:, 2:])


def test_padded_then_gathered() -> None:
    """Lanes before the table's own read the fill, as those that do not rotate read cosine 1."""
    x = rows().pad(((0, 0), (2, 0))).gather("rows", ids().index(negative="skip")).filled(1)
    expected = np.ones((len(IDS), 2 + LANES), int)
    expected[:, 2:] = np.where(VALID[:, None], FOUND, 1)
    assert np.array_equal(read(x, MEMORY, {}), expected)


# -- what the contract vouches for
def conditions(tensor: Tensor) -> list[str]:
    """Text of the mask that is left."""
    levels, _, _ = grid(tensor, {"num_tokens": 1, "num_rows": 1})
    return [str(e) for e in simplify_mask(tensor.locate(*levels)[1])]


@pytest.mark.parametrize(
    ("above", "negative", "text"),
    [
        ("check", "skip", ["ids_value[i0:lane]", "num_rows - ids_value[i0:lane] - 1"]),
        ("never", "skip", ["ids_value[i0:lane]"]),
        ("check", "never", ["num_rows - ids_value[i0:lane] - 1"]),
        ("never", "never", []),
    ],
)
def test_tests_that_an_index_needs(above: str, negative: str, text: list[str]) -> None:
    index = ids(count=num_tokens).index(above=above, negative=negative)
    assert conditions(rows(count=num_rows).gather("rows", index)) == text


@pytest.mark.parametrize(
    ("negative", "text"),
    [
        ("skip", ["ids_value[i0:program * 4 + i2:lane]"]),
        ("never", ["num_tokens - i0:program * 4 - i2:lane - 1"]),
    ],
)
def test_a_skipping_index_vouches_for_its_own_load(negative: str, text: list[str]) -> None:
    """Past the last token it reads as -1 and so fails its own test; one that never skips keeps the bound."""
    index = ids(count=num_tokens).index(above="never", negative=negative)
    x = rows(count=num_rows).gather("rows", index).tile((4, LANES))
    assert conditions(x) == text


def test_in_range_by_contract() -> None:
    order = np.array([4, 0, 9])
    for negative in ("skip", "never"):
        index = ids("order", count=3).index(above="never", negative=negative, name="position")
        x = rows().gather("rows", index).tile((2, LANES)).squeeze("lanes")
        assert np.array_equal(read(x, {"x": X, "order": order}, {}), tiled(X[order], 2))


def test_a_wrong_word_is_told() -> None:
    with pytest.raises(ArrangementError) as raised:
        ids().index(above="sometimes")
    assert str(raised.value) == "ids.index: above='sometimes', negative='skip'"
    with pytest.raises(ArrangementError) as raised:
        rows().gather("columns", ids())
    assert str(raised.value) == "x.gather: there is no axis columns, only [rows=10, lanes=4]"
    with pytest.raises(ArrangementError) as raised:
        rows().gather("rows", ids().tile((2,)))
    assert str(raised.value) == "ids.index: an index has one level, this has 2"
    with pytest.raises(ArrangementError) as raised:
        rows().gather("rows", ids().tile((2,)).dtype)
    assert str(raised.value) == "ids.index: a tile is no index, the tensor itself is"
    with pytest.raises(ArrangementError) as raised:
        rows().where(ids().index())
    assert str(raised.value) == "x.where: there is no axis tokens, only [rows=10, lanes=4]"


# -- arithmetic on an index
@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda i: i // 2, lambda v: v // 2),
        (lambda i: i % 4, lambda v: v % 4),
        (lambda i: i * 3 + 1, lambda v: v * 3 + 1),
        (lambda i: (i // 3) % 2, lambda v: v // 3 % 2),
        (lambda i: i + -3, lambda v: v - 3),
    ],
    ids=["half", "rest", "times", "both", "minus"],
)
def test_arithmetic_on_an_index(change: Any, result: Any) -> None:
    """A skipped value stays skipped; what arithmetic makes of another must lie within the axis."""
    x = rows().gather("rows", change(ids().index()))
    at = result(IDS)
    valid = (IDS >= 0) & (at >= 0) & (at < ROWS)
    expected = np.where(valid[:, None], X[np.clip(at, 0, ROWS - 1)], 0)
    assert np.array_equal(read(x, MEMORY, {}), expected)


def test_routed_rows() -> None:
    """Row i of the expert tiles is token `sorted[i] // top_k`; padding entries point past the last token."""
    top_k, tokens = Size("top_k", "constexpr", low=1, high=8), 3
    order = np.array([5, 0, 6, 6, 2, 1, -1, 4])
    hidden = np.arange(1, 1 + tokens * LANES).reshape(tokens, LANES)
    x = Tensor("hidden", "tokens lanes", (tokens, LANES)).gather("tokens", ids("order", "rows", 8) // top_k)
    assert x.names == ("rows", "lanes")
    token = order // 2
    valid = (order >= 0) & (token < tokens)
    expected = np.where(valid[:, None], hidden[np.clip(token, 0, 2)], 0)
    (x,) = cut([x], program={"rows": 4})
    got = read(x, {"hidden": hidden, "order": order}, {"top_k": 2})
    assert np.array_equal(got, expected.reshape(2, 4, LANES))


# -- pages
BLOCKS, BLOCK = 3, 5
CACHE = np.arange(1, 1 + BLOCKS * BLOCK * LANES).reshape(BLOCKS, BLOCK, LANES)
SLOTS = np.array([0, 14, -1, 7, 5, -3, 9])
PAGED = np.where((SLOTS >= 0)[:, None], CACHE.reshape(-1, LANES)[np.clip(SLOTS, 0, 14)], 0)


@pytest.mark.parametrize("block", [BLOCK, Size("block", "constexpr", low=1, high=64)], ids=["number", "name"])
def test_pages(block: Any) -> None:
    """Both gathers go by one slot: they share the axis of the tokens."""
    cache = Tensor("cache", "blocks rows lanes", (Size("num_blocks"), block, LANES), strides=(BLOCK * LANES, LANES, 1))
    slots = ids("slots").index(name="slot", above="never")
    x = paged_rows(cache, slots, block)
    assert x.names == ("tokens", "lanes")
    memory, values = {"cache": CACHE, "slots": SLOTS}, {"block": BLOCK, "num_blocks": BLOCKS}
    assert np.array_equal(read(x, memory, values), PAGED)
    (x,) = cut([x], program={"tokens": 2})
    assert np.array_equal(read(x, memory, values), tiled(PAGED, 2))
    levels, _, _ = grid(x, values)
    left = simplify_mask(x.locate(*levels)[1])
    assert [str(e) for e in left] == ["slot[i0:program * 2 + i1:lane]"]  # the slot's own test is all that is left


def test_a_slot_past_the_capacity_is_masked_where_it_is_checked() -> None:
    cache = Tensor("cache", "blocks rows lanes", (BLOCKS, BLOCK, LANES))
    slots = np.array([14, 15, 1000, -1])
    x = paged_rows(cache, ids("slots", count=4).index(), BLOCK)
    expected = np.zeros((4, LANES), int)
    expected[0] = CACHE[2, 4]
    assert np.array_equal(read(x, {"cache": CACHE, "slots": slots}, {}), expected)


def test_a_skipped_slot_writes_nothing() -> None:
    """Writing goes to the same places: -1 leaves the cache as it was, and every other row has one writer."""
    cache = Tensor("cache", "blocks rows lanes", (BLOCKS, BLOCK, LANES))
    x = paged_rows(cache, ids("slots").index(above="never"), BLOCK).tile((2, LANES))
    numbers = np.arange(BLOCKS * BLOCK * LANES)  # reading its own offsets gives the places
    places = read(x.filled(-1), {"cache": numbers, "slots": SLOTS}, {})
    written = places[places >= 0]
    assert len(set(written.tolist())) == written.size == (SLOTS >= 0).sum() * LANES
    assert sorted(set(written // LANES)) == sorted(SLOTS[SLOTS >= 0])


def test_a_shorter_index_leaves_the_rest_alone() -> None:
    """8 tokens, 7 slots: the last row is masked although the tensor it comes from has it."""
    inserted = Size("num_inserted", high=num_tokens.expr)
    kv = Tensor("kv", "tokens lanes", (num_tokens, LANES))
    slots = ids("slots", count=inserted).index(above="never")
    x = kv.where(slots)
    values = {"num_tokens": 8, "num_inserted": 7}
    data = np.arange(1, 33).reshape(8, LANES)
    expected = np.where(np.append(SLOTS >= 0, False)[:, None], data, 0)
    memory = {"kv": data, "slots": SLOTS}
    assert np.array_equal(read(x, memory, values), expected)
    (x,) = cut([x], program={"tokens": 3})
    assert np.array_equal(read(x, memory, values), tiled(expected, 3))
    assert conditions(x) == ["slots_value[i0:program * 3 + i1:lane]"]


def test_where_of_an_index_that_never_skips() -> None:
    """It adds that the index exists, not that its value is non-negative."""
    kv = Tensor("kv", "tokens lanes", (num_tokens, LANES))
    x = kv.where(ids("order", count=3).index(negative="never"))
    data = np.arange(1, 21).reshape(5, LANES)
    expected = np.where((np.arange(5) < 3)[:, None], data, 0)
    assert np.array_equal(read(x, {"kv": data, "order": np.array([0, 0, 2])}, {"num_tokens": 5}), expected)


# -- a gather of a gather
TABLE = np.array([[2, -1, 7, 0], [1, 12, 3, -5]])  # [seqs, pages] -> row of x
SEQS = np.array([0, 1, 1, -1, 0, 2, 1])  # by token
PAGES = np.array([2, 0, 1, 0, -1, 0, 2])


def looked_up() -> np.ndarray:
    out = np.zeros((7, LANES), int)
    for token in range(7):
        if 0 <= SEQS[token] < 2 and 0 <= PAGES[token] < 4 and 0 <= TABLE[SEQS[token], PAGES[token]] < ROWS:
            out[token] = X[TABLE[SEQS[token], PAGES[token]]]
    return out


@pytest.mark.parametrize("tile", [1, 3])
def test_a_gather_of_a_gather(tile: int) -> None:
    """A block table: a skipped inner index must not send the outer one astray."""
    table = Tensor("table", "seqs pages", (2, 4), "int64")
    page = table.gather("seqs", ids("seq_of")).gather("pages", ids("page_of"))
    assert page.names == ("tokens",)
    x = rows(count=num_rows).gather("rows", page)
    memory = {"x": X, "table": TABLE, "seq_of": SEQS, "page_of": PAGES}
    assert np.array_equal(read(x, memory, {"num_rows": ROWS}), looked_up())
    (x,) = cut([x], program={"tokens": tile})
    assert np.array_equal(read(x, memory, {"num_rows": ROWS}), tiled(looked_up(), tile))


def test_the_inner_test_guards_the_outer_load() -> None:
    """The outer index is loaded under the inner ones' tests, and its own test then says all of them."""
    table = Tensor("table", "seqs pages", (2, 4), "int64")
    page = table.gather("seqs", ids("seq_of")).gather("pages", ids("page_of").index(above="never"))
    x = rows(count=num_rows).gather("rows", page.index(name="page", above="never"))
    levels, _, _ = grid(x, {"num_rows": 1})
    left = simplify_mask(x.locate(*levels)[1])
    assert len(left) == 1
    outer = left[0].single
    assert isinstance(outer, Loaded) and outer.name == "page" and outer.guarded and outer.fill == -1
    guards = [str(e) for e in simplify_mask(outer.mask)]
    assert guards == [
        "page_of_value[i0:lane]",
        "seq_of_value[i0:lane]",
        "1 - seq_of_value[i0:lane]",
    ]


def test_an_unguarded_load_over_a_guarded_one_keeps_the_guard() -> None:
    """The outer never skips, so it reads 0 where the inner is skipped: the inner test stays in the mask."""
    table = Tensor("table", "slots", (4,), "int64")
    page = table.gather("slots", ids("slots", count=5)).index(negative="never", above="never", name="page")
    x = rows().gather("rows", page)
    slots, values = np.array([1, -1, 3, 4, 0]), np.array([2, 9, 5, 7])
    valid = (slots >= 0) & (slots < 4)
    expected = np.where(valid[:, None], X[values[np.clip(slots, 0, 3)]], 0)
    assert np.array_equal(read(x, {"x": X, "table": values, "slots": slots}, {}), expected)
    assert conditions(x) == ["slots_value[i0:lane]", "3 - slots_value[i0:lane]"]


# -- computed indices and stacks
def test_a_computed_index_on_a_program_axis() -> None:
    """The weight's kind is a test of the head: one program, one pointer."""
    weights = np.arange(8).reshape(2, LANES)
    kinds = Tensor("w", "kinds lanes", (2, LANES))
    w = kinds.gather("kinds", computed([Axis("heads", const(6))], lambda head: at_least(head, 4)))
    assert w.names == ("heads", "lanes")
    expected = weights[[0, 0, 0, 0, 1, 1]]
    assert np.array_equal(read(w, {"w": weights}, {}), expected)
    (w,) = cut([w], program={"heads": 2})
    assert np.array_equal(read(w, {"w": weights}, {}), expected.reshape(3, 2, LANES))
    place, mask = w.locate([1], [0, 2])
    assert [e.value for e in place] == [0, 2] and all(e.value is not None and e.value >= 0 for e in mask)
    assert w.locate([2], [1, 0])[0][0] == 1


def test_a_stack_picks_a_tensor() -> None:
    q, k = np.arange(1, 5), np.arange(11, 15)
    q_weight, k_weight = (Tensor(name, "lanes", (LANES,)) for name in ("q_weight", "k_weight"))
    both = stack(q_weight, k_weight, axis="kind")
    assert both.names == ("kind", "lanes") and both.shape == (2, LANES)
    memory = {"q_weight": q, "k_weight": k}
    assert np.array_equal(read(both, memory, {}), np.stack([q, k]))
    num_heads, num_heads_q = Size("num_heads", low=1, high=64), Size("num_heads_q", low=1, high=64)
    axis = Axis("heads", num_heads.expr)
    w = both.gather("kind", computed([axis], lambda head: at_least(head, num_heads_q)))
    values = {"num_heads": 5, "num_heads_q": 3}
    assert np.array_equal(read(w, memory, values), np.stack([q, q, q, k, k]))
    (w,) = cut([w], program={"heads": 2})
    assert np.array_equal(read(w, memory, values), tiled(np.stack([q, q, q, k, k]), 2))


def test_a_stack_picked_by_loaded_values() -> None:
    arrays = {name: np.arange(4) + 10 * i for i, name in enumerate("abc", 1)}
    both = stack(*(Tensor(name, "lanes", (LANES,)) for name in arrays), axis="kind")
    chosen = np.array([2, 0, -1, 1, 3])
    w = both.gather("kind", ids("chosen", count=5))
    zero = np.zeros(4, int)
    expected = np.stack([arrays["c"], arrays["a"], zero, arrays["b"], zero])
    assert np.array_equal(read(w, {**arrays, "chosen": chosen}, {}), expected)


def test_a_stack_of_views_keeps_their_offset() -> None:
    a, b = np.arange(8), np.arange(100, 108)
    tails = [Tensor(n, "all", (8,)).view(n, "lanes", (LANES,), (1,), "float32", offset=4) for n in "ab"]
    assert np.array_equal(read(stack(*tails, axis="kind"), {"a": a, "b": b}, {}), np.stack([a[4:], b[4:]]))


def test_a_stack_of_padded_tensors_keeps_their_mask() -> None:
    a, b = np.arange(1, 5), np.arange(11, 15)
    padded = [Tensor(n, "lanes", (LANES,)).pad(((1, 2),)) for n in "ab"]
    expected = np.zeros((2, LANES + 3), int)
    expected[:, 1:5] = a, b
    assert np.array_equal(read(stack(*padded, axis="kind"), {"a": a, "b": b}, {}), expected)


def test_what_cannot_be_stacked() -> None:
    a, b = (Tensor(name, "rows lanes", (4, 4)) for name in "ab")

    def message(*tensors: Tensor) -> str:
        with pytest.raises(ArrangementError) as raised:
            stack(*tensors, axis="kind")
        return str(raised.value)

    assert message() == "stack: no tensor is given"
    assert message(a, Tensor("c", "rows lanes", (4, 5))) == "stack: c[rows=4, lanes=5] differs from a[rows=4, lanes=4]"
    other = Tensor("c", "rows lanes", (4, 4), "float16")
    assert message(a, other) == "stack: c[rows=4, lanes=4] differs from a[rows=4, lanes=4]"
    assert message(a, a.tile((2, 2))) == "stack: a[rows=2, lanes=2][rows=2, lanes=2] is cut already"
    assert message(a.tile((2, 2)), a) == "stack: a[rows=2, lanes=2][rows=2, lanes=2] is cut already"
    unlike = "stack: {}[rows=4, lanes=4] and a[rows=4, lanes=4] are not laid out alike"
    assert message(a, Tensor("c", "rows lanes", (4, 4), strides=(8, 1))) == unlike.format("c")
    assert message(a, b[::-1]) == unlike.format("b")
    assert message(a, b.view("c", "rows lanes", (4, 4), (4, 1), "float32", offset=2)) == unlike.format("c")


# -- shared axes
def test_an_index_over_an_axis_that_the_tensor_has() -> None:
    """One column of each row, by an index over the rows."""
    columns = np.array([3, -1, 0, 4, 1, 2, 2, 0, 1, 3])
    x = rows().gather("lanes", ids("columns", "rows", ROWS))
    assert x.names == ("rows",)
    valid = (columns >= 0) & (columns < LANES)
    expected = np.where(valid, X[np.arange(ROWS), np.clip(columns, 0, 3)], 0)
    assert np.array_equal(read(x, {"x": X, "columns": columns}, {}), expected)


def test_an_index_with_a_shared_and_a_new_axis() -> None:
    """Per row, a few columns: the shared axis stays where it was."""
    columns = np.array([[i % 4, (3 * i) % 6 - 1] for i in range(ROWS)])
    x = rows().gather("lanes", Tensor("columns", "rows picked", (ROWS, 2), "int64"))
    assert x.names == ("rows", "picked")
    valid = (columns >= 0) & (columns < LANES)
    expected = np.where(valid, X[np.arange(ROWS)[:, None], np.clip(columns, 0, 3)], 0)
    assert np.array_equal(read(x, {"x": X, "columns": columns}, {}), expected)


def test_gathers_do_not_change_their_tensor() -> None:
    x, index = rows(), ids()
    first, second = x.gather("rows", index), x.gather("rows", index.index() // 2)
    third = first.tile((2, 2))
    assert np.array_equal(read(first, MEMORY, {}), FOUND)
    half = np.where((IDS >= 0)[:, None], X[np.clip(IDS // 2, 0, 9)], 0)
    assert np.array_equal(read(second, MEMORY, {}), half)
    assert read(third, MEMORY, {}).shape == (4, 2, 2, 2)
    assert np.array_equal(read(x, MEMORY, {}), X)


def test_rows_past_31_bits() -> None:
    """Offsets of a cache of 2^34 elements, by slots past 2^31."""
    cache = Tensor("cache", "blocks rows lanes", (1 << 26, 64, 4))
    x = paged_rows(cache, ids("slots", count=4).index(), 64)
    slots = np.array([(1 << 32) - 1, 1 << 31, (1 << 31) - 1, 5])
    levels, env, _ = grid(x, {})
    place, _ = x.locate(*levels)
    at = sum((p * s for p, s in zip(place, cache.source.strides, strict=True)), const(0))
    got = at.evaluate(env, lambda atom: slots.reshape(-1, 1))
    assert got[:, 3].tolist() == [int(s) * 4 + 3 for s in slots]
