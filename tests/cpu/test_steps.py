"""Loops over steps, dot, and the order and limit of programs: texts, results, and the mistakes they refuse."""

# ruff: noqa: F821, F841  (the applications here are read, never run)

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import interpret, vendors
from tilewright.arrange import cut
from tilewright.errors import ApplicationError, GenerationError
from tilewright.expr import Size
from tilewright.kernel import Argument, Branch, Kernel, forced
from tilewright.language import Tile, dot, float32, split, steps, sum
from tilewright.module import module_text
from tilewright.tensor import Tensor

NUM_ROWS, SIZE_N, SIZE_K = Size("num_rows"), Size("size_n", "constexpr", high=1 << 20), Size("size_k", "constexpr")
X = Tensor("x", "rows k", (NUM_ROWS, SIZE_K), "bfloat16|float16|float32")
W = Tensor("w", "columns k", (SIZE_N, SIZE_K), "like:x")
PAIR = Tensor("w", "side columns k", (2, SIZE_N, SIZE_K), "like:x")
OUT = Tensor("out", "rows columns", (NUM_ROWS, SIZE_N), "like:x")
H200 = vendors.load("nvidia-h200").lowering


def product(x: Tile, w: Tile, out: Tile) -> None:
    acc = 0.0
    for step in steps(x):
        acc = acc + dot(x[step], w[step])
    out = acc


def gated(x: Tile, w: Tile, out: Tile) -> None:
    acc = 0.0
    for step in steps(x):
        acc = acc + dot(x[step], w[step])
    gate, up = split(acc, "side")
    out = gate * up


def kernel_of(
    application: Callable[..., None], tensors: tuple[Tensor, ...] = (X, W, OUT), order: Any = None, limit: Any = None,
    more: tuple[Tensor, ...] = (), **extra: Any,
) -> Kernel:  # fmt: skip
    def arrange(rows: Any, columns: Any, block_k: Any) -> dict[str, Any]:
        tiles = cut(tensors, program={"rows": rows, "columns": columns}, steps={"k": block_k})
        return {**dict(zip(("x", "w", "out"), tiles, strict=False)), **extra}

    return Kernel(
        "operator", (*(Argument(t, mutated=t is OUT) for t in tensors), *map(Argument, more)),
        (Branch("tiles", arrange, application, order=order, limit=limit),),
        divides={"columns": (SIZE_N,), "block_k": (SIZE_K,)}, quantities={"rows": "num_rows"},
    )  # fmt: skip


def source(application: Callable[..., None], exact: bool = True, lowering: Any = H200, **more: Any) -> str:
    return kernel_of(application, **more).branch(0, lowering, exact=exact).source


def loaded(kernel: Kernel, profile: str = "nvidia-h200", **tiles: int) -> Any:
    space: dict[str, Any] = {}
    exec(f"def operator({', '.join(a.name for a in kernel.arguments)}):\n    'out of x and w'", space)
    rules = forced({**tiles, "num_warps": 4, "num_stages": 1})
    return interpret.load(module_text(kernel, space["operator"], vendors.load(profile), rules), "steps", "<steps>")


# Texts


def test_a_loop_is_plain() -> None:
    """Pointers are a base plus the step times a constant, and the sum is the dot's accumulator."""
    body = source(product).split("    acc = ", 1)[1].splitlines()
    assert body[:5] == [
        "tl.zeros((rows, columns), dtype=tl.float32)",
        "    for step in range(0, size_k // block_k):",
        "        x_1 = tl.load(x_ptrs + step * block_k, mask=row_ok[:, None], other=0.0)",
        "        w_1 = tl.load(w_ptrs + step * block_k)",
        '        acc = tl.dot(x_1, tl.trans(w_1), acc, input_precision="ieee")',
    ]


def test_a_tail_is_masked_on_both_operands() -> None:
    lines = source(product, exact=False).splitlines()
    (head,) = (line for line in lines if "for step in" in line)
    assert head.strip() == "for step in range(0, (block_k + size_k - 1) // block_k):"
    loads = [line for line in lines if "_1 = tl.load(" in line]
    assert len(loads) == 2
    assert all("(k[None, :] < size_k - step * block_k)" in line and "other=0.0" in line for line in loads)


def test_gate_and_up_are_one_dot() -> None:
    made = source(gated, tensors=(X, PAIR, OUT))
    assert made.count("tl.dot(") == 1 and "(rows, 2 * columns)" in made
    assert "gate, up = tl.split(tl.permute(" in made
    turned = Tensor("w", "columns side k", (SIZE_N, 2, SIZE_K), "like:x")
    assert "gate, up = tl.split(acc_by_side)" in source(gated, tensors=(X, turned, OUT))


