"""Products of routed rows with their experts' weights, and what is done with them before they are rounded once.

x [rows, k] or [k] and w [.., columns, k] in steps of k; bias [.., columns]; weight [rows] or none. Whether a program
has a block of rows or one row is the arrangement's affair, as is whether gate and up lie side by side or in turn.
"""

from __future__ import annotations

from tilewright.applications.activations import gelu, gelu_tanh, silu, swigluoai
from tilewright.language import Tile, dot, float32, split, steps, sum


def routed_rows(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = (x @ w^T + bias) * weight."""
    out = product(x, w, bias, weight, biased, weighted)


def gated_by_silu(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = silu(gate) * up, of gate, up = (x @ w^T + bias) * weight."""
    gate, up = split(product(x, w, bias, weight, biased, weighted), "side")
    out = silu(gate) * up


def gated_by_gelu(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = gelu(gate) * up, of gate, up = (x @ w^T + bias) * weight."""
    gate, up = split(product(x, w, bias, weight, biased, weighted), "side")
    out = gelu(gate) * up


def gated_by_gelu_tanh(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = gelu_tanh(gate) * up, of gate, up = (x @ w^T + bias) * weight."""
    gate, up = split(product(x, w, bias, weight, biased, weighted), "side")
    out = gelu_tanh(gate) * up


def gated_by_swigluoai(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = swigluoai(gate, up), of gate, up = (x @ w^T + bias) * weight."""
    gate, up = split(product(x, w, bias, weight, biased, weighted), "side")
    out = swigluoai(gate, up)


def product(x: Tile, w: Tile, bias: Tile, weight: Tile, biased: bool, weighted: bool) -> Tile:
    """(x @ w^T + bias) * weight, in float32."""
    acc = 0.0
    for step in steps(x):
        acc = acc + dot(x[step], w[step])
    if biased:
        acc = acc + float32(bias)
    if weighted:
        acc = acc * float32(weight)
    return acc


def combined_rows(x: Tile, w: Tile, bias: Tile, weight: Tile, out: Tile, biased: bool, weighted: bool) -> None:
    """out = sum over the slots of (x @ w^T + bias) * weight.

    x [slots, k] and w [slots, columns, k] in steps of k, bias [slots, columns], weight [slots].
    """
    acc = 0.0
    for step in steps(x):
        acc = acc + float32(x[step]) * float32(w[step])
    acc = sum(acc, "k")
    if biased:
        acc = acc + float32(bias)
    if weighted:
        acc = acc * float32(weight)
    out = sum(acc, "slots")


def silu_pairs(x: Tile, out: Tile) -> None:
    """out = silu(gate) * up of the two sides of x."""
    gate, up = split(float32(x), "side")
    out = silu(gate) * up


def gelu_pairs(x: Tile, out: Tile) -> None:
    """out = gelu(gate) * up of the two sides of x."""
    gate, up = split(float32(x), "side")
    out = gelu(gate) * up


def gelu_tanh_pairs(x: Tile, out: Tile) -> None:
    """out = gelu_tanh(gate) * up of the two sides of x."""
    gate, up = split(float32(x), "side")
    out = gelu_tanh(gate) * up


def swigluoai_pairs(x: Tile, out: Tile) -> None:
    """out = swigluoai(gate, up) of the two sides of x."""
    gate, up = split(float32(x), "side")
    out = swigluoai(gate, up)
