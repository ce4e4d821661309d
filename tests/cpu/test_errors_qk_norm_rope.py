"""What fused_qk_norm_rope refuses: the exact texts, and that nothing was written."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qk_norm_rope import Case, Inputs, make
from refusals import described, refused

from tilewright import ops
from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError
from tilewright.launch import OPERATORS

NAME = "fused_qk_norm_rope"
AXES = {
    "qkv": ("tokens", "columns"),
    "q_weight": ("dim",),
    "k_weight": ("dim",),
    "cos_sin_cache": ("positions", "rotary"),
    "position_ids": ("tokens",),
}
PARAMETERS = (
    *("qkv", "num_heads_q", "num_heads_k", "num_heads_v", "head_dim", "eps", "q_weight", "k_weight"),
    *("cos_sin_cache", "is_neox", "position_ids", "forced_token_heads_per_warp"),
)
CASE = Case(5, (4, 2, 2), 128, max_position=64)

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]


def fresh(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Change:
    return lambda a: torch.zeros(shape, dtype=dtype)


def apart(name: str) -> Change:
    """A weight whose elements are two apart."""
    return lambda a: a[name].repeat_interleave(2)[::2]


# One thing wrong: the argument, what it becomes, and the one line that says so.
ONE: dict[str, tuple[str, Change, type[ContractError], str]] = {
    "qkv no tensor": ("qkv", lambda a: None, DtypeError, "qkv is of type NoneType, a tensor is needed"),
    "qkv of rank 3": (
        "qkv", lambda a: a["qkv"].unflatten(1, (-1, 128)), ShapeError,
        "qkv has rank 3, 2 is needed: [tokens, columns]",
    ),
    "qkv of a column less": (
        "qkv", lambda a: a["qkv"][:, :-1], ShapeError,
        "qkv has 1023 columns, 4 + 2 + 2 heads of 128 need 1024",
    ),
    "qkv columns apart": (
        "qkv", lambda a: a["qkv"].repeat_interleave(2, 1)[:, ::2], LayoutError,
        "qkv has stride 2 along its last axis, 1 is needed",
    ),
    "qkv one row five times": (
        "qkv", lambda a: a["qkv"][:1].expand(5, -1), LayoutError,
        "qkv has rows of 1024 columns 0 apart: they overlap",
    ),
    "qkv rows that overlap": (
        "qkv", lambda a: a["qkv"].as_strided((5, 1024), (1023, 1)), LayoutError,
        "qkv has rows of 1024 columns 1023 apart: they overlap",
    ),
    "q heads no int": ("num_heads_q", lambda a: 4.0, DtypeError, "num_heads_q is of type float, an int is needed"),
    "k heads no int": ("num_heads_k", lambda a: "2", DtypeError, "num_heads_k is of type str, an int is needed"),
    "v heads no int": ("num_heads_v", lambda a: None, DtypeError, "num_heads_v is of type NoneType, an int is needed"),
    "head_dim no int": ("head_dim", lambda a: 128.0, DtypeError, "head_dim is of type float, an int is needed"),
    "eps no number": ("eps", lambda a: "1e-6", DtypeError, "eps is of type str, a number is needed"),
    "q_weight no tensor": (
        "q_weight", lambda a: [1.0] * 128, DtypeError,
        "q_weight is of type list, a tensor is needed",
    ),
    "q_weight of rank 2": (
        "q_weight", lambda a: a["q_weight"][None], ShapeError,
        "q_weight has rank 2, 1 is needed: [dim]",
    ),
    "q_weight of 64": ("q_weight", lambda a: a["q_weight"][:64], ShapeError, "q_weight has dim=64, head_dim is 128"),
    "q_weight float32": (
        "q_weight", lambda a: a["q_weight"].float(), DtypeError,
        "q_weight is float32, qkv is bfloat16: they must agree",
    ),
    "q_weight not contiguous": (
        "q_weight", apart("q_weight"), LayoutError,
        "q_weight is not contiguous: its strides are (2,)",
    ),
    "q_weight on another device": (
        "q_weight", lambda a: a["q_weight"].to("meta"), DeviceError,
        "q_weight is on meta, qkv on cpu",
    ),
    "k_weight no tensor": ("k_weight", lambda a: 1.0, DtypeError, "k_weight is of type float, a tensor is needed"),
    "k_weight of rank 0": (
        "k_weight", lambda a: a["k_weight"][0], ShapeError,
        "k_weight has rank 0, 1 is needed: [dim]",
    ),
    "k_weight of 256": ("k_weight", fresh(256), ShapeError, "k_weight has dim=256, head_dim is 128"),
    "k_weight float16": (
        "k_weight", lambda a: a["k_weight"].half(), DtypeError,
        "k_weight is float16, qkv is bfloat16: they must agree",
    ),
    "k_weight not contiguous": (
        "k_weight", apart("k_weight"), LayoutError,
        "k_weight is not contiguous: its strides are (2,)",
    ),
    "k_weight on another device": (
        "k_weight", lambda a: a["k_weight"].to("meta"), DeviceError,
        "k_weight is on meta, qkv on cpu",
    ),
    "cos_sin_cache no tensor": (
        "cos_sin_cache", lambda a: (), DtypeError,
        "cos_sin_cache is of type tuple, a tensor is needed",
    ),
    "cos_sin_cache of rank 1": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"][0], ShapeError,
        "cos_sin_cache has rank 1, 2 is needed: [positions, rotary]",
    ),
    "cos_sin_cache odd": (
        "cos_sin_cache", fresh(64, 63), ShapeError,
        "cos_sin_cache has rotary=63, an even number from 2 to head_dim 128 is needed",
    ),
    "cos_sin_cache wider than a head": (
        "cos_sin_cache", fresh(64, 130), ShapeError,
        "cos_sin_cache has rotary=130, an even number from 2 to head_dim 128 is needed",
    ),
    "cos_sin_cache of no columns": (
        "cos_sin_cache", fresh(64, 0), ShapeError,
        "cos_sin_cache has rotary=0, an even number from 2 to head_dim 128 is needed",
    ),
    "cos_sin_cache float64": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"].double(), DtypeError,
        "cos_sin_cache is float64, float32 or bfloat16 or float16 is needed",
    ),
    "cos_sin_cache not contiguous": (
        "cos_sin_cache", lambda a: torch.zeros((9, 256))[:, :128], LayoutError,
        "cos_sin_cache is not contiguous: its strides are (256, 1)",
    ),
    "cos_sin_cache on another device": (
        "cos_sin_cache", lambda a: a["cos_sin_cache"].to("meta"), DeviceError,
        "cos_sin_cache is on meta, qkv on cpu",
    ),
    "is_neox an int": ("is_neox", lambda a: 1, DtypeError, "is_neox is of type int, a bool is needed"),
    "position_ids no tensor": (
        "position_ids", lambda a: range(5), DtypeError,
        "position_ids is of type range, a tensor is needed",
    ),
    "position_ids of three rows": (
        "position_ids", lambda a: a["position_ids"].expand(3, -1), ShapeError,
        "position_ids has rank 2, 1 is needed: [tokens]",
    ),
    "position_ids of fewer tokens": (
        "position_ids", lambda a: a["position_ids"][:-1], ShapeError,
        "position_ids has tokens=4, qkv has 5",
    ),
    "position_ids int16": (
        "position_ids", lambda a: a["position_ids"].short(), DtypeError,
        "position_ids is int16, int64 or int32 is needed",
    ),
    "position_ids on another device": (
        "position_ids", lambda a: a["position_ids"].to("meta"), DeviceError,
        "position_ids is on meta, qkv on cpu",
    ),
    "forced no int": (
        "forced_token_heads_per_warp", lambda a: 2.0, DtypeError,
        "forced_token_heads_per_warp is of type float, an int is needed",
    ),
    "forced 3": (
        "forced_token_heads_per_warp", lambda a: 3, ContractError,
        "forced_token_heads_per_warp is 3, 1, 2, 4, 8 or at most 0 is needed",
    ),
    "forced 16": (
        "forced_token_heads_per_warp", lambda a: 16, ContractError,
        "forced_token_heads_per_warp is 16, 1, 2, 4, 8 or at most 0 is needed",
    ),
}  # fmt: skip

# Several things wrong: what to change, the class, and every line.
SEVERAL: dict[str, tuple[dict[str, Change], type[ContractError], list[str]]] = {
    "q heads negative": (
        {"num_heads_q": lambda a: -1},
        ShapeError,
        ["num_heads_q is -1, at least 0 is needed", "qkv has 1024 columns, -1 + 2 + 2 heads of 128 need 384"],
    ),
    "k and v heads negative, the sum right": (
        {"num_heads_k": lambda a: -2, "num_heads_v": lambda a: -3, "num_heads_q": lambda a: 13},
        ShapeError,
        ["num_heads_k is -2, at least 0 is needed", "num_heads_v is -3, at least 0 is needed"],
    ),
    "too many heads": (
        {
            "qkv": lambda a: torch.zeros(1, dtype=torch.bfloat16).new_empty(1, 32770 * 128),
            "num_heads_q": lambda a: 16385,
            "num_heads_k": lambda a: 16385,
            "num_heads_v": lambda a: 0,
            "position_ids": lambda a: a["position_ids"][:1],
        },
        ShapeError,
        ["num_heads_q is 16385, at most 16384 is supported", "num_heads_k is 16385, at most 16384 is supported"],
    ),
    "head_dim of no multiple of 16": (
        {"head_dim": lambda a: 120},
        ShapeError,
        [
            "q_weight has dim=128, head_dim is 120",
            "k_weight has dim=128, head_dim is 120",
            "head_dim is 120, a multiple of 16 up to 512 is needed",
            "qkv has 1024 columns, 4 + 2 + 2 heads of 120 need 960",
            "cos_sin_cache has rotary=128, an even number from 2 to head_dim 120 is needed",
        ],
    ),
    "head_dim over 512": (
        {
            "qkv": fresh(5, 8 * 1024),
            "head_dim": lambda a: 1024,
            "q_weight": fresh(1024),
            "k_weight": fresh(1024),
        },
        ShapeError,
        ["head_dim is 1024, a multiple of 16 up to 512 is needed"],
    ),
    "qkv float32": (
        {"qkv": lambda a: a["qkv"].float()},
        DtypeError,
        [
            "qkv is float32, bfloat16 or float16 is needed",
            "q_weight is bfloat16, qkv is float32: they must agree",
            "k_weight is bfloat16, qkv is float32: they must agree",
        ],
    ),
    "of every kind": (
        {
            "qkv": lambda a: a["qkv"][:, :-1].contiguous(),
            "q_weight": lambda a: a["q_weight"][:64].float(),
            "k_weight": lambda a: a["k_weight"].to("meta"),
            "cos_sin_cache": lambda a: torch.zeros((9, 256))[:, :127],
            "position_ids": lambda a: a["position_ids"][:3],
            "forced_token_heads_per_warp": lambda a: 6,
        },
        ContractError,
        [
            "q_weight has dim=64, head_dim is 128",
            "q_weight is float32, qkv is bfloat16: they must agree",
            "k_weight is on meta, qkv on cpu",
            "cos_sin_cache is not contiguous: its strides are (256, 1)",
            "position_ids has tokens=3, qkv has 5",
            "qkv has 1023 columns, 4 + 2 + 2 heads of 128 need 1024",
            "cos_sin_cache has rotary=127, an even number from 2 to head_dim 128 is needed",
            "forced_token_heads_per_warp is 6, 1, 2, 4, 8 or at most 0 is needed",
        ],
    ),
    "all of no use": (
        dict.fromkeys(PARAMETERS, lambda a: None),
        DtypeError,
        [
            *(f"{name} is of type NoneType, a tensor is needed" for name in AXES),
            *(f"{n} is of type NoneType, an int is needed" for n in PARAMETERS[1:5]),
            "eps is of type NoneType, a number is needed",
            "is_neox is of type NoneType, a bool is needed",
            "forced_token_heads_per_warp is of type NoneType, an int is needed",
        ],
    ),
    "ranks, without what follows from them": (
        {"qkv": lambda a: a["qkv"][0], "q_weight": lambda a: a["q_weight"][None], "head_dim": lambda a: 64.0},
        ContractError,
        [
            "qkv has rank 1, 2 is needed: [tokens, columns]",
            "head_dim is of type float, an int is needed",
            "q_weight has rank 2, 1 is needed: [dim]",
        ],
    ),
}


def arguments_of(inputs: Inputs) -> Arguments:
    return dict(zip(PARAMETERS, (*inputs.arguments(), -1), strict=True))


@pytest.mark.parametrize("problem", ONE, ids=lambda problem: problem.replace(" ", "_"))
def test_text_of(problem: str) -> None:
    name, change, kind, line = ONE[problem]
    inputs = make(CASE)
    arguments = arguments_of(inputs)
    arguments[name] = change(arguments)
    error = refused(NAME, inputs, arguments)
    assert str(error) == "\n".join([f"{NAME}: {line}", *described(arguments, AXES)])
    assert type(error) is kind


@pytest.mark.parametrize("problems", SEVERAL, ids=lambda problems: problems.replace(" ", "_"))
def test_text_of_several(problems: str) -> None:
    changes, kind, lines = SEVERAL[problems]
    inputs = make(CASE)
    given = arguments_of(inputs)
    arguments = {name: changes.get(name, lambda a, name=name: a[name])(given) for name in PARAMETERS}
    error = refused(NAME, inputs, arguments)
    assert str(error) == "\n".join([f"{NAME}: {lines[0]}", *lines[1:], *described(arguments, AXES)])
    assert type(error) is kind


def test_text_as_a_user_sees_it() -> None:
    """Written out, so that `described` above has no say in it."""
    inputs = make(Case(17, (16, 8, 8), max_position=64))
    arguments = arguments_of(inputs)
    arguments["qkv"] = arguments["qkv"][:, :4000].contiguous()
    error = refused(NAME, inputs, arguments)
    assert type(error) is ShapeError
    assert str(error) == (
        "fused_qk_norm_rope: qkv has 4000 columns, 16 + 8 + 8 heads of 128 need 4096\n"
        "  qkv            [tokens=17, columns=4000]  bfloat16  cpu\n"
        "  q_weight       [dim=128]  bfloat16  cpu\n"
        "  k_weight       [dim=128]  bfloat16  cpu\n"
        "  cos_sin_cache  [positions=64, rotary=128]  float32  cpu\n"
        "  position_ids   [tokens=17]  int64  cpu"
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
    inputs = make(CASE)
    arguments = arguments_of(inputs)
    arguments["head_dim"] = 130
    message = str(refused(NAME, inputs, arguments, profile=profile))
    assert "head_dim is 130, a multiple of 16 up to 512 is needed" in message


@pytest.mark.parametrize("case", [Case(0), Case(5, (0, 0, 3))], ids=str)
def test_a_call_with_nothing_to_do_is_checked_too(case: Case) -> None:
    inputs = make(case)
    arguments = arguments_of(inputs)
    arguments["position_ids"] = arguments["position_ids"].short()
    message = str(refused(NAME, inputs, arguments))
    assert message.startswith(f"{NAME}: position_ids is int16, int64 or int32 is needed\n")


def test_one_row_may_have_any_stride() -> None:
    """A single row has nothing to overlap with; torch gives such strides."""
    inputs = make(Case(1))
    arguments = arguments_of(inputs)
    arguments["qkv"] = inputs.qkv.as_strided((1, 1024), (1, 1))
    getattr(ops, NAME)(*arguments.values())


def test_a_missing_argument_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'position_ids'"):
        getattr(ops, NAME)(*make(CASE).arguments()[:-1])
