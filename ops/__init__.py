"""The operators."""

from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert import (
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from tilewright.ops.fused_qk_norm_rope import fused_qk_norm_rope

__all__ = ["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", "fused_qk_norm_rope"]
