"""The fused MoE and its kernels on the CPU: the generated text, interpreted, against float64 and in poisoned memory."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe import ACTIVATIONS, FAULTS, SMALL, Case, check, guarded, make, run

import tilewright
from tilewright import interpret, ops
from tilewright.launch import OPERATORS
from tilewright.ops import moe_reference as reference
from tilewright.ops.fused_experts_impl import planned

PROFILES = ("nvidia-h200", "hygon-bw1000", "metax-c550", "generic", "nvidia-a100", "amd-mi300x")
BLOCKS = (1, 16)  # rows as they are listed; in blocks


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    with interpret.poison():
        yield


def experts(block: int | None, profile: str = "generic") -> Any:
    return functools.partial(ops.fused_experts_impl, block_size=block, profile=profile)


# The whole operator


@pytest.mark.parametrize(  # a listed row is many programs
    ("case", "block"), [(c, b) for c in SMALL for b in BLOCKS if b > 1 or c.tokens <= 16], ids=str
)
def test_small_grid(case: Case, block: int) -> None:
    run(experts(block, "nvidia-h200"), make(case), repeats=1)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda name: name.replace(" ", "_"))
def test_faults_of_others(fault: str, block: int) -> None:
    run(experts(block), make(FAULTS[fault]))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("block", (1, 16, 64))
def test_profiles(profile: str, block: int) -> None:
    """Tiles that divide nothing, and tiles that divide everything."""
    for case in (Case(3, 4, 3, 72, 40, bias=True), Case(2, 2, 2, 128, 64)):
        run(experts(block, profile), make(case))
        launch = tilewright.last_launch()
        assert launch is not None and launch.profile == profile


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_dtype(activation: str, dtype: torch.dtype, block: int) -> None:
    for bias, on_input in ((False, False), (True, True)):
        case = Case(4, 3, 2, 40, 24, dtype=dtype, activation=activation, bias=bias, on_input=on_input)
        run(experts(block), make(case))


@pytest.mark.parametrize("block", BLOCKS)
def test_rows_without_a_sentinel_do_not_change(block: int) -> None:
    """Padding ids leave the bits of the other rows as a call without those rows gives them."""
    inputs = make(Case(6, 4, 2, 32, 16, ids="half missing"))
    whole = run(experts(block), inputs)
    kept = {name: getattr(inputs, name)[0::2].contiguous() for name in ("hidden_states", "topk_ids", "topk_weights")}
    alone = experts(block)(**{**inputs.arguments(), **kept})
    assert torch.equal(whole[0::2], alone)
    assert int(torch.count_nonzero(whole[1::2])) == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("ids", "parallel"), [("elsewhere", 2), *((i, p) for i in ("missing", "half missing", "past") for p in (1, 2))]
)
def test_a_row_that_nobody_routes_reads_nothing(ids: str, parallel: int, block: int) -> None:
    """Not even its own hidden state or router weight, which may be NaN; with a map, no element beside the map."""
    inputs = make(Case(6, 8, 2, 32, 16, ids=ids, parallel=parallel, on_input=True))
    local = reference.local_experts(
        inputs.topk_ids, inputs.case.local_experts, inputs.options()["global_num_experts"], inputs.expert_map
    )
    inputs.topk_weights[local < 0] = torch.nan
    inputs.hidden_states[(local < 0).all(1)] = torch.nan
    out = experts(block)(**inputs.arguments())
    assert bool((local < 0).any())
    assert int(torch.count_nonzero(out[(local < 0).all(1)])) == 0
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("count", (0, 2, 3))
def test_global_num_experts_bounds_ids(count: int, block: int) -> None:
    inputs = make(Case(6, 4, 2, 32, 16))
    local = reference.local_experts(inputs.topk_ids, 4, count, None)
    options = {**inputs.arguments(), "global_num_experts": count}
    out = experts(block)(**options)
    want = reference.fused_experts(**{**options, "topk_ids": local, "global_num_experts": -1})
    torch.testing.assert_close(out, want, rtol=2e-2, atol=1e-4)
    assert bool((local < 0).any()) and torch.equal(out[(local < 0).all(1)], torch.zeros_like(out[(local < 0).all(1)]))


@pytest.mark.parametrize("block", BLOCKS)
def test_weights_in_the_other_layout(block: int) -> None:
    """[experts, k, n], as prepare_weights gives them: the same text, and the same bits."""
    inputs = make(Case(5, 4, 2, 48, 32))
    plain = run(experts(block), inputs)
    prepared = ops.prepare_weights(inputs.w1, inputs.w2)
    assert prepared.w1.stride(1) == 1
    turned = experts(block)(**{**inputs.arguments(), "w1": prepared.w1, "w2": prepared.w2})
    assert torch.equal(plain, turned)


@pytest.mark.parametrize(
    "tokens", [32769, *(pytest.param(t, marks=pytest.mark.full) for t in (32768, 40000, 65536))], ids=str
)
def test_no_seam_after_32768_tokens(tokens: int) -> None:
    """Rows that are the same all over, so that each token's result is known without a reference of that size."""
    few = make(Case(8, 2, 1, 16, 16))
    repeats = -(-tokens // 8)
    rows = {name: getattr(few, name).repeat(repeats, 1)[:tokens] for name in
            ("hidden_states", "topk_ids", "topk_weights")}  # fmt: skip
    with guarded():
        out = experts(256)(**{**few.arguments(), **rows})
    expected = run(experts(256), few)
    assert torch.equal(out, expected.repeat(repeats, 1)[:tokens])


def test_fused_experts_takes_an_enumeration() -> None:
    inputs = make(Case(3, 4, 2, 32, 16, activation="gelu"))
    arguments = {k: v for k, v in inputs.arguments().items() if k not in ("w1_bias", "w2_bias")}
    out = ops.fused_experts(**{**arguments, "activation": types.SimpleNamespace(value="gelu")})
    check(inputs, out)


# Which kernels run


@pytest.mark.parametrize("profile", PROFILES)
def test_few_tokens_take_rows_as_they_are_listed(profile: str) -> None:
    device = torch.device("cpu")
    listed = [planned(tokens, tokens // 32, device, profile) == 1 for tokens in (1, 8, 9, 16384)]
    assert listed == [True, True, False, False]
    for tokens, last in ((8, "moe_gemv_combine"), (9, "moe_combine")):
        run(experts(None, profile), make(Case(tokens, 4, 2, 32, 16)))
        launch = tilewright.last_launch()
        assert launch is not None and launch.operator == last


def test_blocks_of_the_h200() -> None:
    """E = 256, top 8: rows of a block by tokens."""
    found = [planned(m, m * 8 // 256, torch.device("cpu"), "nvidia-h200") for m in (8, 16, 256, 512, 2048, 8192, 16384)]
    assert found == [1, 16, 16, 32, 64, 128, 128]


# Its kernels


@dataclasses.dataclass
class Blocks:
    """One block of routed rows by hand: `rows` of them, all of expert `expert`."""

    rows: list[int]
    expert: int = 0
    block: int = 16

    def tables(self, numel: int) -> tuple[torch.Tensor, ...]:
        ids = torch.full((2 * self.block,), numel, dtype=torch.int32)
        ids[: len(self.rows)] = torch.tensor(self.rows, dtype=torch.int32)
        experts = torch.tensor([self.expert, 10**9], dtype=torch.int32)  # what is past the limit is not looked at
        return ids, experts, torch.tensor([self.block], dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 10).to(dtype)


def test_rows_that_are_not_listed_keep_their_values() -> None:
    x, w, weights = normal(3, 32), normal(2, 24, 32), torch.rand(3, 2)
    out = torch.full((6, 24), 7.0, dtype=torch.bfloat16)
    ops.moe_gemm(x, w, None, weights, *Blocks([4, 1], expert=1).tables(6), out, 16, True)
    for row in (4, 1):
        exact = (x[row // 2].double() @ w[1].double().T) * float(weights[row // 2, row % 2])
        torch.testing.assert_close(out[row].double(), exact, rtol=2**-8, atol=1e-6)
    assert bool((out[[0, 2, 3, 5]] == 7.0).all())


@pytest.mark.parametrize("expert", (-1, 2, 2**31 - 1))
def test_a_block_without_an_expert_becomes_0(expert: int) -> None:
    x, w, weights = torch.full((3, 32), torch.nan).bfloat16(), normal(2, 24, 32), torch.full((3, 2), torch.nan)
    out = torch.full((6, 24), 7.0, dtype=torch.bfloat16)
    ops.moe_gemm(x, w, normal(2, 24), weights, *Blocks([0, 5], expert).tables(6), out, 16, True)
    assert bool((out[[0, 5]] == 0.0).all()) and bool((out[1:5] == 7.0).all())
    gated = torch.full((6, 12), 7.0, dtype=torch.bfloat16)
    ops.moe_gemm_gated(x, w, normal(2, 24), weights, *Blocks([0, 5], expert).tables(6), gated, 16, "gelu", True)
    assert bool((gated[[0, 5]] == 0.0).all()) and bool((gated[1:5] == 7.0).all())


def test_programs_past_the_limit_touch_nothing() -> None:
    x, w, weights = normal(3, 32), normal(2, 24, 32), torch.rand(3, 2)
    out = torch.full((6, 24), 7.0, dtype=torch.bfloat16)
    ids, expert_ids, count = Blocks([4, 1]).tables(6)
    with interpret.counting() as counts:
        ops.moe_gemm(x, w, None, weights, ids, expert_ids, count.zero_(), out, 16, True)
    assert bool((out == 7.0).all())
    assert counts.programs > 0 and counts.bytes_loaded == 4 * counts.programs and counts.bytes_stored == 0


def test_grouped_order_gives_the_same_bits() -> None:
    inputs = make(Case(40, 3, 2, 64, 64))
    tables = ops.moe_align_block_size(inputs.topk_ids, 16, 3, pad_sorted_ids=True, ignore_invalid_experts=True)
    outs = []
    for group in (1, 2, 4, 64):
        out = torch.full((80, 128), torch.nan, dtype=torch.bfloat16)
        config = {"columns": 32, "block_k": 32, "group": group, "num_warps": 4, "num_stages": 1}
        ops.moe_gemm(inputs.hidden_states, inputs.w1, None, inputs.topk_weights, *tables, out, 16, False, config=config)
        outs.append(out)
    assert bool(outs[0].isfinite().all())
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_of_its_own(activation: str) -> None:
    """The gated GEMM is the plain one and the activation, but for the rounding between them."""
    gate_up = normal(9, 40, dtype=torch.float32) * 40
    out = torch.full((9, 20), torch.nan)
    ops.moe_activate(gate_up, out, activation)
    sides = (gate_up[:, 0::2], gate_up[:, 1::2]) if activation == "swigluoai" else gate_up.chunk(2, dim=1)
    torch.testing.assert_close(out, reference.activate(*sides, activation), rtol=1e-5, atol=1e-6)


def test_combine_reads_no_row_without_an_expert() -> None:
    ids = torch.tensor([[0, -1, 3], [4, 9, -5], [2, 2, 2]])
    routed = normal(9, 20)
    routed[(ids.reshape(-1) < 0) | (ids.reshape(-1) >= 4)] = torch.nan
    out = torch.full((3, 20), torch.nan, dtype=torch.bfloat16)
    ops.moe_combine(routed, ids, None, 4, out)
    kept = torch.where(((ids >= 0) & (ids < 4)).reshape(3, 3, 1), routed.reshape(3, 3, 20), 0).double().sum(1)
    torch.testing.assert_close(out.double(), kept, rtol=2**-8, atol=0)
    assert bool((out[1] == 0).all())


# Offsets past 2^31; memory that nobody touches is never there


def test_rows_past_2_31_elements() -> None:
    """x and out of 4,200,000 rows of 512: the last rows, in blocks."""
    rows, size = 4_200_000, 512
    x, out = (torch.empty((rows, size), dtype=torch.bfloat16) for _ in range(2))
    w, weights, listed = normal(1, size, size), torch.ones(rows, 1), [rows - 1, 0, rows - 2]
    x[listed] = normal(3, size)
    config = {"columns": 256, "block_k": 512, "group": 1, "num_warps": 4, "num_stages": 1}
    assert x.numel() > 2**31
    ops.moe_gemm(x, w, None, weights, *Blocks(listed).tables(rows), out, 16, False, config=config)
    torch.testing.assert_close(out[listed].double(), x[listed].double() @ w[0].double().T, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("apart", ("experts", "columns", "steps"))
def test_weights_past_2_31_elements(apart: str, block: int) -> None:
    """Experts, rows or columns of weights, so far apart that their last ones lie past 2^31 elements."""
    cases = {"experts": Case(2, 3, 3, 32, 16), "columns": Case(2, 1, 1, 32, 16), "steps": Case(2, 1, 1, 96, 80)}
    inputs = make(cases[apart])
    arguments = inputs.arguments()
    for name in ("w1", "w2"):
        weight = arguments[name]
        count, columns, k = weight.shape
        strides = {
            "experts": ((1 << 30) + k, k, 1), "columns": (columns << 27, 1 << 27, 1), "steps": (k << 26, 1, 1 << 26),
        }[apart]  # fmt: skip
        size = 1 + sum((n - 1) * stride for n, stride in zip(weight.shape, strides, strict=True))
        far = torch.empty(size, dtype=torch.bfloat16).as_strided(weight.shape, strides)
        far.copy_(weight)
        arguments[name] = far
        assert size > 2**31
    check(inputs, experts(block)(**arguments))


# What it is made of


@pytest.mark.parametrize("name", sorted(n for n in OPERATORS if n.startswith("moe_gem")))
def test_two_stages_share_their_text(name: str) -> None:
    """Blocks and listed rows, with any activation, are one product."""
    applications = {a.__name__ for branch in OPERATORS[name].kernel.branches for a in branch.applications}
    gated = {"gated_by_silu", "gated_by_gelu", "gated_by_gelu_tanh", "gated_by_swigluoai"}
    assert applications == {
        "moe_gemm": {"routed_rows"}, "moe_gemm_gated": gated, "moe_gemv_gated": gated,
        "moe_gemv_combine": {"combined_rows"},
    }[name]  # fmt: skip
