"""Inputs of the fused MoE and its parts, and the rules their results must keep, on any device.

What a call allocates itself comes from `guarded`: NaN or large integers between guards, so that a result that depends
on memory nobody wrote, or a write beside a buffer, shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compare import fingerprint
from torch import Tensor

from tilewright.ops import moe_reference as reference

GUARD = 512  # bytes before and after every tensor
UNTOUCHED = 0xAB
SPREADS = 4.0  # of `Exact.spread`, which is more than one standard deviation: few terms may all err the same way
FROBENIUS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 2e-6}  # of the whole output, relative
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


@dataclass(frozen=True)
class Case:
    """One call of the fused MoE.

    Attributes:
        inner: I; w1 has 2 * inner rows.
        ids: how tokens are routed, a key of `IDS`.
        parallel: ranks of expert parallelism; this one holds the first `experts // parallel` experts.
        padding: elements between the rows of w1 and w2.
        strided: topk_ids and topk_weights are every second column of a wider table.
    """

    tokens: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    activation: str = "silu"
    ids: str = "distinct"
    id_dtype: torch.dtype = torch.int32
    weight_dtype: torch.dtype = torch.float32
    parallel: int = 1
    padding: int = 0
    strided: bool = False
    bias: bool = False
    on_input: bool = False
    seed: int = 0

    @property
    def local_experts(self) -> int:
        return self.experts // self.parallel

    def __str__(self) -> str:
        words = [f"{self.tokens}x{self.hidden}x{self.inner}-{self.experts}x{self.top_k}"]
        words += [_short(self.dtype)] * (self.dtype != torch.bfloat16)
        words += [self.activation] * (self.activation != "silu") + [self.ids] * (self.ids != "distinct")
        words += [_short(self.id_dtype)] * (self.id_dtype != torch.int32)
        words += [f"weights_{_short(self.weight_dtype)}"] * (self.weight_dtype != torch.float32)
        words += [f"ep{self.parallel}"] * (self.parallel > 1) + [f"padding{self.padding}"] * (self.padding > 0)
        words += [name for name in ("strided", "bias", "on_input") if getattr(self, name)]
        return "-".join(words).replace(" ", "_")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


# Odd sizes, a token alone, more slots than tokens, experts that get nothing, tiles that divide nothing.
SMALL = (
    Case(1, 4, 1, 16, 16),
    Case(1, 8, 8, 64, 32),
    Case(2, 4, 2, 32, 24, dtype=torch.float16),
    Case(5, 8, 3, 48, 40, bias=True),
    Case(17, 4, 2, 80, 16, strided=True, id_dtype=torch.int64),
    Case(33, 5, 2, 64, 48, padding=8),
    Case(16, 8, 2, 65, 33, padding=1, dtype=torch.float16),
    Case(3, 8, 2, 511, 96),
    Case(9, 4, 4, 32, 32, dtype=torch.float32),
    *(Case(7, 4, 2, 32, 20, activation=name) for name in ACTIVATIONS[1:]),
    Case(6, 4, 2, 32, 20, activation="swigluoai", bias=True, dtype=torch.float16),
    Case(4, 4, 1, 32, 16, on_input=True, bias=True),
    Case(4, 4, 2, 32, 16, on_input=True, weight_dtype=torch.bfloat16),
    Case(12, 8, 3, 32, 16, parallel=4, weight_dtype=torch.float16),
)

# Faults of public implementations, by their numbers in the list that the tests follow.
FAULTS = {
    "41 padding ids, many rows": Case(33, 8, 2, 32, 16, ids="half missing"),
    "41 padding ids, few rows": Case(2, 64, 2, 32, 16, ids="half missing"),
    "41 all ids -1, many rows": Case(20, 4, 2, 32, 16, ids="missing"),
    "41 all ids -1, few rows": Case(1, 256, 2, 32, 16, ids="missing"),
    "41 ids past the experts": Case(9, 4, 2, 32, 16, ids="past"),
    "42 one id -1": Case(9, 8, 4, 32, 16, ids="one missing"),
    "44 experts that are elsewhere": Case(9, 8, 2, 32, 16, ids="elsewhere", parallel=2),
    "45 experts without a token": Case(20, 8, 2, 32, 16, ids="first"),
    "49 steps that do not divide": Case(5, 4, 2, 511, 96),
    "52 no token": Case(0, 8, 8, 32, 16),
    "53 interleaved gate and up": Case(3, 2, 1, 16, 2, activation="swigluoai"),
    "duplicate ids": Case(12, 8, 4, 32, 16, ids="duplicates"),
}


@dataclass
class Inputs:
    """The tensors of a call; `memory` holds what lies around those that it may only read."""

    case: Case
    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    expert_map: Tensor | None
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    memory: dict[str, Tensor] = field(repr=False)

    def arguments(self) -> dict[str, Any]:
        """By the keywords of `fused_experts_impl`."""
        return dict(
            hidden_states=self.hidden_states, w1=self.w1, w2=self.w2, topk_weights=self.topk_weights,
            topk_ids=self.topk_ids, **self.options(),
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        """The keywords after the five tensors."""
        case = self.case
        return dict(
            activation=case.activation, apply_router_weight_on_input=case.on_input,
            global_num_experts=case.experts if case.parallel > 1 else -1,
            expert_map=self.expert_map, w1_bias=self.w1_bias, w2_bias=self.w2_bias,
        )  # fmt: skip

    def read_only(self) -> dict[str, int]:
        """Fingerprints of what a call must leave as it is, with the memory around it."""
        return {name: fingerprint(memory) for name, memory in self.memory.items()}

    def written(self) -> dict[str, int]:
        """A call returns what it writes."""
        return {}


def make(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case: hidden states and weights are normal / 10, with NaN around and between their rows."""
    random = torch.Generator(device).manual_seed(case.seed)
    memory: dict[str, Tensor] = {}

    def normal(name: str, *shape: int, padding: int = 0, around: int = 64) -> Tensor:
        rows = 1
        for size in shape[:-1]:
            rows *= size
        width = shape[-1] + padding
        whole = memory[name] = torch.full((rows * width + 2 * around,), torch.nan, dtype=case.dtype, device=device)
        strides = [1]
        for size in reversed((*shape[1:-1], width)):
            strides.insert(0, strides[0] * size)
        part = whole.as_strided(shape, strides[: len(shape)], around)
        for row in part if len(shape) == 3 else [part]:  # a slice at a time
            row.copy_(torch.randn(row.shape, generator=random, device=device) / 10)
        return part

    experts, hidden, inner = case.local_experts, case.hidden, case.inner
    x = normal("hidden_states", case.tokens, hidden)
    w1 = normal("w1", experts, 2 * inner, hidden, padding=case.padding)
    w2 = normal("w2", experts, hidden, inner, padding=case.padding)
    biases = [None, None]
    if case.bias:
        biases = [normal("w1_bias", experts, 2 * inner), normal("w2_bias", experts, hidden)]

    shape = (case.tokens, case.top_k)
    weights = torch.rand(shape, generator=random, device=device) + 0.25
    ids = IDS[case.ids](case, random, torch.device(device))
    columns = 2 if case.strided else 1
    memory["topk_weights"] = torch.full((*shape, columns), torch.nan, dtype=case.weight_dtype, device=device)
    memory["topk_ids"] = torch.full((*shape, columns), 2**30, dtype=case.id_dtype, device=device)
    memory["topk_weights"][..., 0], memory["topk_ids"][..., 0] = weights, ids
    expert_map = None
    if case.parallel > 1:
        expert_map = torch.arange(case.experts, device=device, dtype=torch.int32)
        expert_map = memory["expert_map"] = torch.where(expert_map < experts, expert_map, -1)
    return Inputs(
        case, x, w1, w2, memory["topk_weights"][..., 0], memory["topk_ids"][..., 0], expert_map, *biases, memory
    )


