"""Every check of every operator has a case with its exact text; those that all operators share are made here.

What an operator asks beyond types, ranks, dtypes, layouts and devices is listed by hand. A new operator that lists
nothing makes `test_every_check_has_its_text` fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter
from typing import Any

import pytest
import torch
from refusals import described
from samples import (
    ACTIVATE,
    COMBINE,
    COMBINED,
    COPY,
    FULL_BF16,
    FULL_FP8,
    GATED,
    GATHER,
    GEMM,
    GEMV,
    KV,
    PADDED,
    SAMPLES,
    SUM,
    A,
    B,
    contents,
    operators,
    sample,
)

from tilewright import interpret, ops, vendors
from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError
from tilewright.kernel import Argument, Flag
from tilewright.launch import OPERATORS
from tilewright.module import _Module

Arguments = dict[str, Any]
FIRST = {operator: name for name, (operator, _) in reversed(SAMPLES.items())}  # the plain sample of each
FP8 = torch.float8_e4m3fn
MANY = (1 << 20) + 1
LONG = torch.zeros(1, dtype=torch.bfloat16)


def bytes_apart(stride: int, width: int | None = None) -> torch.Tensor:
    """Three blocks of bytes, `stride` apart."""
    width = stride if width is None else width
    return torch.zeros(2 * stride + width, dtype=torch.uint8).as_strided((3, width), (stride, 1))


def rows(strides: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Three blocks of 16 rows of 512."""
    size = 2 * strides[0] + 15 * strides[1] + 512
    return torch.zeros(size, dtype=torch.uint8).to(dtype).as_strided((3, 16, 512), strides)


# operator: (sample, changed arguments, the error, its lines) of what it alone asks
Listed = tuple[str, Arguments, type[ContractError], list[str]]
INDEX_ROWS = [
    ("slot_mapping", torch.arange(6), "slot_mapping has 6 slots, {first} has only 5 tokens"),
    ("position_ids", torch.arange(4), "position_ids has tokens=4, {first} has 5"),
    ("cos_sin_cache", torch.zeros(9, 32), "cos_sin_cache has rotary=32, 64 is needed"),
    ("cache_block_size", 0, "cache_block_size is 0, at least 1 is needed"),
]


def whole_rows(name: str, dtype: torch.dtype, axis: str) -> list[Listed]:
    """k_cache [blocks, rows, 512]."""
    wrong: list[tuple[torch.Tensor, type[ContractError], list[str]]] = [
        (
            torch.zeros(3, 0, 512).to(dtype), ShapeError,
            ["k_cache has rows=0, at least 1 is needed", "k_cache has rows=0, cache_block_size is 16"],
        ),
        (
            torch.zeros(0, MANY, 512).to(dtype), ShapeError,
            [
                "k_cache has rows=1048577, at most 1048576 is supported",
                "k_cache has rows=1048577, cache_block_size is 16",
            ],
        ),
        (torch.zeros(3, 16, 448).to(dtype), ShapeError, [f"k_cache has {axis}=448, 512 is needed"]),
        (
            rows((8192, 256, 1), dtype), LayoutError,
            ["k_cache has rows of 512 elements 256 apart: they overlap"],
        ),
        (
            rows((4096, 512, 1), dtype), LayoutError,
            ["k_cache has blocks of 8192 elements 4096 apart: they overlap"],
        ),
    ]  # fmt: skip
    return [(name, {"k_cache": cache}, kind, lines) for cache, kind, lines in wrong]


def one(name: str, argument: str, value: Any, *lines: str, kind: type[ContractError] = ShapeError) -> Listed:
    return name, {argument: value}, kind, list(lines)


def of_heads(name: str, q: str, kv: bool = True) -> list[Listed]:
    """What is asked of q [tokens, heads, 512] and kv [tokens, 512]."""
    of_kv = [
        one(name, "kv", LONG.new_zeros(4, 512), f"kv has tokens=4, {q} has 5"),
        one(name, "kv", LONG.new_zeros(5, 448), "kv has dim=448, 512 is needed"),
    ]
    return [one(name, q, LONG.new_zeros(5, 4, 256), f"{q} has dim=256, 512 is needed"), *of_kv]