def test_the_arrangement_says_which_operand_gives_the_rows() -> None:
    """Columns before rows: the weights are the dot's first matrix, and nothing is transposed but x."""
    made = source(product, tensors=(X, W, OUT.permute(("columns", "rows"))))
    assert 'tl.dot(w_1, tl.trans(x_1), acc, input_precision="ieee")' in made
    assert "tl.zeros((columns, rows)" in made


def test_one_row_is_a_sum() -> None:
    made = kernel_of(product).branch(0, H200, {"rows": 1, "columns": 4, "block_k": 64}).source
    assert "tl.dot" not in made
    assert "        acc = acc + x_1[None, :] * w_1\n" in made  # of all steps, summed once after them
    assert "    tl.store(out_ptrs, tl.sum(acc, axis=1).to(out.dtype.element_ty))\n" in made


def test_a_device_without_a_matrix_unit_sums() -> None:
    made = source(product, lowering={**H200, "dot": "none"})
    assert "acc = acc + tl.sum(x_1[:, None, :] * w_1[None, :, :], axis=2)" in made


def test_small_matrices_are_refused_where_the_unit_wants_16() -> None:
    for dot_form, error in (("pad16", True), ("native", False)):
        try:
            kernel_of(product).branch(0, {**H200, "dot": dot_form}, {"rows": 8, "columns": 64, "block_k": 64})
        except ApplicationError as refusal:
            assert error and "dot() of 8 rows: this device needs 16" in str(refusal)
        else:
            assert not error


def test_what_a_loop_finds_keeps_its_type() -> None:
    """A tile without steps that is first read within the loop is loaded and widened before it."""

    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = 1.5
        for step in steps(x):
            acc = acc + sum(float32(x[step]), "k") * float32(w)
        out = acc

    row = Tensor("w", "columns", (SIZE_N,), "like:x")
    lines = source(application, tensors=(X, row, OUT)).splitlines()
    loop = next(i for i, line in enumerate(lines) if "for step in" in line)
    assert any("w_1 = w_1.to(tl.float32)" in line for line in lines[:loop])
    assert not any("w_1 = " in line for line in lines[loop:])
    assert any(line.strip() == "acc = tl.full((rows, columns), 1.5, dtype=tl.float32)" for line in lines)


# Results


@pytest.mark.parametrize("profile", ["nvidia-h200", "generic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(33, 48, 64), (5, 50, 33), (16, 32, 16)], ids=str)
def test_product(size: tuple[int, int, int], dtype: torch.dtype, profile: str) -> None:
    rows, n, k = size
    made = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(shape, generator=made).to(dtype) for shape in ((rows, k), (n, k)))
    out = torch.full((rows, n), torch.nan, dtype=dtype)
    module = loaded(kernel_of(product), profile, rows=16, columns=16, block_k=16)
    with interpret.poison():
        module.operator(x, w, out)
    exact = x.double() @ w.double().T
    assert module.last_launch[2] == "operator_kernel" + ("" if n % 16 == k % 16 == 0 else "_masked")
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (8, 48), (130, 16), (80, 96)])
def test_every_order_has_every_program_once(rows: int, columns: int) -> None:
    x, w = torch.randn(rows, 16), torch.randn(columns, 16)
    for group in (1, 2, 4, 8, 128):
        out = torch.full((rows, columns), torch.nan)
        kernel = kernel_of(product, order=("rows", "group"))
        with interpret.counting() as counts:
            loaded(kernel, rows=16, columns=16, block_k=16, group=group).operator(x, w, out)
        assert counts.bytes_stored == out.numel() * 4
        torch.testing.assert_close(out, x @ w.T)


def test_a_group_goes_through_its_rows_first() -> None:
    """Five tiles of rows by three of columns, two at a time: which tile program 0, 1, .. is."""
    lines = source(product, order=("rows", "group")).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("row_tiles ="))
    stop = next(i for i, line in enumerate(lines) if line.strip().startswith("k = "))
    text_ = "\n".join(line.strip() for line in lines[start:stop] if "arange" not in line)
    language = type("tl", (), {"minimum": staticmethod(min)})
    seen = []
    for pid in range(15):
        known = {"pid": pid, "tl": language, "num_rows": 80, "size_n": 48, "rows": 16, "columns": 16, "group": 2}
        exec(text_, known)
        seen.append((known["row_tile"], known["column_tile"]))
    pairs = [[(r, c) for c in range(3) for r in part] for part in ((0, 1), (2, 3), (4,))]
    assert seen == list(itertools.chain(*pairs))


def test_a_limit_leaves_programs_out() -> None:
    count = Tensor("limit", "one", (1,), "int32")
    module = loaded(kernel_of(product, limit=("rows", count), more=(count,)), rows=16, columns=16, block_k=16)
    x, w = torch.randn(48, 16), torch.randn(16, 16)
    for given, whole in ((0, 0), (1, 16), (16, 16), (17, 32), (48, 48), (2**31 - 1, 48)):
        out = torch.full((48, 16), 7.0)
        module.operator(x, w, out, torch.tensor([given], dtype=torch.int32))
        torch.testing.assert_close(out[:whole], (x @ w.T)[:whole])
        assert bool((out[whole:] == 7.0).all())


