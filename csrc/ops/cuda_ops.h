// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/ops/accept.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/advance.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/merge.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"

/// CUDA implementations behind the public ops. Arguments have passed the shape checks and are not
/// empty; `context.device` is kCuda. A build without CUDA defines them to return kNoKernel.
namespace diffulex::cuda {

[[nodiscard]] Status block_attention(const BlockAttentionParams& params,
                                     const ExecContext& context);
[[nodiscard]] Status store_kv_cache(const StoreKvCacheParams& params, const ExecContext& context);
[[nodiscard]] Status load_kv_cache(const LoadKvCacheParams& params, const ExecContext& context);
[[nodiscard]] Status copy_kv_pages(const CopyKvPagesParams& params, const ExecContext& context);
[[nodiscard]] Status rms_norm(const RmsNormParams& params, const ExecContext& context);
[[nodiscard]] Status add_rms_norm(const RmsNormParams& params, const ExecContext& context);
[[nodiscard]] Status rms_norm_add(const RmsNormParams& params, const ExecContext& context);
[[nodiscard]] Status rotary_embedding(const RotaryParams& params, const ExecContext& context);
[[nodiscard]] Status qk_norm_rope(const QkNormRopeParams& params, const ExecContext& context);
[[nodiscard]] Status qk_norm_rope_store(const QkNormRopeParams& params, const ExecContext& context);
[[nodiscard]] Status act_and_mul(const ActAndMulParams& params, const ExecContext& context);
[[nodiscard]] Status token_stats(const TokenStatsParams& params, const ExecContext& context);
[[nodiscard]] Status merge_token_stats(const MergeTokenStatsParams& params,
                                       const ExecContext& context);
[[nodiscard]] Status sample_filtered(const SampleFilteredParams& params,
                                     const ExecContext& context);
[[nodiscard]] Status entropy_bound_mask(const EntropyBoundMaskParams& params,
                                        const ExecContext& context);
[[nodiscard]] Status accept_mask_fill(const AcceptMaskFillParams& params,
                                      const ExecContext& context);
[[nodiscard]] Status accept_edit(const AcceptEditParams& params, const ExecContext& context);
[[nodiscard]] Status accept_dmax(const AcceptDmaxParams& params, const ExecContext& context);
[[nodiscard]] Status accept_gemma(const AcceptGemmaParams& params, const ExecContext& context);
[[nodiscard]] Status linear_few_rows(const LinearFewRowsParams& params, const ExecContext& context);
[[nodiscard]] Status advance_decode(const AdvanceDecodeParams& params, const ExecContext& context);
[[nodiscard]] Status token_merge_embed(const TokenMergeEmbedParams& params,
                                       const ExecContext& context);
[[nodiscard]] Status token_merge_partial(const TokenMergePartialParams& params,
                                         const ExecContext& context);
[[nodiscard]] Status token_merge_finalize(const TokenMergeFinalizeParams& params,
                                          const ExecContext& context);
[[nodiscard]] Status soft_embedding(const SoftEmbeddingParams& params, const ExecContext& context);
[[nodiscard]] Status moe_topk(const MoeTopkParams& params, const ExecContext& context);
[[nodiscard]] Status router_gemm(const RouterGemmParams& params, const ExecContext& context);
[[nodiscard]] Status moe_permute(const MoePermuteParams& params, const ExecContext& context);
[[nodiscard]] Status fused_moe(const FusedMoeParams& params, const ExecContext& context);
[[nodiscard]] Status fused_experts_packed(const FusedExpertsPackedParams& params,
                                          const ExecContext& context);
[[nodiscard]] Status moe_combine(const MoeCombineParams& params, const ExecContext& context);

}  // namespace diffulex::cuda
