"""One rounding from float64, for references: torch's own casts to 16 bits go through float32 and so round twice."""

from __future__ import annotations

import torch
from torch import Tensor

# Bits of the significand, the hidden one included, and the least exponent of a normal number.
FORMATS = {torch.bfloat16: (8, -126), torch.float16: (11, -14), torch.float32: (24, -126)}


def spacing(values: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of `dtype` in each value's binade, as float64."""
    significand, least = FORMATS[dtype]
    exponent = ((values.double().view(torch.int64) >> 52) & 0x7FF) - 1023
    return ((exponent.clamp_(min=least) - (significand - 1) + 1023) << 52).view(torch.float64)


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 to `dtype` in one rounding, to nearest even; infinity past the largest finite."""
    step = spacing(values, dtype)
    return ((values / step).round_() * step).to(dtype)