def index_rows(name: str, first: str, *left_out: str) -> list[Listed]:
    return [
        one(name, argument, value, line.format(first=first), kind=ContractError if "block" in argument else ShapeError)
        for argument, value, line in INDEX_ROWS
        if argument not in left_out
    ]


def of_products(
    name: str, out: tuple[int, int], columns: int, k: int, times: str, rows: int, slots: str
) -> list[Listed]:
    """What is asked of x [rows, k], w [3, columns, k], its bias, out and the weights of 5 tokens and 2 slots.

    `slots` is the line about other numbers of slots; `times` what stands before out's columns.
    """
    of_out = f"{times}{{}} columns of out are needed"
    ids = name not in ("gemm", "gated gemm")
    return [
        one(name, "hidden_states", LONG.new_zeros(rows, MANY),
            "hidden_states has k=1048577, at most 1048576 is supported",
            f"expert_weights has k={k}, hidden_states has 1048577"),
        one(name, "expert_weights", LONG.expand(3, 2097153, k),
            "expert_weights has columns=2097153, at most 2097152 is supported",
            f"expert_bias has columns={columns}, expert_weights has 2097153",
            f"expert_weights has columns=2097153, {of_out.format(out[1])}"),
        one(name, "expert_weights", LONG.expand(3, columns, k + 1),
            f"expert_weights has k={k + 1}, hidden_states has {k}"),
        one(name, "expert_bias", LONG.new_zeros(2, columns), "expert_bias has experts=2, expert_weights has 3"),
        one(name, "expert_bias", LONG.new_zeros(3, columns - 1),
            f"expert_bias has columns={columns - 1}, expert_weights has {columns}"),
        *(
            one(name, "topk_weights", torch.zeros(5, count), f"topk_weights has slots={count}, {wrong}",
                *([f"topk_ids has slots=2, topk_weights has {count}"] if ids else []), slots.format(count))
            for count, wrong in ((0, "at least 1 is needed"), (65, "at most 64 is supported"))
        ),
        one(name, "out", LONG.new_zeros(out[0], MANY), "out has columns=1048577, at most 1048576 is supported",
            f"expert_weights has columns={columns}, {of_out.format(MANY)}"),
        one(name, "out", LONG.new_zeros(out[0], out[1] - 1),
            f"expert_weights has columns={columns}, {of_out.format(out[1] - 1)}"),
    ]  # fmt: skip


def of_ids(name: str) -> list[Listed]:
    return [
        one(name, "topk_ids", torch.zeros(4, 2).int(), "topk_ids has tokens=4, topk_weights has 5"),
        one(name, "topk_ids", torch.zeros(5, 3).int(), "topk_ids has slots=3, topk_weights has 2"),
    ]


def of_tables(name: str) -> list[Listed]:
    """An alignment of 64 rows in 4 blocks of 16."""
    return [
        one(name, "num_tokens_post_pad", torch.zeros(2).int(), "num_tokens_post_pad has one=2, 1 is needed"),
        one(name, "block_size", 48, "block_size is 48, 16, 32, 64, 128 or 256 is needed",
            "sorted_token_ids has rows=64, a multiple of block_size 48 is needed", kind=ContractError),
        one(name, "sorted_token_ids", torch.zeros(56).int(),
            "sorted_token_ids has rows=56, a multiple of block_size 16 is needed"),
        one(name, "expert_ids", torch.zeros(3).int(),
            "expert_ids has blocks=3, 64 sorted rows in blocks of 16 need more"),
    ]  # fmt: skip


ROUTED = "out has routed=10, topk_weights has 5 tokens x {} slots"
FEWER_OUT, FEWER_X = LONG.new_zeros(9, 24), LONG.new_zeros(4, 32)

