"""Inputs and checks of `fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, on any device.

Inputs follow from a `Case` and are made on the device, q a slice at a time; so q can be made again
to judge a result that was written over it, and no test needs memory for a second q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from compare import check_bytes, check_close, check_rounding, fingerprint, round_once, spacing
from torch import Tensor

from tilewright.ops.deepseek_v4_reference import (
    BLOCK,
    DATA,
    HEAD,
    PLAIN,
    SCALES,
    cache_rows,
    exact_kv,
    exact_q,
    insert,
    reference,
)

__all__ = [
    "CONTENTS",
    "Case",
    "Inputs",
    "check_cache",
    "check_q",
    "make",
    "reference",
    "run",
    "run_far",
]

UNTOUCHED = 0xAB  # what the cache holds before a call
GUARD = 4096  # elements kept around q, bytes kept around the cache
SLICE = 1 << 22  # elements made and compared at a time: 32 MiB in float64

Operator = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """One problem; its tensors follow from it.

    Attributes:
        inserted: Rows of kv to insert, the first ones; None: all.
        block_stride: Bytes from block to block; None: the next multiple of 576.
        slots: "permuted" over the whole cache; "ordered"; "skipping": permuted, a third and more
            of them negative; "skipped": all -1.
        content: What kv and q hold, a key of `CONTENTS`.
        strided: Slots and positions are every second element, between others that are valid too.
        max_position: Rows of the cos/sin table.
        fnuz: Codes are those of e4m3fnuz, as on gfx942.
        spread: Every 64 values are scaled by a power of two from 2^-spread to 2^spread.
    """

    tokens: int
    heads: int
    block_size: int = 64
    inserted: int | None = None
    block_stride: int | None = None
    dtype: torch.dtype = torch.bfloat16
    slots: str = "permuted"
    content: str = "normal"
    strided: bool = False
    max_position: int = 4096
    spread: int = 4
    eps: float = 1e-6
    seed: int = 0
    fnuz: bool = False

    @property
    def rows(self) -> int:
        """Rows of kv to insert."""
        return self.tokens if self.inserted is None else self.inserted

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that hold something."""
        return self.block_size * (DATA + SCALES)

    @property
    def stride(self) -> int:
        """Bytes from block to block."""
        return self.block_stride or -(-self.block_bytes // DATA) * DATA

    @property
    def blocks(self) -> int:
        """Blocks of the cache: one more than the rows fill."""
        return -(-self.rows // self.block_size) + 1

    @property
    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors, about."""
        rows = self.tokens * ((self.heads + 1) * HEAD * 2 + 16)
        return rows + self.blocks * self.stride + self.max_position * 256

    def __str__(self) -> str:
        words = [f"{self.tokens}x{self.heads}", f"block{self.block_size}"]
        if self.inserted is not None:
            words.append(f"insert{self.inserted}")
        if self.block_stride is not None:
            words.append(f"stride{self.block_stride}")
        if self.dtype != torch.bfloat16:
            words.append(str(self.dtype).removeprefix("torch."))
        words += [w for w in (self.slots, self.content) if w not in ("permuted", "normal")]
        return "-".join(words + ["strided"] * self.strided).replace(" ", "_")


@dataclass
class Inputs:
    """The operator's tensors, and the memory around the two that it writes."""

    case: Case
    q: Tensor
    kv: Tensor
    k_cache: Tensor
    slot_mapping: Tensor
    position_ids: Tensor
    cos_sin_cache: Tensor
    q_memory: Tensor
    cache_memory: Tensor

    def arguments(self) -> tuple[Any, ...]:
        """In the operator's order."""
        slots, positions, table = self.slot_mapping, self.position_ids, self.cos_sin_cache
        options = (self.case.eps, self.case.block_size)
        return (self.q, self.kv, self.k_cache, slots, positions, table, *options)

    def reset(self) -> None:
        """q and the cache as they are before a call."""
        for start, stop in q_slices(self.case):
            self.q[start:stop] = q_values(self.case, start, stop, self.q.device)
        self.cache_memory.fill_(UNTOUCHED)

    def read_only(self) -> dict[str, int]:
        """Fingerprints of what a call must leave as it is."""
        names = ("kv", "slot_mapping", "position_ids", "cos_sin_cache")
        return {name: fingerprint(getattr(self, name)) for name in names}

    def written(self) -> dict[str, int]:
        """Fingerprints of what a call writes, with the memory around it."""
        return {"q": fingerprint(self.q_memory), "k_cache": fingerprint(self.cache_memory)}


# Making inputs


def make(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case, ready for a call."""
    device = torch.device(device)
    # NaN lies around q, kv and the table: a read past their ends shows in the result.
    count = case.tokens * case.heads * HEAD
    q_memory = torch.full((count + 2 * GUARD,), torch.nan, dtype=case.dtype, device=device)
    kv = torch.full((case.tokens + 2, HEAD), torch.nan, dtype=case.dtype, device=device)[1:-1]
    kv.copy_(CONTENTS[case.content](_normal((case.tokens, HEAD), case, device, 1), case))
    table = torch.full((case.max_position + 2, 64), torch.nan, device=device)[1:-1]
    table.copy_(_cos_sin(case.max_position, device))

    size = case.blocks * case.stride + 2 * GUARD
    cache_memory = torch.empty(size, dtype=torch.uint8, device=device)
    k_cache = cache_memory.as_strided((case.blocks, case.block_bytes), (case.stride, 1), GUARD)

    slots, last_slot = _slots(case, device), case.blocks * case.block_size - 1
    random, last_position = _generator(case, device, 2), case.max_position - 1
    positions = torch.randint(last_position + 1, (case.tokens,), generator=random, device=device)
    if case.strided:
        slots = torch.stack((slots, last_slot - slots.clamp(min=0)), dim=1)[:, 0]
        positions = torch.stack((positions, last_position - positions), dim=1)[:, 0]

    q = q_memory[GUARD : GUARD + count].view(case.tokens, case.heads, HEAD)
    inputs = Inputs(case, q, kv, k_cache, slots, positions, table, q_memory, cache_memory)
    inputs.reset()
    return inputs


def q_slices(case: Case) -> Iterator[tuple[int, int]]:
    """The ranges of tokens of q that are made and compared at a time."""
    step = max(1, SLICE // (max(1, case.heads) * HEAD))
    for start in range(0, case.tokens, step):
        yield start, min(start + step, case.tokens)


def q_values(case: Case, start: int, stop: int, device: torch.device) -> Tensor:
    """q of one of the `q_slices`, as it is before a call."""
    q = _normal((stop - start, case.heads, HEAD), case, device, 3 + start)
    if case.content == "zeros":
        q.zero_()
    elif case.content == "not finite" and start == 0:
        q[0, 0, 7] = torch.nan
    return q


def _generator(case: Case, device: torch.device, stream: int) -> torch.Generator:
    return torch.Generator(device).manual_seed((case.seed << 32) + stream)


def _normal(shape: tuple[int, ...], case: Case, device: torch.device, stream: int) -> Tensor:
    """Normal values, every 64 of them scaled by a power of two."""
    random = _generator(case, device, stream)
    values = torch.empty(shape, dtype=case.dtype, device=device).normal_(generator=random)
    low, high, blocks = -case.spread, case.spread + 1, (*shape[:-1], shape[-1] // BLOCK, 1)
    powers = torch.randint(low, high, blocks, generator=random, device=device)
    values.unflatten(-1, (-1, BLOCK)).mul_(powers.float().exp2_().to(case.dtype))
    return values


def _cos_sin(positions: int, device: torch.device) -> Tensor:
    """[positions, 64]: cos, then sin, of position * 10000^(-i / 32)."""
    frequency = 10000.0 ** (-torch.arange(32, dtype=torch.float64, device=device) / 32)
    angle = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def _slots(case: Case, device: torch.device) -> Tensor:
    """[rows], int64; no slot twice."""
    if case.slots == "skipped":
        return torch.full((case.rows,), -1, device=device)
    if case.slots == "ordered":
        return torch.arange(case.rows, device=device)
    random, capacity = _generator(case, device, 0), case.blocks * case.block_size
    slots = torch.randperm(capacity, generator=random, device=device)[: case.rows]
    if case.slots == "skipping":
        slots[0::3] = -1
        slots[4::9] = -case.block_size - 1
    elif case.slots != "permuted":
        raise ValueError(f"unknown slots: {case.slots}")
    return slots


# What kv holds


def _zeros(kv: Tensor, case: Case) -> Tensor:
    """0.0, and -0.0 in every second lane."""
    kv.zero_()
    kv[:, 1::2] = -0.0
    return kv


def _identical(kv: Tensor, case: Case) -> Tensor:
    """Every row the first."""
    return kv[:1].expand_as(kv)


def _not_finite(kv: Tensor, case: Case) -> Tensor:
    """NaN and infinities, in lanes that are quantised and in lanes that rotate. Needs 7 rows."""
    nan, inf = torch.nan, torch.inf
    for row, lane, value in [(0, 5, nan), (1, 70, inf), (2, 130, -inf), (4, 451, nan)]:
        kv[row, lane] = value
    kv[3, 200], kv[3, 203] = nan, inf
    kv[5, 460] = inf
    kv[6, 64:128] = nan
    return kv


def _thresholds(kv: Tensor, case: Case) -> Tensor:
    """Blocks with the largest value 448 * 2^k, then the next value above. Needs 41 rows."""
    exact = 448.0 * torch.tensor(threshold_exponents(case.dtype)).double().exp2()
    largest = torch.cat((exact, exact + spacing(exact, case.dtype)))
    blocks = largest[:, None] * torch.linspace(-0.5, 0.5, BLOCK, dtype=torch.float64)
    blocks[:, 17] = largest
    return _lay(kv, blocks)


def _binade(kv: Tensor, case: Case) -> Tensor:
    """Blocks with each bfloat16 from -448 to -892 as the largest. Needs 19 rows."""
    largest = torch.cat((torch.arange(448, 512, 2), torch.arange(512, 896, 4))).double()
    return _lay(kv, -largest[:, None] / torch.arange(1, BLOCK + 1))


def _every_value(kv: Tensor, case: Case) -> Tensor:
    """Every finite value of the dtype, by size, 64 to a block. Needs 146 rows."""
    values = torch.arange(1 << 16).to(torch.int16).view(case.dtype).double()
    values = values[values.isfinite()]
    return _lay(kv, values[values.abs().argsort(stable=True)].view(-1, BLOCK))


def threshold_exponents(dtype: torch.dtype) -> list[int]:
    """Every k for which 448 * 2^k is above 1e-4 and the value after it finite."""
    return list(range(-22, 120 if dtype == torch.bfloat16 else 8))


def _lay(kv: Tensor, blocks: Tensor) -> Tensor:
    """Rows that hold the blocks [n, 64] one after another, and zeros behind them."""
    rows = torch.zeros((len(kv) * PLAIN // BLOCK, BLOCK), dtype=torch.float64)
    rows[: len(blocks)] = blocks
    kv.zero_()
    kv[:, :PLAIN] = round_once(rows, kv.dtype).view(-1, PLAIN)
    return kv


CONTENTS: dict[str, Callable[[Tensor, Case], Tensor]] = {
    "normal": lambda kv, case: kv,
    "zeros": _zeros,
    "identical": _identical,
    "not finite": _not_finite,
    "thresholds": _thresholds,
    "binade": _binade,
    "every value": _every_value,
}


# Checking results


def run(operator: Operator, inputs: Inputs, *, repeats: int = 0, **options: Any) -> None:
    """One call checked in full, then `repeats` calls on equal inputs that must give its bits.

    Raises:
        AssertionError: Names the first rule that does not hold, and where.
    """
    before = inputs.read_only()
    returned = operator(*inputs.arguments(), **options)
    if returned is not None:
        raise AssertionError(f"returned {type(returned).__name__}; it works in place")
    check_same("the call changed", inputs.read_only(), before)
    check_q(inputs)
    check_cache(inputs)
    first = inputs.written()
    for repeat in range(repeats):
        inputs.reset()
        operator(*inputs.arguments(), **options)
        check_same(f"repeat {repeat + 1} on equal inputs changed", inputs.written(), first)


def run_far(operator: Operator, inputs: Inputs, **options: Any) -> None:
    """A call whose last of three blocks begins past 2^31 bytes, judged in the cache of `inputs`.

    In 32 bits its offset wraps to just before the cache, into memory that must stay as it is. On
    a GPU all the 4 GiB are checked; on a CPU only what is touched is ever backed by memory.
    """
    case, device, stride, front = inputs.case, inputs.q.device, 2**31 - 8192, 2 * 8192
    assert case.blocks == 3 and case.block_bytes <= front
    size = front + 2 * stride + case.block_bytes
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    cache = memory.as_strided(inputs.k_cache.shape, (stride, 1), front)
    checked = memory if device.type != "cpu" else memory[:front]
    for view in (checked, cache):
        view.fill_(UNTOUCHED)
    far = replace(inputs, k_cache=cache)
    operator(*far.arguments(), **options)
    check_q(inputs)
    inputs.k_cache.copy_(cache)
    check_cache(inputs)
    cache.fill_(UNTOUCHED)
    for start, chunk in enumerate(checked.split(2**28)):
        if not bool((chunk == UNTOUCHED).all()):
            at = start * 2**28 + int((chunk != UNTOUCHED).to(torch.uint8).argmax()) - front
            raise AssertionError(f"k_cache: byte {at} from its start written, outside every block")


def check_same(message: str, actual: dict[str, int], expected: dict[str, int]) -> None:
    """Two sets of fingerprints are equal."""
    names = [name for name, value in expected.items() if actual[name] != value]
    if names:
        raise AssertionError(f"{message} {', '.join(names)}")


def check_q(inputs: Inputs) -> None:
    """q within max(2 ulp, 2^-20 of the head's rms), nearly all of it correctly rounded.

    Nothing around it is written.
    """
    case, q, off = inputs.case, inputs.q, 0
    for start, stop in q_slices(case):
        values, positions = q_values(case, start, stop, q.device), inputs.position_ids[start:stop]
        exact = exact_q(values, positions, inputs.cos_sin_cache, case.eps)
        off += check_close(
            "q",
            q[start:stop],
            exact,
            ulps=2,
            floor=exact.square().mean(-1, keepdim=True).sqrt_() * 2.0**-20,
            axes="token head lane",
            first_axis=torch.arange(start, stop),
        )
    check_rounding("q", off, q.numel())
    guard = torch.full((GUARD,), torch.nan, dtype=case.dtype, device=q.device).view(torch.uint8)
    for side, memory in (("before", inputs.q_memory[:GUARD]), ("after", inputs.q_memory[-GUARD:])):
        check_bytes(f"memory {side} q", memory.view(torch.uint8), guard, "byte {}".format)


def check_cache(inputs: Inputs) -> None:
    """Codes, scales, zero bytes and untouched memory are exact; rotated values within a rule.

    The rule is max(1 ulp, 2^-20 of the row's largest rotated value).
    """
    case, cache, step = inputs.case, inputs.k_cache, SLICE // HEAD
    expected = torch.full_like(inputs.cache_memory, UNTOUCHED)
    expected_cache = expected.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    data, _ = cache_rows(cache, case.block_size)
    for start in range(0, case.rows, step):
        rows = start + (inputs.slot_mapping[start : start + step] >= 0).nonzero().squeeze(1)
        slots, positions = inputs.slot_mapping[rows], inputs.position_ids[rows]
        codes, scales, exact = exact_kv(inputs.kv[rows], positions, inputs.cos_sin_cache, case.fnuz)
        stored = data[slots // case.block_size, slots % case.block_size]
        tail = stored[:, PLAIN:].contiguous().view(case.dtype)
        check_close(
            "rotated tail",
            tail,
            exact,
            ulps=1,
            floor=exact.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1, keepdim=True) * 2.0**-20,
            axes="kv_row lane",
            first_axis=rows,
        )
        # A tail that passed counts as expected, so that one comparison covers all the memory.
        insert(expected_cache, case.block_size, slots, codes, scales, tail)
    check_bytes("k_cache", inputs.cache_memory, expected, lambda at: _place(inputs, at))


def _place(inputs: Inputs, offset: int) -> str:
    """Names a byte of the cache's memory."""
    case = inputs.case
    block, byte = divmod(offset - GUARD, case.stride)
    if not 0 <= block < case.blocks:
        return f"byte {offset - GUARD} from its start, outside it"
    if byte >= case.block_bytes:
        return f"block={block}, byte {byte - case.block_bytes} of its padding"
    if byte < case.block_size * DATA:
        row, lane = divmod(byte, DATA)
        part = f"code of lane={lane}" if lane < PLAIN else f"byte {lane - PLAIN} of the tail"
    else:
        row, lane = divmod(byte - case.block_size * DATA, SCALES)
        part = f"scale={lane}"
    slot = block * case.block_size + row
    writers = (inputs.slot_mapping == slot).nonzero().flatten().tolist()
    source = f"kv_row={writers[0]}" if writers else "untouched by any kv row"
    return f"block={block}, row={row} ({source}), {part}"
