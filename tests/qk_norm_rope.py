"""Inputs and checks of `fused_qk_norm_rope`, on any device.

Inputs follow from a `Case` and are made on the device, some rows at a time; so the heads can be made
again to judge a result that was written over them, and no test needs memory for a second qkv.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from compare import check_bytes, check_close, check_rounding, fingerprint
from torch import Tensor

from tilewright.ops.qk_norm_rope_reference import exact_heads, reference

__all__ = [
    "CONTENTS",
    "FORCED",
    "Case",
    "Inputs",
    "check",
    "check_same",
    "make",
    "reference",
    "run",
    "run_far",
    "unfused",
]

FORCED = (1, 2, 4, 8)  # what forced_token_heads_per_warp selects; any other value > 0 is an error
GUARD = 4096  # elements kept around qkv, a multiple of 16 bytes
SLICE = 1 << 22  # elements made and compared at a time: 32 MiB in float64
FAR = 2**31 - 8192  # elements from row to row of `run_far`

Operator = Callable[..., None]
Exact = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]  # as `exact_heads`


@dataclass(frozen=True)
class Case:
    """One problem; its tensors follow from it.

    Attributes:
        heads: Heads of q, of k and of v.
        rotary: Lanes of a head that rotate, the first ones; None: all.
        around: Elements of a wider buffer before and after each row of qkv.
        strided: Positions are every second element, between others that are valid too.
        content: What the heads hold, a key of `CONTENTS`.
        weights: "distinct": no two lanes that rotate together have equal ones; "signs": 1 or -1.
        max_position: Rows of the cos/sin table.
        spread: Every 16 values are scaled by a power of two from 2^-spread to 2^spread.
    """

    tokens: int
    heads: tuple[int, int, int] = (4, 2, 2)
    head_dim: int = 128
    rotary: int | None = None
    neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.float32
    position_dtype: torch.dtype = torch.int64
    strided: bool = False
    around: tuple[int, int] = (0, 0)
    content: str = "normal"
    weights: str = "distinct"
    max_position: int = 4096
    spread: int = 4
    eps: float = 1e-6
    seed: int = 0

    @property
    def rotating(self) -> int:
        """Lanes of a head that rotate."""
        return self.head_dim if self.rotary is None else self.rotary

    @property
    def normed(self) -> int:
        """Heads of a token that a call changes."""
        return self.heads[0] + self.heads[1]

    @property
    def columns(self) -> int:
        return sum(self.heads) * self.head_dim

    @property
    def stride(self) -> int:
        """Elements from row to row."""
        return self.around[0] + self.columns + self.around[1]

    @property
    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors, about."""
        table = self.max_position * self.rotating * self.cache_dtype.itemsize
        return self.tokens * (2 * self.stride + self.position_dtype.itemsize) + table

    def __str__(self) -> str:
        words = [f"{self.tokens}x{'.'.join(map(str, self.heads))}x{self.head_dim}"]
        words += [f"rotary{self.rotary}"] * (self.rotary is not None) + ["gptj"] * (not self.neox)
        words += [_short(self.dtype)] * (self.dtype != torch.bfloat16)
        words += [f"cache_{_short(self.cache_dtype)}"] * (self.cache_dtype != torch.float32)
        words += [_short(self.position_dtype)] * (self.position_dtype != torch.int64)
        words += ["strided"] * self.strided + [f"around{self.around[0]}.{self.around[1]}"] * (self.around != (0, 0))
        words += [w for w in (self.content, self.weights) if w not in ("normal", "distinct")]
        words += [f"eps{self.eps:g}"] * (self.eps != 1e-6)
        return "-".join(words).replace(" ", "_")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


