"""Inputs and checks of the operators around DeepSeek-V4's fused insert, on any device.

A `Case` is one of `deepseek_v4`, which makes q, kv, slots, positions and the table, with a cache of
one of four kinds. Results are compared with float64 in slices of tokens, the cache's memory byte by
byte. Codes of e4m3 are those of the formula; where a value was computed in float32 before it is
coded, a code one off is right if the exact value lies within the tolerance of a rounding edge. How
many of those there were is what `run` returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import deepseek_v4 as base
import torch
from compare import check_bytes, check_close, check_rounding, fingerprint, round_once
from deepseek_v4 import GUARD, SLICE, UNTOUCHED, check_same, q_slices, q_values
from torch import Tensor

from tilewright import ops
from tilewright.ops.deepseek_v4_reference import FNUZ_MAX, HEAD, PLAIN, e4m3, exact_q, quantise, rotate

PADDED = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded"
KV = "fused_deepseek_v4_kv_rope_insert"
FULL_BF16 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert"
FULL_FP8 = "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert"
GATHER = "dequantize_and_gather_k_cache"

CHUNK = 16  # lanes of a head side by side where heads are interleaved
MX, MX_ROW = 32, 528  # lanes of one scale, bytes of a row of an mx cache
GAP = 16  # elements between the rows of a cache of rows
EDGE = 2.0**-20  # how far from exact a float32 value may be, of the largest it was computed with


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        problem: Tokens, heads, slots, contents.
        cache: "packed", "mx", "rows" (of kv's dtype) or "e4m3".
        padded: Heads of q_out; None: as many as q has.
        scale: What an e4m3 cache is divided by.
        q_scale: What q is multiplied by before it becomes e4m3.
    """

    operator: str
    problem: base.Case
    cache: str = "packed"
    padded: int | None = None
    normed: bool = True
    rotated: bool = True
    interleaved: bool = False
    scale: float = 0.37
    q_scale: float = 61.0

    @property
    def tokens(self) -> int:
        return self.problem.tokens

    @property
    def q_heads(self) -> int:
        return self.problem.heads if self.padded is None else self.padded

    @property
    def has_q(self) -> bool:
        return self.operator != KV and self.q_heads > 0

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row; of a packed cache, all that a row has in its block."""
        width = {"packed": 584, "mx": MX_ROW, "rows": 2 * (HEAD + GAP), "e4m3": HEAD + GAP}
        return width[self.cache]

    @property
    def stride(self) -> int:
        """Bytes from block to block."""
        if self.cache == "packed":
            return self.problem.stride
        return self.problem.block_size * self.row_bytes + 64

    @property
    def own_bytes(self) -> int:
        """Bytes of the operator's own tensors, about."""
        case = self.problem
        q = case.heads * (1 + self.interleaved) + {PADDED: self.q_heads, FULL_FP8: case.heads / 2}.get(self.operator, 0)
        rows = case.tokens * (int((q + 1) * HEAD * 2) + 16)
        return rows + case.blocks * self.stride + case.max_position * 256

    def __str__(self) -> str:
        words = [self.operator.removeprefix("fused_deepseek_v4_"), str(self.problem), self.cache]
        words += [f"pad{self.padded}"] if self.padded is not None else []
        words += ["" if self.normed else "unnormed", "" if self.rotated else "unrotated"]
        words += ["interleaved"] if self.interleaved else []
        return "-".join(word for word in words if word)


