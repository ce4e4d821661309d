"""What moe_align_block_size, expert_rows and moe_sum refuse: the exact texts, and that nothing ran or was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import interpret, ops
from tilewright.errors import ContractError, DeviceError, DtypeError, LayoutError, ShapeError
from tilewright.ops.moe_align_block_size import expert_rows

Arguments = dict[str, Any]
Change = Callable[[Arguments], Any]
Problem = tuple[str, Change, type[ContractError], str]


def refused(call: Callable[..., Any], arguments: Arguments) -> ContractError:
    with interpret.counting() as counts, pytest.raises(ContractError) as caught:
        call(**arguments)
    assert counts.programs == 0
    return caught.value


def described(tensors: dict[str, tuple[tuple[str, ...], Any]]) -> str:
    lines, width = "", max(map(len, tensors))
    for name, (axes, tensor) in tensors.items():
        if isinstance(tensor, torch.Tensor):
            sizes = [str(n) for n in tensor.shape]
            if len(sizes) == len(axes):
                sizes = [f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True)]
            dtype = str(tensor.dtype).removeprefix("torch.")
            lines += f"\n  {name:<{width}}  [{', '.join(sizes)}]  {dtype}  {tensor.device}"
    return lines


# moe_align_block_size

ALIGN: dict[str, Problem] = {
    "ids no tensor": ("topk_ids", lambda a: [[0]], DtypeError, "topk_ids is of type list, a tensor is needed"),
    "ids of rank 1": (
        "topk_ids", lambda a: a["topk_ids"][0], ShapeError, "topk_ids has rank 1, 2 is needed: [tokens, top_k]",
    ),
    "ids float": (
        "topk_ids", lambda a: a["topk_ids"].float(), DtypeError, "topk_ids is float32, int32 or int64 is needed",
    ),
    "ids int16": (
        "topk_ids", lambda a: a["topk_ids"].short(), DtypeError, "topk_ids is int16, int32 or int64 is needed",
    ),
    "too many ids": (
        "topk_ids", lambda a: a["topk_ids"][:1, :1].expand(1 << 20, 5), ShapeError,
        "topk_ids has 5242880 ids, at most 4194304 are supported",
    ),
    "block no int": ("block_size", lambda a: 16.0, DtypeError, "block_size is of type float, an int is needed"),
    "block a bool": ("block_size", lambda a: True, DtypeError, "block_size is of type bool, an int is needed"),
    "block of 0": ("block_size", lambda a: 0, ShapeError, "block_size is 0, at least 1 is needed"),
    "block of 65537": ("block_size", lambda a: 65537, ShapeError, "block_size is 65537, at most 65536 is supported"),
    "experts no int": ("num_experts", lambda a: None, DtypeError, "num_experts is of type NoneType, an int is needed"),
    "no expert": ("num_experts", lambda a: -1, ShapeError, "num_experts is -1, at least 1 is needed"),
    "1025 experts": ("num_experts", lambda a: 1025, ShapeError, "num_experts is 1025, at most 1024 is supported"),
    "map no tensor": ("expert_map", lambda a: {}, DtypeError, "expert_map is of type dict, a tensor is needed"),
    "map of rank 2": (
        "expert_map", lambda a: a["expert_map"][None], ShapeError, "expert_map has rank 2, 1 is needed: [experts]",
    ),
    "map bool": (
        "expert_map", lambda a: a["expert_map"] > 0, DtypeError, "expert_map is bool, int32 or int64 is needed",
    ),
    "map elsewhere": (
        "expert_map", lambda a: a["expert_map"].to("meta"), DeviceError, "expert_map is on meta, topk_ids on cpu",
    ),
    "pad no bool": ("pad_sorted_ids", lambda a: 1, DtypeError, "pad_sorted_ids is of type int, a bool is needed"),
    "ignore no bool": (
        "ignore_invalid_experts", lambda a: None, DtypeError,
        "ignore_invalid_experts is of type NoneType, a bool is needed",
    ),
    "scatter no bool": (
        "return_scatter_idx", lambda a: "no", DtypeError, "return_scatter_idx is of type str, a bool is needed",
    ),
}  # fmt: skip


def align_arguments() -> Arguments:
    return {
        "topk_ids": torch.zeros((3, 2), dtype=torch.int32), "block_size": 16, "num_experts": 8,
        "expert_map": torch.arange(8, dtype=torch.int32), "pad_sorted_ids": False, "ignore_invalid_experts": False,
        "return_scatter_idx": False,
    }  # fmt: skip


def align_tensors(arguments: Arguments) -> str:
    axes = {"topk_ids": ("tokens", "top_k"), "expert_map": ("experts",)}
    return described({name: (axes[name], arguments[name]) for name in axes})


@pytest.mark.parametrize("name", ALIGN)
def test_align_refuses(name: str) -> None:
    argument, change, kind, text = ALIGN[name]
    arguments = align_arguments()
    arguments[argument] = change(arguments)
    error = refused(ops.moe_align_block_size, arguments)
    assert type(error) is kind
    assert str(error) == f"moe_align_block_size: {text}{align_tensors(arguments)}"


def test_align_names_every_problem_of_a_call() -> None:
    arguments = align_arguments()
    wrong = ("ids of rank 1", "map bool", "block of 0", "1025 experts", "pad no bool")
    for name in wrong:
        argument, change, _, _ = ALIGN[name]
        arguments[argument] = change(arguments)
    error = refused(ops.moe_align_block_size, arguments)
    assert type(error) is ContractError
    texts = "\n".join(ALIGN[name][3] for name in wrong)
    assert str(error) == f"moe_align_block_size: {texts}{align_tensors(arguments)}"


def test_align_on_meta() -> None:
    arguments = align_arguments() | {"topk_ids": torch.zeros((3, 2), dtype=torch.int32, device="meta")}
    error = refused(ops.moe_align_block_size, arguments)
    assert type(error) is DeviceError
    assert str(error) == "moe_align_block_size: topk_ids is on meta, where nothing can run"


def test_expert_rows_refuses() -> None:
    ids = torch.zeros((3, 2), dtype=torch.uint8)
    error = refused(expert_rows, {"topk_ids": ids, "num_experts": 0})
    assert type(error) is ContractError
    assert str(error) == (
        "expert_rows: topk_ids is uint8, int32 or int64 is needed\n"
        "num_experts is 0, at least 1 is needed\n"
        "  topk_ids  [tokens=3, top_k=2]  uint8  cpu"
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"ids": 100}, "ids = 100 is no power of two from 32 to 1024"),
        ({"ids": 16}, "ids = 16 is no power of two from 32 to 1024"),
        ({"few": -1}, "few = -1 is no whole number from 0 to 8192"),
        ({"scan": 3}, "scan = 3 is no power of two from 1 to 64"),
        ({"num_warps": 0}, "num_warps = 0 is no power of two from 1 to 32"),
        ({"tokens": 1, "scan": "8"}, "tokens is unknown; scan = '8' is no power of two from 1 to 64"),
    ],
    ids=str,
)
def test_align_refuses_a_configuration(config: Any, text: str) -> None:
    error = refused(ops.moe_align_block_size, align_arguments() | {"config": config})
    assert type(error) is ContractError
    assert str(error) == f"moe_align_block_size: config: {text}"


# moe_sum

SUM: dict[str, Problem] = {
    "input no tensor": ("input", lambda a: None, DtypeError, "input is of type NoneType, a tensor is needed"),
    "input of rank 2": (
        "input", lambda a: a["input"][0], ShapeError, "input has rank 2, 3 is needed: [tokens, slots, columns]",
    ),
    "no slot": ("input", lambda a: a["input"][:, :0], ShapeError, "input has slots=0, at least 1 is needed"),
    "65 slots": (
        "input", lambda a: a["input"][:, :1].expand(3, 65, 16), ShapeError,
        "input has slots=65, at most 64 is supported",
    ),
    "input int": (
        "input", lambda a: a["input"].int(), DtypeError,
        "input is int32, bfloat16 or float16 or float32 is needed\noutput is float16, input is int32: they must agree",
    ),
    "output no tensor": ("output", lambda a: 1, DtypeError, "output is of type int, a tensor is needed"),
    "output of rank 3": (
        "output", lambda a: a["output"][None], ShapeError, "output has rank 3, 2 is needed: [tokens, columns]",
    ),
    "a token less": ("output", lambda a: a["output"][:2], ShapeError, "output has tokens=2, input has 3"),
    "a column more": (
        "output", lambda a: torch.zeros((3, 17), dtype=torch.float16), ShapeError,
        "output has columns=17, input has 16",
    ),
    "output float32": (
        "output", lambda a: a["output"].float(), DtypeError, "output is float32, input is float16: they must agree",
    ),
    "output not contiguous": (
        "output", lambda a: torch.zeros((16, 3), dtype=torch.float16).T, LayoutError,
        "output is not contiguous: its strides are (1, 3)",
    ),
    "output elsewhere": (
        "output", lambda a: a["output"].to("meta"), DeviceError, "output is on meta, input on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUM)
def test_sum_refuses(name: str) -> None:
    argument, change, kind, text = SUM[name]
    arguments = {
        "input": torch.ones((3, 4, 16), dtype=torch.float16), "output": torch.zeros((3, 16), dtype=torch.float16),
    }  # fmt: skip
    arguments[argument] = change(arguments)
    error = refused(ops.moe_sum, arguments)
    axes = {"input": ("tokens", "slots", "columns"), "output": ("tokens", "columns")}
    assert type(error) is kind
    assert str(error) == f"moe_sum: {text}{described({n: (axes[n], arguments[n]) for n in axes})}"
    out = arguments["output"]
    assert not isinstance(out, torch.Tensor) or out.device.type == "meta" or not bool(out.any())
