"""DeepSeek-V4's heads and cache rows: 512 lanes, of which the last 64 rotate, each with its neighbour."""

from __future__ import annotations

from tilewright.arrange import named
from tilewright.arrangements.paged_rows import paged_rows
from tilewright.arrangements.rope import neighbour_pairs, trailing_tables
from tilewright.arrangements.token_heads import token_heads, token_rows
from tilewright.expr import Expr, wrap
from tilewright.tensor import IndexTensor, SizeLike, Tensor

HEAD, ROTARY = 512, 64  # lanes of a head, of its rotating tail
PASSED, PAIRS = HEAD - ROTARY, HEAD // 2
GROUP, MX_GROUP = 64, 32  # lanes under one scale
DATA, SCALES = PASSED + 2 * ROTARY, HEAD // GROUP  # bytes of a packed row: 448 codes, 64 lanes of 2 bytes; its scales
MX_SCALES = HEAD // MX_GROUP
ROW_BYTES, MX_ROW_BYTES = DATA + SCALES, HEAD + MX_SCALES  # 584 and 528
CHUNK = 16  # lanes of a head that lie together where heads are interleaved

Tiles = dict[str, Tensor]


def heads(
    x: Tensor, out: Tensor, table: Tensor, position_ids: Tensor, tokens: SizeLike, heads: SizeLike, **more: Tensor
) -> Tiles:
    """A program takes `tokens` tokens by `heads` heads of x to the same heads of out; `more` is shared by all."""
    positions = position_ids.index(name="position", above="never", negative="never")
    cos, sin = trailing_tables(table, positions, PAIRS)
    return _heads(x, out, cos, sin, tokens, heads, **more)


def pieces(
    x: Tensor, out: Tensor, table: Tensor, position_ids: Tensor, tokens: SizeLike, heads: SizeLike
) -> Tiles:
    """As `heads` where no head is needed as a whole: interleaved ones `as_stored`, each pair with its own angle."""
    positions = position_ids.index(name="position", above="never", negative="never")
    count, run = x.shape[1], CHUNK // 2

    def pair_of_head(piece: Expr, pair: Expr) -> Expr:
        at = piece * PAIRS + pair
        return at // (count * run) * run + at % run

    cos, sin = (
        side.reindex("pairs", pair_of_head, heads=count, pairs=PAIRS)
        for side in trailing_tables(table, positions, PAIRS)
    )
    return _heads(x, out, cos, sin, tokens, heads)


def deinterleaved(x: Tensor) -> Tensor:
    """Heads of x [tokens, chunks, heads, lanes], where a token's heads alternate every `CHUNK` lanes."""
    return x.permute(("tokens", "heads", "chunks", "lanes")).flatten(2, 4, name="dim")


def as_stored(x: Tensor) -> Tensor:
    """x [tokens, chunks, heads, lanes] cut in the order of memory into pieces of a head's size."""
    return x.flatten(1, 4, name="dim").split("dim", heads=-1, dim=HEAD)


def _heads(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, tokens: SizeLike, heads: SizeLike, **more: Tensor
) -> Tiles:
    tiles = {"x": neighbour_pairs(x), "cos": cos, "sin": sin, "out": neighbour_pairs(out), **more}
    return named(tiles, token_heads(*tiles.values(), tokens=tokens, heads=heads))


def rows(
    kv: Tensor, cache: Tensor, table: Tensor, slot_mapping: Tensor, position_ids: Tensor, block_size: SizeLike,
    tokens: SizeLike, **more: Tensor,
) -> Tiles:  # fmt: skip
    """A program takes `tokens` rows of kv to the rows of cache [blocks, rows, dim] that their slots name."""
    x, slots, positions = _inserted(kv, slot_mapping, position_ids)
    cos, sin = trailing_tables(table, positions, PAIRS)
    out = paged_rows(cache, slots, block_size)
    tiles = {"x": neighbour_pairs(x), "cos": cos, "sin": sin, "out": neighbour_pairs(out), **more}
    return named(tiles, token_rows(*tiles.values(), tokens=tokens))


