"""What the kernels of the fused mixture of experts share: sizes, tensors and checks."""

from __future__ import annotations

from tilewright.applications.moe import (
    gated_by_gelu,
    gated_by_gelu_tanh,
    gated_by_silu,
    gated_by_swigluoai,
)
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Flag, Requirement, Scalar
from tilewright.tensor import Tensor

MOST = 1 << 20  # columns and inner sizes up to which offsets within a row are small
FAR = 1 << 40  # elements that a stride may be

num_tokens = Size("num_tokens")
top_k = Size("top_k", "constexpr", low=1, high=64)
slot_lanes = Size("slot_lanes", "constexpr", low=1, high=64)  # top_k, rounded up to a power of two
num_rows = Size("num_rows")  # of x
num_routed = Size("num_routed")
num_experts = Size("num_experts")
num_global_experts = Size("num_global_experts")
columns_of_w = Size("columns_of_w", high=2 * MOST)
size_n = Size("size_n", "constexpr", high=MOST)
size_k = Size("size_k", "constexpr", high=MOST)
num_sorted = Size("num_sorted")
block_size = Size("block_size", "constexpr", low=16, high=256, divides=(num_sorted.expr,))

expert_stride, column_stride, k_stride = (Size(f"w_{name}_stride", high=FAR) for name in ("expert", "column", "k"))
weight_strides = tuple(Size(f"topk_weights_{name}_stride", high=FAR) for name in ("token", "slot"))
id_strides = tuple(Size(f"topk_ids_{name}_stride", high=FAR) for name in ("token", "slot"))

FLOATS = "bfloat16|float16|float32"
x = Tensor("hidden_states", "tokens k", (num_rows, size_k), FLOATS)
w = Tensor("expert_weights", "experts columns k", (num_experts, columns_of_w, size_k), "like:hidden_states",
           (expert_stride, column_stride, k_stride))  # fmt: skip
bias = Tensor("expert_bias", "experts columns", (num_experts, columns_of_w), "like:hidden_states")
topk_weights = Tensor("topk_weights", "tokens slots", (num_tokens, top_k), "float32|bfloat16|float16", weight_strides)
topk_ids = Tensor("topk_ids", "tokens slots", (num_tokens, top_k), "int32|int64", id_strides)
expert_map = Tensor("expert_map", "experts", (num_global_experts,), "int32")
sorted_token_ids = Tensor("sorted_token_ids", "rows", (num_sorted,), "int32")
expert_ids = Tensor("expert_ids", "blocks", (Size("num_blocks"),), "int32")
num_tokens_post_pad = Tensor("num_tokens_post_pad", "one", (1,), "int32")
out = Tensor("out", "routed columns", (num_routed, size_n), "like:hidden_states")

QUANTITIES = {
    "rows": "num_routed", "block": "block_size", "columns": "size_n", "k": "size_k",
    "bytes": "hidden_states.element_size()",  # float32 has no matrix unit, and half the room
    "odd": "int(size_n % 32 != 0 or size_k % 32 != 0)",  # no tile divides: masks take registers
}  # fmt: skip

ROUTED = num_tokens.expr * top_k
routed_out = out.view("out", "routed columns", (ROUTED, size_n), (size_n, 1), "like:hidden_states")


def plain_weights() -> tuple[Tensor, Tensor]:
    """w [experts, columns, k] and bias [experts, columns], of as many columns as out."""
    strides = (expert_stride, column_stride, k_stride)
    return (
        w.view("expert_weights", "experts columns k", (num_experts, size_n, size_k), strides, "like:hidden_states"),
        bias.view("expert_bias", "experts columns", (num_experts, size_n), (size_n, 1), "like:hidden_states"),
    )


