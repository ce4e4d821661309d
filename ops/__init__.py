"""The operators."""

from tilewright.ops.dequantize_and_gather_k_cache import dequantize_and_gather_k_cache
from tilewright.ops.fused_deepseek_v4_kv_rope_insert import fused_deepseek_v4_kv_rope_insert
from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
)
from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert import (
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
)
from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert import (
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from tilewright.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded import (
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded,
)
from tilewright.ops.fused_experts import fused_experts
from tilewright.ops.fused_experts_impl import fused_experts_impl
from tilewright.ops.fused_qk_norm_rope import fused_qk_norm_rope
from tilewright.ops.moe_activate import moe_activate
from tilewright.ops.moe_align_block_size import moe_align_block_size
from tilewright.ops.moe_combine import moe_combine
from tilewright.ops.moe_gemm import moe_gemm
from tilewright.ops.moe_gemm_gated import moe_gemm_gated
from tilewright.ops.moe_gemv_combine import moe_gemv_combine
from tilewright.ops.moe_gemv_gated import moe_gemv_gated
from tilewright.ops.moe_sum import moe_sum
from tilewright.ops.permute_copy import permute_copy, prepare_weights
from tilewright.ops.strided_copy import strided_copy
from tilewright.register import when_torch_is_there

__all__ = [
    "dequantize_and_gather_k_cache",
    "fused_deepseek_v4_kv_rope_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_padded",
    "fused_experts",
    "fused_experts_impl",
    "fused_qk_norm_rope",
    "moe_activate",
    "moe_align_block_size",
    "moe_combine",
    "moe_gemm",
    "moe_gemm_gated",
    "moe_gemv_combine",
    "moe_gemv_gated",
    "moe_sum",
    "permute_copy",
    "prepare_weights",
    "strided_copy",
]

when_torch_is_there()