LISTED: dict[str, list[Listed]] = {
    GEMM: [
        *of_products("gemm", (10, 24), 24, 32, "", 5, ROUTED),
        *of_tables("gemm"),
        one("gemm", "out", FEWER_OUT, "out has routed=9, topk_weights has 5 tokens x 2 slots"),
        one("gemm", "hidden_states", FEWER_X, "hidden_states has tokens=4, 5 or out's 10 are needed"),
    ],
    GATED: [
        *of_products("gated gemm", (10, 24), 48, 32, "2 * ", 5, ROUTED),
        *of_tables("gated gemm"),
        one("gated gemm", "out", FEWER_OUT, "out has routed=9, topk_weights has 5 tokens x 2 slots"),
        one("gated gemm", "hidden_states", FEWER_X, "hidden_states has tokens=4, topk_weights has 5"),
    ],
    GEMV: [
        *of_products("gated gemv", (10, 24), 48, 32, "2 * ", 5, ROUTED),
        *of_ids("gated gemv"),
        one("gated gemv", "out", FEWER_OUT, "out has routed=9, topk_weights has 5 tokens x 2 slots"),
        one("gated gemv", "hidden_states", FEWER_X, "hidden_states has tokens=4, topk_weights has 5"),
    ],
    COMBINED: [
        *of_products("gemv of all slots", (5, 32), 32, 24, "", 10,
                     "hidden_states has tokens=10, topk_weights has 5 tokens x {} slots"),
        *of_ids("gemv of all slots"),
        one("gemv of all slots", "out", LONG.new_zeros(4, 32), "out has tokens=4, topk_weights has 5"),
        one("gemv of all slots", "hidden_states", LONG.new_zeros(9, 24),
            "hidden_states has tokens=9, topk_weights has 5 tokens x 2 slots"),
    ],
    COMBINE: [
        one("sum of those with an expert", "routed", LONG.new_zeros(10, MANY),
            "routed has columns=1048577, at most 1048576 is supported", "out has columns=32, routed has 1048577"),
        *(
            one("sum of those with an expert", "topk_ids", torch.zeros(5, count).int(),
                f"topk_ids has slots={count}, {wrong}", f"routed has routed=10, topk_ids has 5 tokens x {count} slots")
            for count, wrong in ((0, "at least 1 is needed"), (65, "at most 64 is supported"))
        ),
        one("sum of those with an expert", "out", LONG.new_zeros(4, 32), "out has tokens=4, topk_ids has 5"),
        one("sum of those with an expert", "out", LONG.new_zeros(5, 31), "out has columns=31, routed has 32"),
        one("sum of those with an expert", "routed", LONG.new_zeros(9, 32),
            "routed has routed=9, topk_ids has 5 tokens x 2 slots"),
    ],
    ACTIVATE: [
        one("activation", "gate_up", LONG.new_zeros(5, 2097153),
            "gate_up has columns=2097153, at most 2097152 is supported",
            "gate_up has columns=2097153, 2 * 24 columns of out are needed"),
        one("activation", "out", LONG.new_zeros(4, 24), "out has routed=4, gate_up has 5"),
        one("activation", "out", LONG.new_zeros(5, MANY), "out has columns=1048577, at most 1048576 is supported",
            "gate_up has columns=48, 2 * 1048577 columns of out are needed"),
        one("activation", "out", LONG.new_zeros(5, 23), "gate_up has columns=48, 2 * 23 columns of out are needed"),
    ],
    PADDED: [
        *of_heads("padded", "q_in"),
        *index_rows("padded", "q_in"),
        one("padded", "q_head_padded", 2, "q_head_padded is 2, 0 or 4 heads of q_in to 16384 is needed"),
        one("padded", "k_cache", bytes_apart(8448), "k_cache has a block stride of 8448 bytes, 16 rows need 9344",
            kind=LayoutError),
        one("padded, mx rows alone", "k_cache", bytes_apart(8000),
            "k_cache has a block stride of 8000 bytes, 16 rows need 8448", kind=LayoutError),
        one("padded", "k_cache", bytes_apart(9345),
            "k_cache has a block stride of 9345 bytes, an even one is needed for its 2-byte lanes", kind=LayoutError),
        one("padded", "k_cache", torch.zeros(3 * 9344 + 1, dtype=torch.uint8)[1:].view(3, 9344),
            "k_cache begins 1 bytes into its storage, an even number is needed", kind=LayoutError),
    ],
    KV: [
        one("kv", "kv", LONG.new_zeros(5, 448), "kv has dim=448, 512 is needed"),
        *index_rows("kv", "kv", "cache_block_size"),
        *whole_rows("kv, fp8", FP8, "width"),
        one("kv", "cache_block_size", 0, "cache_block_size is 0, at least 1 is needed",
            "k_cache has rows=16, cache_block_size is 0", kind=ContractError),
        one("kv", "kv_mxfp8", True, "k_cache has rows of 584 bytes, 584 apart, 528 is needed"),
        one("kv, fp8", "kv_mxfp8", True, "kv_mxfp8 is True, k_cache is float8_e4m3fn, uint8 is needed",
            kind=DtypeError),
        one("kv", "k_cache", torch.zeros(3, 16, 512).half(), "k_cache is float16, kv is bfloat16: they must agree",
            kind=DtypeError),
        one("kv", "k_cache", torch.zeros(3 * 9345, dtype=torch.uint8).as_strided((3, 16, 584), (9345, 584, 1)),
            "k_cache has a block stride of 9345 bytes, an even one is needed for its 2-byte lanes", kind=LayoutError),
        one("kv", "k_cache", torch.zeros(3 * 9344 + 1, dtype=torch.uint8)[1:].view(3, 16, 584),
            "k_cache begins 1 bytes into its storage, an even number is needed", kind=LayoutError),
        one("kv, fp8", "fp8_scale", torch.ones(2), "fp8_scale has one=2, 1 is needed"),
        one("kv, fp8", "fp8_scale", None, "fp8_scale is None, k_cache is float8_e4m3fn, which needs one",
            kind=ContractError),
    ],
    FULL_BF16: [
        *of_heads("bf16 cache", "q"),
        *index_rows("bf16 cache", "q", "cache_block_size"),
        *whole_rows("bf16 cache", torch.bfloat16, "dim"),
        one("bf16 cache", "q", LONG.new_zeros(5, 0, 512), "q has heads=0, at least 1 is needed"),
        one("bf16 cache", "q", LONG.new_empty(5, 16385, 512), "q has heads=16385, at most 16384 is supported"),
        one("bf16 cache", "cache_block_size", 0, "cache_block_size is 0, at least 1 is needed",
            "k_cache has rows=16, cache_block_size is 0", kind=ContractError),
    ],
    FULL_FP8: [
        *of_heads("fp8 cache", "q"),
        *index_rows("fp8 cache", "q", "cache_block_size"),
        *whole_rows("fp8 cache", FP8, "dim"),
        one("fp8 cache", "q", LONG.new_zeros(5, 0, 512), "q has heads=0, at least 1 is needed",
            "q_fp8 has heads=4, q has 0"),
        one("fp8 cache", "q", LONG.new_empty(5, 16385, 512), "q has heads=16385, at most 16384 is supported",
            "q_fp8 has heads=4, q has 16385"),
        one("fp8 cache", "q_fp8", torch.zeros(4, 4, 512).to(FP8), "q_fp8 has tokens=4, q has 5"),
        one("fp8 cache", "q_fp8", torch.zeros(5, 3, 512).to(FP8), "q_fp8 has heads=3, q has 4"),
        one("fp8 cache", "q_fp8", torch.zeros(5, 4, 256).to(FP8), "q_fp8 has dim=256, 512 is needed"),
        one("fp8 cache", "fp8_scale", torch.ones(2), "fp8_scale has one=2, 1 is needed"),
        one("fp8 cache", "q_fp8_scale_inv", torch.ones(0), "q_fp8_scale_inv has one=0, 1 is needed"),
        one("fp8 cache", "cache_block_size", 0, "cache_block_size is 0, at least 1 is needed",
            "k_cache has rows=16, cache_block_size is 0", kind=ContractError),
    ],
    GATHER: [
        one("gather", "out", LONG.new_zeros(5, 448), "out has dim=448, 512 is needed"),
        one("gather", "slot_mapping", torch.arange(6), "slot_mapping has tokens=6, out has 5"),
        one("gather", "cache_block_size", 0, "cache_block_size is 0, at least 1 is needed", kind=ContractError),
        one("gather", "k_cache", bytes_apart(8448), "k_cache has a block stride of 8448 bytes, 16 rows need 9344",
            kind=LayoutError),
        one("gather", "k_cache", bytes_apart(9345),
            "k_cache has a block stride of 9345 bytes, an even one is needed for its 2-byte lanes", kind=LayoutError),
        one("gather", "k_cache", torch.zeros(3 * 9344 + 1, dtype=torch.uint8)[1:].view(3, 9344),
            "k_cache begins 1 bytes into its storage, an even number is needed", kind=LayoutError),
    ],
    SUM: [
        one("sum", "input", LONG.new_zeros(5, 0, 64), "input has slots=0, at least 1 is needed"),
        one("sum", "input", LONG.new_zeros(5, 65, 64), "input has slots=65, at most 64 is supported"),
        one("sum", "input", LONG.new_zeros(5, 3, 0), "input has columns=0, at least 1 is needed",
            "output has columns=64, input has 0"),
        one("sum", "input", LONG.expand(5, 3, MANY), "input has columns=1048577, at most 1048576 is supported",
            "output has columns=64, input has 1048577"),
        one("sum", "output", LONG.new_zeros(4, 64), "output has tokens=4, input has 5"),
        one("sum", "output", LONG.new_zeros(5, 63), "output has columns=63, input has 64"),
    ],
    COPY: [
        one("copy", "out", torch.zeros(shape, dtype=torch.uint8), f"out has {axis}={size + 1}, x has {size}")
        for shape, axis, size in (
            ((3, 3, 1, 5, 9), "outers", 2), ((2, 4, 1, 5, 9), "middles", 3), ((2, 3, 2, 5, 9), "inners", 1),
            ((2, 3, 1, 6, 9), "rows", 5), ((2, 3, 1, 5, 10), "columns", 9),
        )
    ],
}  # fmt: skip
ELSEWHERE = {A: "test_errors_deepseek_v4.py", B: "test_errors_qk_norm_rope.py"}  # all of their texts