def packed_rows(
    kv: Tensor, cache: Tiles, table: Tensor, slot_mapping: Tensor, position_ids: Tensor, block_size: SizeLike,
    tokens: SizeLike,
) -> Tiles:  # fmt: skip
    """As `rows`, to a cache's codes and scales, lanes by the groups that share a scale.

    A cache with a tail takes the turning lanes there, as a tile of their own; one without holds codes of all lanes.
    """
    x, slots, positions = _inserted(kv, slot_mapping, position_ids)
    stored = {name: paged_rows(part, slots, block_size) for name, part in cache.items()}
    groups = cache["scales"].shape[-1]
    if "tail" in cache:
        cos, sin = trailing_tables(table, positions, ROTARY // 2)
        pairs = {"turning": x[:, PASSED:], "tail": stored["tail"]}
        tiles = {name: neighbour_pairs(t) for name, t in pairs.items()}
        grouped = {name: t.pad(((0, 0), (0, ROTARY))) for name, t in (("x", x[:, :PASSED]), ("codes", stored["codes"]))}
    else:
        cos, sin = (t.split("pairs", groups=groups, pairs=-1) for t in trailing_tables(table, positions, PAIRS))
        tiles, grouped = {}, {"x": x, "codes": stored["codes"]}
    tiles |= {name: t.split("dim", groups=groups, pairs=-1, side=2) for name, t in grouped.items()}
    tiles |= {"cos": cos, "sin": sin, "scales": stored["scales"]}
    return named(tiles, token_rows(*tiles.values(), tokens=tokens))


def gathered_rows(cache: Tiles, out: Tensor, slot_mapping: Tensor, block_size: SizeLike, tokens: SizeLike) -> Tiles:
    """The way back of `packed_rows`: a program takes `tokens` rows of the cache to rows of out [tokens, dim]."""
    slots = slot_mapping.index(name="slot", above="never")
    groups = cache["scales"].shape[-1]
    stored = {**_whole(cache, slots, block_size), "out": out}
    tiles = {
        name: t if name == "scales" else t.split("dim", groups=groups, pairs=-1, side=2) for name, t in stored.items()
    }
    return named(tiles, token_rows(*tiles.values(), tokens=tokens))


def packed_cache(
    cache: Tensor, num_blocks: SizeLike, block_size: SizeLike, block_stride: SizeLike, tail_block_stride: SizeLike,
    like: str,
) -> Tiles:  # fmt: skip
    """The parts of a cache whose blocks hold 576 bytes of data a row, then 8 bytes of scales a row.

    Strides count bytes, that of the tail its own 2-byte lanes, of the dtype of `like`.
    """
    codes = cache.view("codes", "blocks rows dim", (num_blocks, block_size, PASSED), (block_stride, DATA, 1), "uint8")
    tail = cache.view(
        "tail", "blocks rows dim", (num_blocks, block_size, ROTARY), (tail_block_stride, DATA // 2, 1), f"like:{like}",
        offset=PASSED // 2,
    )  # fmt: skip
    scales = cache.view(
        "scales", "blocks rows groups", (num_blocks, block_size, SCALES), (block_stride, SCALES, 1), "uint8",
        offset=wrap(block_size) * DATA,
    )  # fmt: skip
    return {"codes": codes, "scales": scales, "tail": tail}


def mx_cache(cache: Tensor, num_blocks: SizeLike, block_size: SizeLike, block_stride: SizeLike) -> Tiles:
    """The parts of a cache whose rows hold 512 codes and their 16 scales."""
    rows, strides = (num_blocks, block_size), (block_stride, MX_ROW_BYTES, 1)
    codes = cache.view("codes", "blocks rows dim", (*rows, HEAD), strides, "uint8")
    scales = cache.view("scales", "blocks rows groups", (*rows, MX_SCALES), strides, "uint8", offset=HEAD)
    return {"codes": codes, "scales": scales}


def _inserted(kv: Tensor, slot_mapping: Tensor, position_ids: Tensor) -> tuple[Tensor, IndexTensor, IndexTensor]:
    """The rows of kv that have a slot, their slots and positions; without a slot not even a position is read."""
    count = slot_mapping.shape[0]
    slots = slot_mapping.index(name="slot", above="never")
    positions = position_ids[:count].where(slots).index(name="position", above="never", negative="never")
    return kv[:count].where(slots), slots, positions


def _whole(cache: Tiles, slots: IndexTensor, block_size: SizeLike) -> Tiles:
    """The cache's parts by token; codes and tail over all the lanes of a row, of which each has its own."""
    parts = {name: paged_rows(part, slots, block_size) for name, part in cache.items()}
    if "tail" in parts:
        parts["codes"] = parts["codes"].pad(((0, 0), (0, ROTARY)))
        parts["tail"] = parts["tail"].pad(((0, 0), (PASSED, 0)))
    return parts
