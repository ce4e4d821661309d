"""Problems of `fused_qk_norm_rope` in which every two values of any two columns meet.

A row: tokens, heads of q, k and v, head_dim, lanes that rotate, is_neox, qkv's dtype, the table's,
the positions, elements around each row of a wider buffer, and what is forced: nothing, so that the
rules choose; a forced_token_heads_per_warp; or a configuration (tokens, heads, num_warps).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from qk_norm_rope import Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LONG, LONG_STRIDED = (torch.int64, False), (torch.int64, True)
INT, INT_STRIDED = (torch.int32, False), (torch.int32, True)


def config(tokens: int, heads: int, num_warps: int) -> dict[str, int]:
    return {"tokens": tokens, "heads": heads, "num_warps": num_warps, "num_stages": 1}


def cases(**more: Any) -> Iterator[tuple[Case, dict[str, Any], str]]:
    """Each case of `GRID`, the options that force what is forced, and a name.

    Args:
        more: Attributes that every case gets.
    """
    for tokens, heads, dim, rotary, neox, dtype, cache, positions, around, forced in GRID:
        case = Case(tokens, heads, dim, rotary, neox, dtype, cache, *positions, around, **more)
        if forced is None:
            yield case, {}, str(case)
        elif isinstance(forced, int):
            yield case, {"forced_token_heads_per_warp": forced}, f"{case}-forced{forced}"
        else:
            yield case, {"config": config(*forced)}, f"{case}-tile{'.'.join(map(str, forced))}"


GRID = [
    (1, (3, 1, 1), 16, 8, True, FP16, FP16, INT_STRIDED, (0, 0), None),
    (1, (7, 3, 0), 16, 2, False, FP16, BF16, LONG_STRIDED, (1, 2), 8),
    (7, (16, 8, 8), 16, 4, True, BF16, FP32, INT, (0, 0), (1, 1, 1)),
    (7, (6, 2, 3), 16, 12, False, FP16, FP32, LONG, (8, 24), (2, 4, 1)),
    (7, (6, 2, 3), 16, 10, True, FP16, BF16, INT, (1, 2), (8, 8, 4)),
    (8, (5, 0, 0), 16, 8, False, BF16, FP16, LONG, (1, 2), 4),
    (9, (1, 1, 1), 16, 16, False, FP16, FP16, LONG_STRIDED, (0, 0), (4, 2, 2)),
    (9, (4, 2, 2), 16, 8, True, BF16, BF16, INT, (8, 24), 1),
    (17, (0, 2, 1), 16, 8, False, FP16, FP16, INT_STRIDED, (0, 0), 2),
    (1, (3, 1, 1), 48, 30, False, FP16, FP32, LONG_STRIDED, (8, 24), (4, 2, 2)),
    (1, (6, 2, 3), 48, 48, True, BF16, BF16, INT, (1, 2), 4),
    (1, (7, 3, 0), 48, 26, True, FP16, BF16, LONG, (0, 0), None),
    (7, (0, 2, 1), 48, 2, False, BF16, BF16, INT_STRIDED, (0, 0), 1),
    (8, (5, 0, 0), 48, 12, False, FP16, FP16, INT_STRIDED, (0, 0), (1, 1, 1)),
    (9, (1, 1, 1), 48, 36, False, BF16, BF16, LONG, (0, 0), 2),
    (17, (16, 8, 8), 48, 24, True, BF16, FP32, INT_STRIDED, (1, 2), 8),
    (17, (4, 2, 2), 48, 12, True, BF16, FP16, LONG_STRIDED, (0, 0), (2, 4, 1)),
    (17, (4, 2, 2), 48, 36, False, BF16, FP16, INT, (1, 2), (8, 8, 4)),
    (1, (5, 0, 0), 64, 48, True, FP16, FP16, INT, (8, 24), (8, 8, 4)),
    (1, (5, 0, 0), 64, 40, False, BF16, FP32, INT, (0, 0), (1, 1, 1)),
    (7, (0, 2, 1), 64, 40, False, FP16, FP32, INT, (8, 24), 2),
    (7, (16, 8, 8), 64, 2, True, BF16, FP32, INT_STRIDED, (0, 0), None),
    (7, (5, 0, 0), 64, 48, True, BF16, FP16, LONG_STRIDED, (8, 24), 8),
    (8, (3, 1, 1), 64, 16, True, BF16, FP32, LONG_STRIDED, (8, 24), 4),
    (8, (4, 2, 2), 64, 32, False, FP16, FP16, LONG, (1, 2), None),
    (9, (7, 3, 0), 64, 16, True, FP16, FP32, LONG_STRIDED, (0, 0), (4, 2, 2)),
    (17, (1, 1, 1), 64, 64, False, FP16, FP32, LONG_STRIDED, (1, 2), (2, 4, 1)),
    (17, (6, 2, 3), 64, 36, False, BF16, BF16, LONG_STRIDED, (0, 0), 1),
    (1, (16, 8, 8), 80, 44, True, BF16, FP32, LONG_STRIDED, (0, 0), (2, 4, 1)),
    (1, (5, 0, 0), 80, 50, False, BF16, FP32, LONG_STRIDED, (8, 24), 1),
    (7, (1, 1, 1), 80, 50, True, FP16, BF16, INT_STRIDED, (8, 24), 2),
    (7, (3, 1, 1), 80, 40, False, FP16, BF16, LONG, (1, 2), (8, 8, 4)),
    (7, (4, 2, 2), 80, 80, True, FP16, BF16, INT, (8, 24), (4, 2, 2)),
    (8, (0, 2, 1), 80, 60, False, BF16, FP16, LONG_STRIDED, (0, 0), 4),
    (9, (4, 2, 2), 80, 50, True, FP16, BF16, INT, (1, 2), 8),
    (9, (6, 2, 3), 80, 20, False, BF16, FP16, INT_STRIDED, (1, 2), None),
    (17, (7, 3, 0), 80, 2, True, FP16, FP32, INT, (8, 24), (1, 1, 1)),
    (1, (16, 8, 8), 96, 48, False, BF16, FP32, INT, (0, 0), (2, 4, 1)),
    (1, (3, 1, 1), 96, 24, True, BF16, BF16, LONG_STRIDED, (1, 2), 1),
    (1, (6, 2, 3), 96, 60, True, BF16, FP16, INT, (8, 24), (1, 1, 1)),
    (7, (1, 1, 1), 96, 24, True, BF16, FP16, LONG_STRIDED, (0, 0), 8),
    (7, (4, 2, 2), 96, 54, True, FP16, FP32, INT_STRIDED, (8, 24), 4),
    (8, (3, 1, 1), 96, 2, True, BF16, FP16, INT, (8, 24), 2),
    (8, (5, 0, 0), 96, 96, False, BF16, FP16, INT, (8, 24), None),
    (9, (7, 3, 0), 96, 96, False, FP16, FP32, LONG, (0, 0), (8, 8, 4)),
    (17, (0, 2, 1), 96, 72, True, FP16, BF16, LONG, (1, 2), (4, 2, 2)),
    (1, (16, 8, 8), 112, 112, False, BF16, FP16, INT, (1, 2), (8, 8, 4)),
    (1, (4, 2, 2), 112, 56, False, BF16, FP32, LONG_STRIDED, (0, 0), (1, 1, 1)),
    (7, (5, 0, 0), 112, 112, False, FP16, FP16, INT, (0, 0), (4, 2, 2)),
    (8, (0, 2, 1), 112, 2, True, BF16, FP32, INT, (1, 2), (2, 4, 1)),
    (8, (3, 1, 1), 112, 84, True, FP16, FP16, LONG_STRIDED, (0, 0), None),
    (9, (16, 8, 8), 112, 70, False, FP16, BF16, LONG, (1, 2), 4),
    (17, (1, 1, 1), 112, 28, False, FP16, FP16, INT, (1, 2), 1),
    (17, (6, 2, 3), 112, 112, True, FP16, FP16, INT_STRIDED, (8, 24), 8),
    (17, (7, 3, 0), 112, 62, True, FP16, FP32, LONG, (0, 0), 2),
    (1, (0, 2, 1), 128, 72, True, BF16, FP32, LONG, (0, 0), 8),
    (7, (16, 8, 8), 128, 32, False, FP16, FP16, LONG_STRIDED, (8, 24), 2),
    (8, (1, 1, 1), 128, 96, False, BF16, BF16, LONG, (8, 24), (4, 2, 2)),
    (8, (7, 3, 0), 128, 80, True, BF16, BF16, INT_STRIDED, (1, 2), (2, 4, 1)),
    (9, (3, 1, 1), 128, 128, False, BF16, BF16, INT, (0, 0), (1, 1, 1)),
    (9, (5, 0, 0), 128, 64, False, FP16, BF16, INT, (1, 2), 1),
    (9, (6, 2, 3), 128, 96, True, BF16, FP32, INT_STRIDED, (0, 0), None),
    (17, (1, 1, 1), 128, 2, True, FP16, FP32, INT_STRIDED, (0, 0), 4),
    (17, (4, 2, 2), 128, 2, False, BF16, FP16, LONG, (0, 0), (8, 8, 4)),
    (1, (1, 1, 1), 192, 120, False, FP16, FP16, INT_STRIDED, (0, 0), 1),
    (1, (4, 2, 2), 192, 192, True, FP16, FP32, INT_STRIDED, (1, 2), (8, 8, 4)),
    (1, (5, 0, 0), 192, 48, True, BF16, FP32, LONG, (1, 2), 2),
    (1, (7, 3, 0), 192, 96, True, FP16, FP32, LONG_STRIDED, (8, 24), 8),
    (7, (1, 1, 1), 192, 2, False, FP16, FP32, LONG_STRIDED, (0, 0), 4),
    (8, (6, 2, 3), 192, 96, False, FP16, FP16, LONG_STRIDED, (8, 24), (4, 2, 2)),
    (9, (0, 2, 1), 192, 192, True, FP16, BF16, INT, (8, 24), None),
    (17, (16, 8, 8), 192, 144, False, FP16, FP32, LONG_STRIDED, (8, 24), (1, 1, 1)),
    (17, (3, 1, 1), 192, 108, True, FP16, FP32, INT_STRIDED, (8, 24), (2, 4, 1)),
    (1, (0, 2, 1), 256, 64, True, FP16, FP32, INT_STRIDED, (0, 0), (8, 8, 4)),
    (7, (1, 1, 1), 256, 144, False, FP16, BF16, INT, (1, 2), (1, 1, 1)),
    (7, (6, 2, 3), 256, 2, False, FP16, FP16, LONG, (1, 2), 2),
    (8, (16, 8, 8), 256, 256, True, BF16, FP32, LONG, (1, 2), 1),
    (8, (4, 2, 2), 256, 192, True, FP16, FP32, LONG_STRIDED, (8, 24), 8),
    (8, (5, 0, 0), 256, 144, False, BF16, FP32, LONG_STRIDED, (1, 2), (2, 4, 1)),
    (9, (3, 1, 1), 256, 144, True, BF16, FP16, INT_STRIDED, (0, 0), (4, 2, 2)),
    (17, (5, 0, 0), 256, 160, False, FP16, BF16, LONG_STRIDED, (8, 24), None),
    (17, (7, 3, 0), 256, 128, True, BF16, FP32, LONG_STRIDED, (8, 24), 4),
    (1, (4, 2, 2), 512, 512, False, BF16, BF16, INT, (0, 0), 2),
    (7, (0, 2, 1), 512, 320, True, BF16, FP32, LONG, (0, 0), (1, 1, 1)),
    (7, (7, 3, 0), 512, 384, False, FP16, FP16, INT_STRIDED, (1, 2), 1),
    (8, (1, 1, 1), 512, 288, True, BF16, FP32, LONG_STRIDED, (8, 24), (8, 8, 4)),
    (8, (1, 1, 1), 512, 256, True, BF16, FP16, LONG, (1, 2), None),
    (8, (16, 8, 8), 512, 2, False, BF16, FP32, INT_STRIDED, (0, 0), (4, 2, 2)),
    (9, (5, 0, 0), 512, 2, False, FP16, FP16, LONG_STRIDED, (1, 2), (2, 4, 1)),
    (9, (6, 2, 3), 512, 320, True, FP16, FP32, INT_STRIDED, (8, 24), 4),
    (17, (3, 1, 1), 512, 128, False, BF16, BF16, INT, (0, 0), 8),
]