def distinct(case: Case, random: torch.Generator, device: torch.device) -> Tensor:
    """Different experts in a row where there are enough of them."""
    if case.top_k > case.experts:
        return duplicates(case, random, device)
    order = torch.rand((case.tokens, case.experts), generator=random, device=device)
    return order.argsort(1)[:, : case.top_k]


def duplicates(case: Case, random: torch.Generator, device: torch.device) -> Tensor:
    """Any experts, so that a row may name one twice."""
    return torch.randint(case.experts, (case.tokens, case.top_k), generator=random, device=device)


def _with(change: Callable[[Tensor, Case], None]) -> Callable[[Case, torch.Generator, torch.device], Tensor]:
    def made(case: Case, random: torch.Generator, device: torch.device) -> Tensor:
        ids = distinct(case, random, device)
        change(ids, case)
        return ids

    return made


def _half_missing(ids: Tensor, case: Case) -> None:
    ids[1::2] = -1


def _one_missing(ids: Tensor, case: Case) -> None:
    ids[case.tokens // 2, case.top_k // 2] = -1


def _missing(ids: Tensor, case: Case) -> None:
    ids.fill_(-1)


def _past(ids: Tensor, case: Case) -> None:
    """Past the experts, just and far, and far below 0."""
    ids[0::3, 0] = case.experts
    ids[1::3, -1] = 2**31 - 1
    ids[2::3, 0] = -(2**31)


def _elsewhere(ids: Tensor, case: Case) -> None:
    """Every third token to experts of other ranks alone."""
    ids[::3] = case.local_experts + ids[::3] % (case.experts - case.local_experts)


def _first(ids: Tensor, case: Case) -> None:
    ids.fill_(0)


IDS: dict[str, Callable[[Case, torch.Generator, torch.device], Tensor]] = {
    "distinct": distinct,
    "duplicates": duplicates,
    "half missing": _with(_half_missing),
    "one missing": _with(_one_missing),
    "missing": _with(_missing),
    "past": _with(_past),
    "elsewhere": _with(_elsewhere),
    "first": _with(_first),
}


# Memory that a call allocates


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Within it `torch.empty` and its like give poisoned tensors between guards; a guard that was written is an error.

    Floats are NaN; integers hold 0x7B in every byte, which is no index of anything.
    """
    plain = torch.empty
    made: list[tuple[Tensor, int]] = []

    def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = torch.get_default_dtype() if dtype is None else dtype
        number = 1
        for extent in shape:
            number *= int(extent)
        whole = plain(number * dtype.itemsize + 2 * GUARD, dtype=torch.uint8, device=device, **options)
        whole.fill_(UNTOUCHED)
        part = whole[GUARD : GUARD + number * dtype.itemsize].view(dtype)
        if dtype.is_floating_point:
            part.fill_(torch.nan)
        else:
            part.view(torch.uint8).fill_(0x7B)
        made.append((whole, number * dtype.itemsize))
        return part.view(shape)

    def empty_like(tensor: Tensor, **options: Any) -> Tensor:
        return empty(tensor.shape, **{"dtype": tensor.dtype, "device": tensor.device, **options})

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        return empty(*size, **{"dtype": self.dtype, "device": self.device, **options})

    kept = [(torch, "empty", empty), (torch, "empty_like", empty_like), (torch.Tensor, "new_empty", new_empty)]
    before = [getattr(owner, name) for owner, name, _ in kept]
    for owner, name, value in kept:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(kept, before, strict=True):
            setattr(owner, name, value)
    for number, (whole, size) in enumerate(made):
        for side, part in (("before", whole[:GUARD]), ("after", whole[GUARD + size :])):
            if not bool((part == UNTOUCHED).all()):
                at = int((part != UNTOUCHED).to(torch.uint8).argmax())
                raise AssertionError(
                    f"allocation {number} of {size} bytes: byte {at} of the {GUARD} {side} it was written"
                )


# Results of the fused MoE


def run(operator: Callable[..., Tensor], inputs: Inputs, *, repeats: int = 0, **options: Any) -> Tensor:
    """One call checked in full, then `repeats` calls on the same inputs that must give its bits; the result."""
    before = inputs.read_only()
    with guarded():
        out = operator(**inputs.arguments(), **options)
    after = inputs.read_only()
    changed = [name for name, value in before.items() if after[name] != value]
    if changed:
        raise AssertionError(f"the call changed {', '.join(changed)}")
    check(inputs, out)
    for repeat in range(repeats):
        with guarded():
            again = operator(**inputs.arguments(), **options)
        if fingerprint(again) != fingerprint(out):
            raise AssertionError(f"repeat {repeat + 1} on equal inputs gave other bits")
    return out


def check(inputs: Inputs, out: Tensor, tokens: Tensor | None = None) -> float:
    """`out` against float64: each element within `SPREADS` spreads, rows that nobody routes exactly 0.

    Args:
        inputs: of the call.
        out: its result, [tokens, hidden].
        tokens: compares these rows alone.

    Returns:
        The relative error of what was compared, by its Frobenius norm.

    Raises:
        AssertionError: names the worst element.
    """
    case = inputs.case
    shape = (case.tokens, case.hidden)
    if tuple(out.shape) != shape or out.dtype != case.dtype:
        raise AssertionError(f"out: {tuple(out.shape)} {out.dtype}, not {shape} {case.dtype}")
    if not out.is_contiguous():
        raise AssertionError(f"out: strides {out.stride()}, it must be contiguous")
    rows = torch.arange(case.tokens, device=out.device) if tokens is None else tokens
    if not len(rows):
        return 0.0
    ids, options = inputs.topk_ids[rows], inputs.options()
    exact = reference.exact_experts(
        inputs.hidden_states[rows], inputs.w1, inputs.w2, inputs.topk_weights[rows], ids, **options
    )
    local = reference.local_experts(ids, case.local_experts, options["global_num_experts"], inputs.expert_map)
    got, routed = out[rows].double(), (local >= 0).any(1)
    error, allowed = (got - exact.value).abs(), SPREADS * exact.spread
    wrong = ~(error <= allowed)
    if bool(wrong.any()):
        excess = torch.where(wrong, (error / allowed).nan_to_num(nan=torch.inf), -1.0)
        row, lane = (int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        why = "" if bool(routed[row]) else ", a token that nobody routes"
        raise AssertionError(
            f"out[token={int(rows[row])}, lane={lane}]{why}: got {float(got[row, lane])!r}, exact "
            f"{float(exact.value[row, lane])!r}, {float(allowed[row, lane])!r} apart is allowed; "
            f"{int(wrong.sum())} of {wrong.numel()} elements are further"
        )
    norm = float(exact.value.norm())
    relative = float(error.norm()) / norm if norm else 0.0
    if relative > FROBENIUS[case.dtype]:
        raise AssertionError(f"out: relative error {relative:.2e}, at most {FROBENIUS[case.dtype]:.0e} is allowed")
    return relative


# Results of moe_align_block_size

ALIGNED = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad", "scatter_idx")


def check_aligned(actual: Sequence[Tensor], topk_ids: Tensor, *arguments: Any, **options: Any) -> None:
    """All tables of `moe_align_block_size(topk_ids, *arguments, **options)`, bit for bit."""
    expected = reference.align(topk_ids, *arguments, **options)
    if len(actual) != len(expected):
        raise AssertionError(f"{len(actual)} tables, not {len(expected)}")
    for name, got, want in zip(ALIGNED, actual, expected, strict=False):
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise AssertionError(f"{name}: {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}")
        if not torch.equal(got, want):
            at = int((got != want).to(torch.uint8).argmax())
            raise AssertionError(
                f"{name}[{at}]: got {int(got[at])}, expected {int(want[at])}; "
                f"{int((got != want).sum())} of {got.numel()} differ"
            )
