"""Odd input: refused with the operator's own error, or right on every profile alike."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from tilewright.errors import DeviceError, DtypeError
from tilewright.ops import fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as operator


def arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(32) / 32)
    return {
        "q": torch.randn(4, 2, 512, generator=generator).bfloat16(),
        "kv": torch.randn(4, 512, generator=generator).bfloat16(),
        "k_cache": torch.zeros(2, 16 * 584, dtype=torch.uint8),
        "slot_mapping": torch.arange(4),
        "position_ids": torch.arange(4),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "eps": 1e-6,
        "cache_block_size": 16,
    }


def test_a_bool_is_no_block_size() -> None:
    given = arguments()
    with pytest.raises(DtypeError, match="cache_block_size is of type bool, an int is needed"):
        operator(**{**given, "cache_block_size": True})
    assert not given["k_cache"].any()


def test_an_array_is_no_tensor() -> None:
    with pytest.raises(DtypeError, match="q is of type ndarray, a tensor is needed"):
        operator(**{**arguments(), "q": numpy.zeros((4, 2, 512))})


def test_meta_tensors() -> None:
    given = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments().items()}
    with pytest.raises(DeviceError, match="meta"):
        operator(**given)


CACHES = {
    "rows of 585 bytes": lambda: torch.zeros(2, 16, 585, dtype=torch.uint8),
    "an odd number of bytes": lambda: torch.zeros(2, 20000, dtype=torch.uint8)[:, : 16 * 584 + 1],
}


@pytest.mark.parametrize("profile", ["generic", "nvidia-h200"])
@pytest.mark.parametrize("cache", CACHES)
def test_only_the_block_stride_of_a_cache_counts(cache: str, profile: str) -> None:
    given, plain = arguments(), arguments()
    given["k_cache"] = CACHES[cache]()
    operator(**given, profile=profile)
    operator(**plain, profile=profile)
    stride = given["k_cache"].stride(0)
    stored = given["k_cache"].as_strided((2, 16 * 584), (stride, 1))
    assert torch.equal(stored, plain["k_cache"])


@pytest.mark.parametrize("profile", ["generic", "nvidia-h200"])
def test_a_cache_at_an_odd_address_is_refused(profile: str) -> None:
    cache = torch.zeros(2 * 16 * 584 + 1, dtype=torch.uint8)[1:].view(2, -1)
    with pytest.raises(ValueError, match="k_cache"):
        operator(**{**arguments(), "k_cache": cache}, profile=profile)
    assert not cache.any()
