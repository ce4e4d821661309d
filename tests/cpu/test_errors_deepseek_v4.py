"""What fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert refuses: the exact texts, and that nothing was written."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepseek_v4 import Case, Inputs, make
from refusals import described, refused

from tilewright import ops
from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError
from tilewright.launch import OPERATORS

NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
AXES = {
    "q": ("tokens", "heads", "dim"),
    "kv": ("tokens", "dim"),
    "k_cache": ("blocks", "bytes"),
    "slot_mapping": ("tokens",),
    "position_ids": ("tokens",),
    "cos_sin_cache": ("positions", "rotary"),
}
PARAMETERS = (*AXES, "eps", "cache_block_size")

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]


def cache(stride: int, rows: int = 16) -> Change:
    """Three blocks, `stride` bytes apart."""
    memory = torch.zeros(2 * stride + rows * 584, dtype=torch.uint8)
    return lambda a: memory.as_strided((3, min(stride, rows * 584)), (stride, 1))


# One thing wrong: the argument, what it becomes, and the one line that says so.
ONE: dict[str, tuple[str, Change, type[ContractError], str]] = {
    "q no tensor": ("q", lambda a: None, DtypeError, "q is of type NoneType, a tensor is needed"),
    "q of rank 2": (
        "q", lambda a: a["q"][:, 0].contiguous(), ShapeError,
        "q has rank 2, 3 is needed: [tokens, heads, dim]",
    ),
    "q without heads": ("q", lambda a: a["q"][:, :0].contiguous(), ShapeError, "q has heads=0, at least 1 is needed"),
    "q of too many heads": (
        "q", lambda a: torch.zeros(1, dtype=torch.bfloat16).new_empty(5, 16385, 512), ShapeError,
        "q has heads=16385, at most 16384 is supported",
    ),
    "q heads of 256": ("q", lambda a: a["q"][..., :256].contiguous(), ShapeError, "q has dim=256, 512 is needed"),
    "q not contiguous": (
        "q", lambda a: a["q"].transpose(0, 1).contiguous().transpose(0, 1), LayoutError,
        "q is not contiguous: its strides are (512, 2560, 1)",
    ),
    "kv no tensor": ("kv", lambda a: [0.0] * 512, DtypeError, "kv is of type list, a tensor is needed"),
    "kv of rank 1": ("kv", lambda a: a["kv"][0], ShapeError, "kv has rank 1, 2 is needed: [tokens, dim]"),
    "kv of fewer tokens": ("kv", lambda a: a["kv"][:-1], ShapeError, "kv has tokens=4, q has 5"),
    "kv rows of 448": ("kv", lambda a: a["kv"][:, :448].contiguous(), ShapeError, "kv has dim=448, 512 is needed"),
    "kv of another dtype": (
        "kv", lambda a: a["kv"].half(), DtypeError,
        "kv is float16, q is bfloat16: they must agree",
    ),
    "kv not contiguous": (
        "kv", lambda a: a["kv"].repeat_interleave(2, 0)[::2], LayoutError,
        "kv is not contiguous: its strides are (1024, 1)",
    ),
    "kv on another device": ("kv", lambda a: a["kv"].to("meta"), DeviceError, "kv is on meta, q on cpu"),
    "k_cache no tensor": (
        "k_cache", lambda a: bytearray(4), DtypeError,
        "k_cache is of type bytearray, a tensor is needed",
    ),
    "k_cache of rank 1": ("k_cache", lambda a: a["k_cache"][0], ShapeError, "k_cache has rank 1, at least 2 is needed"),
    "k_cache int8": (
        "k_cache", lambda a: a["k_cache"].view(torch.int8), DtypeError,
        "k_cache is int8, uint8 is needed",
    ),
    "k_cache bytes apart": (
        "k_cache", lambda a: torch.zeros((3, 2 * 9344)).byte()[:, ::2], LayoutError,
        "k_cache has stride 2 along its last axis, 1 is needed",
    ),
    "k_cache on another device": (
        "k_cache", lambda a: a["k_cache"].to("meta"), DeviceError,
        "k_cache is on meta, q on cpu",
    ),
    "k_cache stride too small": (
        "k_cache", cache(16 * 584 - 16), LayoutError,
        "k_cache has a block stride of 9328 bytes, an even one of at least 9344 (16 rows of 584) is needed",
    ),
    "k_cache stride odd": (
        "k_cache", cache(16 * 584 + 1), LayoutError,
        "k_cache has a block stride of 9345 bytes, an even one of at least 9344 (16 rows of 584) is needed",
    ),
    "k_cache at an odd address": (
        "k_cache", lambda a: torch.empty(2 * 16 * 584 + 1, dtype=torch.uint8)[1:].view(2, -1), LayoutError,
        "k_cache begins 1 bytes into its storage, an even number is needed",
    ),
    "slot_mapping no tensor": (
        "slot_mapping", lambda a: range(5), DtypeError,
        "slot_mapping is of type range, a tensor is needed",
    ),
    "slot_mapping of rank 2": (
        "slot_mapping", lambda a: a["slot_mapping"][:, None], ShapeError,
        "slot_mapping has rank 2, 1 is needed: [tokens]",
    ),
    "slot_mapping of rank 0": (
        "slot_mapping", lambda a: a["slot_mapping"][0], ShapeError,
        "slot_mapping has rank 0, 1 is needed: [tokens]",
    ),
    "slot_mapping int32": (
        "slot_mapping", lambda a: a["slot_mapping"].int(), DtypeError,
        "slot_mapping is int32, int64 is needed",
    ),
    "slot_mapping on another device": (
        "slot_mapping", lambda a: a["slot_mapping"].to("meta"), DeviceError,
        "slot_mapping is on meta, q on cpu",
    ),
    "more slots than tokens": (
        "slot_mapping", lambda a: torch.arange(6), ShapeError,
        "slot_mapping has 6 slots, q has only 5 tokens",
    ),
    "position_ids no tensor": (
        "position_ids", lambda a: 0, DtypeError,
        "position_ids is of type int, a tensor is needed",
    ),
    "position_ids of rank 2": (
        "position_ids", lambda a: a["position_ids"][:, None], ShapeError,
        "position_ids has rank 2, 1 is needed: [tokens]",
    ),
    "fewer positions than tokens": (
        "position_ids", lambda a: a["position_ids"][:-1], ShapeError,
        "position_ids has tokens=4, q has 5",
    ),
    "position_ids int32": (
        "position_ids", lambda a: a["position_ids"].int(), DtypeError,
        "position_ids is int32, int64 is needed",
    ),
    "position_ids on another device": (
        "position_ids", lambda a: a["position_ids"].to("meta"), DeviceError,
        "position_ids is on meta, q on cpu",
    ),
    "cos_sin_cache no tensor": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"].numpy(), DtypeError,
        "cos_sin_cache is of type ndarray, a tensor is needed",
    ),
    "cos_sin_cache of rank 3": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"][None], ShapeError,
        "cos_sin_cache has rank 3, 2 is needed: [positions, rotary]",
    ),
    "cos_sin_cache of 32": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"][:, :32].contiguous(), ShapeError,
        "cos_sin_cache has rotary=32, 64 is needed",
    ),
    "cos_sin_cache bfloat16": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"].bfloat16(), DtypeError,
        "cos_sin_cache is bfloat16, float32 is needed",
    ),
    "cos_sin_cache not contiguous": (
        "cos_sin_cache", lambda a: torch.zeros((9, 128))[:, :64], LayoutError,
        "cos_sin_cache is not contiguous: its strides are (128, 1)",
    ),
    "cos_sin_cache on another device": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"].to("meta"), DeviceError,
        "cos_sin_cache is on meta, q on cpu",
    ),
    "eps no number": ("eps", lambda a: "1e-6", DtypeError, "eps is of type str, a number is needed"),
    "cache_block_size no int": (
        "cache_block_size", lambda a: 16.0, DtypeError,
        "cache_block_size is of type float, an int is needed",
    ),
    "cache_block_size 0": (
        "cache_block_size", lambda a: 0, ContractError,
        "cache_block_size is 0, at least 1 is needed",
    ),
}

# Several things wrong: what to change, the class, and every line.
SEVERAL: dict[str, tuple[dict[str, Change], type[ContractError], list[str]]] = {
    "of one kind": (
        {
            "kv": lambda a: a["kv"][:2],
            "slot_mapping": lambda a: torch.arange(7),
            "position_ids": lambda a: a["position_ids"][:1],
        },
        ShapeError,
        [
            "kv has tokens=2, q has 5",
            "position_ids has tokens=1, q has 5",
            "slot_mapping has 7 slots, q has only 5 tokens",
        ],
    ),
    "of every kind": (
        {
            "q": lambda a: a["q"].float().transpose(0, 1).contiguous().transpose(0, 1),
            "kv": lambda a: a["kv"].to("meta")[:3, :448],
            "k_cache": cache(16 * 584 + 1),
            "position_ids": lambda a: a["position_ids"].int(),
        },
        ContractError,
        [
            "q is float32, bfloat16 or float16 is needed",
            "q is not contiguous: its strides are (512, 2560, 1)",
            "kv has tokens=3, q has 5",
            "kv has dim=448, 512 is needed",
            "kv is bfloat16, q is float32: they must agree",
            "kv is not contiguous: its strides are (512, 1)",
            "kv is on meta, q on cpu",
            "position_ids is int32, int64 is needed",
            "k_cache has a block stride of 9345 bytes, an even one of at least 9344 (16 rows of 584) is needed",
        ],
    ),
    "all no tensors": (
        dict.fromkeys(PARAMETERS, lambda a: None),
        DtypeError,
        [
            *(f"{name} is of type NoneType, a tensor is needed" for name in AXES),
            "eps is of type NoneType, a number is needed",
            "cache_block_size is of type NoneType, an int is needed",
        ],
    ),
    "beside one that is no tensor": (
        {
            "q": lambda a: 3,
            "position_ids": lambda a: a["position_ids"].int(),
            "cache_block_size": lambda a: "16",
        },
        DtypeError,
        [
            "q is of type int, a tensor is needed",
            "position_ids is int32, int64 is needed",
            "cache_block_size is of type str, an int is needed",
        ],
    ),
    "ranks, without what follows from them": (
        {"q": lambda a: a["q"][0], "kv": lambda a: a["kv"][0], "k_cache": lambda a: a["k_cache"][0, 0]},
        ShapeError,
        [
            "q has rank 2, 3 is needed: [tokens, heads, dim]",
            "kv has rank 1, 2 is needed: [tokens, dim]",
            "k_cache has rank 0, at least 2 is needed",
        ],
    ),
    "the block size and the stride for it": (
        {"k_cache": cache(16 * 584 - 1), "cache_block_size": lambda a: 17},
        LayoutError,
        ["k_cache has a block stride of 9343 bytes, an even one of at least 9928 (17 rows of 584) is needed"],
    ),
}


def arguments_of(inputs: Inputs) -> Arguments:
    return dict(zip(PARAMETERS, inputs.arguments(), strict=True))


@pytest.mark.parametrize("problem", ONE, ids=lambda problem: problem.replace(" ", "_"))
def test_text_of(problem: str) -> None:
    name, change, kind, line = ONE[problem]
    inputs = make(Case(5, 3, 16))
    arguments = arguments_of(inputs)
    arguments[name] = change(arguments)
    error = refused(NAME, inputs, arguments)
    assert str(error) == "\n".join([f"{NAME}: {line}", *described(arguments, AXES)])
    assert type(error) is kind


@pytest.mark.parametrize("problems", SEVERAL, ids=lambda problems: problems.replace(" ", "_"))
def test_text_of_several(problems: str) -> None:
    changes, kind, lines = SEVERAL[problems]
    inputs = make(Case(5, 3, 16))
    given = arguments_of(inputs)
    arguments = {name: changes.get(name, lambda a, name=name: a[name])(given) for name in PARAMETERS}
    error = refused(NAME, inputs, arguments)
    assert str(error) == "\n".join([f"{NAME}: {lines[0]}", *lines[1:], *described(arguments, AXES)])
    assert type(error) is kind


def test_text_as_a_user_sees_it() -> None:
    """Written out, so that `described` above has no say in it."""
    inputs = make(Case(5, 3, 16, dtype=torch.float16))
    arguments = arguments_of(inputs)
    arguments["kv"] = arguments["kv"][:4].bfloat16()
    assert str(refused(NAME, inputs, arguments)) == (
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert: kv has tokens=4, q has 5\n"
        "kv is bfloat16, q is float16: they must agree\n"
        "  q              [tokens=5, heads=3, dim=512]  float16  cpu\n"
        "  kv             [tokens=4, dim=512]  bfloat16  cpu\n"
        "  k_cache        [blocks=2, bytes=9344]  uint8  cpu\n"
        "  slot_mapping   [tokens=5]  int64  cpu\n"
        "  position_ids   [tokens=5]  int64  cpu\n"
        "  cos_sin_cache  [positions=4096, rotary=64]  float32  cpu"
    )


def test_every_check_of_the_module_has_its_text_here() -> None:
    tree = ast.parse(OPERATORS[NAME].source("generic"))
    refusal = next(f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name == "_refusal")
    patterns = []
    for node in ast.walk(refusal):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.JoinedStr):
            parts = node.elts[1].values
            text = (re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in parts)
            patterns.append("".join(text))
    lines = [line for *_, line in ONE.values()] + list(itertools.chain(*(texts for *_, texts in SEVERAL.values())))
    assert len(patterns) > 30
    assert [p for p in patterns if not any(re.fullmatch(p, line) for line in lines)] == []


@pytest.mark.parametrize("profile", ["nvidia-h200", "hygon-bw1000", "metax-c550", "generic"])
def test_every_profile_checks_alike(profile: str) -> None:
    inputs = make(Case(5, 3, 16))
    arguments = arguments_of(inputs)
    arguments["slot_mapping"] = torch.arange(6)
    error = refused(NAME, inputs, arguments, profile=profile)
    line = f"{NAME}: slot_mapping has 6 slots, q has only 5 tokens"
    assert str(error) == "\n".join([line, *described(arguments, AXES)])


def test_zero_tokens_are_checked_too() -> None:
    inputs = make(Case(0, 3, 16))
    arguments = arguments_of(inputs)
    arguments["cos_sin_cache"] = arguments["cos_sin_cache"].half()
    assert str(refused(NAME, inputs, arguments)).startswith(f"{NAME}: cos_sin_cache is float16, float32 is needed\n")


def test_a_missing_argument_is_python_s_own_error() -> None:
    inputs = make(Case(5, 3, 16))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cache_block_size'"):
        getattr(ops, NAME)(*inputs.arguments()[:-1])