@dataclass
class Inputs:
    """The operator's tensors, and the memory around those that a wrong call could write or read."""

    case: Case
    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos_sin_cache: Tensor
    position_ids: Tensor
    memory: Tensor
    fixed_memory: dict[str, Tensor]

    def arguments(self) -> tuple[Any, ...]:
        """In the operator's order, but for the last, which has a default."""
        case, table, positions = self.case, self.cos_sin_cache, self.position_ids
        numbers = (*case.heads, case.head_dim, case.eps)
        return (self.qkv, *numbers, self.q_weight, self.k_weight, table, case.neox, positions)

    def reset(self) -> None:
        """qkv and the memory around it as they are before a call."""
        self.memory.fill_(torch.nan)
        rows = self.memory[GUARD : GUARD + self.case.tokens * self.case.stride].view(-1, self.case.stride)
        for start, stop in row_slices(self.case):
            rows[start:stop] = row_values(self.case, start, stop, self.memory.device)

    def read_only(self) -> dict[str, int]:
        """Fingerprints of what a call must leave as it is, with the memory around it."""
        return {name: fingerprint(memory) for name, memory in self.fixed_memory.items()}

    def written(self) -> dict[str, int]:
        """Fingerprint of what a call writes, with the memory around it."""
        return {"qkv": fingerprint(self.memory)}


# Making inputs


