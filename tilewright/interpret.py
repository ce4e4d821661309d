"""Run generated Triton modules on CPU tensors, with the arithmetic of a GPU.

`load` executes the text of a generated module; the `@triton.jit` functions in it are interpreted with numpy instead of
compiled. Triton's own front end (`triton.language` and its type promotion) does the work, and the stock interpreter's
builder is the base, with its faults mended. Nothing of Triton is patched: an interpreted function has globals of its
own, in which `tl` is a view of `triton.language` bound to the interpreter. So compiled functions from the same text,
the stock interpreter and launches in other threads run beside it undisturbed, and TRITON_INTERPRET does not matter.

What a kernel computes, where the stock interpreter or numpy would differ:

* Casts round to nearest even, bit-equal to torch for every bf16 value, tie and subnormal. A cast to fp8 saturates,
  infinities included (`cvt.rn.satfinite`: 448 for float8e4nv), and NaN stays NaN. For float8e5 that is what sm_90 does;
  torch overflows to infinity.
* bf16 and fp8 arithmetic is done in float32 and rounded once an operation. A `tl.dot` of bf16, fp16 or fp8 accumulates
  in float32. A `tl.sum` of bf16 or fp16 is a float32 sum rounded once; a GPU rounds at every step of its tree.
* `tl.maximum`, `tl.minimum`, `tl.max`, `tl.min` and `tl.clamp` return the operand that is not NaN, as on NVIDIA, unless
  `propagate_nan` says otherwise. A float to integer cast saturates and turns NaN into 0.
* Integers wrap; unsigned types divide, shift, compare and widen as unsigned.
* A float argument of a kernel is float32, an int is int32 where it fits, else int64, a bool is int1. The variable of
  `range` is a tensor; a conditional on a block is an error; `assert` and `tl.device_assert` are checked.
* An access outside the storage of every tensor given to the kernel raises IndexError before memory is touched.
* A masked lane of a `tl.load` without `other` reads 0, or NaN and the largest integers under `poison`.

Not interpreted: inline assembly, libdevice, tensor descriptors, `tl.map_elementwise`, bf16 atomics. A multiply and an
add are not fused. A float32 `tl.dot` is computed in float32, whatever its `input_precision`. The check of addresses
knows storages, not views: a read beside a view but within its storage passes.
"""

from __future__ import annotations

import ast
import bisect
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import linecache
import textwrap
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as _memory
from triton._C.libtriton import ir as _ir
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpretedFunction as _StockFunction
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle
from triton.runtime.jit import JITFunction, KernelInterface

from tilewright.errors import DeviceError, GenerationError

# What callers use


@dataclasses.dataclass
class Counts:
    """What interpreted launches did: bytes moved by unmasked lanes, and programs run.

    A lane counts each time it is loaded or stored, also where several lanes hold one address; an atomic counts as both.
    """

    bytes_loaded: int = 0
    bytes_stored: int = 0
    programs: int = 0


_poison: contextvars.ContextVar[bool | None] = contextvars.ContextVar("poison", default=None)
_counters: contextvars.ContextVar[tuple[Counts, ...]] = contextvars.ContextVar("counters", default=())
_poison_default = False


def load(source: str, name: str, filename: str) -> types.ModuleType:
    """Executes `source` as a module whose `@triton.jit` functions are interpreted on CPU tensors.

    Launch options (num_warps, num_stages, enable_fp_fusion, a vendor's own) are accepted and ignored. The lines of
    `source` are known to tracebacks under `filename`; the module is not entered in `sys.modules`.

    Args:
        source: the text of a generated module.
        name: the `__name__` of the module.
        filename: the `__file__` of the module, which need not exist.
    """
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    names = module.__dict__
    names[_JIT] = functools.partial(InterpretedFunction, namespace=_Namespace(names))
    exec(_compile_module(source, filename), names)
    return module


@contextlib.contextmanager
def poison(enabled: bool = True) -> Iterator[None]:
    """Within it, in this thread, masked lanes of a `tl.load` without `other` read NaN, or the largest integer.

    A GPU leaves such lanes undefined, so a result that changes under poison is wrong. `poison(False)` reads 0.
    """
    token = _poison.set(enabled)
    try:
        yield
    finally:
        _poison.reset(token)