def shared(operator: str) -> Iterator[tuple[str, Any, type[ContractError], str]]:
    """(argument, what it becomes, error, line) of what is asked of every argument of its kind."""
    names = [a.name for a in OPERATORS[operator].kernel.arguments]
    given = dict(zip(names, right(operator), strict=True))
    first = OPERATORS[operator].kernel.tensors[0].name
    for argument in OPERATORS[operator].kernel.arguments:
        name, value = argument.name, given[argument.name]
        if not isinstance(argument, Argument):
            if isinstance(argument, Flag) and isinstance(argument.values[0], str):
                options = f"{', '.join(argument.values[:-1])} or {argument.values[-1]} is needed"
                for wrong in ("relu", None):
                    yield name, wrong, ContractError, f"{name} is {wrong!r}, {options}"
                continue
            word = "a bool" if isinstance(argument, Flag) else "an int" if argument.is_integer else "a number"
            for wrong in ("4", None) if isinstance(argument, Flag) else ("4", True):
                kind = type(wrong).__name__
                yield name, wrong, DtypeError, f"{name} is of type {kind}, {word} is needed"
            continue
        yield name, [1], DtypeError, f"{name} is of type list, a tensor is needed"
        axes = [str(axis.name) for axis in argument.tensor.axes]
        if argument.least_rank:
            yield name, value.flatten(), ShapeError, f"{name} has rank 1, at least {argument.least_rank} is needed"
        else:
            text = f"{name} has rank {len(axes) + 1}, {len(axes)} is needed: [{', '.join(axes)}]"
            yield name, value[None], ShapeError, text
        if name != first:
            yield name, value.to("meta"), DeviceError, f"{name} is on meta, {first} on cpu"
        dtype = argument.dtypes[0]
        if dtype.startswith("like:"):
            like = dtype.removeprefix("like:")
            text = f"{name} is float64, {like} is {str(given[like].dtype).removeprefix('torch.')}: they must agree"
        else:
            wanted = " or ".join("float8_e4m3fn" if d == "e4m3" else d for d in argument.dtypes)
            text = f"{name} is float64, {wanted} is needed"
        yield name, value.double(), DtypeError, text
        apart = _apart(value)
        if argument.layout == "contiguous":
            text = f"{name} is not contiguous: its strides are {tuple(apart.stride())}"
            yield name, apart, LayoutError, text
        elif argument.layout == "rows":
            yield name, apart, LayoutError, f"{name} has stride 2 along its last axis, 1 is needed"


