"""Offsets past 2^31: the generated index text, evaluated with the integers of a GPU at sizes that fit no CPU test.

The statements of a device function that pointers and masks depend on run on numpy arrays of int32 and int64, which wrap
as a GPU's do; where they point to is compared with Python's integers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from compiled import launched

from tilewright.launch import OPERATORS
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator

NAME = operator.__name__
SHIPPED = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic")
LARGE = [(65536, 128), (98304, 64), (98304, 128), (131072, 64), (131072, 128)]  # tokens, heads: q has > 2^31 elements
STRIDE = 37440  # bytes of a block of 64 rows


# Numbers of a GPU


class Number:
    """A tensor or scalar of int32, int64 or bool; Python integers join in as int32 where they fit."""

    def __init__(self, values: Any):
        self.values = np.asarray(values)

    def _with(self, other: Any, function: Callable[..., Any]) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        if not isinstance(other, Number):
            other = number(other)
        with np.errstate(over="ignore"):
            return Number(function(np.atleast_1d(self.values), np.atleast_1d(other.values)).reshape(
                np.broadcast_shapes(self.values.shape, other.values.shape)
            ))

    def __add__(self, other: Any) -> Any:
        return self._with(other, np.add)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, np.subtract)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, np.multiply)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(other, np.floor_divide)  # a negative slot, where C would truncate, is masked

    def __neg__(self) -> Any:
        return Number(-self.values)

    def __mod__(self, other: Any) -> Any:
        return self._with(other, np.mod)

    def __radd__(self, other: Any) -> Any:
        return number(other) + self

    def __rsub__(self, other: Any) -> Any:
        return number(other) - self

    def __lt__(self, other: Any) -> Any:
        return self._with(other, np.less)

    def __ge__(self, other: Any) -> Any:
        return self._with(other, np.greater_equal)

    def __and__(self, other: Any) -> Any:
        return self._with(other, np.logical_and)

    def __getitem__(self, index: Any) -> Number:
        return Number(self.values[index])

    def to(self, dtype: Any) -> Number:
        return Number(self.values.astype(dtype))


def number(value: int) -> Number:
    return Number(np.array(value, np.int32 if -(2**31) <= value < 2**31 else np.int64))


class Pointer:
    """Elements of an argument: an offset of 64 bits, to which narrower ones are extended as they are added."""

    dtype = types.SimpleNamespace(element_ty="an element")

    def __init__(self, name: str, offset: Any = 0):
        self.name, self.offset = name, np.asarray(offset, np.int64)

    def __add__(self, other: Any) -> Pointer:
        values = other.values if isinstance(other, Number) else number(other).values
        return Pointer(self.name, self.offset + values.astype(np.int64))

    def __sub__(self, other: Any) -> Pointer:
        values = other.values if isinstance(other, Number) else number(other).values
        return Pointer(self.name, self.offset - values.astype(np.int64))

    def to(self, kind: Any) -> Pointer:
        return Pointer(f"{self.name} as {kind}", self.offset)


# The part of a device function that says where


def device_function(source: str, name: str) -> ast.FunctionDef:
    return next(f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == name)


def accesses(function: ast.FunctionDef) -> Iterator[tuple[ast.Call, str]]:
    """Every load and store, and what it loads or stores."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("tl.load", "tl.store"):
            where = call.args[0]
            while isinstance(where, ast.BinOp):
                where = where.left
            yield call, f"{ast.unparse(call.func)[3:]} {ast.unparse(where).removesuffix('_ptrs')}"


