"""Operators of other kinds: fills without a literal, lanes that pad a tile, names that the module has taken."""

# ruff: noqa: F841  (assigning to a tile stores it)

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright.ops  # noqa: F401  (declares them)
from tilewright import interpret, vendors
from tilewright.arrange import cut
from tilewright.errors import TilewrightError
from tilewright.expr import Size
from tilewright.kernel import Argument, Branch, Kernel, forced
from tilewright.language import Tile, exp, inside, max, position, sum, where
from tilewright.launch import OPERATORS
from tilewright.module import module_text
from tilewright.tensor import Tensor

COLUMNS = 50
INFINITY = float("inf")


def loaded(
    application: Callable[..., None], fill: float | None = None, size: str = "num_rows", x: str = "x",
    place: Callable[[Tensor], Tensor] = lambda t: t,
) -> types.ModuleType:  # fmt: skip
    """The module of an application to x [rows, cols], arranged by `place`, and y alike, four rows a program."""
    rows_of_x = Size(size)
    tensors = [Tensor(name, "rows cols", (rows_of_x, COLUMNS)) for name in (x, "y")]

    def arrange(rows: Any) -> dict[str, Any]:
        given = place(tensors[0] if fill is None else tensors[0].filled(fill))
        return dict(zip(("x", "y"), cut((given, tensors[1]), program={"rows": rows}), strict=True))

    space: dict[str, Any] = {}
    exec(f"def operator({x}, y):\n    'y of x'", space)
    kernel = Kernel(
        "operator", (Argument(tensors[0]), Argument(tensors[1], mutated=True)), (Branch("rows", arrange, application),),
        quantities={"rows": size},
    )  # fmt: skip
    rules = forced({"rows": 4, "num_warps": 1, "num_stages": 1})
    text = module_text(kernel, space["operator"], vendors.load("nvidia-h200"), rules)
    return interpret.load(text, "review", f"<{application.__name__} {fill} {size} {x} {place}>")


def ran(module: types.ModuleType) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(0)) - 5
    y = torch.full_like(x, torch.nan)
    module.operator(x, y)
    return x, y


def softmax(x: Tile, y: Tile) -> None:
    e = exp(x - max(x, "cols"))
    y = e / sum(e, "cols")


def count(x: Tile, y: Tile) -> None:
    y = sum(where(position("cols") >= 10, 1.0, 0.0), "cols") + x * 0.0


def clipped(x: Tile, y: Tile) -> None:
    y = where(x > -5.0, x, -INFINITY)


def twice(x: Tile, y: Tile) -> None:
    y = x * 2.0


def test_softmax_of_a_padded_row_filled_with_minus_infinity() -> None:
    x, y = ran(loaded(softmax, fill=-INFINITY))
    torch.testing.assert_close(y, x.softmax(1))


def test_an_infinite_number_in_an_application() -> None:
    x, y = ran(loaded(clipped))
    assert torch.equal(y, torch.where(x > -5, x, -INFINITY))


def test_padded_lanes_do_not_count() -> None:
    _, y = ran(loaded(count))
    assert (y == COLUMNS - 10).all()


@pytest.mark.parametrize("size", ["num_rows", "programs", "device", "rule", "kernel", "config", "x", "torch"])
def test_a_size_may_have_any_name_or_is_refused(size: str) -> None:
    try:
        module = loaded(twice, size=size)
    except TilewrightError:
        return
    x, y = ran(module)
    assert torch.equal(y, x * 2)


@pytest.mark.parametrize("name", ["x", "pid", "tl", "num_rows", "device", "rule", "kernel", "programs", "fits"])
def test_an_argument_may_have_any_name_or_is_refused(name: str) -> None:
    try:
        module = loaded(twice, x=name)
    except TilewrightError:
        return
    x, y = ran(module)
    assert torch.equal(y, x * 2)


def thrice(x: Tile) -> Tile:
    z = x * 2.0
    return z + x


def again(x: Tile, y: Tile) -> None:
    a = x + 1.0
    b = thrice(a * 2.0)
    a = a + 3.0
    c = thrice(a * 2.0)
    y = b * 16.0 + c


def test_what_was_kept_of_a_variable_is_forgotten_when_it_changes() -> None:
    x, y = ran(loaded(again))
    torch.testing.assert_close(y, (x + 1) * 6 * 16 + (x + 4) * 6)


def copied(x: Tile, y: Tile) -> None:
    y = x


def transposed_in_pieces(x: Tensor) -> Tensor:
    """The columns of x one after another, cut into pieces as long as a row."""
    return x.permute(("cols", "rows")).flatten(0, 2, name="at").split("at", rows=-1, cols=COLUMNS)


def test_a_division_whose_numerator_moves_along_two_axes() -> None:
    x, y = ran(loaded(copied, place=transposed_in_pieces))
    assert torch.equal(y.flatten(), x.T.flatten())


def where_inside(x: Tile, y: Tile) -> None:
    y = where(inside(x, "cols"), 1.0, 0.0) + where(inside(y, "rows"), 0.5, 0.0) + x * 0.0


def test_inside_is_true_where_a_tile_has_elements() -> None:
    """x ends ten columns before its tile does, which reads the fill there; y fills its own."""
    x, y = ran(loaded(where_inside, fill=3.0, place=lambda t: t[:, :40].pad([(0, 0), (0, 10)])))
    expected = torch.tensor([1.5] * 40 + [0.5] * 10).expand_as(y)
    assert torch.equal(y, expected)


def test_a_sum_of_offsets_past_31_bits_is_wide() -> None:
    """Each product stays below 2^31, their sum does not."""
    a, b = Size("a_size", high=100000), Size("b_size", high=100000)
    made = [Tensor(name, "as bs cols", (a, b, 64), strides=(20000, 20000, 1)) for name in ("x", "y")]

    def arrange(rows: Any) -> dict[str, Any]:
        return dict(zip(("x", "y"), cut(tuple(made), program={"as": rows, "bs": 1}), strict=True))

    kernel = Kernel("copy", tuple(map(Argument, made)), (Branch("rows", arrange, copied),))
    source = kernel.branch(0, vendors.load("nvidia-h200").lowering, {"rows": 1}).source
    assert source.count(".to(tl.int64)") == 1
    assert "as_1 = " in source  # an axis called `as` has no variable of that name


@pytest.mark.parametrize("profile", ["nvidia-h200", "metax-c550", "generic"])
def test_a_nan_is_tested_for_where_the_compilers_maximum_is_not_known(profile: str) -> None:
    source = OPERATORS["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"].source(profile)
    known = vendors.load(profile).lowering["nan_max"] == "ignored"
    assert ("tl.where(values == values, values, -float(\"inf\"))" in source) != known
    assert ("tl.maximum(x, -448.0)" in source) == known
    assert known == (profile == "nvidia-h200")


def test_a_launch_makes_the_tensors_device_current() -> None:
    for operator in OPERATORS.values():
        source = operator.source("nvidia-h200")
        guarded = source.split("        with torch.get_device_module(device).device(device):\n", 1)[1]
        assert guarded.lstrip().startswith("_launch(")
