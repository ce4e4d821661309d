"""The references of the fused MoE, against the plainest loops, and the rules that judge results."""

from __future__ import annotations

import math

import moe
import pytest
import torch
from moe import FAULTS, SMALL, Case, Inputs, make

from tilewright.ops import moe_reference as reference

CASES = [*SMALL, *FAULTS.values()]


def looped(inputs: Inputs) -> torch.Tensor:
    """One product at a time, in Python's floats."""
    case, options = inputs.case, inputs.options()
    out = torch.zeros(case.tokens, case.hidden, dtype=torch.float64)
    for token in range(case.tokens):
        for slot in range(case.top_k):
            expert = int(inputs.topk_ids[token, slot])
            if not 0 <= expert < case.experts:
                continue
            if inputs.expert_map is not None:
                expert = int(inputs.expert_map[expert])
            if expert < 0:
                continue
            weight = float(inputs.topk_weights[token, slot].float())
            row = inputs.w1[expert].double() @ inputs.hidden_states[token].double()
            if inputs.w1_bias is not None:
                row += inputs.w1_bias[expert].double()
            if options["apply_router_weight_on_input"]:
                row *= weight
            product = [activated(*sides(row.tolist(), i, case), case.activation) for i in range(case.inner)]
            row = inputs.w2[expert].double() @ torch.tensor(product, dtype=torch.float64)
            if inputs.w2_bias is not None:
                row += inputs.w2_bias[expert].double()
            out[token] += row if options["apply_router_weight_on_input"] else row * weight
    return out


def sides(row: list[float], i: int, case: Case) -> tuple[float, float]:
    if case.activation == "swigluoai":
        return row[2 * i], row[2 * i + 1]
    return row[i], row[i + case.inner]


def activated(gate: float, up: float, activation: str) -> float:
    if activation == "silu":
        return gate / (1 + math.exp(-gate)) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_plain_loop(case: Case) -> None:
    inputs = make(case)
    exact = reference.exact_experts(**inputs.arguments())
    torch.testing.assert_close(exact.value, looped(inputs), rtol=1e-12, atol=1e-14)
    unrounded = reference.fused_experts(**inputs.arguments(), rounds=())
    assert torch.equal(unrounded, exact.value)


def test_cases_hold_what_their_names_say() -> None:
    """A maker that stopped making missing ids would leave its fault untested."""
    routed = {}
    for name, case in FAULTS.items():
        inputs = make(case)
        local = reference.local_experts(inputs.topk_ids, case.local_experts, case.experts, inputs.expert_map)
        routed[name] = (local >= 0).any(1).tolist()
    assert routed["41 padding ids, many rows"] == [token % 2 == 0 for token in range(33)]
    assert routed["41 padding ids, few rows"] == [True, False]
    assert not any(routed["41 all ids -1, many rows"]) and not any(routed["41 all ids -1, few rows"])
    assert not any(routed["44 experts that are elsewhere"][::3]) and any(routed["44 experts that are elsewhere"])
    assert routed["52 no token"] == []
    ids = make(FAULTS["41 ids past the experts"]).topk_ids
    assert {int(ids.min()), int(ids.max())} == {-(2**31), 2**31 - 1} and bool((ids == 4).any())
    assert int((make(FAULTS["42 one id -1"]).topk_ids == -1).sum()) == 1
    assert make(FAULTS["45 experts without a token"]).topk_ids.unique().tolist() == [0]
    duplicates = make(FAULTS["duplicate ids"]).topk_ids
    assert any(len(set(row)) < len(row) for row in duplicates.tolist())


def test_activations_at_the_clamps_and_in_order() -> None:
    gate, up = torch.tensor([8.0, -9.0, 1.0]).double(), torch.tensor([-8.0, 9.0, 0.0]).double()
    wanted = [7 / (1 + math.exp(-1.702 * 7)) * -6, -9 / (1 + math.exp(1.702 * 9)) * 8, 1 / (1 + math.exp(-1.702))]
    assert reference.activate(gate, up, "swigluoai").tolist() == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(ValueError) as caught:
        reference.activate(gate, up, "relu")
    assert str(caught.value) == "activation 'relu' is none of silu, gelu, gelu_tanh, swigluoai"


