"""The operators."""

from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert import (
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)

__all__ = ["fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"]
