// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/cuda_ops.h"

namespace diffulex::cuda {
namespace {

Status absent(const char* op) {
  return make_error(StatusCode::kNoKernel, "diffulex::", op,
                    ": device: expected a build with CUDA, got cuda tensors and a library built "
                    "without CUDA");
}

}  // namespace

Status block_attention(const BlockAttentionParams& /*params*/, const ExecContext& /*context*/) {
  return absent("block_attention");
}
Status attention_plan(const AttentionPlanParams& /*params*/, const ExecContext& /*context*/) {
  return absent("attention_plan");
}
Status store_kv_cache(const StoreKvCacheParams& /*params*/, const ExecContext& /*context*/) {
  return absent("store_kv_cache");
}
Status load_kv_cache(const LoadKvCacheParams& /*params*/, const ExecContext& /*context*/) {
  return absent("load_kv_cache");
}
Status copy_kv_pages(const CopyKvPagesParams& /*params*/, const ExecContext& /*context*/) {
  return absent("copy_kv_pages");
}
Status rms_norm(const RmsNormParams& /*params*/, const ExecContext& /*context*/) {
  return absent("rms_norm");
}
Status add_rms_norm(const RmsNormParams& /*params*/, const ExecContext& /*context*/) {
  return absent("add_rms_norm");
}
Status rms_norm_add(const RmsNormParams& /*params*/, const ExecContext& /*context*/) {
  return absent("rms_norm_add");
}
Status rotary_embedding(const RotaryParams& /*params*/, const ExecContext& /*context*/) {
  return absent("rotary_embedding");
}
Status qk_norm_rope(const QkNormRopeParams& /*params*/, const ExecContext& /*context*/) {
  return absent("qk_norm_rope");
}
Status qk_norm_rope_store(const QkNormRopeParams& /*params*/, const ExecContext& /*context*/) {
  return absent("qk_norm_rope_store");
}
Status act_and_mul(const ActAndMulParams& /*params*/, const ExecContext& /*context*/) {
  return absent("act_and_mul");
}
Status token_stats(const TokenStatsParams& /*params*/, const ExecContext& /*context*/) {
  return absent("token_stats");
}
Status merge_token_stats(const MergeTokenStatsParams& /*params*/, const ExecContext& /*context*/) {
  return absent("merge_token_stats");
}
Status accept_mask_fill(const AcceptMaskFillParams& /*params*/, const ExecContext& /*context*/) {
  return absent("accept_mask_fill");
}

}  // namespace diffulex::cuda