def test_roundings_are_where_they_are_named() -> None:
    inputs = make(Case(2, 2, 1, 16, 8, seed=3))
    with pytest.raises(ValueError) as caught:
        reference.fused_experts(**inputs.arguments(), rounds=("gate_up", "product"))
    assert str(caught.value) == "rounds: product is none of gate_up, activated, routed, output"
    results = {
        point: reference.fused_experts(**inputs.arguments(), rounds=(point,)).double()
        for point in (*reference.ROUNDINGS, "output")
    }
    plain = reference.fused_experts(**inputs.arguments(), rounds=())
    assert all(not torch.equal(result, plain) for result in results.values())
    assert torch.equal(results["routed"], results["output"])  # one slot: its row is the sum
    assert not torch.equal(results["gate_up"], results["activated"])


def test_local_experts() -> None:
    ids = torch.tensor([[-1, 0, 3], [4, 7, 8]])
    assert reference.local_experts(ids, 4).tolist() == [[-1, 0, 3], [-1, -1, -1]]
    assert reference.local_experts(ids, 8, 4).tolist() == [[-1, 0, 3], [-1, -1, -1]]
    mapped = torch.tensor([-7, -1, -1, 2, 0, -1, -1, 5])  # 5: past the experts there are
    assert reference.local_experts(ids, 4, 8, mapped).tolist() == [[-1, -1, 2], [0, -1, -1]]
    assert reference.local_experts(ids, 4, 8, mapped[:4]).tolist() == [[-1, -1, 2], [-1, -1, -1]]


# The rules that judge results