def test_an_order_needs_two_axes() -> None:
    with pytest.raises(GenerationError) as caught:
        source(product, order=("columns", "group"))
    assert str(caught.value) == "an order by columns needs a grid of it and one more axis, not ['rows', 'columns']"


def test_arithmetic_on_a_32_bit_index_is_wide() -> None:
    """`id // 2` may be 2^30, and a row of 64 elements begins far past 2^31 then: the product must not wrap."""

    def copied(x: Tile, out: Tile) -> None:
        out = x

    ids = Tensor("ids", "rows", (NUM_ROWS,), "int32")
    table, out = Tensor("table", "entries lanes", (Size("entries"), 64)), Tensor("out", "rows lanes", (NUM_ROWS, 64))

    def arrange(rows: Any) -> dict[str, Any]:
        x = table.gather("entries", ids.index(name="id") // 2)
        return dict(zip(("x", "out"), cut((x, out), program={"rows": rows}), strict=True))

    kernel = Kernel("copy", tuple(map(Argument, (table, ids, out))), (Branch("copied", arrange, copied),))
    made = kernel.branch(0, H200).source
    (load,) = (line for line in made.splitlines() if "tl.load(ids" in line)
    assert load.endswith(".to(tl.int64)")


# Mistakes


def text(function: Callable[..., Any], message: str, at: str) -> str:
    """A message that points at the first place of `function`'s text where `at` stands."""
    lines, first = inspect.getsourcelines(function)
    number, line = next((i, line.rstrip()) for i, line in enumerate(lines) if at in line)
    place = f"  {__file__}:{first + number}\n    {line}\n    {' ' * line.index(at)}^"
    return f"{function.__name__}: {message}\n{place}"


def refused(application: Callable[..., None], **more: Any) -> str:
    with pytest.raises(ApplicationError) as caught:
        source(application, **more)
    return str(caught.value)


def test_a_tile_with_steps_is_read_a_step_at_a_time() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        out = sum(float32(x), "k")  # all

    message = "x is read a step at a time: x[k]"
    assert refused(application) == text(application, message, 'sum(float32(x), "k")')


def test_a_tile_without_steps_has_none() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = 0.0
        for step in steps(x):
            acc = acc + out[step]

    message = "out has no steps along k"
    assert refused(application) == text(application, message, "out[step]")


def test_steps_of_a_tile_that_has_none() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        for step in steps(out):
            acc = dot(x[step], w[step])

    message = "steps() takes a tile that the arrangement cuts into steps along one axis"
    assert refused(application) == text(application, message, "steps(out)")


def test_a_step_is_named_by_the_loop() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        out = sum(float32(x[0]), "k")

    message = "only a tile has steps, and only the variable of a loop names one: x[k]"
    assert refused(application) == text(application, message, "x[0]")


def test_a_store_within_a_loop() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        for step in steps(x):
            out = dot(x[step], w[step])

    message = "out is stored in a loop; a tile is stored once, after it"
    assert refused(application) == text(application, message, "out = dot")


def test_a_loop_within_a_loop() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = 0.0
        for step in steps(x):
            for other in steps(w):
                acc = acc + dot(x[step], w[other])

    message = "a loop over steps within another has no meaning yet"
    assert refused(application) == text(application, message, "for other")


def test_a_variable_that_changes_its_axes() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = sum(float32(out), "columns")
        for step in steps(x):
            acc = acc + dot(x[step], w[step])  # wider
        out = acc

    message = "acc is float32 [rows] before a step, float32 [rows, columns] after it"
    assert message in refused(application)


def test_a_dot_of_two_common_axes() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = 0.0
        for step in steps(x):
            acc = acc + dot(x[step], x[step])

    message = "dot() sums over the one axis that both have; these have rows, k"
    assert refused(application) == text(application, message, "dot(x[step], x[step])")


def test_a_variable_of_a_loop_is_gone_after_it() -> None:
    def application(x: Tile, w: Tile, out: Tile) -> None:
        acc = 0.0
        for step in steps(x):
            more = dot(x[step], w[step])
            acc = acc + more
        out = acc + more  # gone

    assert refused(application) == text(application, "more is not defined here", "more  # gone")


def test_a_tile_that_does_not_move_by_one_stride() -> None:
    """An index that is loaded at each step has no constant to move by."""
    ids = Tensor("ids", "k", (SIZE_K,), "int32")
    tensors = (X.gather("k", ids.index(name="id")), W, OUT)
    with pytest.raises(GenerationError) as caught:
        source(product, tensors=tensors)
    assert str(caught.value) == "x does not move by one stride a step of k"
