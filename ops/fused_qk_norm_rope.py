"""RMSNorm and rotation of the query and key heads of packed qkv, in place."""

from __future__ import annotations

from typing import Any

from tilewright.applications.qk_norm_rope import qk_head
from tilewright.arrangements.rope import half_pairs, leading_half_pairs, leading_tables, neighbour_pairs
from tilewright.arrangements.token_heads import token_heads
from tilewright.expr import Expr, Size, at_least
from tilewright.kernel import Argument, Branch, Flag, Kernel, Requirement, Scalar
from tilewright.launch import operator
from tilewright.tensor import Tensor, computed, stack

num_tokens = Size("num_tokens")
num_heads_q = Size("num_heads_q", "constexpr", high=16384)
num_heads_k = Size("num_heads_k", "constexpr", high=16384)
head_dim = Size("head_dim", "constexpr", low=16, high=512)
half_head = Size("half_head", "constexpr", low=8, high=256)
half_rotary = Size("half_rotary", "constexpr", low=1, high=256)
pair_lanes = Size("pair_lanes", "constexpr", low=8, high=256)  # half_head, rounded up to a power of two
num_positions = Size("num_positions")
row_stride = Size("row_stride", high=1 << 40)
DIM = half_head.expr * 2

qkv = Tensor("qkv", "tokens columns", (num_tokens, Size("columns")), "bfloat16|float16", (row_stride, 1))
q_weight = Tensor("q_weight", "dim", (head_dim,), "like:qkv")
k_weight = Tensor("k_weight", "dim", (head_dim,), "like:qkv")
cos_sin_cache = Tensor(
    "cos_sin_cache", "positions rotary", (num_positions, Size("rotary_dim")), "float32|bfloat16|float16"
)
position_ids = Tensor("position_ids", "tokens", (num_tokens,), "int64|int32", (Size("position_stride"),))

rotated = qkv.view(
    "heads_of_qkv", "tokens heads dim", (num_tokens, num_heads_q.expr + num_heads_k.expr, DIM), (row_stride, DIM, 1),
    "like:qkv",
)  # fmt: skip


def arrange(tokens: Expr, heads: Expr, *, is_neox: bool = True, rotation: str = "whole") -> dict[str, Any]:
    """A program takes `tokens` tokens by `heads` query or key heads, each with its weight."""
    weights = stack(*(w.view(w.name, "dim", (DIM,), (1,), "like:qkv") for w in (q_weight, k_weight)),
                    axis="kind", name="weight_of_head")  # fmt: skip
    is_key = computed(rotated.axes[1:2], lambda head: at_least(head, num_heads_q))
    rotating = half_head if rotation == "whole" else half_rotary
    table = cos_sin_cache.view(
        "cos_sin_cache", "positions rotary", (num_positions, rotating.expr * 2), (rotating.expr * 2, 1),
        cos_sin_cache.source.dtype,
    )  # fmt: skip
    positions = position_ids.index(name="position", above="never", negative="never")
    lanes = pair_lanes if rotation == "uneven" else half_head
    cos, sin = leading_tables(table, positions, lanes)
    x, weight = (_paired(t, is_neox, rotation) for t in (rotated, weights.gather("kind", is_key)))
    x, weight, cos, sin = token_heads(x, weight, cos, sin, tokens=tokens, heads=heads)
    return {"x": x, "weight": weight, "cos": cos, "sin": sin, "dim": DIM, "eps": "eps"}


def _paired(x: Tensor, is_neox: bool, rotation: str) -> Tensor:
    """Lanes by pair and side; where half a head is no power of two, over a power of two of pairs."""
    if not is_neox:
        paired = neighbour_pairs(x)
    elif rotation == "whole":
        paired = half_pairs(x)
    else:
        paired = leading_half_pairs(x, half_rotary, half_head)
    if rotation != "uneven":
        return paired
    extra = pair_lanes.expr - half_head
    return paired.pad([(0, extra if axis.name == "pairs" else 0) for axis in paired.axes])


def _one_token(heads: int) -> dict[str, int]:
    return {"tokens": 1, "heads": heads, "num_warps": 1, "num_stages": 1}


