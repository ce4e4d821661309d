"""Rows of a mixture of experts: which row of x, which expert and which row of out belong together.

A routed row is one token with one of its experts: row i is token `i // top_k`, slot `i % top_k`. An alignment lists the
routed rows by expert, each expert's padded to whole blocks; without one, routed rows are taken as they come.
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.arrange import cut, named
from tilewright.expr import wrap
from tilewright.tensor import Axis, IndexTensor, SizeLike, Tensor, computed

Tiles = dict[str, Tensor]


def aligned_tiles(
    x: Tensor, w: Tensor, bias: Tensor, weight: Tensor, out: Tensor, sorted_ids: Tensor, expert_ids: Tensor,
    shared_by: SizeLike, top_k: SizeLike, block: SizeLike, columns: SizeLike, k: SizeLike,
) -> Tiles:  # fmt: skip
    """A program takes a block of sorted rows by `columns` columns, in steps of `k`.

    x [tokens, k] has a row for `shared_by` routed rows; w [experts, .., columns, k] and bias [experts, .., columns] are
    those of the block's expert; weight [tokens, slots]; out [routed, columns] is scattered to the rows that were
    gathered. Sorted ids past the last routed row are padding. Of a block whose expert is negative or not there, nothing
    is read.
    """
    rows = sorted_ids.index(name="routed_row", negative="never")
    at_block = computed(sorted_ids.axes, lambda row: row // block)
    expert = expert_ids.gather("blocks", at_block).index(name="expert")
    tiles = {
        "x": x.gather("tokens", rows // shared_by).where(expert, w.shape[0]),
        "w": w.gather("experts", expert),
        "bias": bias.gather("experts", expert),
        "weight": by_routed_row(weight, rows, top_k).where(expert, w.shape[0]),
        "out": out.gather("routed", rows),
    }
    return cut_rows(tiles, block, columns, k)


def listed_tiles(
    x: Tensor, w: Tensor, bias: Tensor, weight: Tensor, out: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    num_routed: SizeLike, top_k: SizeLike, columns: SizeLike, k: SizeLike,
) -> Tiles:  # fmt: skip
    """A program takes one routed row by `columns` columns, in steps of `k`; as `aligned_tiles`, without an alignment.

    topk_ids [tokens, slots] names each row's expert, through expert_map [experts] if there is one; of a row whose
    expert is negative or not there, nothing is read.
    """
    rows = computed((Axis("rows", wrap(num_routed)),), lambda row: row)
    expert = expert_of(by_routed_row(topk_ids, rows, top_k), expert_map)
    tiles = {
        "x": x.gather("tokens", rows // top_k).where(expert, w.shape[0]),
        "w": w.gather("experts", expert),
        "bias": bias.gather("experts", expert),
        "weight": by_routed_row(weight, rows, top_k).where(expert, w.shape[0]),
        "out": out.rename(routed="rows"),
    }
    return cut_rows(tiles, 1, columns, k)


def token_tiles(
    x: Tensor, w: Tensor, bias: Tensor, weight: Tensor, out: Tensor, topk_ids: Tensor, expert_map: Tensor | None,
    lanes: SizeLike, columns: SizeLike, k: SizeLike,
) -> Tiles:  # fmt: skip
    """A program takes one token, all its slots (over `lanes` lanes), by `columns` columns, in steps of `k`.

    x [tokens, slots, k] has a row for each slot; out [tokens, columns] one for each token.
    """
    expert = expert_of(topk_ids, expert_map)
    extra = wrap(lanes) - topk_ids.shape[1]

    def padded(t: Tensor) -> Tensor:
        return t.pad([(0, extra if axis.name == "slots" else 0) for axis in t.axes])

    tiles = {
        "x": padded(x.where(expert, w.shape[0])),
        "w": padded(w.gather("experts", expert)),
        "bias": padded(bias.gather("experts", expert)),
        "weight": padded(weight.where(expert, w.shape[0])),
        "out": out,
    }
    return named(tiles, cut(tuple(tiles.values()), program={"tokens": 1, "columns": columns}, steps={"k": k}))


def cut_rows(tiles: Mapping[str, Tensor], rows: SizeLike, columns: SizeLike, k: SizeLike) -> Tiles:
    """Programs of `rows` rows by `columns` columns, in steps of `k`."""
    return named(tiles, cut(tuple(tiles.values()), program={"rows": rows, "columns": columns}, steps={"k": k}))


def by_routed_row(x: Tensor, rows: IndexTensor, top_k: SizeLike) -> Tensor:
    """x [tokens, slots] by routed row."""
    return x.gather("tokens", rows // top_k).gather("slots", rows % top_k)


def expert_of(topk_ids: Tensor, expert_map: Tensor | None) -> IndexTensor:
    """Which expert each of topk_ids means: none where the id, or what it is mapped to, is negative or too large."""
    ids = topk_ids.index(name="expert")
    if expert_map is None:
        return ids
    return expert_map.gather("experts", ids).index(name="local_expert")
