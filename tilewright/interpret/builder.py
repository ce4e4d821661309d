"""The stock interpreter's builder, mended: what Triton's front end emits is computed at once, with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as _memory
from triton._C.libtriton import ir as _ir
from triton.runtime.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle

from tilewright.interpret.launch import current
from tilewright.interpret.numbers import (
    NARROW,
    as_signed,
    as_unsigned,
    cast,
    decode,
    encode,
    fma,
    poison_value,
    rounded,
    storage_type,
    to_integer,
    wide,
)

Operation = Callable[..., np.ndarray]
Create = Callable[..., TensorHandle]


def _floats(op: Operation) -> Create:
    def create(self: Any, *args: TensorHandle) -> TensorHandle:
        ty = args[0].dtype
        if ty.name in NARROW:
            return TensorHandle(encode(op(*(decode(arg.data, ty.name) for arg in args)), ty.name), ty)
        return TensorHandle(op(*(arg.data for arg in args)), ty)

    return create


def _integers(op: Operation, on_bool: Operation | None = None) -> Create:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        chosen = on_bool if on_bool and left.data.dtype == np.bool_ else op
        return TensorHandle(chosen(left.data, right.data), left.dtype)

    return create


def _naturals(op: Operation) -> Create:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        return TensorHandle(as_signed(op(as_unsigned(left.data), as_unsigned(right.data))), left.dtype)

    return create


def _compares(op: Operation, unsigned: bool = False) -> Create:
    def create(self: Any, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        a, b = left.data, right.data
        if unsigned:
            a, b = as_unsigned(a), as_unsigned(b)
        elif left.dtype.name in NARROW:
            a, b = decode(a, left.dtype.name), decode(b, right.dtype.name)
        return TensorHandle(op(a, b), tl.int1)

    return create


def _natural_constant(ty: Any) -> Create:
    return lambda self, value: TensorHandle(as_signed(np.array([value], dtype=ty.name)), ty)


def _float_constant(ty: Any) -> Create:
    # Rounded to float32 on the way: that is what Triton's own builder takes.
    return lambda self, value: TensorHandle(rounded(np.array([value], dtype=np.float32), ty), ty)


def _divide(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left - np.fmod(left, right)) // right


def _clamp(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.fmin(np.fmax(x, low), high)


def _contiguous(handle: TensorHandle) -> TensorHandle:
    # The memory operations, in C++, read an array that was broadcast along its only axis past its end.
    return TensorHandle(np.ascontiguousarray(handle.data), handle.dtype)


class _Block(NamedTuple):
    """A block type as the builder needs it; `tl.block_type` is slow to make."""

    scalar: Any
    shape: Sequence[int]


class Builder(InterpreterBuilder):
    """Integers are stored signed, since the front end says in each operation how it reads them, as LLVM does."""

    def __init__(self) -> None:
        super().__init__()
        # Overflow checks would double the integer work and never fire: int32 wraps here as on a device.
        self.options: Any = InterpreterOptions(sanitize_overflow=False, debug=True)

    # constants
    get_uint8 = _natural_constant(tl.uint8)
    get_uint16 = _natural_constant(tl.uint16)
    get_uint32 = _natural_constant(tl.uint32)
    get_uint64 = _natural_constant(tl.uint64)
    get_fp16 = _float_constant(tl.float16)
    get_bf16 = _float_constant(tl.bfloat16)

    def get_block_ty(self, dtype: Any, shape: Sequence[int]) -> Any:
        return _Block(dtype, tuple(shape))

    def get_null_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.zeros(1, dtype=storage_type(type.scalar)), type.scalar)

    def get_all_ones_value(self, type: Any) -> TensorHandle:
        return TensorHandle(np.full(1, -1, dtype=storage_type(type.scalar)), type.scalar)

    # programs
    def create_get_program_id(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([current().program[axis]], dtype=np.int32), tl.int32)

    def create_get_num_programs(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([current().grid[axis]], dtype=np.int32), tl.int32)

    # memory
    def create_load(self, ptr: TensorHandle, *_: Any, **__: Any) -> TensorHandle:
        return self.create_masked_load(ptr, None, None)

    def create_store(self, ptr: TensorHandle, value: TensorHandle, *_: Any, **__: Any) -> None:
        self.create_masked_store(ptr, value, None)

    def create_masked_load(self, ptr: TensorHandle, mask: Any, other: Any, *_: Any, **__: Any) -> TensorHandle:
        ty = ptr.get_element_ty()
        storage = storage_type(ty)
        active = self._touch(ptr, mask, storage.itemsize, "reads")
        if other is not None:
            fill = other.data
        else:
            fill = np.full(ptr.data.shape, poison_value(ty) if current().poisoned else 0, dtype=storage)
        return TensorHandle(_memory.load(*map(np.ascontiguousarray, (ptr.data, active, fill)), storage), ty)

    def create_masked_store(self, ptr: TensorHandle, value: TensorHandle, mask: Any, *_: Any, **__: Any) -> None:
        active = self._touch(ptr, mask, value.data.dtype.itemsize, "writes")
        _memory.store(*map(np.ascontiguousarray, (ptr.data, value.data, active)))

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        if value.dtype.name in NARROW:
            raise NotImplementedError(f"an atomic on {value.dtype} is not interpreted")
        data = as_unsigned(value.data) if op in (_ir.ATOMIC_OP.UMAX, _ir.ATOMIC_OP.UMIN) else value.data
        self._touch(ptr, mask, data.dtype.itemsize, "updates")
        where, what, active = map(_contiguous, (ptr, TensorHandle(data, value.dtype), mask))
        old = super().create_atomic_rmw(op, where, what, active, sem, scope)
        return TensorHandle(as_signed(old.data), value.dtype)

    def create_atomic_cas(self, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any) -> TensorHandle:
        self._touch(ptr, None, value.data.dtype.itemsize, "updates")
        return super().create_atomic_cas(*map(_contiguous, (ptr, compare, value)), sem, scope)

    def _touch(self, ptr: TensorHandle, mask: Any, size: int, verb: str) -> np.ndarray:
        """Checks and counts what the mask lets through; the mask as an array."""
        if mask is None:
            current().touch(ptr.data, size, verb)
            return np.ones(ptr.data.shape, dtype=bool)
        active = mask if isinstance(mask, np.ndarray) else mask.data  # an array: a block pointer's
        current().touch(ptr.data if active.all() else ptr.data[active], size, verb)
        current().check_masked(ptr.data, size, verb)
        return active

    def create_addptr(self, ptr: TensorHandle, offset: TensorHandle) -> TensorHandle:
        step = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return TensorHandle(ptr.data + (offset.data.astype(np.int64) * step).view(np.uint64), ptr.dtype)

    # casts
    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any = None) -> TensorHandle:
        target = dst_type.scalar
        toward_zero = rounding_mode == _ir.ROUNDING_MODE.RTZ
        return TensorHandle(cast(src.data, src.dtype, target, toward_zero), target)

    create_fp_ext = create_fp_to_fp
    create_fp_trunc = create_fp_to_fp

    def create_si_to_fp(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return TensorHandle(rounded(src.data, dst_type.scalar), dst_type.scalar)

    def create_ui_to_fp(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return TensorHandle(rounded(as_unsigned(src.data), dst_type.scalar), dst_type.scalar)

    def create_fp_to_si(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        target = dst_type.scalar
        return TensorHandle(to_integer(wide(src.data, src.dtype), storage_type(target), signed=True), target)

    def create_fp_to_ui(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        target = dst_type.scalar
        return TensorHandle(to_integer(wide(src.data, src.dtype), storage_type(target), signed=False), target)

    def create_int_cast(self, src: TensorHandle, dst_type: Any, is_signed: bool) -> TensorHandle:
        data = src.data if is_signed else as_unsigned(src.data)
        return TensorHandle(data.astype(storage_type(dst_type.scalar)), dst_type.scalar)

    def create_bitcast(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        return TensorHandle(src.data.view(storage_type(dst_type.scalar)), dst_type.scalar)

    create_ptr_to_int = create_bitcast

    def create_int_to_ptr(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        current().foreign = True
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

    create_icmpEQ = create_fcmpOEQ = _compares(np.equal)
    create_icmpNE = create_fcmpUNE = _compares(np.not_equal)
    create_icmpSLT = create_fcmpOLT = _compares(np.less)
    create_icmpSLE = create_fcmpOLE = _compares(np.less_equal)
    create_icmpSGT = create_fcmpOGT = _compares(np.greater)
    create_icmpSGE = create_fcmpOGE = _compares(np.greater_equal)
    create_icmpULT = _compares(np.less, unsigned=True)
    create_icmpULE = _compares(np.less_equal, unsigned=True)
    create_icmpUGT = _compares(np.greater, unsigned=True)
    create_icmpUGE = _compares(np.greater_equal, unsigned=True)

    def create_umulhi(self, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        a, b = as_unsigned(left.data), as_unsigned(right.data)
        bits = a.dtype.itemsize * 8
        wider: Any = object if bits == 64 else f"u{bits // 4}"
        return TensorHandle(as_signed((a.astype(wider) * b.astype(wider) >> bits).astype(a.dtype)), left.dtype)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        ty = z.dtype
        if ty.name == "fp64":
            return TensorHandle(x.data * y.data + z.data, ty)
        return TensorHandle(rounded(fma(*(wide(arg.data, arg.dtype) for arg in (x, y, z))), ty), ty)

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
        values = torch.erf(torch.from_numpy(np.array(wide(arg.data, arg.dtype)))).numpy()
        return TensorHandle(rounded(values, arg.dtype), arg.dtype)

    def create_select(self, condition: TensorHandle, left: TensorHandle, right: TensorHandle) -> TensorHandle:
        return TensorHandle(np.where(condition.data, left.data, right.data), left.dtype)

    def create_dot(self, a: TensorHandle, b: TensorHandle, acc: TensorHandle, *_: Any) -> TensorHandle:
        ty = acc.dtype
        if a.data.dtype.kind == "i":  # exact: int8 products of any length that fits int32 are small for a float64
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return TensorHandle((product.astype(np.int64) + acc.data).astype(acc.data.dtype), ty)
        product = np.matmul(wide(a.data, a.dtype), wide(b.data, b.dtype))
        return TensorHandle(rounded(product + wide(acc.data, ty), ty), ty)

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
        values = as_unsigned(data.data)
        kept = values < bins if mask is None else (values < bins) & mask.data
        return TensorHandle(np.bincount(values[kept].astype(np.int64), minlength=bins).astype(np.int32), tl.int32)

    def create_gather(self, src: TensorHandle, indices: TensorHandle, axis: int) -> TensorHandle:
        index = as_unsigned(indices.data)
        outside = index >= src.data.shape[axis]
        found = np.take_along_axis(src.data, np.where(outside, 0, index).astype(np.int64), axis=axis)
        if outside.any():  # undefined on a GPU
            found[outside] = poison_value(src.dtype) if current().poisoned else 0
        return TensorHandle(found, src.dtype)
