"""The sum of each token's routed rows."""

from __future__ import annotations

from typing import Any

from tilewright.applications.moe_sum import sum_slots
from tilewright.arrangements.token_columns import token_columns
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Flag, Kernel
from tilewright.launch import operator
from tilewright.tensor import Tensor

num_tokens = Size("num_tokens")
top_k = Size("top_k", "constexpr", low=1, high=64)
slot_lanes = Size("slot_lanes", "constexpr", low=1, high=64)  # top_k, rounded up to a power of two
num_columns = Size("num_columns", "constexpr", low=1, high=1 << 20)

routed = Tensor(
    "input", "tokens slots columns", (num_tokens, top_k, num_columns), "bfloat16|float16|float32",
    (Size("token_stride", high=1 << 40), Size("slot_stride", high=1 << 40), Size("column_stride", high=1 << 40)),
)  # fmt: skip
summed = Tensor("output", "tokens columns", (num_tokens, num_columns), "like:input")


def arrange(tokens: Expr, columns: Expr, *, padded: bool = False) -> dict[str, Any]:
    """A program takes `tokens` tokens by `columns` columns, and all slots of each."""
    x = routed.pad(((0, 0), (0, slot_lanes.expr - top_k if padded else 0), (0, 0)))
    x, out = token_columns(x, summed, tokens=tokens, columns=columns)
    return {"x": x, "out": out}


kernel = Kernel(
    name="moe_sum",
    arguments=(Argument(routed, layout="strided"), Argument(summed, mutated=True)),
    branches=(Branch("sum_slots", arrange, sum_slots),),
    divides={"columns": (num_columns,)},
    derived={"slot_lanes": "1 << (input.shape[1] - 1).bit_length()"},
    flags=(Flag("padded", "input.shape[1] & (input.shape[1] - 1) != 0"),),
    quantities={"tokens": "num_tokens", "slots": "top_k", "columns": "num_columns"},
)


@operator(kernel)
def moe_sum(input: Any, output: Any) -> None:
    """output[t] = sum over slots s of input[t, s], in float32, in an order that only the shapes decide; one rounding.

    Args:
        input: [tokens, top_k, hidden] bfloat16, float16 or float32, any strides, top_k up to 64; read only.
        output: [tokens, hidden], input's dtype, contiguous; written. It may share no memory with input.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33, `moe_sum`.
    """
