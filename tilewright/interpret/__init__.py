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
* Under `every_lane` that holds for the addresses of masked lanes too.
* A masked lane of a `tl.load` without `other` reads 0, or NaN and the largest integers under `poison`.

Not interpreted: inline assembly, libdevice, tensor descriptors, `tl.map_elementwise`, bf16 atomics. A multiply and an
add are not fused. A float32 `tl.dot` is computed in float32, whatever its `input_precision`. The check of addresses
knows storages, not views: a read beside a view but within its storage passes.

In the order a call passes through them: `modules` loads a text and binds its names, `statements` rewrites its kernels,
`functions` launches one, `launch` runs its programs, `semantic` and `reductions` are Triton's front end, `builder`
computes what that emits, `numbers` stores and casts.
"""

from tilewright.interpret.launch import Counts, counting, every_lane, poison, set_poison_default
from tilewright.interpret.modules import load

__all__ = ["Counts", "counting", "every_lane", "load", "poison", "set_poison_default"]
