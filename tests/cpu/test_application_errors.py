"""Mistakes in applications, arrangements and configurations: the exact texts, with file, line and caret."""

# ruff: noqa: F821, F841  (the applications here are read, never run)

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest

from tilewright import vendors
from tilewright.applications.rope import rotate
from tilewright.arrange import cut
from tilewright.errors import ApplicationError, ArrangementError, GenerationError
from tilewright.expr import Size
from tilewright.kernel import Branch, Kernel
from tilewright.language import Tile, float32, inside, rsqrt, split, sum, where
from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator
from tilewright.tensor import Tensor

NUM_ROWS = Size("num_rows")
X = Tensor("x", "rows cols", (NUM_ROWS, 64))
Y = Tensor("y", "rows cols", (NUM_ROWS, 64))
ROW = Tensor("row", "rows", (NUM_ROWS,))
HALF = Tensor("half", "rows cols", (NUM_ROWS, 64), "bfloat16")
PAIRED = Tensor("paired", "rows pairs side", (NUM_ROWS, 32, 2))


def generated(application: Callable[..., None], **parameters: Any) -> str:
    """The device function of an application to tensors that are cut by rows."""
    tensors = {name: value for name, value in parameters.items() if isinstance(value, Tensor)}

    def arrange(rows: Any) -> dict[str, Any]:
        tiles = cut(tuple(tensors.values()), program={"rows": rows})
        return {**parameters, **dict(zip(tensors, tiles, strict=True))}

    kernel = Kernel("kernel", (), (Branch("rows", arrange, application),))
    return kernel.branch(0, vendors.load("nvidia-h200").lowering).source


def refused(application: Callable[..., None], **parameters: Any) -> str:
    with pytest.raises(ApplicationError) as caught:
        generated(application, **parameters)
    return str(caught.value)


def text(function: Callable[..., Any], message: str, at: str, file: str = __file__) -> str:
    """A message that points at the first place of `function`'s text where `at` stands."""
    lines, first = inspect.getsourcelines(function)
    number, line = next((i, line.rstrip()) for i, line in enumerate(lines) if at in line)
    return (
        f"{function.__name__}: {message}\n"
        f"  {file}:{first + number}\n"
        f"    {line}\n"
        f"    {' ' * line.index(at)}^"
    )


# Words


def test_unknown_word() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = tanh(x) + 1

    message = "tanh is no word of tilewright.language and no function"
    assert refused(application, x=X, y=Y) == text(application, message, "tanh(x)")


def test_unknown_name() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = x * slope

    assert refused(application, x=X, y=Y) == text(application, "slope is not defined here", "slope")


def test_method_call() -> None:
    def application(x: Tile, row: Tile) -> None:
        row = x.sum("cols")

    message = "only words of tilewright.language and plain functions can be called"
    assert refused(application, x=X, row=ROW) == text(application, message, 'x.sum("cols")')


def test_function_of_a_module() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = math.sqrt(x)

    message = "only words of tilewright.language and plain functions can be called"
    assert refused(application, x=X, y=Y) == text(application, message, "math.sqrt")


def test_keyword_arguments_of_a_word() -> None:
    def application(x: Tile, row: Tile) -> None:
        row = sum(x, "cols", keep=True)

    assert refused(application, x=X, row=ROW) == text(application, "sum: pass its parameters by position", "sum(")


def twice(x: Tile) -> Tile:
    return x * 2


def test_keyword_arguments_of_a_function() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = twice(x=x)

    assert refused(application, x=X, y=Y) == text(application, "twice: pass its parameters by position", "twice(")


def test_wrong_number_of_operands() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = rsqrt(x, x)

    assert refused(application, x=X, y=Y) == text(application, "rsqrt takes the operands (x), not 2", "rsqrt(")


def test_wrong_number_of_parameters() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = twice(x, x)

    assert refused(application, x=X, y=Y) == text(application, "twice takes the parameters (x), not 2", "twice(")


