"""The gated activation as a pass of its own."""

from __future__ import annotations

from typing import Any

from tilewright.applications.moe import gelu_pairs, gelu_tanh_pairs, silu_pairs, swigluoai_pairs
from tilewright.arrange import cut
from tilewright.expr import Expr
from tilewright.kernel import Argument, Branch, Kernel, Requirement
from tilewright.launch import operator
from tilewright.ops import moe
from tilewright.tensor import Tensor

gate_up = Tensor("gate_up", "routed columns", (moe.num_routed, moe.columns_of_w), moe.FLOATS)
out = Tensor("out", "routed columns", (moe.num_routed, moe.size_n), "like:gate_up")


def arrange(columns: Expr, *, activation: str = "silu") -> dict[str, Any]:
    """A program takes one routed row by `columns` columns of gate and of up."""
    interleaved = activation in moe.INTERLEAVED
    names = "routed columns side" if interleaved else "routed side columns"
    sizes, strides = ((moe.size_n, 2), (2, 1)) if interleaved else ((2, moe.size_n), (moe.size_n, 1))
    x = gate_up.view("gate_up", names, (moe.num_routed, *sizes), (moe.size_n.expr * 2, *strides), moe.FLOATS)
    x, product = cut((x, out), program={"routed": 1, "columns": columns})
    return {"x": x, "out": product}


kernel = Kernel(
    name="moe_activate",
    arguments=(Argument(gate_up), Argument(out, mutated=True), moe.ACTIVATIONS),
    branches=(
        Branch(
            "pairs", arrange, silu_pairs, by="activation",
            instead={"gelu": gelu_pairs, "gelu_tanh": gelu_tanh_pairs, "swigluoai": swigluoai_pairs},
        ),
    ),
    divides={"columns": (moe.size_n,)},
    quantities={"rows": "num_routed", "columns": "size_n"},
    requirements=(
        Requirement(
            "ShapeError", "gate_up.shape[1] == 2 * out.shape[1]",
            "gate_up has columns={gate_up.shape[1]}, 2 * {out.shape[1]} columns of out are needed", ("gate_up", "out"),
        ),
    ),
)  # fmt: skip


@operator(kernel)
def moe_activate(gate_up: Any, out: Any, activation: str) -> None:
    """out = activation(gate) * up, in float32 with one rounding; what `moe_gemm_gated` does before it rounds.

    Args:
        gate_up: [rows, 2 * columns] bfloat16, float16 or float32, contiguous: the gate, then up; for swigluoai in turn.
        out: [rows, columns], gate_up's dtype, contiguous; written.
        activation: silu, gelu, gelu_tanh or swigluoai.

    Raises:
        ContractError: or its subclass for shapes, dtypes, layouts or devices, before anything is written.

    Contract: vLLM 0.33's activations, which round silu(gate) before the product; this does not.
    """
