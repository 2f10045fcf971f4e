// SPDX-License-Identifier: Apache-2.0
#include "torch/ops.h"

namespace diffulex::torch_ops {

void register_ops(torch::stable::detail::StableLibrary& library) {
  library.impl("block_attention", TORCH_BOX(&block_attention));
  library.impl("attention_plan", TORCH_BOX(&attention_plan));
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
  library.impl("token_stats", TORCH_BOX(&token_stats));
  library.impl("merge_token_stats", TORCH_BOX(&merge_token_stats));
  library.impl("accept_mask_fill", TORCH_BOX(&accept_mask_fill));
}

}  // namespace diffulex::torch_ops

STABLE_TORCH_LIBRARY_IMPL(diffulex, CPU, library) {
  diffulex::torch_ops::register_ops(library);
}