# Arithmetic


def test_arithmetic_on_16_bit_floats() -> None:
    def application(half: Tile, y: Tile) -> None:
        y = half * 2.0

    message = "arithmetic on bfloat16: write float32(...) first, a rounding is never implied"
    assert refused(application, half=HALF, y=Y) == text(application, message, "half * 2.0")


def test_reduction_of_16_bit_floats() -> None:
    def application(half: Tile, row: Tile) -> None:
        row = 1.0 + sum(half, "cols")

    message = "arithmetic on bfloat16: write float32(...) first, a rounding is never implied"
    assert refused(application, half=HALF, row=ROW) == text(application, message, "sum(half")


def test_16_bit_floats_made_float32_first() -> None:
    def application(half: Tile, y: Tile) -> None:
        y = float32(half) * 2.0

    source = generated(application, half=HALF, y=Y)
    assert "half = tl.load(half_ptrs, mask=row_ok[:, None], other=0.0)\n" in source
    assert "half = half.to(tl.float32)\n" in source


def test_operator_without_a_meaning() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = x @ x

    message = "the operator MatMult has no meaning on tiles"
    assert refused(application, x=X, y=Y) == text(application, message, "x @ x")


def test_where_without_a_comparison() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = where(x, x, 0.0)

    message = "where() chooses by a comparison, not by x"
    assert refused(application, x=X, y=Y) == text(application, message, "where(")


# Axes and values


def test_unknown_axis() -> None:
    def application(x: Tile, row: Tile) -> None:
        row = sum(x, "lanes")

    message = "there is no axis lanes, only rows, cols"
    assert refused(application, x=X, row=ROW) == text(application, message, 'sum(x, "lanes")')


def test_reduction_without_axes() -> None:
    def application(x: Tile, row: Tile) -> None:
        row = sum(x)

    assert refused(application, x=X, row=ROW) == text(application, "sum() needs the axes to reduce over", "sum(x)")


def test_split_of_an_axis_that_is_no_pair() -> None:
    def application(x: Tile, y: Tile) -> None:
        first, second = split(x, "cols")

    message = "axis cols has 64 positions, split() needs 2"
    assert refused(application, x=X, y=Y) == text(application, message, 'split(x, "cols")')


def test_inside_of_no_tile() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = where(inside(x + 1.0, "cols"), x, 0.0)

    at = 'inside(x + 1.0, "cols")'
    assert refused(application, x=X, y=Y) == text(application, "inside() asks about a tile", at)


def test_or_of_what_is_no_flag() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = where(x > 1.0 or x < 0.0, x, 0.0)

    message = "and, or join flags of the operator; tiles are chosen among with where()"
    assert refused(application, x=X, y=Y) == text(application, message, "x > 1.0 or x < 0.0")


def test_wrong_number_of_values() -> None:
    def application(paired: Tile, row: Tile) -> None:
        first, second, third = split(paired, "side")

    message = "the left side names 3, the right side gives 2"
    assert refused(application, paired=PAIRED, row=ROW) == text(application, message, 'split(paired, "side")')


def test_one_value_for_two_names() -> None:
    def application(x: Tile, y: Tile) -> None:
        first, second = x  # one

    message = "the left side names 2, the right side gives 1"
    assert refused(application, x=X, y=Y) == text(application, message, "x  # one")


# Memory


def test_read_after_a_store_of_the_same_memory() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = x
        x = y + 1

    message = "y is read after y was stored in the same memory"
    assert refused(application, x=X, y=Y) == text(application, message, "y + 1")


def test_read_after_a_store_through_another_view() -> None:
    def application(x: Tile, shifted: Tile) -> None:
        x = 0.0
        shifted = shifted * 2

    view = X.view("shifted", "rows cols", (NUM_ROWS, 64), (64, 1), "float32", offset=64)
    message = "shifted is read after x was stored in the same memory"
    assert refused(application, x=X, shifted=view) == text(application, message, "shifted * 2")