@dataclass
class Inputs:
    """The operator's tensors, and the memory around those that it writes."""

    case: Case
    device: torch.device
    made: base.Inputs
    q: Tensor  # as the operator sees it
    cache_memory: Tensor
    k_cache: Tensor
    q_fp8_memory: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)
    room: Tensor | None = None  # memory that a call's own output may take, given up before it

    @property
    def q_fp8(self) -> Tensor:
        case = self.case.problem
        tokens = case.tokens if self.case.operator == FULL_FP8 else 0
        return self.q_fp8_memory[GUARD : GUARD + tokens * case.heads * HEAD].view(tokens, case.heads, HEAD)

    def call(self, **options: Any) -> Tensor | None:
        """The operator's result."""
        case, made = self.case, self.made
        problem, operator = case.problem, getattr(ops, case.operator)
        index = (made.slot_mapping, made.position_ids, made.cos_sin_cache)
        if case.operator == PADDED:
            return operator(
                self.q, made.kv, self.k_cache, *index, case.q_heads, problem.eps, problem.block_size,
                case.normed, case.cache == "mx", case.rotated, case.interleaved, **options,
            )  # fmt: skip
        if case.operator == KV:
            scale = self.scales["fp8_scale"] if case.cache == "e4m3" else None
            return operator(made.kv, self.k_cache, *index, problem.block_size, scale, case.cache == "mx", **options)
        tail = (problem.eps, problem.block_size, case.normed)
        if case.operator == FULL_BF16:
            return operator(self.q, made.kv, self.k_cache, *index, *tail, **options)
        q_fp8 = self.q_fp8.view(e4m3_dtype(case))
        return operator(self.q, made.kv, q_fp8, self.k_cache, *index, *self.scales.values(), *tail, **options)

    def reset(self) -> None:
        """q, if it is written, and the cache as they are before a call."""
        if self.case.operator == FULL_BF16:
            self.made.reset()
        self.cache_memory.fill_(UNTOUCHED)
        self.q_fp8_memory.fill_(UNTOUCHED)

    def read_only(self) -> dict[str, int]:
        """Fingerprints of what a call must leave as it is."""
        names = ("kv", "slot_mapping", "position_ids", "cos_sin_cache")
        tensors = {name: getattr(self.made, name) for name in names} | self.scales
        if self.case.operator != FULL_BF16:
            tensors["q"] = self.q
        return {name: fingerprint(tensor) for name, tensor in tensors.items()}

    def written(self, returned: Tensor | None) -> dict[str, int]:
        """Fingerprints of what a call writes, with the memory around it."""
        tensors = {"k_cache": self.cache_memory, "q": self.made.q_memory, "q_fp8": self.q_fp8_memory}
        if returned is not None:
            tensors["q_out"] = returned
        return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def e4m3_dtype(case: Case) -> torch.dtype:
    """torch's dtype of the case's codes."""
    return torch.float8_e4m3fnuz if case.problem.fnuz else torch.float8_e4m3fn