def _apart(value: torch.Tensor) -> torch.Tensor:
    """A tensor of its form with room between the elements; of two where it has one, which is always contiguous."""
    if value.numel() == 1:
        return value.new_zeros(4)[::2]
    return value.new_zeros(2 * value.numel()).as_strided(value.shape, [2 * stride for stride in value.stride()])


def right(operator: str) -> list[Any]:
    """Arguments of a right call, an optional tensor among them."""
    return sample("kv, fp8" if operator == KV else FIRST[operator])[1]


def refused(operator: str, given: list[Any], changes: Arguments) -> tuple[ContractError, list[str], str]:
    """The error of a call that starts nothing and writes nothing, its lines, and the whole text they should make."""
    kernel = OPERATORS[operator].kernel
    arguments = dict(zip([a.name for a in kernel.arguments], given, strict=True)) | changes
    before = contents(None, given)
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        getattr(ops, operator)(*arguments.values())
    assert (counts.programs, contents(None, given)) == (0, before)
    head, _, text = str(caught.value).partition(": ")
    assert head == operator
    lines = [line for line in text.splitlines() if not line.startswith("  ")]
    axes = {t.name: [str(a.name) for a in t.tensor.axes] for t in kernel.tensors}
    return caught.value, lines, "\n".join([f"{operator}: {lines[0]}", *lines[1:], *described(arguments, axes)])