def test_reading_twice_before_a_store_loads_once() -> None:
    def application(x: Tile) -> None:
        x = x * x + x

    assert generated(application, x=X).count("tl.load(") == 1


def test_store_along_a_missing_axis() -> None:
    def application(x: Tile, row: Tile) -> None:
        row = x * 2

    message = "row has no axis cols to store the value along"
    assert refused(application, x=X, row=ROW) == text(application, message, "x * 2")


# Statements


def test_if_on_a_tile() -> None:
    def application(x: Tile, y: Tile) -> None:
        if x > 0:
            y = x

    message = "an if chooses by a flag of the operator; choose among values with where()"
    assert refused(application, x=X, y=Y) == text(application, message, "0:")


def test_if_on_a_size() -> None:
    def application(x: Tile, y: Tile, rows: int) -> None:
        if rows > 1:
            y = x

    message = "an if chooses by a flag of the operator; choose among values with where()"
    assert refused(application, x=X, y=Y, rows=NUM_ROWS) == text(application, message, "1:")


def test_if_on_a_flag() -> None:
    def application(x: Tile, y: Tile, double: bool) -> None:
        if double:
            y = x * 2
        else:
            y = x

    assert "x * 2" in generated(application, x=X, y=Y, double=True)
    assert "x * 2" not in generated(application, x=X, y=Y, double=False)


@pytest.mark.parametrize("place", ["for", "while", "with", "index", "star"])
def test_statement_without_a_meaning(place: str) -> None:
    def loop(x: Tile, y: Tile) -> None:
        for _ in range(3):
            y = x

    def repeat(x: Tile, y: Tile) -> None:
        while True:
            y = x

    def block(x: Tile, y: Tile) -> None:
        with x:
            y = x

    def item(x: Tile, y: Tile) -> None:
        y[0] = x

    def spread(x: Tile, y: Tile) -> None:
        first, *rest = x

    function, at = {
        "for": (loop, "for _"),
        "while": (repeat, "while True"),
        "with": (block, "with x"),
        "index": (item, "y[0]"),
        "star": (spread, "first, *rest"),
    }[place]
    message = "this statement has no meaning in an application"
    if place == "for":
        message = "a for goes over the steps of a tile: for k in steps(x)"
    if place in ("index", "star"):
        message = "only names and tuples of names can be assigned to"
    assert refused(function, x=X, y=Y) == text(function, message, at)


@pytest.mark.parametrize("place", ["choice", "chain", "list"])
def test_expression_without_a_meaning(place: str) -> None:
    def choice(x: Tile, y: Tile) -> None:
        y = x if x else 0

    def chain(x: Tile, y: Tile) -> None:
        y = 0 < x < 1

    def listed(x: Tile, y: Tile) -> None:
        y = [x]

    function, at = {"choice": (choice, "x if x"), "chain": (chain, "0 < x"), "list": (listed, "[x]")}[place]
    message = "this expression has no meaning in an application"
    assert refused(function, x=X, y=Y) == text(function, message, at)


# Where it points


def unclear(value: Tile) -> Tile:
    more = value * 2
    return more + nothing


def test_error_in_a_called_function_points_into_it() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = unclear(x)

    assert refused(application, x=X, y=Y) == text(unclear, "nothing is not defined here", "nothing")


def test_error_in_a_long_statement_points_at_its_own_line() -> None:
    def application(x: Tile, y: Tile) -> None:
        y = (
            x
            + twice(x)
            * missing
        )

    assert refused(application, x=X, y=Y) == text(application, "missing is not defined here", "missing")


def test_module_of_the_project_is_named_by_its_room() -> None:
    tiles = dict.fromkeys(inspect.signature(rotate).parameters, HALF)
    message = "arithmetic on bfloat16: write float32(...) first, a rounding is never implied"
    assert refused(rotate, **tiles) == text(rotate, message, "first * cos", file="applications/rope.py")


# Arrangement and application


