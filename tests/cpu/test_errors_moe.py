"""Calls that the fused MoE refuses: the exact texts, and nothing launched. Its kernels' are in test_errors_every.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe import Case, Inputs, make
from refusals import described

from tilewright import interpret, ops
from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError
from tilewright.ops import moe_contract

NAME = "fused_experts_impl"
CASE = Case(5, 4, 2, 32, 16, bias=True, parallel=2)
Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]


def apart(name: str) -> Change:
    """A tensor whose elements are two apart."""
    return lambda a: a[name].repeat_interleave(2, -1)[..., ::2]


def cut(name: str, dim: int, size: int) -> Change:
    return lambda a: a[name].narrow(dim, 0, size)


TENSORS = {n: axes for n, axes in moe_contract.AXES.items()}
# One thing wrong: the argument, what it becomes, and the one line that says so.
ONE: dict[str, tuple[str, Change, type[ContractError], str]] = {
    **{
        f"{n} no tensor": (n, lambda a: [1.0], DtypeError, f"{n} is of type list, a tensor is needed") for n in TENSORS
    },
    **{
        f"{n} of rank {len(axes) + 1}": (
            n, lambda a, n=n: a[n][None], ShapeError,
            f"{n} has rank {len(axes) + 1}, {len(axes)} is needed: [{', '.join(axes)}]",
        )
        for n, axes in TENSORS.items()
    },
    "hidden differs": ("w1", cut("w1", 2, 31), ShapeError, "w1 has hidden=31, hidden_states has 32"),
    "w2 hidden": ("w2", cut("w2", 1, 31), ShapeError, "w2 has hidden=31, hidden_states has 32"),
    "w2 experts": ("w2", cut("w2", 0, 1), ShapeError, "w2 has experts=1, w1 has 2"),
    "weights of fewer tokens": (
        "topk_weights", cut("topk_weights", 0, 4), ShapeError, "topk_weights has tokens=4, hidden_states has 5",
    ),
    "ids of fewer tokens": (
        "topk_ids", cut("topk_ids", 0, 4), ShapeError, "topk_ids has tokens=4, hidden_states has 5",
    ),
    "ids of fewer slots": ("topk_ids", cut("topk_ids", 1, 1), ShapeError, "topk_ids has slots=1, topk_weights has 2"),
    "w1 odd": ("w2", cut("w2", 2, 15), ShapeError, "w1 has 2 * inner=32, w2 has inner=15"),
    "w1_bias of fewer": (
        "w1_bias", lambda a: a["w1_bias"][:, :30].contiguous(), ShapeError, "w1_bias has 2 * inner=30, w1 has 32",
    ),
    "w1_bias of fewer experts": ("w1_bias", cut("w1_bias", 0, 1), ShapeError, "w1_bias has experts=1, w1 has 2"),
    "w2_bias of fewer": (
        "w2_bias", lambda a: a["w2_bias"][:, :30].contiguous(), ShapeError,
        "w2_bias has hidden=30, hidden_states has 32",
    ),
    "w1 float16": (
        "w1", lambda a: a["w1"].half(), DtypeError, "w1 is float16, hidden_states is bfloat16: they must agree",
    ),
    "w2 float32": (
        "w2", lambda a: a["w2"].float(), DtypeError, "w2 is float32, hidden_states is bfloat16: they must agree",
    ),
    "weights float64": (
        "topk_weights", lambda a: a["topk_weights"].double(), DtypeError,
        "topk_weights is float64, float32 or bfloat16 or float16 is needed",
    ),
    "ids int16": (
        "topk_ids", lambda a: a["topk_ids"].short(), DtypeError, "topk_ids is int16, int32 or int64 is needed",
    ),
    "map int64": ("expert_map", lambda a: a["expert_map"].long(), DtypeError, "expert_map is int64, int32 is needed"),
    "w1_bias float32": (
        "w1_bias", lambda a: a["w1_bias"].float(), DtypeError,
        "w1_bias is float32, hidden_states is bfloat16: they must agree",
    ),
    "w2_bias float32": (
        "w2_bias", lambda a: a["w2_bias"].float(), DtypeError,
        "w2_bias is float32, hidden_states is bfloat16: they must agree",
    ),
    "hidden_states apart": (
        "hidden_states", apart("hidden_states"), LayoutError,
        "hidden_states is not contiguous: its strides are (64, 2)",
    ),
    "map apart": (
        "expert_map", apart("expert_map"), LayoutError, "expert_map is not contiguous: its strides are (2,)",
    ),
    "w1_bias apart": (
        "w1_bias", apart("w1_bias"), LayoutError, "w1_bias is not contiguous: its strides are (64, 2)",
    ),
    "w2_bias apart": (
        "w2_bias", apart("w2_bias"), LayoutError, "w2_bias is not contiguous: its strides are (64, 2)",
    ),
    **{
        f"{n} on another device": (
            n, lambda a, n=n: a[n].to("meta"), DeviceError, f"{n} is on meta, hidden_states on cpu",
        )
        for n in TENSORS if n != "hidden_states"
    },
    "activation unknown": (
        "activation", lambda a: "relu", ContractError,
        "activation is 'relu', silu, gelu, gelu_tanh or swigluoai is needed",
    ),
    "activation a layout that is not there": (
        "activation", lambda a: "swigluoai_uninterleave", ContractError,
        "activation is 'swigluoai_uninterleave', silu, gelu, gelu_tanh or swigluoai is needed",
    ),
    "inplace of older callers": (
        "activation", lambda a: False, ContractError,
        "activation is False, silu, gelu, gelu_tanh or swigluoai is needed",
    ),
    "on input no bool": (
        "apply_router_weight_on_input", lambda a: 1, DtypeError,
        "apply_router_weight_on_input is of type int, a bool is needed",
    ),
    "experts no int": (
        "global_num_experts", lambda a: None, DtypeError, "global_num_experts is of type NoneType, an int is needed",
    ),
    "block of 24": (
        "block_size", lambda a: 24, ContractError, "block_size is 24, 1, 16, 32, 64, 128, 256 or None is needed",
    ),
}  # fmt: skip


def arguments_of(inputs: Inputs) -> Arguments:
    return {**inputs.arguments(), "block_size": None}


def refusal(inputs: Inputs, arguments: Arguments) -> ContractError:
    before = inputs.read_only()
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        ops.fused_experts_impl(**arguments)
    assert counts.programs == 0
    assert inputs.read_only() == before
    return caught.value


@pytest.mark.parametrize("problem", ONE, ids=lambda problem: problem.replace(" ", "_"))
def test_text_of(problem: str) -> None:
    name, change, kind, line = ONE[problem]
    inputs = make(CASE)
    arguments = arguments_of(inputs)
    arguments[name] = change(arguments)
    error = refusal(inputs, arguments)
    assert str(error) == "\n".join([f"{NAME}: {line}", *described(arguments, TENSORS)])
    assert type(error) is kind


def test_text_of_several() -> None:
    inputs = make(CASE)
    arguments = arguments_of(inputs)
    arguments |= {
        "hidden_states": arguments["hidden_states"].double()[:, ::2], "topk_ids": arguments["topk_ids"][0],
        "activation": None, "w2": None,
    }  # fmt: skip
    error = refusal(inputs, arguments)
    lines = [
        "w2 is of type NoneType, a tensor is needed",
        "activation is None, silu, gelu, gelu_tanh or swigluoai is needed",
        "topk_ids has rank 1, 2 is needed: [tokens, slots]",
        "w1 has hidden=32, hidden_states has 16",
        "w2_bias has hidden=32, hidden_states has 16",
        "hidden_states is float64, bfloat16 or float16 or float32 is needed",
        *(f"{n} is bfloat16, hidden_states is float64: they must agree" for n in ("w1", "w1_bias", "w2_bias")),
        "hidden_states is not contiguous: its strides are (32, 2)",
    ]
    assert str(error) == "\n".join([f"{NAME}: {lines[0]}", *lines[1:], *described(arguments, TENSORS)])
    assert type(error) is ContractError


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"w1": (1025, 32, 32), "w2": (1025, 32, 16)}, "w1 has experts=1025, at most 1024 is supported"),
        ({"topk_weights": (5, 65), "topk_ids": (5, 65)}, "topk_weights has slots=65, at most 64 is supported"),
        (
            {"hidden_states": (5, 1 << 21), "w1": (2, 32, 1 << 21), "w2": (2, 1 << 21, 16)},
            "hidden_states has hidden=2097152, at most 1048576 is supported",
        ),
        ({"w1": (2, 1 << 22, 32), "w2": (2, 32, 1 << 21)}, "w2 has inner=2097152, at most 1048576 is supported"),
        ({"w1": (2, 0, 32), "w2": (2, 32, 0)}, "w2 has inner=0, at least 1 is needed"),
    ],
)
def test_sizes_beyond_the_limits(change: dict[str, tuple[int, ...]], line: str) -> None:
    inputs = make(Case(5, 2, 2, 32, 16))
    arguments = arguments_of(inputs)
    for name, shape in change.items():
        arguments[name] = torch.zeros(1, dtype=arguments[name].dtype).expand(shape)
    error = refusal(inputs, arguments)
    assert f"{NAME}: {line}" in str(error) or line in str(error).splitlines()


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        *((({mode: True}), f"{mode} is True") for mode in moe_contract.MODES),
        *((({scale: torch.ones(1)}), f"{scale} is given") for scale in moe_contract.SCALES),
        ({"use_fp8_w8a8": True, "w1_scale": torch.ones(1)}, "use_fp8_w8a8 is True, w1_scale is given"),
    ],
    ids=str,
)
def test_quantised_modes_are_refused(options: Arguments, asked: str) -> None:
    inputs = make(CASE)
    with pytest.raises(NotImplementedError) as caught:
        ops.fused_experts_impl(**{**inputs.arguments(), **options})
    assert str(caught.value) == f"{NAME}: {asked}: quantised modes are not there yet"


def test_a_quantisation_of_fused_experts_is_refused() -> None:
    inputs = make(Case(2, 2, 1, 32, 16))
    tensors = {n: inputs.arguments()[n] for n in ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")}
    with pytest.raises(NotImplementedError) as caught:
        ops.fused_experts(**tensors, quant_config=object())
    assert str(caught.value) == "fused_experts: quant_config is given: quantised modes are not there yet"


def test_every_check_of_the_contract_has_its_text_here() -> None:
    tree = ast.parse(open(moe_contract.__file__).read())
    patterns = []
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name in ("refuse_quantised", "_described"):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and ast.unparse(node.elts[0]).endswith("Error"):
                text = node.elts[1]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                patterns.append("".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in parts))
    lines = [line for *_, line in ONE.values()]
    lines += ["w1 has experts=1025, at most 1024 is supported", "w2 has inner=0, at least 1 is needed",
              "hidden_states is float64, bfloat16 or float16 or float32 is needed"]  # fmt: skip
    assert len(patterns) > 12
    assert [p for p in patterns if not any(re.fullmatch(p, line) for line in lines)] == []
