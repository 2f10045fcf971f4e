// SPDX-License-Identifier: Apache-2.0
#include "ops/cuda_ops.h"

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
Status sample_filtered(const SampleFilteredParams& /*params*/, const ExecContext& /*context*/) {
  return absent("sample_filtered");
}
Status entropy_bound_mask(const EntropyBoundMaskParams& /*params*/,
                          const ExecContext& /*context*/) {
  return absent("entropy_bound_mask");
}
Status accept_mask_fill(const AcceptMaskFillParams& /*params*/, const ExecContext& /*context*/) {
  return absent("accept_mask_fill");
}
Status accept_edit(const AcceptEditParams& /*params*/, const ExecContext& /*context*/) {
  return absent("accept_edit");
}
Status accept_dmax(const AcceptDmaxParams& /*params*/, const ExecContext& /*context*/) {
  return absent("accept_dmax");
}
Status accept_gemma(const AcceptGemmaParams& /*params*/, const ExecContext& /*context*/) {
  return absent("accept_gemma");
}
Status advance_decode(const AdvanceDecodeParams& /*params*/, const ExecContext& /*context*/) {
  return absent("advance_decode");
}
Status token_merge_embed(const TokenMergeEmbedParams& /*params*/, const ExecContext& /*context*/) {
  return absent("token_merge_embed");
}
Status token_merge_partial(const TokenMergePartialParams& /*params*/,
                           const ExecContext& /*context*/) {
  return absent("token_merge_partial");
}
Status token_merge_finalize(const TokenMergeFinalizeParams& /*params*/,
                            const ExecContext& /*context*/) {
  return absent("token_merge_finalize");
}
Status soft_embedding(const SoftEmbeddingParams& /*params*/, const ExecContext& /*context*/) {
  return absent("soft_embedding");
}
Status moe_topk(const MoeTopkParams& /*params*/, const ExecContext& /*context*/) {
  return absent("moe_topk");
}
Status router_gemm(const RouterGemmParams& /*params*/, const ExecContext& /*context*/) {
  return absent("router_gemm");
}
Status moe_permute(const MoePermuteParams& /*params*/, const ExecContext& /*context*/) {
  return absent("moe_permute");
}
Status fused_moe(const FusedMoeParams& /*params*/, const ExecContext& /*context*/) {
  return absent("fused_moe");
}
Status fused_experts_packed(const FusedExpertsPackedParams& /*params*/,
                            const ExecContext& /*context*/) {
  return absent("fused_experts_packed");
}
Status moe_combine(const MoeCombineParams& /*params*/, const ExecContext& /*context*/) {
  return absent("moe_combine");
}

}  // namespace diffulex::cuda