@pytest.mark.parametrize("rounds", [(), ("output",), ("activated", "output"), reference.ROUNDINGS], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_that_round_elsewhere_pass(case: Case, rounds: tuple[str, ...]) -> None:
    inputs = make(case)
    moe.check(inputs, reference.fused_experts(**inputs.arguments(), rounds=rounds).to(case.dtype))


def wrong_results(inputs: Inputs) -> dict[str, torch.Tensor]:
    """What a faulty kernel might give."""
    arguments, case = inputs.arguments(), inputs.case

    def computed(**changes: object) -> torch.Tensor:
        return reference.fused_experts(**{**arguments, **changes})

    last = inputs.w2.clone()
    last[..., -1] = 0
    fewer = torch.cat((inputs.topk_ids[:, :-1], -torch.ones(case.tokens, 1)), dim=1).int()
    swapped = torch.cat(inputs.w1.chunk(2, dim=1)[::-1], dim=1)
    nan = computed()
    nan[-1, -1] = torch.nan
    return {
        "the last lane of the inner axis left out": computed(w2=last),
        "gate and up swapped": computed(w1=swapped),
        "router weights left out": computed(topk_weights=torch.ones_like(inputs.topk_weights)),
        "weights of another slot": computed(topk_weights=inputs.topk_weights.roll(1, 0)),
        "another activation": computed(activation="gelu"),
        "a slot left out": computed(topk_ids=fewer),
        "a NaN": nan,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_faulty_results_are_refused(dtype: torch.dtype) -> None:
    inputs = make(Case(17, 4, 2, 64, 48, dtype=dtype))
    wrong = wrong_results(inputs)
    assert len(wrong) == 7
    for name, result in wrong.items():
        with pytest.raises(AssertionError) as caught:
            moe.check(inputs, result)
        assert "apart is allowed" in str(caught.value), name


def test_unrouted_rows_must_be_exactly_zero() -> None:
    inputs = make(FAULTS["41 padding ids, many rows"])
    out = reference.fused_experts(**inputs.arguments())
    moe.check(inputs, out)
    out[1, 3] = 2.0**-100
    with pytest.raises(AssertionError, match=r"out\[token=1, lane=3\], a token that nobody routes: got "):
        moe.check(inputs, out)


def test_run_sees_changed_inputs_and_changing_results() -> None:
    inputs = make(Case(3, 4, 2, 16, 8))

    def careless(**arguments: object) -> torch.Tensor:
        out = reference.fused_experts(**arguments)
        inputs.w1[0, 0, 0] += 1
        return out

    with pytest.raises(AssertionError, match="the call changed w1$"):
        moe.run(careless, inputs)
    calls = []

    def unsteady(**arguments: object) -> torch.Tensor:
        calls.append(None)
        out = reference.fused_experts(**arguments)
        return out if len(calls) == 1 else torch.nextafter(out, out + 1)

    with pytest.raises(AssertionError, match="repeat 1 on equal inputs gave other bits"):
        moe.run(unsteady, make(Case(3, 4, 2, 16, 8)), repeats=1)


def test_guarded_memory_is_poisoned_and_watched() -> None:
    with moe.guarded():
        assert torch.empty(3).isnan().all() and torch.empty((2, 2), dtype=torch.bfloat16).isnan().all()
        assert torch.empty_like(torch.zeros(2, dtype=torch.int32)).tolist() == [0x7B7B7B7B] * 2
        assert torch.zeros(2).new_empty(5).isnan().all()
    for offset, text in ((4, "byte 0 of the 512 after it"), (-1, "byte 508 of the 512 before it")):
        with pytest.raises(AssertionError, match=f"^allocation 0 of 16 bytes: {text} was written$"), moe.guarded():
            part = torch.empty(4, dtype=torch.int32)
            part.as_strided((1,), (1,), part.storage_offset() + offset).fill_(0)


# The tables


def test_align_reference_by_hand() -> None:
    ids = torch.tensor([[2, 0], [2, -1], [5, 2]], dtype=torch.int32)
    tables = reference.align(ids, 2, 4, return_scatter_idx=True)
    names = dict(zip(moe.ALIGNED, (t.tolist() for t in tables), strict=True))
    assert names == {  # flat ids: 2 0 2 -1 5 2; expert 0 has row 1, expert 2 rows 0, 2, 5
        "sorted_token_ids": [1, 6, 0, 2, 5, 6, 6, 6, 6, 6],
        "expert_ids": [0, 2, 2, -1, -1],
        "num_tokens_post_pad": [6],
        "scatter_idx": [2, 0, 3, -1, -1, 4],
    }
    mapped = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    assert reference.align(ids, 2, 4, mapped)[1].tolist() == [-1, 1, 1, -1, -1]
    rows, experts, padded = reference.align(ids, 2, 4, mapped, ignore_invalid_experts=True)
    assert (rows.tolist()[:6], experts.tolist(), padded.tolist()) == ([0, 2, 5, 6, 6, 6], [1, 1, -1, -1, -1], [4])


def test_align_reference_sizes() -> None:
    ids = torch.zeros((3, 2), dtype=torch.int32)
    assert [len(t) for t in reference.align(ids, 16, 4)] == [66, 5, 1]
    assert [len(t) for t in reference.align(ids, 16, 4, pad_sorted_ids=True)] == [80, 5, 1]
    assert [len(t) for t in reference.align(ids, 16, 8)] == [96, 6, 1]  # fewer ids than experts
    assert [len(t) for t in reference.align(ids[:0], 16, 8)] == [0, 0, 1]


def test_aligned_tables_are_compared_exactly() -> None:
    ids = torch.tensor([[2, 0], [2, -1]], dtype=torch.int32)
    moe.check_aligned(reference.align(ids, 2, 4), ids, 2, 4)
    for number, name in enumerate(moe.ALIGNED[:3]):
        tables = [table.clone() for table in reference.align(ids, 2, 4)]
        tables[number][0] += 1
        with pytest.raises(AssertionError, match=rf"^{name}\[0\]: got "):
            moe.check_aligned(tables, ids, 2, 4)
    with pytest.raises(AssertionError, match="^3 tables, not 4$"):
        moe.check_aligned(reference.align(ids, 2, 4), ids, 2, 4, return_scatter_idx=True)
