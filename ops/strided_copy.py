"""A copy between two layouts of a batch of matrices."""

from __future__ import annotations

from typing import Any

from tilewright.applications.copy import copy
from tilewright.arrangements.token_columns import matrix_tiles
from tilewright.expr import Expr, Size
from tilewright.kernel import Argument, Branch, Kernel
from tilewright.launch import operator
from tilewright.tensor import Tensor

AXES = "outers middles inners rows columns"
# Constexpr where a mask may test them: how the compiler then knows that what is left of a row is a whole vector.
SIZES = tuple(Size(f"num_{axis}", "constexpr" if axis in ("rows", "columns") else "runtime") for axis in AXES.split())


def _strided(name: str, dtype: str) -> Tensor:
    strides = [Size(f"{name}_{axis[:-1]}_stride", high=1 << 40) for axis in AXES.split()]
    return Tensor(name, AXES, SIZES, dtype, strides)


x, out = _strided("x", "uint8|int16|int32|int64"), _strided("out", "like:x")


def arrange(rows: Expr, columns: Expr) -> dict[str, Any]:
    """A program takes `rows` by `columns` of one matrix; where x has its rows side by side, the tile is turned."""
    source, target = matrix_tiles(x, out, rows=rows, columns=columns)
    return {"x": source, "out": target}


kernel = Kernel(
    name="strided_copy",
    arguments=(Argument(x, layout="strided"), Argument(out, layout="strided", mutated=True)),
    branches=(Branch("copy", arrange, copy),),
    divides={"rows": (SIZES[3],), "columns": (SIZES[4],)},
    quantities={
        "turned": "int(x.stride(4) != 1 and x.shape[3] > 1)", "columns": "num_columns", "bytes": "x.element_size()"
    },
)


@operator(kernel)
def strided_copy(x: Any, out: Any) -> None:
    """out = x, bit for bit, between any two layouts of [outers, middles, inners, rows, columns].

    Accesses are wide where out has unit stride along columns, and x along columns or along rows.

    Args:
        x: five axes, uint8, int16, int32 or int64, any strides; read only.
        out: x's shape and dtype, any strides under which no two elements lie on each other; written. It may share no
            memory with x.

    Raises:
        ContractError: or its subclass for shapes, dtypes or devices, before anything is written.
    """