def test_parameter_that_is_not_arranged() -> None:
    def application(x: Tile, y: Tile, slope: float) -> None:
        y = x * slope

    assert refused(application, x=X, y=Y) == "application: its parameter slope is not in the arrangement"


def test_arranged_tensors_that_the_application_does_not_take() -> None:
    def application(x: Tile) -> None:
        x = x * 2

    assert refused(application, x=X, y=Y, row=ROW) == "application: has no parameter row, y"


def add(x: Tile, y: Tile) -> None:
    y = x + y


def branch_of(tensors: dict[str, Any]) -> str:
    kernel = Kernel("kernel", (), (Branch("rows", lambda: tensors, add),))
    return kernel.branch(0, vendors.load("generic").lowering).source


def test_grids_that_differ() -> None:
    (x,), (y,) = cut((X,), program={"rows": 4}), cut((Y,), program={"rows": 8})
    with pytest.raises(GenerationError) as caught:
        branch_of({"x": x, "y": y})
    assert str(caught.value) == (
        "y is arranged over [rows=(num_rows + 7) // 8], x over [rows=(num_rows + 3) // 4]"
    )


def test_tiles_that_differ() -> None:
    narrow = Tensor("y", "rows cols", (NUM_ROWS, 32))
    x, y = (cut((tensor,), program={"rows": 4})[0] for tensor in (X, narrow))
    with pytest.raises(GenerationError) as caught:
        branch_of({"x": x, "y": y})
    assert str(caught.value) == "y: axis cols=32 of its tile is cols=64 in another"


def test_a_tensor_that_is_not_cut() -> None:
    (x,) = cut((X,), program={"rows": 4})
    with pytest.raises(GenerationError) as caught:
        branch_of({"x": x, "y": Y})
    assert str(caught.value) == (
        "y is arranged over [rows=num_rows, cols=64], x over [rows=(num_rows + 3) // 4]"
    )


# Cuts


def test_cut_along_an_axis_that_no_tensor_has() -> None:
    with pytest.raises(ArrangementError) as caught:
        cut((X, ROW), program={"heads": 4})
    assert str(caught.value) == "cut: no tensor has an axis heads"


def test_cut_of_tensors_that_disagree_about_an_axis() -> None:
    other = Tensor("other", "rows", (Size("num_others"),))
    with pytest.raises(ArrangementError) as caught:
        cut((X, other), program={"rows": 4})
    assert str(caught.value) == "cut: axis rows differs: x num_rows, other num_others"


def test_cut_of_a_tensor_that_is_cut() -> None:
    (x,) = cut((X,), program={"rows": 4})
    with pytest.raises(ArrangementError) as caught:
        cut((x,), program={"rows": 2})
    assert str(caught.value) == (
        "cut: x[rows=(num_rows + 3) // 4][rows=4, cols=64] is cut already"
    )


# Configurations

GOOD = {"tokens": 1, "heads": 2, "kv_tokens": 1, "num_warps": 1, "num_stages": 1}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"heads": None}, "heads is missing"),
    "unknown": ({"lanes": 4}, "lanes is unknown"),
    "no power of two": ({"heads": 3}, "heads = 3 is no power of two"),
    "zero": ({"tokens": 0}, "tokens = 0 is no power of two"),
    "no number": ({"num_warps": "4"}, "num_warps = '4' is no power of two"),
    "several": (
        {"tokens": None, "warps": 4, "kv_tokens": 6, "num_stages": 0},
        "tokens is missing; warps is unknown; kv_tokens = 6 is no power of two; "
        "num_stages = 0 is no whole number above 0",
    ),
}


@pytest.mark.parametrize("what", CONFIGS, ids=lambda what: what.replace(" ", "_"))
def test_configuration(what: str) -> None:
    changes, problems = CONFIGS[what]
    config = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(GenerationError) as caught:
        OPERATORS[operator.__name__].kernel.checked_config(config)
    assert str(caught.value) == f"{operator.__name__}: configuration {config}: {problems}"