def set_poison_default(enabled: bool) -> None:
    """Says whether launches outside any `poison` block are poisoned, in every thread; at first they are not."""
    global _poison_default
    _poison_default = enabled


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Yields a `Counts` that sums the interpreted launches made within it, in this thread."""
    counts = Counts()
    token = _counters.set((*_counters.get(), counts))
    try:
        yield counts
    finally:
        _counters.reset(token)


# Numbers: how a Triton type is stored in numpy, and every cast between floating types

_STORAGE = {
    name: np.dtype(storage)
    for name, storage in {
        "int1": "bool",
        **{f"{sign}int{bits}": f"int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")},
        "fp16": "float16",
        "fp32": "float32",
        "fp64": "float64",
        "bf16": "uint16",
        **dict.fromkeys(("fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16"), "uint8"),
    }.items()
}
_POINTER = np.dtype("uint64")
_FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
_NARROW = frozenset(("bf16", *_FP8))  # types that numpy lacks: held as bits, computed in float32


def _storage(ty: Any) -> np.dtype:
    if ty.is_ptr():
        return _POINTER
    try:
        return _STORAGE[ty.name]
    except KeyError:
        raise NotImplementedError(f"{ty} is not interpreted") from None


def _unsigned(data: np.ndarray) -> np.ndarray:
    return data.view(f"u{data.dtype.itemsize}") if data.dtype.kind == "i" else data


def _signed(data: np.ndarray) -> np.ndarray:
    return data.view(f"i{data.dtype.itemsize}") if data.dtype.kind == "u" else data


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(_FP8[name]).float().numpy()


def _decode(data: np.ndarray, name: str) -> np.ndarray:
    """The bits of a bf16 or fp8 type as float32, exactly."""
    if name == "bf16":
        wide = data.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return _fp8_values(name)[data]


def _encode(data: np.ndarray, name: str) -> np.ndarray:
    """float32 rounded to nearest even to the bits of a bf16 or fp8 type; fp8 saturates."""
    if name == "bf16":
        bits = data.view(np.uint32)
        rounded = ((bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
        nan = np.isnan(data)
        return np.where(nan, np.uint16(0x7FFF), rounded) if nan.any() else rounded
    values = torch.from_numpy(np.array(data, dtype=np.float32))
    limit = torch.finfo(_FP8[name]).max
    return values.clamp_(-limit, limit).to(_FP8[name]).view(torch.uint8).numpy()


def _cast(data: np.ndarray, source: Any, target: Any, toward_zero: bool = False) -> np.ndarray:
    wide = _decode(data, source.name) if source.name in _NARROW else data
    if target.name in _NARROW:
        out = _encode(wide.astype(np.float32, copy=False), target.name)
        back = _decode(out, target.name) if toward_zero else None
    else:
        out = back = wide.astype(_storage(target))
    if toward_zero and back is not None:
        bits = out.view(f"u{out.dtype.itemsize}")
        out = (bits - (np.abs(back) > np.abs(wide)).astype(bits.dtype)).view(out.dtype)
    return out


def _to_integer(data: np.ndarray, target: np.dtype, signed: bool) -> np.ndarray:
    # As `cvt.rzi`: NaN is 0 and the rest saturates; an 8-bit result is the low half of a 16-bit one.
    info = np.iinfo(f"{'i' if signed else 'u'}{max(2, target.itemsize)}")
    wide = np.where(np.isnan(data), 0.0, data.astype(np.float64))
    over, under = wide >= float(info.max), wide <= float(info.min)
    inside = np.where(over | under, 0.0, wide).astype(info.dtype)
    return _signed(np.where(over, info.max, np.where(under, info.min, inside)).astype(info.dtype)).astype(target)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """float32 x * y + z as a float64 that rounds to what the exact value rounds to: where it is inexact, it is odd."""
    product = x.astype(np.float64) * y
    addend = z.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    even = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(even, bits + np.where((error > 0) == (total > 0), 1, -1), bits).view(np.float64)


def _poison_value(ty: Any) -> Any:
    if ty.is_ptr() or not ty.is_floating():
        storage = _storage(ty)
        return True if storage == np.bool_ else np.iinfo(storage).max
    if ty.name in _NARROW:
        return {"bf16": 0x7FFF, "fp8e4nv": 0x7F, "fp8e5": 0x7F}.get(ty.name, 0x80)
    return np.nan


# A launch: what is shared by its programs


@dataclasses.dataclass
class _Launch:
    kernel: str
    poisoned: bool
    starts: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    foreign: bool = False  # an address was made from an integer, so that any may be meant
    grid: tuple[int, int, int] = (1, 1, 1)
    program: tuple[int, int, int] = (0, 0, 0)
    bytes_loaded: int = 0
    bytes_stored: int = 0

    def allow(self, storages: dict[int, tuple[int, list[str]]]) -> None:
        for start, (size, names) in sorted(storages.items()):
            if self.ends and start < self.ends[-1]:  # storages that overlap are one
                self.ends[-1] = max(self.ends[-1], start + size)
                self.names[-1] += f", {', '.join(names)}"
            else:
                self.starts.append(start)
                self.ends.append(start + size)
                self.names.append(", ".join(names))

    def check(self, addresses: np.ndarray, size: int, verb: str) -> None:
        if not addresses.size or self.foreign:
            return
        low, high = int(addresses.min()), int(addresses.max()) + size
        at = bisect.bisect_right(self.starts, low) - 1
        if at >= 0 and high <= self.ends[at]:
            return
        for address in addresses.ravel().tolist():
            at = bisect.bisect_right(self.starts, address) - 1
            if at < 0 or address + size > self.ends[at]:
                where = "before every tensor it was given"
                if at >= 0:
                    length = self.ends[at] - self.starts[at]
                    where = f"at byte {address - self.starts[at]} of {self.names[at]}, whose storage has {length}"
                raise IndexError(f"{self.kernel}, program {self.program}: {verb} {size} bytes {where}")


class _State(threading.local):
    launch: _Launch | None = None


_state = _State()


def _current() -> _Launch:
    if _state.launch is None:
        raise RuntimeError("a @triton.jit function runs only within a launch: kernel[grid](...)")
    return _state.launch


# The builder: what Triton's front end emits, computed at once


def _floats(op: Callable[..., np.ndarray]) -> Callable[..., TensorHandle]:
    def create(self: Any, *args: TensorHandle) -> TensorHandle:
        ty = args[0].dtype
        if ty.name in _NARROW:
            return TensorHandle(_encode(op(*(_decode(arg.data, ty.name) for arg in args)), ty.name), ty)
        return TensorHandle(op(*(arg.data for arg in args)), ty)

    return create


def _integers(op: Callable[..., np.ndarray], on_bool: Callable[..., np.ndarray] | None = None) -> Callable[..., Any]:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        chosen = on_bool if on_bool and left.data.dtype == np.bool_ else op
        return TensorHandle(chosen(left.data, right.data), left.dtype)

    return create


def _naturals(op: Callable[..., np.ndarray]) -> Callable[..., Any]:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        return TensorHandle(_signed(op(_unsigned(left.data), _unsigned(right.data))), left.dtype)

    return create


def _compares(op: Callable[..., np.ndarray], unsigned: bool = False) -> Callable[..., Any]:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        a, b = left.data, right.data
        if unsigned:
            a, b = _unsigned(a), _unsigned(b)
        elif left.dtype.name in _NARROW:
            a, b = _decode(a, left.dtype.name), _decode(b, right.dtype.name)
        return TensorHandle(op(a, b), tl.int1)

    return create


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left - np.fmod(left, right)) // right


def _clamp(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.fmin(np.fmax(x, low), high)


def _wide(handle: TensorHandle) -> np.ndarray:
    """A handle's floats in float32 at least."""
    if handle.dtype.name in _NARROW:
        return _decode(handle.data, handle.dtype.name)
    return handle.data.astype(np.float32) if handle.data.dtype == np.float16 else handle.data