def names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def places(source: str, function: str, indices: dict[str, Callable[[Any], Any]], **arguments: Any) -> dict[str, Any]:
    """Offset of each element that a program touches, by what it loads or stores: sorted, masked ones left out.

    `indices` gives the values of the tensors that hold indices, from the offsets at which they are read.
    """
    text = device_function(source, function)
    asked = dict(accesses_by_text(text))
    needed = set().union(*(names(ast.parse(part)) for parts in asked.values() for part in parts))
    kept: list[ast.stmt] = []
    for statement in reversed(text.body):
        if isinstance(statement, ast.Assign) and names(statement.targets[0]) & needed:
            needed |= names(statement.value)
            kept.insert(0, statement)

    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Number:
        values = indices[pointer.name](pointer.offset)
        return Number(values if mask is None else np.where(mask.values, values, np.int64(other)))

    language = types.SimpleNamespace(
        int64=np.int64, int32=np.int32, load=load, pointer_type=str,
        arange=lambda start, stop: Number(np.arange(start, stop, dtype=np.int32)),
    )  # fmt: skip
    known: dict[str, Any] = {"tl": language}
    for parameter in text.args.args:
        value = arguments.get(parameter.arg, Pointer(parameter.arg))
        is_constant = parameter.annotation is not None
        known[parameter.arg] = number(value) if isinstance(value, int) and not is_constant else value
    exec(compile(ast.Module(kept, []), function, "exec"), known)

    found: dict[str, Any] = {}
    for what, (pointer_text, mask_text) in asked.items():
        pointer, mask = eval(pointer_text, known), eval(mask_text, known)
        offset, inside = np.broadcast_arrays(pointer.offset, True if mask is True else mask.values)
        found[what] = np.sort(offset[inside])
    return found


def accesses_by_text(function: ast.FunctionDef) -> Iterator[tuple[str, tuple[str, str]]]:
    for call, what in accesses(function):
        mask = next((ast.unparse(k.value) for k in call.keywords if k.arg == "mask"), "True")
        yield what, (ast.unparse(call.args[0]), mask)


def combined(*parts: Any) -> Any:
    """Sorted sums of one of each of `parts`, in Python's integers."""
    sums = [0]
    for part in parts:
        sums = [total + int(value) for total in sums for value in part]
    return np.array(sorted(sums), dtype=object)


def texts() -> Iterator[Any]:
    """Every configuration of every profile, with its module's text."""
    for profile in SHIPPED:
        for number_, rule in enumerate(OPERATORS[NAME].kernel.rules(profile).rules):
            yield pytest.param(profile, dict(rule.config), id=f"{profile}-rule{number_}")


# q: token * heads * 512


def q_places(source: str, config: dict[str, int], tokens: int, heads: int, pid: int, **more: Any) -> dict[str, Any]:
    indices = {"position_ids": lambda offset: offset % 1000}
    sizes = {"num_tokens": tokens, "num_heads": heads, "position_stride": 1, **config, **more}
    return places(source, "q_head", indices, pid=pid, eps=1e-6, **sizes)


def q_expected(config: dict[str, int], tokens: int, heads: int, pid: int) -> Any:
    tile, tiles = config["heads"], heads // config["heads"]
    first = pid // tiles * config["tokens"]
    rows = [t * heads * 512 for t in range(first, min(first + config["tokens"], tokens))]
    lanes = [(pid % tiles * tile + h) * 512 + lane for h in range(tile) for lane in range(512)]
    return combined(rows, lanes)


