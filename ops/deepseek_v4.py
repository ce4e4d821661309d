"""What the DeepSeek-V4 operators share: sizes, tensors that are alike in all of them, and checks."""

from __future__ import annotations

from tilewright.arrangements.deepseek_v4 import HEAD, ROTARY
from tilewright.expr import Size
from tilewright.kernel import Argument, Requirement
from tilewright.tensor import Tensor

num_tokens = Size("num_tokens")
num_inserted = Size("num_inserted", high=num_tokens.expr)
num_heads = Size("num_heads", "constexpr", low=1, high=16384)
num_positions = Size("num_positions")
num_blocks = Size("num_blocks")
block_size = Size("cache_block_size", "constexpr", low=1, high=1 << 20)
block_stride = Size("block_stride", high=1 << 40)
tail_block_stride = Size("tail_block_stride", high=1 << 40)
row_stride = Size("row_stride", high=1 << 40)

slot_mapping = Tensor("slot_mapping", "tokens", (num_inserted,), "int64", (Size("slot_stride"),))
position_ids = Tensor("position_ids", "tokens", (num_tokens,), "int64", (Size("position_stride"),))
cos_sin_cache = Tensor("cos_sin_cache", "positions rotary", (num_positions, ROTARY), "float32")

INDICES = (
    Argument(slot_mapping, layout="strided"),
    Argument(position_ids, layout="strided"),
    Argument(cos_sin_cache),
)
SLOTS = ("slot_mapping", "k_cache.shape[0] * cache_block_size")
BLOCK_SIZE = Requirement(
    "ContractError", "cache_block_size >= 1", "cache_block_size is {cache_block_size}, at least 1 is needed"
)


def row_cache(dtype: str, kernel_dtype: str | None = None) -> tuple[Argument, Tensor]:
    """k_cache [blocks, rows, dim] of whole rows, any stride but along a row, as an argument and as kernels see it."""
    shape, strides = (num_blocks, block_size, HEAD), (block_stride, row_stride, 1)
    made = [Tensor("k_cache", "blocks rows dim", shape, d, strides) for d in (dtype, kernel_dtype or dtype)]
    return Argument(made[0], layout="rows", mutated=True), made[1]


def even_cache(unless: str = "") -> tuple[Requirement, Requirement]:
    """Rotated lanes of 2 bytes lie at even addresses, in caches that have them: not where `unless` holds."""
    free = f"{unless} or " if unless else ""
    return (
        Requirement(
            "LayoutError",
            f"{free}k_cache.stride(0) % 2 == 0",
            "k_cache has a block stride of {k_cache.stride(0)} bytes, an even one is needed for its 2-byte lanes",
            ("k_cache",),
        ),
        Requirement(
            "LayoutError",
            f"{free}k_cache.storage_offset() % 2 == 0",
            "k_cache begins {k_cache.storage_offset()} bytes into its storage, an even number is needed",
        ),
    )


def fewer_slots_than(tokens_of: str) -> Requirement:
    """No more slots than the argument `tokens_of` has tokens."""
    return Requirement(
        "ShapeError",
        f"slot_mapping.shape[0] <= {tokens_of}.shape[0]",
        f"slot_mapping has {{slot_mapping.shape[0]}} slots, {tokens_of} has only {{{tokens_of}.shape[0]}} tokens",
        ("slot_mapping", tokens_of),
    )


def rows_of_a_block() -> Requirement:
    """Axis 1 of k_cache is as long as a block."""
    return Requirement(
        "ShapeError",
        "k_cache.shape[1] == cache_block_size",
        "k_cache has rows={k_cache.shape[1]}, cache_block_size is {cache_block_size}",
        ("k_cache",),
    )


def rows_apart() -> tuple[Requirement, Requirement]:
    """Rows and blocks of k_cache [blocks, rows, ...] do not overlap."""
    block = "(k_cache.shape[1] - 1) * k_cache.stride(1) + k_cache.shape[2]"
    all_blocks = "(k_cache.shape[0] - 1) * k_cache.stride(0) + k_cache.shape[2]"  # of one row, where rows hold blocks
    return (
        Requirement(
            "LayoutError",
            "k_cache.shape[1] <= 1 or k_cache.stride(1) >= k_cache.shape[2]",
            "k_cache has rows of {k_cache.shape[2]} elements {k_cache.stride(1)} apart: they overlap",
            ("k_cache",),
        ),
        Requirement(
            "LayoutError",
            f"k_cache.shape[0] <= 1 or k_cache.stride(0) >= {block} "
            f"or (k_cache.stride(0) >= k_cache.shape[2] and k_cache.stride(1) >= {all_blocks})",
            f"k_cache has blocks of {{{block}}} elements {{k_cache.stride(0)}} apart: they overlap",
            ("k_cache",),
        ),
    )