def make(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """The inputs of a case, ready for a call."""
    device, problem = torch.device(device), case.problem
    made = base.make(problem, device)
    q = made.q
    if case.interleaved:
        q = torch.empty_like(q)
        for start, stop in q_slices(problem):
            q[start:stop] = interleave(made.q[start:stop])
    memory = made.cache_memory
    if case.cache != "packed":
        memory = torch.empty(problem.blocks * case.stride + 2 * GUARD, dtype=torch.uint8, device=device)
    count = problem.tokens * problem.heads * HEAD if case.operator == FULL_FP8 else 0
    q_fp8 = torch.empty(count + 2 * GUARD, dtype=torch.uint8, device=device)
    scales = {"fp8_scale": case.scale, "q_fp8_scale_inv": case.q_scale}
    tensors = {name: torch.full((1,), value, device=device) for name, value in scales.items()}
    inputs = Inputs(case, device, made, q, memory, cache_view(case, memory), q_fp8, tensors)
    inputs.reset()
    return inputs


def cache_view(case: Case, memory: Tensor) -> Tensor:
    """k_cache as the operator takes it, within the cache's memory."""
    problem, dtype = case.problem, memory.dtype
    if case.cache in ("packed", "mx"):
        width = case.row_bytes
        if case.operator in (PADDED, GATHER):
            return memory.as_strided((problem.blocks, problem.block_size * width), (case.stride, 1), GUARD)
        return memory.as_strided((problem.blocks, problem.block_size, width), (case.stride, width, 1), GUARD)
    dtype = problem.dtype if case.cache == "rows" else e4m3_dtype(case)
    typed, size = memory.view(dtype), dtype.itemsize
    strides = (case.stride // size, case.row_bytes // size, 1)
    return typed.as_strided((problem.blocks, problem.block_size, HEAD), strides, GUARD // size)


def cache_rows(case: Case, memory: Tensor) -> Tensor:
    """[blocks, rows, bytes] of an mx, rows or e4m3 cache, as bytes."""
    problem, width = case.problem, {"mx": MX_ROW, "rows": 2 * HEAD, "e4m3": HEAD}[case.cache]
    return memory.as_strided((problem.blocks, problem.block_size, width), (case.stride, case.row_bytes, 1), GUARD)


def interleave(q: Tensor) -> Tensor:
    """[tokens, heads, 512] with every head's next 16 lanes side by side."""
    return q.unflatten(-1, (-1, CHUNK)).transpose(1, 2).reshape(q.shape)


def deinterleave(q: Tensor) -> Tensor:
    """The heads of `interleave`."""
    tokens, heads, lanes = q.shape
    return q.reshape(tokens, lanes // CHUNK, heads, CHUNK).transpose(1, 2).reshape(q.shape)


# Checking results

Off = dict[str, tuple[int, int]]  # what: how many are not the formula's, of how many


def run(inputs: Inputs, *, repeats: int = 0, **options: Any) -> Off:
    """One call checked in full, then `repeats` calls on equal inputs that must give its bits.

    Returns:
        How many values or codes are not the formula's, though within its tolerance.

    Raises:
        AssertionError: Names the first rule that does not hold, and where.
    """
    before, inputs.room = inputs.read_only(), None
    returned = inputs.call(**options)
    check_same("the call changed", inputs.read_only(), before)
    off = check(inputs, returned)
    first = inputs.written(returned)
    for repeat in range(repeats):
        returned = None
        inputs.reset()
        returned = inputs.call(**options)
        check_same(f"repeat {repeat + 1} on equal inputs changed", inputs.written(returned), first)
    return off


def run_far(inputs: Inputs, **options: Any) -> None:
    """A call whose last of three blocks begins past 2^31 elements, judged in the cache of `inputs`.

    In 32 bits its offset wraps to just before the cache, into memory that must stay as it is. On a CPU only what is
    touched is ever backed by memory.
    """
    case, near = inputs.case, inputs.k_cache
    size, block = near.dtype.itemsize, case.problem.block_size * case.row_bytes
    stride, front = (2**31 - 8192) * size, 2 * 8192 * size
    assert case.problem.blocks == 3 and block <= front
    memory = torch.empty(front + 2 * stride + block, dtype=torch.uint8, device=inputs.device)
    strides = (stride // size, *near.stride()[1:])
    far = memory.view(near.dtype).as_strided(near.shape, strides, front // size)
    memory[:front] = UNTOUCHED
    for number in range(3):
        memory[front + number * stride :][:block] = UNTOUCHED
    inputs.k_cache = far
    returned = inputs.call(**options)
    inputs.k_cache = near
    own = near.view(torch.uint8)
    own.copy_(far.view(torch.uint8))
    check(inputs, returned)
    check_bytes("memory before k_cache", memory[:front], torch.full_like(memory[:front], UNTOUCHED), "byte {}".format)


def check(inputs: Inputs, returned: Tensor | None) -> Off:
    """Everything that a call returned or wrote."""
    case = inputs.case
    off = check_q(inputs, returned) if case.operator != KV else {}
    return off | check_cache(inputs)


def check_q(inputs: Inputs, returned: Tensor | None) -> Off:
    """q_out, q in place or q_fp8; and that nothing around them is written."""
    case, problem = inputs.case, inputs.case.problem
    if case.operator == PADDED:
        shape = (problem.tokens, case.q_heads, HEAD) if case.has_q else (0,)
        if returned is None or returned.shape != shape or returned.dtype != problem.dtype:
            raise AssertionError(f"returned {returned if returned is None else returned.shape}, not {shape}")
        result = returned
    elif returned is not None:
        raise AssertionError(f"returned {type(returned).__name__}; it works in place")
    else:
        result = inputs.q if case.operator == FULL_BF16 else inputs.q_fp8
    off = elements = 0
    for start, stop in q_slices(problem) if case.has_q else ():
        part = result[start:stop]
        if case.interleaved:
            part = deinterleave(part)
        off += _check_heads(inputs, part, start, stop)
        elements += (stop - start) * problem.heads * HEAD
    if case.operator == FULL_FP8:
        check_guards("q_fp8", inputs.q_fp8_memory, UNTOUCHED)
    elif case.has_q:
        check_rounding("q", off, elements)
    return {"q": (off, elements)}


def _check_heads(inputs: Inputs, part: Tensor, start: int, stop: int) -> int:
    case, problem = inputs.case, inputs.case.problem
    heads = part[:, : problem.heads]
    pads = as_bytes(part[:, problem.heads :])
    check_bytes("pad heads", pads, torch.zeros_like(pads), "byte {}".format)
    x = q_values(problem, start, stop, part.device)
    positions, tokens = inputs.made.position_ids[start:stop], torch.arange(start, stop)
    exact = _exact_heads(inputs, x, positions)
    rms = exact.square().mean(-1, keepdim=True).sqrt_()
    if case.operator == FULL_FP8:
        if not case.normed:
            still = e4m3((x[..., :PLAIN].float() * case.q_scale).double(), problem.fnuz)
            check_bits("q_fp8, lanes that do not rotate", heads[..., :PLAIN], still)
            heads, exact = heads[..., PLAIN:], exact[..., PLAIN:]
        floor = EDGE * (rms if case.normed else _largest(exact))
        return check_codes("q_fp8", heads, exact, floor, case.q_scale, problem.fnuz, "token head lane", tokens)
    if case.normed:
        return check_close("q", heads, exact, ulps=2, floor=rms * EDGE, axes="token head lane", first_axis=tokens)
    still = PLAIN if case.rotated else HEAD
    check_bits("q, lanes that do not rotate", heads[..., :still], x[..., :still])
    if not case.rotated:
        return 0
    tail = exact[..., PLAIN:]
    return check_close(
        "q's rotated tail", heads[..., PLAIN:], tail, ulps=1, floor=_largest(tail) * EDGE, axes="token head lane",
        first_axis=tokens,
    )  # fmt: skip


def _exact_heads(inputs: Inputs, x: Tensor, positions: Tensor) -> Tensor:
    """float64: rotate(rms_norm(x)), without the steps that the case leaves out."""
    case, table = inputs.case, inputs.made.cos_sin_cache
    if case.normed and case.rotated:
        return exact_q(x, positions, table, case.problem.eps)
    exact = x.double()
    if case.normed:
        eps = float(torch.tensor(case.problem.eps, dtype=torch.float32))
        return exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt_()
    if case.rotated:
        exact[..., PLAIN:] = rotate(exact[..., PLAIN:], table[positions].unsqueeze(1))
    return exact


def check_cache(inputs: Inputs) -> Off:
    """The rows of the cache, and that all its other memory is untouched."""
    case, problem, made = inputs.case, inputs.case.problem, inputs.made
    if case.cache == "packed":
        base.check_cache(made)
        return {}
    expected = torch.full_like(inputs.cache_memory, UNTOUCHED)
    stored_rows, expected_rows = (cache_rows(case, memory) for memory in (inputs.cache_memory, expected))
    step, off, elements = SLICE // HEAD, 0, 0
    for start in range(0, problem.rows, step):
        rows = start + (made.slot_mapping[start : start + step] >= 0).nonzero().squeeze(1)
        slots, positions = made.slot_mapping[rows], made.position_ids[rows]
        at = (slots // problem.block_size, slots % problem.block_size)
        stored, x = stored_rows[at], made.kv[rows]
        exact = x.double()
        exact[:, PLAIN:] = rotate(exact[:, PLAIN:], made.cos_sin_cache[positions])
        off += CHECKS[case.cache](case, stored, x, exact, rows)
        elements += (HEAD - PLAIN) * len(rows)
        expected_rows[at] = stored  # what passed counts as expected, so one comparison covers all the memory
    check_bytes("k_cache", inputs.cache_memory, expected, lambda at: f"byte {at - GUARD} from its start")
    return {"kv": (off, elements)}


def _check_row(case: Case, stored: Tensor, x: Tensor, exact: Tensor, rows: Tensor) -> int:
    values = stored.contiguous().view(x.dtype)
    check_bits("row, lanes that do not rotate", values[:, :PLAIN], x[:, :PLAIN])
    tail = exact[:, PLAIN:]
    return check_close(
        "rotated tail", values[:, PLAIN:], tail, ulps=1, floor=_largest(tail) * EDGE, axes="kv_row lane",
        first_axis=rows,
    )  # fmt: skip


def _check_e4m3_row(case: Case, stored: Tensor, x: Tensor, exact: Tensor, rows: Tensor) -> int:
    factor = float(1 / torch.tensor(case.scale, dtype=torch.float32))
    still = e4m3((x[:, :PLAIN].float() * factor).double(), case.problem.fnuz)
    check_bits("row, lanes that do not rotate", stored[:, :PLAIN], still)
    tail = exact[:, PLAIN:]
    floor = EDGE * _largest(tail)
    return check_codes("row", stored[:, PLAIN:], tail, floor, factor, case.problem.fnuz, "kv_row lane", rows)


def _check_mx_row(case: Case, stored: Tensor, x: Tensor, exact: Tensor, rows: Tensor) -> int:
    """Groups that do not rotate exactly; of the others, codes of a value that rounds within the tolerance."""
    fnuz, still = case.problem.fnuz, PLAIN // MX
    codes, scales = stored[:, :HEAD], stored[:, HEAD:]
    formula, formula_scales = quantise(x[:, :PLAIN], MX, fnuz)
    check_bits("codes, groups that do not rotate", codes[:, :PLAIN], formula)
    check_bits("scales, groups that do not rotate", scales[:, :still], formula_scales)
    tail = exact[:, PLAIN:]
    floor = EDGE * _largest(tail)
    low, high = (round_once(value, x.dtype) for value in (tail - floor, tail + floor))
    formula, formula_scales = quantise(round_once(tail, x.dtype), MX, fnuz)
    own = scales[:, still:]
    # The largest of a group may itself lie on an edge, and that edge where the scale changes.
    magnitudes = torch.stack((low, high)).double().abs()
    magnitudes[:, low.double().sign() != high.double().sign()] = 0.0
    least, most = (quantise(m, MX, fnuz)[1] for m in (magnitudes.amin(0), torch.stack((low, high)).abs().amax(0)))
    wrong = ((own < least) | (own > most)) & (own != formula_scales)
    _refuse("scales of rotated groups", wrong, own, formula_scales, "kv_row group", rows)
    power = torch.exp2(127.0 - own.double()).masked_fill_(own == 255, 0.0).repeat_interleave(MX, -1)
    ends = [e4m3(value.double() * power, fnuz) for value in (low, high)]
    own_codes = codes[:, PLAIN:]
    wrong = outside(own_codes, *ends) & (own_codes != formula)
    _refuse("codes of rotated groups", wrong, own_codes, formula, "kv_row lane", rows)
    return int((own_codes != formula).sum()) + int((own != formula_scales).sum())


CHECKS = {"rows": _check_row, "e4m3": _check_e4m3_row, "mx": _check_mx_row}


def check_codes(
    name: str, codes: Tensor, exact: Tensor, floor: Tensor, factor: float, fnuz: bool, axes: str, first: Tensor
) -> int:
    """Codes of exact * factor, or one off where a value within `floor` of exact has that code; how many are off."""
    factor = float(torch.tensor(factor, dtype=torch.float32))
    formula = e4m3(exact * factor, fnuz)
    low, high = (e4m3((exact + sign * (floor + exact.abs() * EDGE)) * factor, fnuz) for sign in (-1, 1))
    far = (ordinal(codes) - ordinal(formula)).abs() > 1
    wrong = (far | outside(codes, low, high)) & (codes != formula)
    _refuse(name, wrong, codes, formula, axes, first)
    return int((codes != formula).sum())


def ordinal(codes: Tensor) -> Tensor:
    """Codes in the order of their values; both zeros are 0."""
    size = (codes & 0x7F).short()
    return torch.where(codes >= 0x80, -size, size)


def outside(codes: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (ordinal(codes) < ordinal(low)) | (ordinal(codes) > ordinal(high))


def _refuse(name: str, wrong: Tensor, got: Tensor, want: Tensor, axes: str, first: Tensor) -> None:
    if not bool(wrong.any()):
        return
    at = [int(i) for i in wrong.nonzero()[0]]
    a, b = int(got[tuple(at)]), int(want[tuple(at)])
    at[0] = int(first[at[0]])
    where = ", ".join(f"{axis}={i}" for axis, i in zip(axes.split(), at, strict=True))
    count = f"{int(wrong.sum())} of {wrong.numel()} wrong"
    raise AssertionError(f"{name}[{where}]: got 0x{a:02X}, expected 0x{b:02X}; {count}")


def check_guards(name: str, memory: Tensor, value: int) -> None:
    """Nothing on either side of a tensor is written."""
    for side, part in (("before", memory[:GUARD]), ("after", memory[-GUARD:])):
        check_bytes(f"memory {side} {name}", part, torch.full_like(part, value), "byte {}".format)


def check_gathered(inputs: Inputs, slots: Tensor, **options: Any) -> None:
    """What `dequantize_and_gather_k_cache` makes of the cache that a call has filled, to the bit."""
    case, problem = inputs.case, inputs.case.problem
    out = torch.full((len(slots) + 2, HEAD), torch.nan, dtype=problem.dtype, device=inputs.device)
    cache, before = inputs.k_cache, fingerprint(inputs.cache_memory)
    operator, is_mx = getattr(ops, GATHER), case.cache == "mx"
    operator(out[1:-1], cache, slots, problem.block_size, is_mx, **options)
    check_same("the call changed", {"k_cache": fingerprint(inputs.cache_memory)}, {"k_cache": before})
    step = SLICE // HEAD
    for start in range(0, len(slots), step):
        part, wanted = out[1:-1][start : start + step], slots[start : start + step]
        expected, kept = torch.zeros_like(part), wanted >= 0
        block, row = wanted[kept] // problem.block_size, wanted[kept] % problem.block_size
        expected[kept] = dequantised(inputs, block, row)

        def place(at: int, start: int = start) -> str:
            return f"row={start + at // 1024}, byte {at % 1024}"

        check_bytes("out", as_bytes(part), as_bytes(expected), place)
    for side in (out[0], out[-1]):
        if not bool(side.isnan().all()):
            raise AssertionError("out: memory around it written")


def dequantised(inputs: Inputs, block: Tensor, row: Tensor) -> Tensor:
    """Rows of a packed or mx cache in float64, rounded once to its values' dtype."""
    case, problem = inputs.case, inputs.case.problem
    if case.cache == "mx":
        stored = cache_rows(case, inputs.cache_memory)[block, row]
        return round_once(_values(case, stored[:, :HEAD], stored[:, HEAD:]), problem.dtype)
    data, scales = base.cache_rows(inputs.made.k_cache, problem.block_size)
    stored = data[block, row]
    plain = round_once(_values(case, stored[:, :PLAIN], scales[block, row][:, :7]), problem.dtype)
    return torch.cat((plain, stored[:, PLAIN:].contiguous().view(problem.dtype)), dim=1)


def _values(case: Case, codes: Tensor, scales: Tensor) -> Tensor:
    values = codes.contiguous().view(e4m3_dtype(case)).double().unflatten(-1, (scales.shape[-1], -1))
    return (values * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def _largest(values: Tensor) -> Tensor:
    return values.abs().nan_to_num_(0.0, 0.0, 0.0).amax(-1, keepdim=True)


def check_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Every bit is equal, but that a NaN may be another one."""
    if actual.is_floating_point():
        actual, expected = (t.masked_fill(t.isnan(), torch.nan) for t in (actual, expected))
    check_bytes(name, as_bytes(actual), as_bytes(expected), "byte {}".format)


def as_bytes(tensor: Tensor) -> Tensor:
    """A flat tensor of a tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).flatten()


def profile_case(case: Case, fnuz: bool) -> Case:
    """The case on a device whose e4m3 is fnuz, or is not; scaled so that as much saturates."""
    factor = FNUZ_MAX / 448.0 if fnuz else 1.0
    return replace(case, problem=replace(case.problem, fnuz=fnuz), q_scale=case.q_scale * factor)


def cases(operators: tuple[str, ...] = (PADDED, KV, FULL_BF16, FULL_FP8)) -> Iterator[tuple[str, str]]:
    """Every operator with every kind of cache that it writes."""
    kinds = {PADDED: ("packed", "mx"), KV: ("packed", "mx", "rows", "e4m3"), FULL_BF16: ("rows",), FULL_FP8: ("e4m3",)}
    return ((operator, kind) for operator in operators for kind in kinds[operator])