def last_programs(config: dict[str, int], tokens: int, heads: int) -> list[int]:
    """The first, those about element 2^31, and the last three."""
    count = -(-tokens // config["tokens"]) * (heads // config["heads"])
    middle = 2**31 // (config["tokens"] * config["heads"] * 512)
    return [p for p in (0, middle - 1, middle, middle + 1, count - 3, count - 2, count - 1) if p < count]


@pytest.mark.parametrize(("profile", "config"), list(texts()))
def test_q_past_2_31_elements(profile: str, config: dict[str, int]) -> None:
    source = OPERATORS[NAME].source(profile)
    for tokens, heads in LARGE:
        assert tokens * heads * 512 > 2**31
        for pid in last_programs(config, tokens, heads):
            found, expected = q_places(source, config, tokens, heads, pid), q_expected(config, tokens, heads, pid)
            assert np.array_equal(found["load x"], expected)
            assert np.array_equal(found["store x"], expected)
        assert expected[-1] == tokens * heads * 512 - 1  # the last program holds the last element


def test_q_where_tokens_are_left_over() -> None:
    source = OPERATORS[NAME].source("hygon-bw1000")
    config = {"tokens": 8, "heads": 1, "kv_tokens": 8}
    pid = -(-131067 // 8) * 128 - 1
    found = q_places(source, config, 131067, 128, pid)["store x"]
    assert np.array_equal(found, q_expected(config, 131067, 128, pid))
    assert (len(found), found[-1]) == (3 * 512, 131067 * 128 * 512 - 1)


@pytest.mark.parametrize(("profile", "config"), list(texts()))
def test_q_in_32_bits_would_be_wrong(profile: str, config: dict[str, int]) -> None:
    """The control: the same text without its casts, at these sizes and at the last that needs none."""
    source = OPERATORS[NAME].source(profile)
    narrow = source.replace(".to(tl.int64)", "")
    assert narrow.count("int64") < source.count("int64")
    for tokens, heads in LARGE:
        pid = last_programs(config, tokens, heads)[-1]
        found = q_places(narrow, config, tokens, heads, pid)["store x"]
        assert not np.array_equal(found, q_expected(config, tokens, heads, pid))
        assert found[0] < 2**31
    pid = last_programs(config, 65536, 64)[-1]
    assert np.array_equal(q_places(narrow, config, 65536, 64, pid)["store x"], q_expected(config, 65536, 64, pid))


def test_far_positions() -> None:
    """position * 64, and a position's own place where positions are far apart."""
    source, config = OPERATORS[NAME].source("nvidia-h200"), {"tokens": 1, "heads": 2, "kv_tokens": 1}
    seen = []

    def positions(offset: Any) -> Any:
        seen.append(int(offset))
        return np.int64(50_000_000)

    found = places(
        source, "q_head", {"position_ids": positions}, pid=131071 * 32, num_tokens=131072, num_heads=64,
        position_stride=1 << 17, eps=1e-6, **config,
    )  # fmt: skip
    assert seen == [131071 << 17]
    assert np.array_equal(found["load cos"], combined([50_000_000 * 64], range(32)))
    assert np.array_equal(found["load sin"], combined([50_000_000 * 64 + 32], range(32)))


# kv: block * block_stride


def kv_places(
    source: str, config: dict[str, int], slots: Callable[[Any], Any], stride: int, pid: int, inserted: int = 131072,
    slot_stride: int = 1, block_size: int = 64,
) -> dict[str, Any]:  # fmt: skip
    return places(
        source, "kv_row", {"slot_mapping": slots, "position_ids": lambda offset: offset % 1000}, pid=pid,
        num_inserted=inserted, slot_stride=slot_stride, position_stride=1, block_stride=stride,
        tail_block_stride=stride // 2, cache_block_size=block_size, **config,
    )  # fmt: skip


def kv_expected(slots: list[int], stride: int, block_size: int = 64) -> dict[str, Any]:
    live = [(slot // block_size, slot % block_size) for slot in slots if slot >= 0]
    return {
        "store codes": combined([block * stride + row * 576 for block, row in live], range(448)),
        "store tail": combined([block * (stride // 2) + row * 288 + 224 for block, row in live], range(64)),
        "store scales": combined([block * stride + block_size * 576 + row * 8 for block, row in live], range(8)),
    }


SLOTS = {  # the slot of token i, the block stride
    "many blocks": (lambda i: (131071 - i) * 64 + i % 64, STRIDE),
    "far blocks": (lambda i: 2**31 - 1 - i, STRIDE),
    "slots past 2^31": (lambda i: 2**33 + 65 * i, STRIDE),
    "long blocks": (lambda i: i % 4096, 2**31 + 64),
    "some skipped": (lambda i: np.where(i % 3 == 1, -1, 2**31 + i), STRIDE),
}


@pytest.mark.parametrize("slots", SLOTS, ids=lambda slots: slots.replace(" ", "_"))
@pytest.mark.parametrize(("profile", "config"), list(texts()))
def test_blocks_past_2_31_bytes(profile: str, config: dict[str, int], slots: str) -> None:
    source, (slot_of, stride) = OPERATORS[NAME].source(profile), SLOTS[slots]
    count = 131072 // config["kv_tokens"]
    for pid in (0, count // 2 + 1, count - 1):
        tokens = np.arange(pid * config["kv_tokens"], (pid + 1) * config["kv_tokens"])
        expected = kv_expected(np.asarray(slot_of(tokens)).tolist(), stride)
        found = kv_places(source, config, slot_of, stride, pid)
        assert {name: list(found[name]) for name in expected} == {name: list(v) for name, v in expected.items()}
    far = (*range(0, 64), *range(131072 - 64, 131072))
    assert max(int(slot_of(np.int64(token))) // 64 * stride for token in far) > 2**31


@pytest.mark.parametrize(("profile", "config"), list(texts()))
def test_blocks_in_32_bits_would_be_wrong(profile: str, config: dict[str, int]) -> None:
    """The control: a block number of 32 bits, as its slot fits them."""
    source, (slot_of, stride) = OPERATORS[NAME].source(profile), SLOTS["many blocks"]
    narrow = source.replace("block = slot // cache_block_size", "block = (slot // cache_block_size).to(tl.int32)")
    assert narrow != source
    expected = kv_expected(np.asarray(slot_of(np.arange(config["kv_tokens"]))).tolist(), stride)
    found = kv_places(narrow, config, slot_of, stride, pid=0)
    assert found["store codes"][-1] < 2**31 < expected["store codes"][-1]
    small = kv_places(narrow, config, lambda i: i % 4096, STRIDE, pid=0)["store codes"]
    assert np.array_equal(small, kv_expected(list(range(config["kv_tokens"])), STRIDE)["store codes"])


def test_far_slots_are_read_where_they_lie() -> None:
    """token * slot_stride, for slots that are every 2^17th element of something larger."""
    seen = []

    def slots(offset: Any) -> Any:
        seen.extend(np.ravel(offset).tolist())
        return offset >> 17

    for profile, config in (("nvidia-h200", {"kv_tokens": 1}), ("hygon-bw1000", {"kv_tokens": 8})):
        seen.clear()
        count = 131072 // config["kv_tokens"]
        kv_places(OPERATORS[NAME].source(profile), config, slots, STRIDE, count - 1, slot_stride=1 << 17)
        assert seen == [token << 17 for token in range(131072 - config["kv_tokens"], 131072)]


# Programs


@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize(("tokens", "heads"), LARGE)
def test_every_program_is_launched_once(profile: str, tokens: int, heads: int) -> None:
    """By `_launch` itself, which needs no tensor of that size."""
    module = OPERATORS[NAME].module(profile, True)
    config = dict(OPERATORS[NAME].kernel.rules(profile).rules[0].config)
    sizes = {"num_tokens": tokens, "num_inserted": tokens, "num_heads": heads, "cache_block_size": 64, "eps": 1e-6}
    arguments = {
        name: sizes.get(name, 64 if "stride" in name else torch.zeros(64, dtype=torch.uint8))
        for name in inspect.signature(module._launch).parameters
    }
    made = launched(module, functools.partial(module._launch, **{**arguments, "rule": 0, "config": config}))
    programs = -(-tokens // config["kv_tokens"]) + -(-tokens // config["tokens"]) * (heads // config["heads"])
    limit = 65535 if profile == "generic" else programs
    assert [launch.grid[0] for launch in made] == [min(limit, programs - i) for i in range(0, programs, limit)]
    if profile == "generic":
        where = made[0].kernel.arg_names.index("first_program")
        assert [launch.arguments[where] for launch in made] == list(range(0, programs, limit))
    assert programs < 2**31


# The siblings: q of the same size, and what they make of it

PADDED = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded"
SIBLINGS = {
    PADDED: "store out",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": "store x",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": "store out",
}


def sibling_configs(name: str, profile: str) -> list[dict[str, int]]:
    rules = OPERATORS[name].kernel.rules(profile).rules
    return [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(rule.config.items())) for rule in rules)]


@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_past_2_31_elements(name: str, profile: str) -> None:
    source, (tokens, heads) = OPERATORS[name].source(profile), LARGE[-1]
    for config in sibling_configs(name, profile):
        for pid in last_programs(config, tokens, heads):
            sizes = {"num_tokens": tokens, "num_heads": heads, "q_head_padded": heads, "position_stride": 1, **config}
            found = places(source, "q_head", {"position_ids": lambda o: o % 1000}, pid=pid, eps=1e-6, **sizes)
            expected = q_expected(config, tokens, heads, pid)
            assert np.array_equal(found["load x"], expected)
            assert np.array_equal(found[SIBLINGS[name]], expected)
        assert expected[-1] == tokens * heads * 512 - 1


@pytest.mark.parametrize("profile", SHIPPED)
@pytest.mark.parametrize("name", SIBLINGS)
def test_siblings_in_32_bits_would_be_wrong(name: str, profile: str) -> None:
    source, (tokens, heads) = OPERATORS[name].source(profile).replace(".to(tl.int64)", ""), LARGE[-1]
    config = sibling_configs(name, profile)[0]
    pid = last_programs(config, tokens, heads)[-1]
    sizes = {"num_tokens": tokens, "num_heads": heads, "q_head_padded": heads, "position_stride": 1, **config}
    found = places(source, "q_head", {"position_ids": lambda o: o % 1000}, pid=pid, eps=1e-6, **sizes)
    assert not np.array_equal(found["load x"], q_expected(config, tokens, heads, pid))


def interleaved(config: dict[str, int], tokens: int, pid: int, cut: int, heads: int, first: int, of_heads: bool) -> Any:
    """Offsets of a program's heads or pieces: of `cut` heads from `first` on, of `heads` interleaved ones a token."""
    tile, tiles = config["heads"], cut // config["heads"]
    tokens_of = np.arange(pid // tiles * config["tokens"], min((pid // tiles + 1) * config["tokens"], tokens))
    head, lane = np.meshgrid(pid % tiles * tile + np.arange(tile), np.arange(512), indexing="ij")
    if of_heads:
        place = lane // 16 * heads * 16 + (first + head) * 16 + lane % 16
    else:
        at = head * 512 + lane
        place = at // (16 * cut) * heads * 16 + first * 16 + at % (16 * cut)
    return np.sort((tokens_of[:, None] * heads * 512 + place.ravel()[None]).ravel())


INTERLEAVED = {"q_head_interleaved": True, "q_head_unnormed_interleaved": False,
               "q_head_unnormed_unrotated_interleaved": False}  # fmt: skip


@pytest.mark.parametrize("profile", SHIPPED)
def test_interleaved_heads_past_2_31_elements(profile: str) -> None:
    source, (tokens, heads), pads = OPERATORS[PADDED].source(profile), LARGE[-1], 64
    sizes = {"num_tokens": tokens, "num_heads": heads, "num_pads": pads, "q_head_padded": heads + pads}
    positions = {"position_ids": lambda offset: offset % 1000}
    for config in sibling_configs(PADDED, profile):
        for pid in last_programs(config, tokens, heads):
            for function, of_heads in INTERLEAVED.items():
                found = places(source, function, positions, pid=pid, eps=1e-6, position_stride=1, **sizes, **config)
                loaded = interleaved(config, tokens, pid, heads, heads, 0, of_heads)
                assert np.array_equal(found["load x"], loaded)
                stored = interleaved(config, tokens, pid, heads, heads + pads, 0, of_heads)
                assert np.array_equal(found["store out"], stored)
        assert loaded[-1] == tokens * heads * 512 - 1
        for pid in last_programs(config, tokens, pads):
            found = places(source, "zero_heads_interleaved", {}, pid=pid, **sizes, **config)
            stored = interleaved(config, tokens, pid, pads, heads + pads, heads, False)
            assert np.array_equal(found["store out"], stored)
        assert stored[-1] == tokens * (heads + pads) * 512 - 1