def gated_weights(activation: str) -> tuple[Tensor, Tensor]:
    """As `plain_weights`, of twice the columns: those of the gate before those it gates, or each beside its own."""
    interleaved = activation in INTERLEAVED
    names, sizes = "experts side columns", (num_experts, 2, size_n)

    def strides(column: Size | int) -> tuple[Expr | Size | int, ...]:
        return (column, column * 2) if interleaved else (size_n.expr * column, column)

    of_w = (expert_stride, *strides(column_stride.expr), k_stride)
    return (
        w.view("expert_weights", f"{names} k", (*sizes, size_k), of_w, "like:hidden_states"),
        bias.view("expert_bias", names, sizes, (size_n.expr * 2, *strides(1)), "like:hidden_states"),
    )


INTERLEAVED = ("swigluoai",)  # activations whose gate and up columns come in turn
SLOT_LANES = "1 << (topk_ids.shape[1] - 1).bit_length()"
ACTIVATIONS = Flag("activation", values=("silu", "gelu", "gelu_tanh", "swigluoai"))
BIASED = Flag("biased", "expert_bias is not None")
MAPPED = Flag("mapped", "expert_map is not None")
WEIGHTED = Flag("apply_router_weight", words={True: "weighted"})
GATED_BY = {"gelu": gated_by_gelu, "gelu_tanh": gated_by_gelu_tanh, "swigluoai": gated_by_swigluoai}

X, W, BIAS = Argument(x), Argument(w, layout="strided"), Argument(bias, optional=True)
WEIGHTS, IDS = Argument(topk_weights, layout="strided"), Argument(topk_ids, layout="strided")
EXPERT_MAP, OUT = Argument(expert_map, optional=True), Argument(out, mutated=True)
ALIGNMENT = (Argument(sorted_token_ids), Argument(expert_ids), Argument(num_tokens_post_pad))
BLOCK_SIZE = Scalar("block_size", block_size)

PER_TOKEN = Requirement(
    "ShapeError", "hidden_states.shape[0] == topk_weights.shape[0]",
    "hidden_states has tokens={hidden_states.shape[0]}, topk_weights has {topk_weights.shape[0]}",
    ("hidden_states", "topk_weights"),
)  # fmt: skip
ALL_ROUTED = Requirement(
    "ShapeError", "out.shape[0] == topk_weights.shape[0] * topk_weights.shape[1]",
    "out has routed={out.shape[0]}, topk_weights has {topk_weights.shape[0]} tokens x {topk_weights.shape[1]} slots",
    ("out", "topk_weights"),
)  # fmt: skip
ALIGNED = (
    Requirement(
        "ContractError", "block_size in (16, 32, 64, 128, 256)",
        "block_size is {block_size}, 16, 32, 64, 128 or 256 is needed",
    ),
    Requirement(
        "ShapeError", "block_size > 0 and sorted_token_ids.shape[0] % block_size == 0",
        "sorted_token_ids has rows={sorted_token_ids.shape[0]}, a multiple of block_size {block_size} is needed",
        ("sorted_token_ids",),
    ),
    Requirement(
        "ShapeError", "block_size > 0 and expert_ids.shape[0] >= sorted_token_ids.shape[0] // block_size",
        "expert_ids has blocks={expert_ids.shape[0]}, {sorted_token_ids.shape[0]} sorted rows in blocks of "
        "{block_size} need more", ("sorted_token_ids", "expert_ids"),
    ),
)  # fmt: skip


def columns(count: int) -> Requirement:
    """w has `count` columns for each of out."""
    times = f"{count} * " if count > 1 else ""
    return Requirement(
        "ShapeError", f"expert_weights.shape[1] == {times}out.shape[1]",
        f"expert_weights has columns={{expert_weights.shape[1]}}, {times}{{out.shape[1]}} columns of out are needed",
        ("expert_weights", "out"),
    )  # fmt: skip


def gated_branch(name: str, arrange: object, **more: object) -> Branch:
    """A branch whose application is the activation's."""
    return Branch(name, arrange, gated_by_silu, by="activation", instead=GATED_BY, **more)  # type: ignore[arg-type]
