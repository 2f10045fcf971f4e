// SPDX-License-Identifier: Apache-2.0
#include "torch/ops.h"

namespace diffulex::torch_ops {

void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("block_attention", TORCH_BOX(&block_attention));
  library.impl("store_kv_cache", TORCH_BOX(&store_kv_cache));
  library.impl("load_kv_cache", TORCH_BOX(&load_kv_cache));
  library.impl("copy_kv_pages", TORCH_BOX(&copy_kv_pages));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rms_norm_add", TORCH_BOX(&rms_norm_add));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  library.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope));
  library.impl("qk_norm_rope_store", TORCH_BOX(&qk_norm_rope_store));
  library.impl("act_and_mul", TORCH_BOX(&act_and_mul));
  // Also for CUDA, where it explains that it runs on the CPU only.
  library.impl("linear_packed", TORCH_BOX(&linear_packed));
  library.impl("linear_few_rows", TORCH_BOX(&linear_few_rows));
  library.impl("moe_topk", TORCH_BOX(&moe_topk));
  library.impl("router_gemm", TORCH_BOX(&router_gemm));
  library.impl("moe_permute", TORCH_BOX(&moe_permute));
  library.impl("fused_moe", TORCH_BOX(&fused_moe));
  library.impl("fused_experts_packed", TORCH_BOX(&fused_experts_packed));
  library.impl("moe_combine", TORCH_BOX(&moe_combine));
  library.impl("token_stats", TORCH_BOX(&token_stats));
  library.impl("merge_token_stats", TORCH_BOX(&merge_token_stats));
  library.impl("sample_filtered", TORCH_BOX(&sample_filtered));
  library.impl("entropy_bound_mask", TORCH_BOX(&entropy_bound_mask));
  library.impl("accept_mask_fill", TORCH_BOX(&accept_mask_fill));
  library.impl("accept_edit", TORCH_BOX(&accept_edit));
  library.impl("accept_dmax", TORCH_BOX(&accept_dmax));
  library.impl("accept_gemma", TORCH_BOX(&accept_gemma));
  library.impl("advance_decode", TORCH_BOX(&advance_decode));
  library.impl("token_merge_embed", TORCH_BOX(&token_merge_embed));
  library.impl("token_merge_partial", TORCH_BOX(&token_merge_partial));
  library.impl("token_merge_finalize", TORCH_BOX(&token_merge_finalize));
  library.impl("soft_embedding", TORCH_BOX(&soft_embedding));
}

}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY_IMPL(diffulex, CPU, library) {
  diffulex::torch_ops::register_ops(library);
}