def _contiguous(handle: TensorHandle) -> TensorHandle:
    # The memory operations, in C++, read an array that was broadcast along its only axis past its end.
    return TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)


def _round(data: np.ndarray, ty: Any) -> np.ndarray:
    """Floats of any width in the storage of `ty`."""
    if ty.name in _NARROW:
        return _encode(np.ascontiguousarray(data, dtype=np.float32), ty.name)
    return data.astype(_storage(ty), copy=False)


class _Block(NamedTuple):
    """A block type as the builder needs it; `tl.block_type` is slow to make."""

    scalar: Any
    shape: Sequence[int]


class _Builder(InterpreterBuilder):
    """Integers are stored signed, since the front end says in each operation how it reads them, as LLVM does."""

    def __init__(self) -> None:
        super().__init__()
        # Overflow checks would double the integer work and never fire: int32 wraps here as on a device.
        self.options: Any = InterpreterOptions(sanitize_overflow=False, debug=True)

    # constants
    def get_block_ty(self, dtype: Any, shape: Sequence[int]) -> Any:
        return _Block(dtype, tuple(shape))

    def get_null_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.zeros(1, dtype=_storage(type.scalar)), type.scalar)

    def get_all_ones_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.full(1, -1, dtype=_storage(type.scalar)), type.scalar)

    def get_fp16(self, value: float) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=np.float32).astype(np.float16), tl.float16)

    def get_bf16(self, value: float) -> TensorHandle:
        return TensorHandle(_encode(np.array([value], dtype=np.float32), "bf16"), tl.bfloat16)

    def get_uint8(self, value: int) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=np.uint8).view(np.int8), tl.uint8)

    def get_uint16(self, value: int) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=np.uint16).view(np.int16), tl.uint16)

    def get_uint32(self, value: int) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=np.uint32).view(np.int32), tl.uint32)

    def get_uint64(self, value: int) -> TensorHandle:
        return TensorHandle(np.array([value], dtype=np.uint64).view(np.int64), tl.uint64)

    # programs
    def create_get_program_id(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([_current().program[axis]], dtype=np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([_current().grid[axis]], dtype=np.int32), tl.int32)

    # memory
    def create_load(self, ptr: TensorHandle, *_: Any, **__: Any) -> TensorHandle:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: TensorHandle, value: TensorHandle, *_: Any, **__: Any) -> None:
        self.create_masked_store(ptr, value, None)

    def create_masked_load(self, ptr: TensorHandle, mask: Any, other: Any, *_: Any, **__: Any) -> TensorHandle:
        ty, launch = ptr.get_element_ty(), _current()
        storage = _storage(ty)
        active, lanes = self._lanes(ptr, mask)
        launch.check(lanes, storage.itemsize, "reads")
        launch.bytes_loaded += lanes.size * storage.itemsize
        if other is not None:
            fill = other.data
        else:
            fill = np.full(ptr.data.shape, _poison_value(ty) if launch.poisoned else 0, dtype=storage)
        return TensorHandle(_memory.load(*map(np.ascontiguousarray, (ptr.data, active, fill)), storage), ty)

    def create_masked_store(self, ptr: TensorHandle, value: TensorHandle, mask: Any, *_: Any, **__: Any) -> None:
        launch = _current()
        active, lanes = self._lanes(ptr, mask)
        launch.check(lanes, value.data.dtype.itemsize, "writes")
        launch.bytes_stored += lanes.size * value.data.dtype.itemsize
        _memory.store(*map(np.ascontiguousarray, (ptr.data, value.data, active)))

    def _lanes(self, ptr: TensorHandle, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """The mask as an array, and the addresses it lets through."""
        if mask is None:
            return np.ones(ptr.data.shape, dtype=bool), ptr.data
        active = mask if isinstance(mask, np.ndarray) else mask.data
        return active, ptr.data if active.all() else ptr.data[active]

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        if value.dtype.name in _NARROW:
            raise NotImplementedError(f"an atomic on {value.dtype} is not interpreted")
        data = _unsigned(value.data) if op in (_ir.ATOMIC_OP.UMAX, _ir.ATOMIC_OP.UMIN) else value.data
        self._touch_atomically(ptr, mask.data, data.dtype.itemsize)
        where, what, active = map(_contiguous, (ptr, TensorHandle(data, value.dtype), mask))
        old = super().create_atomic_rmw(op, where, what, active, sem, scope)
        return TensorHandle(_signed(old.data), value.dtype)

    def create_atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> TensorHandle:
        self._touch_atomically(ptr, np.ones(ptr.data.shape, dtype=bool), value.data.dtype.itemsize)
        return super().create_atomic_cas(*map(_contiguous, (ptr, compare, value)), sem, scope)

    def _touch_atomically(self, ptr: TensorHandle, active: np.ndarray, size: int) -> None:
        lanes, launch = ptr.data[active], _current()
        launch.check(lanes, size, "updates")
        launch.bytes_loaded += lanes.size * size
        launch.bytes_stored += lanes.size * size

    def create_addptr(self, ptr: TensorHandle, offset: TensorHandle) -> TensorHandle:
        step = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return TensorHandle(ptr.data + (offset.data.astype(np.int64) * step).view(np.uint64), ptr.dtype)

    # casts
    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any = None) -> TensorHandle:
        target = dst_type.scalar
        toward_zero = rounding_mode == _ir.ROUNDING_MODE.RTZ
        return TensorHandle(_cast(src.data, src.dtype, target, toward_zero), target)

    create_fp_ext = create_fp_to_fp
    create_fp_trunc = create_fp_to_fp

    def create_si_to_fp(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        target = dst_type.scalar
        if target.name in _NARROW:
            return TensorHandle(_encode(src.data.astype(np.float32), target.name), target)
        return TensorHandle(src.data.astype(_storage(target)), target)

    def create_ui_to_fp(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return self.create_si_to_fp(TensorHandle(_unsigned(src.data), src.dtype), dst_type)

    def create_fp_to_si(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        target = dst_type.scalar
        return TensorHandle(_to_integer(_wide(src), _storage(target), signed=True), target)

    def create_fp_to_ui(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        target = dst_type.scalar
        return TensorHandle(_to_integer(_wide(src), _storage(target), signed=False), target)

    def create_int_cast(self, src: TensorHandle, dst_type: Any, is_signed: bool) -> TensorHandle:
        data = src.data if is_signed else _unsigned(src.data)
        return TensorHandle(data.astype(_storage(dst_type.scalar)), dst_type.scalar)

    def create_bitcast(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return TensorHandle(src.data.view(_storage(dst_type.scalar)), dst_type.scalar)

    create_ptr_to_int = create_bitcast

    def create_int_to_ptr(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        _current().foreign = True
        return self.create_bitcast(src, dst_type)

    # arithmetic
    create_fadd = _floats(np.add)
    create_fsub = _floats(np.subtract)
    create_fmul = _floats(np.multiply)
    create_fdiv = create_precise_divf = create_approx_divf = _floats(np.divide)
    create_frem = _floats(np.fmod)
    create_fneg = _floats(np.negative)
    create_minnumf = _floats(np.fmin)
    create_maxnumf = _floats(np.fmax)
    create_minimumf = _floats(np.minimum)
    create_maximumf = _floats(np.maximum)
    create_cos = _floats(np.cos)
    create_sin = _floats(np.sin)
    create_exp = _floats(np.exp)
    create_exp2 = _floats(np.exp2)
    create_log = _floats(np.log)
    create_log2 = _floats(np.log2)
    create_floor = _floats(np.floor)
    create_ceil = _floats(np.ceil)
    create_sqrt = create_precise_sqrt = _floats(np.sqrt)
    create_rsqrt = _floats(lambda x: np.reciprocal(np.sqrt(x)))

    create_add = _integers(np.add, np.bitwise_xor)
    create_sub = _integers(np.subtract, np.bitwise_xor)
    create_mul = _integers(np.multiply, np.bitwise_and)
    create_sdiv = _integers(_divide)
    create_udiv = _naturals(np.floor_divide)
    create_srem = _integers(np.fmod)
    create_urem = _naturals(np.remainder)
    create_and = _integers(np.bitwise_and)
    create_or = _integers(np.bitwise_or)
    create_xor = _integers(np.bitwise_xor)
    create_shl = _integers(np.left_shift)
    create_ashr = _integers(np.right_shift)
    create_lshr = _naturals(np.right_shift)
    create_minsi = _integers(np.minimum)
    create_maxsi = _integers(np.maximum)
    create_minui = _naturals(np.minimum)
    create_maxui = _naturals(np.maximum)

    create_icmpEQ = _compares(np.equal)
    create_icmpNE = _compares(np.not_equal)
    create_icmpSLT = _compares(np.less)
    create_icmpSLE = _compares(np.less_equal)
    create_icmpSGT = _compares(np.greater)
    create_icmpSGE = _compares(np.greater_equal)
    create_icmpULT = _compares(np.less, unsigned=True)
    create_icmpULE = _compares(np.less_equal, unsigned=True)
    create_icmpUGT = _compares(np.greater, unsigned=True)
    create_icmpUGE = _compares(np.greater_equal, unsigned=True)
    create_fcmpOLT = _compares(np.less)
    create_fcmpOLE = _compares(np.less_equal)
    create_fcmpOGT = _compares(np.greater)
    create_fcmpOGE = _compares(np.greater_equal)
    create_fcmpOEQ = _compares(np.equal)
    create_fcmpONE = _compares(lambda a, b: (a < b) | (a > b))
    create_fcmpULT = _compares(lambda a, b: ~(a >= b))
    create_fcmpULE = _compares(lambda a, b: ~(a > b))
    create_fcmpUGT = _compares(lambda a, b: ~(a <= b))
    create_fcmpUGE = _compares(lambda a, b: ~(a < b))
    create_fcmpUEQ = _compares(lambda a, b: ~((a < b) | (a > b)))
    create_fcmpUNE = _compares(np.not_equal)

    def create_umulhi(self, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        a, b = _unsigned(left.data), _unsigned(right.data)
        bits = a.dtype.itemsize * 8
        wider: Any = object if bits == 64 else f"u{bits // 4}"
        return TensorHandle(_signed((a.astype(wider) * b.astype(wider) >> bits).astype(a.dtype)), left.dtype)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        ty = z.dtype
        if ty.name == "fp64":
            return TensorHandle(x.data * y.data + z.data, ty)
        return TensorHandle(_round(_fma(_wide(x), _wide(y), _wide(z)), ty), ty)

    def create_clampf(self, x: TensorHandle, low: TensorHandle, high: TensorHandle, nan: Any) -> TensorHandle:
        if nan == _ir.PROPAGATE_NAN.ALL:
            return self.create_minimumf(self.create_maximumf(x, low), high)
        return _floats(_clamp)(self, x, low, high)

    def create_fabs(self, arg: TensorHandle) -> TensorHandle:
        bits = arg.data.view(f"u{arg.data.dtype.itemsize}")
        cleared = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
        return TensorHandle(cleared.view(arg.data.dtype), arg.dtype)

    def create_iabs(self, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(np.abs(arg.data), arg.dtype)

    def create_erf(self, arg: TensorHandle) -> TensorHandle:
        values = torch.erf(torch.from_numpy(np.array(_wide(arg)))).numpy()
        return TensorHandle(_round(values, arg.dtype), arg.dtype)

    def create_select(self, condition: TensorHandle, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        return TensorHandle(np.where(condition.data, left.data, right.data), left.dtype)

    def create_dot(self, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any) -> TensorHandle:
        ty = acc.dtype
        if a.data.dtype.kind == "i":  # exact: int8 products of any length that fits int32 are small for a float64
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return TensorHandle((product.astype(np.int64) + acc.data).astype(acc.data.dtype), ty)
        return TensorHandle(_round(np.matmul(_wide(a), _wide(b)) + _wide(acc), ty), ty)

    # shapes
    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> TensorHandle:
        return TensorHandle(np.arange(start, stop, dtype=np.int32), tl.int32)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(np.broadcast_to(arg.data, tuple(ret_ty.shape)), arg.dtype)

    def create_unsplat(self, arg: TensorHandle) -> TensorHandle:
        return TensorHandle(arg.data.reshape(-1)[:1], arg.dtype)

    def create_broadcast(self, arg: TensorHandle, shape: Sequence[int]) -> TensorHandle:
        return TensorHandle(np.broadcast_to(arg.data, tuple(shape)), arg.dtype)

    def create_reshape(self, arg: TensorHandle, shape: Sequence[int], allow_reorder: bool) -> TensorHandle:
        return TensorHandle(arg.data.reshape(tuple(shape)), arg.dtype)

    def create_trans(self, arg: TensorHandle, perm: Sequence[int]) -> TensorHandle:
        return TensorHandle(np.transpose(arg.data, [int(axis) for axis in perm]), arg.dtype)

    def create_histogram(self, data: TensorHandle, bins: int, mask: Any) -> TensorHandle:
        values = _unsigned(data.data)
        kept = values < bins if mask is None else (values < bins) & mask.data
        return TensorHandle(np.bincount(values[kept].astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    def create_gather(self, src: TensorHandle, indices: TensorHandle, axis: int) -> TensorHandle:
        index = _unsigned(indices.data)
        outside = index >= src.data.shape[axis]
        found = np.take_along_axis(src.data, np.where(outside, 0, index).astype(np.int64), axis=axis)
        if outside.any():  # undefined on a GPU
            found[outside] = _poison_value(src.dtype) if _current().poisoned else 0
        return TensorHandle(found, src.dtype)


# Tensors


class _Size(int):
    """A size that is an int, and has the `value` of a constexpr."""

    @property
    def value(self) -> int:
        return int(self)


@functools.cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, _Size]:
    return tl.tuple([_Size(size) for size in shape]), _Size(np.prod(shape, dtype=np.int64))


class _Tensor(tl.tensor):
    """A `tl.tensor` that holds numpy data and whose operators need no semantic passed to them."""

    def __init__(self, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = _sizes(tuple(type.shape.values) if type.is_block() else ())

    @property
    def T(self) -> Any:
        rank = len(self.shape)
        return _semantic.permute(self, (*range(rank - 2), rank - 1, rank - 2))

    def __repr__(self) -> str:
        ty = self.dtype
        return f"{self}: {_wide(self.handle) if ty.is_floating() else self.handle.data}"


class _Semantic(TritonSemantic):
    tensor = _Tensor

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        # As the original, in a third of its time: half of all a kernel's operations come by here.
        left, right = (value.handle.data.shape if value.type.is_block() else () for value in (lhs, rhs))
        if left == right:
            return lhs, rhs
        try:
            shape = np.broadcast_shapes(left, right)
        except ValueError:
            return super().broadcast_impl_value(lhs, rhs)  # for its message
        return tuple(
            value if mine == shape else _tensor(np.broadcast_to(value.handle.data, shape), value.dtype)
            for value, mine in ((lhs, left), (rhs, right))
        )


_builder = _Builder()
_semantic: Any = _Semantic(_builder)


def _tensor(data: np.ndarray, ty: Any) -> _Tensor:
    if data.ndim == 0:
        return _Tensor(TensorHandle(data.reshape(1), ty), ty)
    return _Tensor(TensorHandle(data, ty), _block_type(ty, data.shape))


_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _block_type(ty: Any, shape: tuple[int, ...]) -> Any:
    known = _block_types.get((ty.name, shape))
    if known is None:
        known = _block_types[ty.name, shape] = tl.block_type(ty, list(shape))
    return known


def _static(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


# Reductions and scans


def _fold(name: str, data: np.ndarray, ty: Any) -> np.ndarray | None:
    """Reduces axis 0 with the operation that a combine function of Triton's library stands for."""
    floating = ty.is_floating()
    if name in ("_sum_combine", "_prod_combine"):
        op: Any = np.add if name == "_sum_combine" else np.multiply
        if floating:
            return _round(op.reduce(_wide(TensorHandle(data, ty)), axis=0), ty)
        return op.reduce(data, axis=0, dtype=data.dtype)
    if name in ("_elementwise_max", "_elementwise_min"):
        largest = name.endswith("max")
        if floating:
            op = np.fmax if largest else np.fmin
            return _round(op.reduce(_wide(TensorHandle(data, ty)), axis=0), ty)
        values = _unsigned(data) if ty.is_int_unsigned() else data
        return _signed((np.maximum if largest else np.minimum).reduce(values, axis=0))
    if name in ("_or_combine", "_xor_combine"):
        return (np.bitwise_or if name == "_or_combine" else np.bitwise_xor).reduce(data, axis=0)
    return None


def _first_of(name: str, data: np.ndarray, ty: Any) -> np.ndarray | None:
    """The position along axis 0 of the first largest or smallest value, for a combine of values and their indices."""
    if not name.startswith(("_argmax_combine", "_argmin_combine")):
        return None
    largest = name.startswith("_argmax")
    if ty.is_floating():
        values = _wide(TensorHandle(data, ty))
        values = np.where(np.isnan(values), -np.inf if largest else np.inf, values)
    else:
        values = _unsigned(data) if ty.is_int_unsigned() else data
    return (np.argmax if largest else np.argmin)(values, axis=0)


def _combined(combine: Any, left: list[np.ndarray], right: list[np.ndarray], types: list[Any]) -> list[np.ndarray]:
    parts = [*map(_tensor, left, types), *map(_tensor, right, types)]
    out = combine(*parts)
    return [part.handle.data for part in (out if isinstance(out, tuple | tl.tuple) else (out,))]


def _library_name(combine: Any) -> str:
    fn = getattr(combine, "fn", None)
    return fn.__name__ if fn is not None and fn.__module__ == tl.standard.__name__ else ""


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
    axis, keep_dims = _static(axis), _static(keep_dims)
    types = [part.dtype for part in inputs]
    rank = len(inputs[0].shape)
    if axis is None:
        parts = [part.handle.data.reshape(-1) for part in inputs]
    else:
        parts = [np.moveaxis(part.handle.data, axis, 0) for part in inputs]

    name = _library_name(combine_fn)
    out: list[np.ndarray] | None = None
    if len(parts) == 1 and (folded := _fold(name, parts[0], types[0])) is not None:
        out = [folded]
    elif len(parts) == 2 and (first := _first_of(name, parts[0], types[0])) is not None:
        out = [np.take_along_axis(part, first[None], axis=0)[0] for part in parts]
    else:
        while len(parts[0]) > 1:
            parts = _combined(combine_fn, [p[0::2] for p in parts], [p[1::2] for p in parts], types)
        out = [part[0] for part in parts]

    if keep_dims:
        out = [np.expand_dims(part, list(range(rank)) if axis is None else axis) for part in map(np.asarray, out)]
    results = tuple(map(_tensor, map(np.asarray, out), types))
    return results[0] if isinstance(input, tl.tensor) else results


def _reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    shape = input.handle.data.shape
    axis = _static(axis) % len(shape)
    positions = np.arange(shape[axis], dtype=np.int32).reshape([-1 if at == axis else 1 for at in range(len(shape))])
    return _reduce((input, _tensor(np.broadcast_to(positions, shape), tl.int32)), axis, combine_fn, keep_dims)


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    inputs = (input,) if isinstance(input, tl.tensor) else tuple(input)
    axis = _static(axis)
    types = [part.dtype for part in inputs]
    parts = [np.moveaxis(part.handle.data, axis, 0) for part in inputs]
    if _static(reverse):
        parts = [part[::-1] for part in parts]

    name = _library_name(combine_fn)
    if len(parts) == 1 and name in ("_sum_combine", "_prod_combine"):
        op: Any = np.add if name == "_sum_combine" else np.multiply
        if types[0].is_floating():
            outs = [_round(op.accumulate(_wide(TensorHandle(parts[0], types[0])), axis=0), types[0])]
        else:
            outs = [op.accumulate(parts[0], axis=0, dtype=parts[0].dtype)]
    else:
        steps = [[part[:1] for part in parts]]
        for at in range(1, len(parts[0])):
            steps.append(_combined(combine_fn, steps[-1], [part[at : at + 1] for part in parts], types))
        outs = [np.concatenate(column) for column in zip(*steps, strict=True)]

    if _static(reverse):
        outs = [out[::-1] for out in outs]
    results = tuple(map(_tensor, (np.moveaxis(out, 0, axis) for out in outs), types))
    return results[0] if isinstance(input, tl.tensor) else results


# What the rewritten text of a device function calls


def _assign(value: Any) -> Any:
    """Numbers become tensors when they are assigned, as in the compiler."""
    value = _static(value)
    if isinstance(value, int | float):
        return _semantic.to_tensor(value)
    return tuple(map(_assign, value)) if type(value) is tuple else value


def _truth(value: Any) -> bool:
    if isinstance(value, tl.tensor):
        if value.numel != 1:
            raise TypeError(f"a condition must be a scalar, this one is a block of {tuple(value.shape)}")
        return bool(value.handle.data.any())
    return bool(value)


def _all_true(value: Any) -> bool:
    return bool(value.handle.data.all()) if isinstance(value, tl.tensor) else bool(value)


def _logical(method: str, stop: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    # As the compiler: a number decides at once, tensors are all evaluated.
    value, tensors = first, []
    for later in (*rest, None):
        if isinstance(value, tl.tensor):
            tensors.append(value)
        elif bool(value) is stop:
            return value
        if later is not None:
            value = later()
    if not tensors:
        return value
    return functools.reduce(lambda left, right: getattr(left, method)(right), tensors)


def _negate(value: Any) -> Any:
    return _semantic.not_(value) if isinstance(value, tl.tensor) else not value


def _range(start: Any, stop: Any = None, step: Any = None, **_hints: Any) -> Iterator[Any]:
    """The `range` and `tl.range` of a kernel: the variable is a tensor of the bounds' common type."""
    bounds = [_semantic.to_tensor(bound) for bound in ((0, start) if stop is None else (start, stop))]
    bounds.append(_semantic.to_tensor(1 if step is None else step))
    ty = functools.reduce(_semantic.integer_promote_impl, (bound.dtype for bound in bounds))
    for value in range(*(int(_semantic.cast(bound, ty).handle.data[0]) for bound in bounds)):
        yield _semantic.scalar_constant(value, ty)


def _static_range(start: Any, stop: Any = None, step: Any = None) -> range:
    first, last = (0, start) if stop is None else (start, stop)
    return range(_static(first), _static(last), 1 if step is None else _static(step))


def _static_assert(condition: Any, message: Any = "") -> None:
    if isinstance(condition, tl.tensor):
        raise TypeError("tl.static_assert needs a condition known when compiling")
    if not condition:
        raise AssertionError(_static(message))


def _extreme(builtin: Callable[..., Any], elementwise: Any) -> Callable[..., Any]:
    def choose(*args: Any) -> Any:
        if any(isinstance(arg, tl.tensor) for arg in args):
            return functools.reduce(_view(elementwise), args)
        return builtin(*args)

    return choose


def _hint(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"tl.{name} is not interpreted")

    return refuse


_REPLACED: dict[str, Any] = {
    "reduce": _reduce,
    "_reduce_with_indices": _reduce_with_indices,
    "associative_scan": _scan,
    "range": _range,
    "static_range": _static_range,
    "static_assert": _static_assert,
    "static_print": print,
    **dict.fromkeys(("multiple_of", "max_contiguous", "max_constancy"), _hint),
    **{name: _missing(name) for name in ("map_elementwise", "inline_asm_elementwise", "make_tensor_descriptor")},
}
_HELPERS: dict[str, Callable[..., Any]] = {
    "__assign__": _assign,
    "__static__": _static,
    "__truth__": _truth,
    "__all_true__": _all_true,
    "__negate__": _negate,
    "__and__": functools.partial(_logical, "logical_and", False),
    "__or__": functools.partial(_logical, "logical_or", True),
}
_JIT = "__interpreted__"


# Names: Triton as an interpreted function sees it


class _ModuleView(types.ModuleType):
    """A module of Triton, its functions bound to the interpreter."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = _view(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _bound(member: Any) -> Callable[..., Any]:
    @functools.wraps(member)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        out = member(*args, **kwargs)
        return _Tensor(out.handle, out.type) if type(out) is tl.tensor else out  # triton.language.math makes these

    return call


_views: dict[int, tuple[Any, Any]] = {}  # by id: what is seen, what is shown instead


def _view(value: Any) -> Any:
    """What an interpreted function sees where a compiled one sees `value`."""
    known = _views.get(id(value))
    if known is not None:
        return known[1]
    if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "triton":
        shown: Any = _ModuleView(value)
    elif isinstance(value, JITFunction | _StockFunction):
        shown = InterpretedFunction(value.fn, namespace=_namespace(value.fn.__globals__), rewritten=False)
    elif isinstance(value, types.FunctionType) and tl.core.is_builtin(value):
        shown = _bound(value)
    elif isinstance(value, tl.constexpr):
        return value.value
    else:
        return value
    return _views.setdefault(id(value), (value, shown))[1]


class _Namespace:
    """The globals of a module's device functions, made when first needed: by then the module is complete."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    @functools.cached_property
    def device(self) -> dict[str, Any]:
        extremes = {"min": _extreme(min, tl.minimum), "max": _extreme(max, tl.maximum)}
        seen = {name: _view(value) for name, value in self.names.items()}
        return {"range": _range, **extremes, **seen, **_HELPERS}


_namespaces: dict[int, _Namespace] = {}  # of modules that were imported, which stay


def _namespace(names: dict[str, Any]) -> _Namespace:
    return _namespaces.setdefault(id(names), _Namespace(names))


# The text of device functions


class _DeviceCode(ast.NodeTransformer):
    """Makes Python's statements mean what the compiler takes them to mean."""

    def _call(self, name: str, *args: ast.expr) -> ast.Call:
        call = ast.Call(ast.Name(name, ast.Load()), list(args), [])
        return ast.fix_missing_locations(ast.copy_location(call, args[0]))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._call("__assign__", node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if node.value is not None:
            static = ast.unparse(node.annotation).strip("'").endswith("constexpr")
            node.value = self._call("__static__" if static else "__assign__", node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        old = ast.copy_location(ast.Name(node.target.id, ast.Load()), node.target)
        value = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return ast.copy_location(ast.Assign([node.target], self._call("__assign__", value)), node)

    def _conditional(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = self._call("__truth__", node.test)
        return node

    visit_If = visit_While = visit_IfExp = _conditional

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = self._call("__all_true__", node.test)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        rest = [ast.copy_location(ast.Lambda(nothing, value), value) for value in node.values[1:]]
        return self._call("__and__" if isinstance(node.op, ast.And) else "__or__", node.values[0], *rest)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return self._call("__negate__", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:
            raise GenerationError(f"line {node.lineno}: Triton compares two values at a time: {ast.unparse(node)}")
        return self.generic_visit(node)


class _ModuleCode(ast.NodeTransformer):
    """Turns `@triton.jit` functions into interpreted ones and leaves the rest of a module as it is."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        interpreted = False
        for index, decorator in enumerate(node.decorator_list):
            name = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(name) in ("triton.jit", "jit", "triton.runtime.jit.jit"):
                node.decorator_list[index] = ast.copy_location(ast.Name(_JIT, ast.Load()), decorator)
                interpreted = True
        if not interpreted:
            return self.generic_visit(node)
        node.body = [_DeviceCode().visit(statement) for statement in node.body]
        return node


@functools.lru_cache(maxsize=64)
def _compile_module(source: str, filename: str) -> types.CodeType:
    tree = _ModuleCode().visit(ast.parse(source, filename))
    return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)


def _device_code(fn: types.FunctionType) -> types.CodeType:
    """The code of a device function of an imported module, its text rewritten."""
    if fn.__closure__:
        raise GenerationError(f"{fn.__qualname__} is a closure, which is interpreted only in a module that was loaded")
    lines, start = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    definition: Any = tree.body[0]
    definition.decorator_list = []
    definition.body = [_DeviceCode().visit(statement) for statement in definition.body]
    ast.increment_lineno(ast.fix_missing_locations(tree), start - 1)
    module = compile(tree, inspect.getsourcefile(fn) or "<triton>", "exec", dont_inherit=True)
    codes = [const for const in module.co_consts if isinstance(const, types.CodeType)]
    return next(code for code in codes if code.co_name == fn.__name__)


# Kernels and device functions

_POINTEES = {
    torch.bool: tl.int1,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
    **{
        getattr(torch, name): getattr(tl, name)
        for name in (f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
        if hasattr(torch, name)
    },
}


class InterpretedFunction(KernelInterface[Any]):
    """A `@triton.jit` function of a loaded module: launched as `fn[grid](...)`, called by other device functions."""

    def __init__(self, fn: Any, *, namespace: _Namespace, rewritten: bool = True) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.namespace = namespace
        self.rewritten = rewritten
        self.signature = inspect.signature(fn)
        self.arg_names = list(self.signature.parameters)
        annotations = {name: parameter.annotation for name, parameter in self.signature.parameters.items()}
        self.static = {name for name, note in annotations.items() if _names_constexpr(note)}

    @functools.cached_property
    def device(self) -> Callable[..., Any]:
        fn = self.fn
        code = fn.__code__ if self.rewritten else _device_code(fn)
        function = types.FunctionType(code, self.namespace.device, fn.__name__, fn.__defaults__, fn.__closure__)
        function.__kwdefaults__ = fn.__kwdefaults__
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _current()
        return self.device(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Runs every program of `grid`, one after the other; launch options in `kwargs` are ignored."""
        if warmup:
            return
        bound = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in self.arg_names})
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        poisoned = _poison.get()
        launch = _Launch(self.__name__, _poison_default if poisoned is None else poisoned)
        x, y, z = (int(size) for size in (*sizes, 1, 1)[:3])
        launch.grid = (x, y, z)
        storages: dict[int, tuple[int, list[str]]] = {}
        values = {
            name: _static(value) if name in self.static else _argument(name, value, storages)
            for name, value in bound.arguments.items()
        }
        launch.allow(storages)
        programs = 0
        before, _state.launch = _state.launch, launch
        try:
            with np.errstate(all="ignore"):
                for launch.program in itertools.product(range(x), range(y), range(z)):
                    self.device(**values)
                    programs += 1
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in program {launch.program} of {self.__name__}")
            raise
        finally:
            _state.launch = before
            for counts in _counters.get():
                counts.bytes_loaded += launch.bytes_loaded
                counts.bytes_stored += launch.bytes_stored
                counts.programs += programs


def _names_constexpr(annotation: Any) -> bool:
    return annotation is tl.constexpr or (isinstance(annotation, str) and annotation.endswith("constexpr"))


def _argument(name: str, value: Any, storages: dict[int, tuple[int, list[str]]]) -> Any:
    """A kernel's run-time argument as its programs see it; notes which memory it gives them."""
    if hasattr(value, "data_ptr"):
        base = getattr(value, "base", value)  # what triton.reinterpret makes has one
        if base.device.type != "cpu":
            raise DeviceError(f"{name} is on {base.device}; an interpreted kernel takes tensors on the CPU")
        storage = base.untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage.data_ptr(), (storage.nbytes(), []))[1].append(name)
        ty = tl.pointer_type(value.dtype if isinstance(value.dtype, tl.dtype) else _POINTEES[value.dtype])
        return _Tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), ty), ty)
    if isinstance(value, tuple):
        return tuple(_argument(name, item, storages) for item in value)
    if isinstance(value, bool):
        return _Tensor(_builder.get_int1(value), tl.int1)
    if isinstance(value, int):
        if value >= 2**63:
            return _Tensor(_builder.get_uint64(value), tl.uint64)
        ty = tl.int32 if -(2**31) <= value < 2**31 else tl.int64
        return _semantic.scalar_constant(value, ty)
    if isinstance(value, float):
        return _Tensor(_builder.get_fp32(value), tl.float32)
    return value


def _fill_views() -> None:
    """Binds what `tl` and `tl.tensor` offer to the interpreter."""
    for name, replacement in _REPLACED.items():
        for module in (tl, tl.core):
            if (original := getattr(module, name, None)) is not None:
                _views[id(original)] = (original, replacement)
    _views[id(tl.tensor)] = (tl.tensor, _Tensor)
    for name in dir(tl.tensor):
        member, function = inspect.getattr_static(tl.tensor, name), getattr(tl, name, None)
        if name in _REPLACED:
            setattr(_Tensor, name, _REPLACED[name])
        elif isinstance(function, JITFunction | _StockFunction):
            setattr(_Tensor, name, _method(function))
        elif isinstance(member, types.FunctionType) and tl.core.is_builtin(member):
            setattr(_Tensor, name, _bound(member))


    for module in (tl, tl.core, tl.math, tl.standard):  # now, since a launch of the stock interpreter changes them
        for name in dir(module):
            getattr(_view(module), name)


def _method(function: Any) -> Callable[..., Any]:
    shown = _view(function)
    return lambda self, *args, **kwargs: shown(self, *args, **kwargs)


_fill_views()