kernel = Kernel(
    name="fused_qk_norm_rope",
    arguments=(
        Argument(qkv, layout="rows", mutated=True),
        Scalar("num_heads_q", num_heads_q),
        Scalar("num_heads_k", num_heads_k),
        Scalar("num_heads_v", integer=True),
        Scalar("head_dim", head_dim),
        Scalar("eps"),
        Argument(q_weight),
        Argument(k_weight),
        Argument(cos_sin_cache),
        Flag("is_neox", values=(True, False), words={False: "gptj"}),
        Argument(position_ids, layout="strided"),
        Scalar("forced_token_heads_per_warp", integer=True),
    ),
    branches=(Branch("qk_head", arrange, qk_head),),
    divides={"heads": (num_heads_q, num_heads_k)},
    refits={"heads": "tokens"},
    derived={
        "row_stride": "qkv.stride(0)",
        "half_head": "head_dim // 2",
        "half_rotary": "cos_sin_cache.shape[1] // 2",
        "pair_lanes": "1 << (head_dim // 2 - 1).bit_length()",
    },
    flags=(
        Flag(
            "rotation",
            '"uneven" if head_dim & (head_dim - 1) != 0 else "partial" if cos_sin_cache.shape[1] < head_dim '
            'else "whole"',
            values=("whole", "partial", "uneven"),
        ),
    ),
    quantities={"tokens": "num_tokens", "units": "num_tokens * (num_heads_q + num_heads_k)"},
    forces=("forced_token_heads_per_warp", {heads: _one_token(heads) for heads in (1, 2, 4, 8)}),
    requirements=(
        *(
            Requirement("ShapeError", f"{n} >= 0", f"{n} is {{{n}}}, at least 0 is needed")
            for n in ("num_heads_q", "num_heads_k", "num_heads_v")
        ),
        *(
            Requirement("ShapeError", f"{n} <= 16384", f"{n} is {{{n}}}, at most 16384 is supported")
            for n in ("num_heads_q", "num_heads_k")
        ),
        Requirement(
            "ShapeError", "16 <= head_dim <= 512 and head_dim % 16 == 0",
            "head_dim is {head_dim}, a multiple of 16 up to 512 is needed",
        ),
        Requirement(
            "ShapeError", "qkv.shape[1] == (num_heads_q + num_heads_k + num_heads_v) * head_dim",
            "qkv has {qkv.shape[1]} columns, {num_heads_q} + {num_heads_k} + {num_heads_v} heads of {head_dim} need "
            "{(num_heads_q + num_heads_k + num_heads_v) * head_dim}",
            ("qkv",),
        ),
        Requirement(
            "LayoutError", "qkv.shape[0] < 2 or qkv.stride(0) >= qkv.shape[1]",
            "qkv has rows of {qkv.shape[1]} columns {qkv.stride(0)} apart: they overlap",
            ("qkv",),
        ),
        Requirement(
            "ShapeError", "cos_sin_cache.shape[1] % 2 == 0 and 2 <= cos_sin_cache.shape[1] <= head_dim",
            "cos_sin_cache has rotary={cos_sin_cache.shape[1]}, an even number from 2 to head_dim {head_dim} is needed",
            ("cos_sin_cache",),
        ),
        Requirement(
            "ContractError", "forced_token_heads_per_warp <= 0 or forced_token_heads_per_warp in (1, 2, 4, 8)",
            "forced_token_heads_per_warp is {forced_token_heads_per_warp}, 1, 2, 4, 8 or at most 0 is needed",
        ),
    ),
)  # fmt: skip


@operator(kernel)
def fused_qk_norm_rope(
    qkv: Any, num_heads_q: int, num_heads_k: int, num_heads_v: int, head_dim: int, eps: float, q_weight: Any,
    k_weight: Any, cos_sin_cache: Any, is_neox: bool, position_ids: Any, forced_token_heads_per_warp: int = -1,
) -> None:  # fmt: skip
    """Every query and key head of qkv becomes rotate(rms_norm(head) * weight), in place; values keep their bytes.

    In float32 with one rounding: a head is divided by sqrt(mean(head^2) + eps), multiplied by the weight of its kind,
    and its first `rotary` lanes are rotated by the position's angles: lanes i and i + rotary / 2 together (NeoX), or
    2i and 2i + 1 (GPT-J).

    Args:
        qkv: [tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim] bfloat16 or float16, rows of query, key and
            value heads; unit stride along a row, rows any distance apart that do not overlap.
        num_heads_q: query heads, 0 to 16384.
        num_heads_k: key heads, 0 to 16384.
        num_heads_v: value heads, 0 or more.
        head_dim: lanes of a head, a multiple of 16 up to 512.
        eps: added to the mean of squares.
        q_weight: [head_dim], qkv's dtype, contiguous.
        k_weight: [head_dim], qkv's dtype, contiguous.
        cos_sin_cache: [positions, rotary] float32, bfloat16 or float16, contiguous: rotary / 2 cosines, then as many
            sines; rotary is even and at most head_dim. Read in its own dtype, never written.
        is_neox: pairs of halves, else pairs of neighbours.
        position_ids: [tokens] int64 or int32, any stride, each within cos_sin_cache: the caller's word.
        forced_token_heads_per_warp: 1, 2, 4 or 8 heads of one token on one warp; 0 or less leaves it to the rules.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `_C.fused_qk_norm_rope`.
    """