def make(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case, ready for a call."""
    device = torch.device(device)
    # NaN lies around qkv, the weights and the table: a read past their ends shows in the result.
    memory = torch.empty(case.tokens * case.stride + 2 * GUARD, dtype=case.dtype, device=device)
    qkv = memory.as_strided((case.tokens, case.columns), (case.stride, 1), GUARD + case.around[0])

    fixed: dict[str, Tensor] = {}
    for stream, name in enumerate(("q_weight", "k_weight")):
        fixed[name] = torch.full((3, case.head_dim), torch.nan, dtype=case.dtype, device=device)
        fixed[name][1] = _weight(case, device, 1 + stream)
    sizes = (case.max_position + 32, case.rotating)
    table = fixed["cos_sin_cache"] = torch.full(sizes, torch.nan, dtype=case.cache_dtype, device=device)
    table[16:-16] = _cos_sin(case, device)

    random, last = _generator(case, device, 3), case.max_position - 1
    positions = torch.randint(last + 1, (case.tokens,), generator=random, device=device).to(case.position_dtype)
    if case.strided:
        positions = torch.stack((positions, last - positions), dim=1)[:, 0]
    fixed["position_ids"] = positions

    weights = (fixed["q_weight"][1], fixed["k_weight"][1])
    inputs = Inputs(case, qkv, *weights, table[16:-16], positions, memory, fixed)
    inputs.reset()
    return inputs


def row_slices(case: Case) -> Iterator[tuple[int, int]]:
    """The ranges of rows that are made and compared at a time."""
    step = max(1, SLICE // max(1, case.stride))
    for start in range(0, case.tokens, step):
        yield start, min(start + step, case.tokens)


def row_values(case: Case, start: int, stop: int, device: torch.device) -> Tensor:
    """[rows, stride] of one of the `row_slices`, as it is before a call.

    What is no q or k head holds random bits: NaN of every payload, infinities, values of any size.
    """
    random = _generator(case, device, 4 + start)
    shape, first = (stop - start, case.stride), case.around[0]
    rows = torch.randint(-(2**15), 2**15, shape, generator=random, device=device, dtype=torch.int16).view(case.dtype)
    heads = torch.empty((stop - start, case.normed, case.head_dim), dtype=case.dtype, device=device)
    heads.normal_(generator=random)
    blocks = (stop - start, case.normed, case.head_dim // 16, 1)
    powers = torch.randint(-case.spread, case.spread + 1, blocks, generator=random, device=device)
    heads.unflatten(-1, (-1, 16)).mul_(powers.float().exp2_().to(case.dtype))
    CONTENTS[case.content](heads, start)
    rows[:, first : first + case.normed * case.head_dim] = heads.flatten(1)
    return rows


def head_values(case: Case, rows: Tensor) -> Tensor:
    """The q and k heads [rows, heads, dim] in rows as `row_values` makes them."""
    first = case.around[0]
    return rows[:, first : first + case.normed * case.head_dim].unflatten(1, (case.normed, case.head_dim))


def _not_finite(heads: Tensor, start: int) -> None:
    """NaN in one head, an infinity in two. Needs 3 tokens and 2 heads."""
    if start == 0:
        heads[0, 0, 5] = torch.nan
        heads[1, 1, 2] = torch.inf
        heads[2, 0, heads.shape[2] - 1] = -torch.inf


def _zeros(heads: Tensor, start: int) -> None:
    """0.0, and -0.0 in every second lane."""
    heads.zero_()
    heads[..., 1::2] = -0.0


CONTENTS: dict[str, Callable[[Tensor, int], None]] = {
    "normal": lambda heads, start: None,
    "zeros": _zeros,
    "not finite": _not_finite,
}


def _generator(case: Case, device: torch.device, stream: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((case.seed << 32) + stream)


def _weight(case: Case, device: torch.device, stream: int) -> Tensor:
    """[head_dim], float64.

    "distinct": below 1 and above 1 in turn, over each half of the lanes that rotate and over all of
    them, so that the two lanes of a pair, in either pairing, have unequal ones.
    """
    random = _generator(case, device, stream)
    value = torch.rand(case.head_dim, generator=random, device=device, dtype=torch.float64)
    if case.weights == "signs":
        return 1.0 - 2.0 * (value < 0.5)
    half = case.rotating // 2
    lane = torch.arange(case.head_dim, device=device)
    above = (lane % 2 == 1) ^ ((lane >= half) & (lane < 2 * half) & (half % 2 == 0))
    return torch.where(above, 1.1 + 0.9 * value, 0.4 + 0.5 * value)


def _cos_sin(case: Case, device: torch.device) -> Tensor:
    """[positions, rotary]: cos, then sin, of position * 10000^(-2i / rotary), float64."""
    pair = torch.arange(case.rotating // 2, dtype=torch.float64, device=device)
    angle = torch.arange(case.max_position, dtype=torch.float64, device=device)[:, None]
    angle = angle * 10000.0 ** (-2 * pair / case.rotating)
    return torch.cat((angle.cos(), angle.sin()), dim=1)


# Checking results


def run(
    operator: Operator, inputs: Inputs, *, repeats: int = 0, exact: Exact = exact_heads, **options: Any
) -> None:
    """One call checked in full, then `repeats` calls on equal inputs that must give its bits.

    Args:
        operator: What is checked.
        inputs: What it gets.
        repeats: Further calls.
        exact: What it computes, float64.
        options: Its further keywords.

    Raises:
        AssertionError: Names the first rule that does not hold, and where.
    """
    before = inputs.read_only()
    returned = operator(*inputs.arguments(), **options)
    if returned is not None:
        raise AssertionError(f"returned {type(returned).__name__}; it works in place")
    check_same("the call changed", inputs.read_only(), before)
    check(inputs, exact)
    first = inputs.written()
    for repeat in range(repeats):
        inputs.reset()
        operator(*inputs.arguments(), **options)
        check_same(f"repeat {repeat + 1} on equal inputs changed", inputs.written(), first)


def run_far(operator: Operator, inputs: Inputs, **options: Any) -> None:
    """A call whose third row begins past 2^31 elements, judged in the memory of `inputs`.

    In 32 bits its offset wraps to just before the first row, into memory that must stay as it is.
    On a GPU all the 8 GiB are checked; on a CPU only what is touched is ever backed by memory.
    """
    case, device, front = inputs.case, inputs.qkv.device, 2 * 8192
    assert case.tokens == 3 and case.columns <= front and case.around == (0, 0)
    size = front + 2 * FAR + case.columns
    memory = _unbacked(size) if device.type == "cpu" else torch.empty(size, dtype=torch.int16, device=device)
    rows = memory.as_strided((3, case.columns), (FAR, 1), front)
    checked = memory if device.type != "cpu" else memory[:front]
    checked.fill_(UNTOUCHED)
    rows.copy_(inputs.qkv.view(torch.int16))
    operator(*replace(inputs, qkv=rows.view(case.dtype)).arguments(), **options)
    inputs.qkv.copy_(rows.view(case.dtype))
    check(inputs)
    rows.fill_(UNTOUCHED)
    for start, chunk in enumerate(checked.split(2**28)):
        if not bool((chunk == UNTOUCHED).all()):
            at = start * 2**28 + int((chunk != UNTOUCHED).to(torch.uint8).argmax()) - front
            raise AssertionError(f"qkv: element {at} from its start written, outside every row")


UNTOUCHED = 0x2BAB  # what `run_far` finds between rows before and after a call


def _unbacked(size: int) -> Tensor:
    """int16 elements of address space; a page takes memory once it is touched."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * size, flags=flags), dtype=torch.int16)


def check_same(message: str, actual: dict[str, int], expected: dict[str, int]) -> None:
    """Two sets of fingerprints are equal."""
    names = [name for name, value in expected.items() if actual[name] != value]
    if names:
        raise AssertionError(f"{message} {', '.join(names)}")


def check(inputs: Inputs, formula: Exact = exact_heads) -> None:
    """Every q and k head is right, every other byte of qkv and around it as before.

    A value is within max(1 ulp, 2^-20 of the head's rms) of the exact one, nearly all of them are
    correctly rounded.
    """
    case, memory, off = inputs.case, inputs.memory, 0
    weights = _weights(inputs)
    table, device = inputs.cos_sin_cache, memory.device
    rows = memory[GUARD : GUARD + case.tokens * case.stride].view(-1, case.stride)
    for start, stop in row_slices(case):
        expected = row_values(case, start, stop, device)
        heads, actual = head_values(case, expected), head_values(case, rows[start:stop])
        cos_sin = table[inputs.position_ids[start:stop].long()]
        if case.normed:
            exact = formula(heads, weights, cos_sin, case.neox, case.eps)
            off += check_close(
                "qkv",
                actual,
                exact,
                ulps=1,
                floor=exact.square().mean(-1, keepdim=True).sqrt_() * 2.0**-20,
                axes="token head lane",
                first_axis=torch.arange(start, stop),
            )
        # Heads that passed count as expected, so that one comparison covers all the row.
        heads.copy_(actual)
        got, want = (x.reshape(-1).view(torch.uint8) for x in (rows[start:stop], expected))
        check_bytes("qkv", got, want, lambda at, start=start: _place(case, start, at))
    # float16 after five roundings to float32: 2e-4 to 3e-4 are expected. A second rounding of the result makes it 0.2.
    check_rounding("qkv", off, case.tokens * case.normed * case.head_dim, share=2e-3, least=4)
    guard = torch.full((GUARD,), torch.nan, dtype=case.dtype, device=device).view(torch.uint8)
    for side, part in (("before", memory[:GUARD]), ("after", memory[len(memory) - GUARD :])):
        check_bytes(f"memory {side} qkv", part.view(torch.uint8), guard, "byte {}".format)


def _weights(inputs: Inputs) -> Tensor:
    """[heads, dim]: the weight of each q and k head."""
    hq, hk, _ = inputs.case.heads
    return torch.cat((inputs.q_weight.expand(hq, -1), inputs.k_weight.expand(hk, -1)))


def _place(case: Case, start: int, offset: int) -> str:
    """Names a byte of rows from `start` on that is no q or k head."""
    row, column = divmod(offset // 2, case.stride)
    column -= case.around[0]
    where = f"token={start + row}"
    if not 0 <= column < case.columns:
        return f"{where}, column {column} of its row, outside it"
    head, lane = divmod(column, case.head_dim)
    return f"{where}, v_head={head - case.normed}, lane={lane}"


# What others compute


def unfused(inputs: Inputs) -> Tensor:
    """q and k heads [tokens, heads, dim] as a separate norm and rotation give them, with more roundings.

    The norm is float32, rounded before and after the weight; the rotation is in qkv's dtype, with
    the table rounded to it.
    """
    case, dtype = inputs.case, inputs.case.dtype
    x = inputs.qkv[:, : case.normed * case.head_dim].unflatten(1, (case.normed, case.head_dim)).float()
    scale = (x.square().mean(-1, keepdim=True) + case.eps).rsqrt()
    y = (x * scale).to(dtype) * _weights(inputs)
    cos, sin = inputs.cos_sin_cache[inputs.position_ids.long()].to(dtype).unsqueeze(1).chunk(2, dim=-1)
    turning = y[..., : case.rotating]
    if case.neox:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, y[..., case.rotating :]), dim=-1)