@pytest.mark.parametrize(("operator", "number"), [(o, i) for o in LISTED for i in range(len(LISTED[o]))])
def test_texts_of_an_operators_own_checks(operator: str, number: int) -> None:
    name, changes, kind, expected = LISTED[operator][number]
    error, lines, text = refused(operator, sample(name)[1], changes)
    assert (lines, str(error)) == (expected, text)
    assert type(error) is kind or len(expected) > 1


@pytest.mark.parametrize("operator", operators())
def test_texts_of_what_every_argument_is_asked(operator: str) -> None:
    """The line stands in the message; other lines may follow from the same change."""
    for argument, value, kind, line in shared(operator):
        error, lines, text = refused(operator, right(operator), {argument: value})
        assert line in lines and str(error) == text, (argument, lines)
        assert type(error) is kind or len(lines) > 1


def pattern(message: str) -> re.Pattern[str]:
    """What a check's message can be."""
    parts = ((literal, field) for literal, field, _, _ in Formatter().parse(message))
    return re.compile("".join(re.escape(text) + (".+" if field is not None else "") for text, field in parts))


@pytest.mark.parametrize("operator", [o for o in operators() if o not in ELSEWHERE])
def test_every_check_has_its_text(operator: str) -> None:
    made = OPERATORS[operator]
    checks = _Module(made.kernel, made.public, vendors.load("generic"), made.kernel.rules("generic"))._checks()
    lines = [line for *_, line in shared(operator)] + [line for *_, listed in LISTED[operator] for line in listed]
    missing = [m for _, _, m, _ in checks if not any(pattern(m).fullmatch(line) for line in lines)]
    assert missing == []
