// SPDX-License-Identifier: Apache-2.0

// Every public op: shape checks, early return for empty inputs, then the implementation of the
// device. No exception leaves this file.

#include <exception>

#include "ops/accept/check.h"
#include "ops/activation/check.h"
#include "ops/advance/check.h"
#include "ops/attention/check.h"
#include "ops/cpu_ops.h"
#include "ops/cuda_ops.h"
#include "ops/kv/check.h"
#include "ops/linear/check.h"
#include "ops/merge/check.h"
#include "ops/moe/check.h"
#include "ops/moe/routing_check.h"
#include "ops/norm/check.h"
#include "ops/rope/check.h"
#include "ops/sampling/check.h"
#include "ops/sampling/filter_check.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

/// Implementations of one op.
template <typename Params>
struct Implementations {
  const char* op;
  Status (*check)(const Params&);
  bool (*empty)(const Params&);
  Status (*cpu)(const Params&, const ExecContext&);
  Status (*cuda)(const Params&, const ExecContext&);
  size_t (*workspace_bytes)(const Params&, Device);
};

template <typename Params>
size_t no_workspace(const Params& /*params*/, Device /*device*/) {
  return 0;
}

template <typename Params>
Status dispatch(const Implementations<Params>& op, const Params& params,
                const ExecContext& context) {
  try {
    DIFFULEX_RETURN_IF_ERROR(op.check(params));
    if (op.empty(params)) {
      return {};
    }
    DIFFULEX_RETURN_IF_ERROR(
        check_workspace(op.op, context, op.workspace_bytes(params, context.device)));
    return context.device == Device::kCuda ? op.cuda(params, context) : op.cpu(params, context);
  } catch (const std::bad_alloc&) {
    return make_error(StatusCode::kOutOfMemory, "diffulex::", op.op,
                      ": host memory: expected enough for scratch, got an allocation failure");
  } catch (const std::exception& error) {
    return make_error(StatusCode::kInternal, "diffulex::", op.op, ": ", error.what());
  }
}

bool empty_x(const RmsNormParams& params) {
  return params.x.numel() == 0;
}

bool empty_qkv(const QkNormRopeParams& params) {
  return params.qkv.size[0] == 0;
}

size_t attention_scratch(const BlockAttentionParams& params, Device device) {
  return attention_workspace_bytes(attention_shape(params), device);
}

size_t soft_embedding_scratch(const SoftEmbeddingParams& params, Device device) {
  return soft_embedding_workspace_bytes(params.out.size[0], params.logits.size[1],
                                        params.out.size[1], params.embedding.dtype, device);
}

size_t token_stats_scratch(const TokenStatsParams& params, Device device) {
  const int32_t top_k =
      params.topk_ids.present() ? static_cast<int32_t>(params.topk_ids.size[1]) : 0;
  return token_stats_workspace_bytes(params.ids.size[0], params.logits.size[1], top_k, device);
}

size_t fused_moe_workspace(const FusedMoeParams& params, Device device) {
  return fused_moe_workspace_bytes({params.x.size[0], static_cast<int32_t>(params.topk_ids.size[1]),
                                    static_cast<int32_t>(params.w13.size[0]), params.x.size[1],
                                    params.w2.size[2], params.x.dtype},
                                   device);
}

size_t packed_workspace(const FusedExpertsPackedParams& params, Device device) {
  const int64_t num_rows = params.x.numel() / params.x.last();
  return fused_experts_packed_workspace_bytes(num_rows, static_cast<int32_t>(params.w13.size[0]),
                                              params.w2.size[2], params.x.dtype, device);
}

}  // namespace

Status block_attention(const BlockAttentionParams& params, const ExecContext& context) {
  return dispatch<BlockAttentionParams>(
      {"block_attention", check_block_attention,
       [](const BlockAttentionParams& args) { return args.q.size[0] == 0; }, cpu::block_attention,
       cuda::block_attention, attention_scratch},
      params, context);
}

Status store_kv_cache(const StoreKvCacheParams& params, const ExecContext& context) {
  return dispatch<StoreKvCacheParams>(
      {"store_kv_cache", check_store_kv_cache,
       [](const StoreKvCacheParams& args) { return args.k.size[0] == 0; }, cpu::store_kv_cache,
       cuda::store_kv_cache, no_workspace<StoreKvCacheParams>},
      params, context);
}

Status load_kv_cache(const LoadKvCacheParams& params, const ExecContext& context) {
  return dispatch<LoadKvCacheParams>(
      {"load_kv_cache", check_load_kv_cache,
       [](const LoadKvCacheParams& args) { return args.k_out.size[0] == 0; }, cpu::load_kv_cache,
       cuda::load_kv_cache, no_workspace<LoadKvCacheParams>},
      params, context);
}

Status copy_kv_pages(const CopyKvPagesParams& params, const ExecContext& context) {
  return dispatch<CopyKvPagesParams>(
      {"copy_kv_pages", check_copy_kv_pages,
       [](const CopyKvPagesParams& args) { return args.src_dst.size[0] == 0; }, cpu::copy_kv_pages,
       cuda::copy_kv_pages, no_workspace<CopyKvPagesParams>},
      params, context);
}

Status rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return dispatch<RmsNormParams>({"rms_norm", check_rms_norm, empty_x, cpu::rms_norm,
                                  cuda::rms_norm, no_workspace<RmsNormParams>},
                                 params, context);
}

Status add_rms_norm(const RmsNormParams& params, const ExecContext& context) {
  return dispatch<RmsNormParams>({"add_rms_norm", check_add_rms_norm, empty_x, cpu::add_rms_norm,
                                  cuda::add_rms_norm, no_workspace<RmsNormParams>},
                                 params, context);
}

Status rms_norm_add(const RmsNormParams& params, const ExecContext& context) {
  return dispatch<RmsNormParams>({"rms_norm_add", check_rms_norm_add, empty_x, cpu::rms_norm_add,
                                  cuda::rms_norm_add, no_workspace<RmsNormParams>},
                                 params, context);
}

Status rotary_embedding(const RotaryParams& params, const ExecContext& context) {
  return dispatch<RotaryParams>(
      {"rotary_embedding", check_rotary_embedding,
       [](const RotaryParams& args) { return args.q.size[0] == 0; }, cpu::rotary_embedding,
       cuda::rotary_embedding, no_workspace<RotaryParams>},
      params, context);
}

Status qk_norm_rope(const QkNormRopeParams& params, const ExecContext& context) {
  return dispatch<QkNormRopeParams>(
      {"qk_norm_rope", check_qk_norm_rope, empty_qkv, cpu::qk_norm_rope, cuda::qk_norm_rope,
       no_workspace<QkNormRopeParams>},
      params, context);
}

Status qk_norm_rope_store(const QkNormRopeParams& params, const ExecContext& context) {
  return dispatch<QkNormRopeParams>(
      {"qk_norm_rope_store", check_qk_norm_rope_store, empty_qkv, cpu::qk_norm_rope_store,
       cuda::qk_norm_rope_store, no_workspace<QkNormRopeParams>},
      params, context);
}

Status act_and_mul(const ActAndMulParams& params, const ExecContext& context) {
  return dispatch<ActAndMulParams>(
      {"act_and_mul", check_act_and_mul,
       [](const ActAndMulParams& args) { return args.x.numel() == 0; }, cpu::act_and_mul,
       cuda::act_and_mul, no_workspace<ActAndMulParams>},
      params, context);
}

Status linear_packed(const LinearPackedParams& params, const ExecContext& context) {
  return dispatch<LinearPackedParams>(
      {"linear_packed", check_linear_packed,
       [](const LinearPackedParams& args) { return args.x.size[0] == 0; }, cpu::linear_packed,
       // By design, not for want of a build: cuBLAS does dense products there.
       [](const LinearPackedParams& /*args*/, const ExecContext& /*context*/) {
         return make_error(StatusCode::kUnsupported,
                           "diffulex::linear_packed: x: expected a CPU tensor, got cuda");
       },
       no_workspace<LinearPackedParams>},
      params, context);
}

Status token_stats(const TokenStatsParams& params, const ExecContext& context) {
  return dispatch<TokenStatsParams>(
      {"token_stats", check_token_stats,
       [](const TokenStatsParams& args) { return args.ids.size[0] == 0; }, cpu::token_stats,
       cuda::token_stats, token_stats_scratch},
      params, context);
}

Status merge_token_stats(const MergeTokenStatsParams& params, const ExecContext& context) {
  return dispatch<MergeTokenStatsParams>(
      {"merge_token_stats", check_merge_token_stats,
       [](const MergeTokenStatsParams& args) { return args.ids.size[0] == 0; },
       cpu::merge_token_stats, cuda::merge_token_stats, no_workspace<MergeTokenStatsParams>},
      params, context);
}

Status sample_filtered(const SampleFilteredParams& params, const ExecContext& context) {
  return dispatch<SampleFilteredParams>(
      {"sample_filtered", check_sample_filtered,
       [](const SampleFilteredParams& args) { return args.ids.size[0] == 0; }, cpu::sample_filtered,
       cuda::sample_filtered, no_workspace<SampleFilteredParams>},
      params, context);
}

Status entropy_bound_mask(const EntropyBoundMaskParams& params, const ExecContext& context) {
  return dispatch<EntropyBoundMaskParams>(
      {"entropy_bound_mask", check_entropy_bound_mask,
       [](const EntropyBoundMaskParams& args) { return args.segments.size[0] == 1; },
       cpu::entropy_bound_mask, cuda::entropy_bound_mask, no_workspace<EntropyBoundMaskParams>},
      params, context);
}

Status accept_mask_fill(const AcceptMaskFillParams& params, const ExecContext& context) {
  return dispatch<AcceptMaskFillParams>(
      {"accept_mask_fill", check_accept_mask_fill,
       [](const AcceptMaskFillParams& args) { return args.tokens.size[0] == 0; },
       cpu::accept_mask_fill, cuda::accept_mask_fill, no_workspace<AcceptMaskFillParams>},
      params, context);
}

Status accept_edit(const AcceptEditParams& params, const ExecContext& context) {
  return dispatch<AcceptEditParams>(
      {"accept_edit", check_accept_edit,
       [](const AcceptEditParams& args) { return args.tokens.size[0] == 0; }, cpu::accept_edit,
       cuda::accept_edit, no_workspace<AcceptEditParams>},
      params, context);
}

Status accept_dmax(const AcceptDmaxParams& params, const ExecContext& context) {
  return dispatch<AcceptDmaxParams>(
      {"accept_dmax", check_accept_dmax,
       [](const AcceptDmaxParams& args) { return args.tokens.size[0] == 0; }, cpu::accept_dmax,
       cuda::accept_dmax, no_workspace<AcceptDmaxParams>},
      params, context);
}

Status linear_few_rows(const LinearFewRowsParams& params, const ExecContext& context) {
  return dispatch<LinearFewRowsParams>(
      {"linear_few_rows", check_linear_few_rows,
       [](const LinearFewRowsParams& args) { return args.x.size[0] == 0; }, cpu::linear_few_rows,
       cuda::linear_few_rows, no_workspace<LinearFewRowsParams>},
      params, context);
}

Status advance_decode(const AdvanceDecodeParams& params, const ExecContext& context) {
  return dispatch<AdvanceDecodeParams>(
      {"advance_decode", check_advance_decode,
       [](const AdvanceDecodeParams& args) { return args.requests.size[0] == 0; },
       cpu::advance_decode, cuda::advance_decode, no_workspace<AdvanceDecodeParams>},
      params, context);
}

Status accept_gemma(const AcceptGemmaParams& params, const ExecContext& context) {
  return dispatch<AcceptGemmaParams>(
      {"accept_gemma", check_accept_gemma,
       [](const AcceptGemmaParams& args) { return args.tokens.size[0] == 0; }, cpu::accept_gemma,
       cuda::accept_gemma, no_workspace<AcceptGemmaParams>},
      params, context);
}

Status token_merge_embed(const TokenMergeEmbedParams& params, const ExecContext& context) {
  return dispatch<TokenMergeEmbedParams>(
      {"token_merge_embed", check_token_merge_embed,
       [](const TokenMergeEmbedParams& args) { return args.hidden.size[0] == 0; },
       cpu::token_merge_embed, cuda::token_merge_embed, no_workspace<TokenMergeEmbedParams>},
      params, context);
}

Status token_merge_partial(const TokenMergePartialParams& params, const ExecContext& context) {
  return dispatch<TokenMergePartialParams>(
      {"token_merge_partial", check_token_merge_partial,
       [](const TokenMergePartialParams& args) { return args.partial.size[0] == 0; },
       cpu::token_merge_partial, cuda::token_merge_partial, no_workspace<TokenMergePartialParams>},
      params, context);
}

Status token_merge_finalize(const TokenMergeFinalizeParams& params, const ExecContext& context) {
  return dispatch<TokenMergeFinalizeParams>(
      {"token_merge_finalize", check_token_merge_finalize,
       [](const TokenMergeFinalizeParams& args) { return args.hidden.size[0] == 0; },
       cpu::token_merge_finalize, cuda::token_merge_finalize,
       no_workspace<TokenMergeFinalizeParams>},
      params, context);
}

Status soft_embedding(const SoftEmbeddingParams& params, const ExecContext& context) {
  return dispatch<SoftEmbeddingParams>(
      {"soft_embedding", check_soft_embedding,
       [](const SoftEmbeddingParams& args) { return args.out.size[0] == 0; }, cpu::soft_embedding,
       cuda::soft_embedding, soft_embedding_scratch},
      params, context);
}

Status moe_topk(const MoeTopkParams& params, const ExecContext& context) {
  return dispatch<MoeTopkParams>(
      {"moe_topk", check_moe_topk,
       [](const MoeTopkParams& args) { return args.logits.size[0] == 0; }, cpu::moe_topk,
       cuda::moe_topk, no_workspace<MoeTopkParams>},
      params, context);
}

Status router_gemm(const RouterGemmParams& params, const ExecContext& context) {
  return dispatch<RouterGemmParams>(
      {"router_gemm", check_router_gemm,
       [](const RouterGemmParams& args) { return args.x.size[0] == 0; }, cpu::router_gemm,
       cuda::router_gemm, no_workspace<RouterGemmParams>},
      params, context);
}

Status moe_permute(const MoePermuteParams& params, const ExecContext& context) {
  return dispatch<MoePermuteParams>(
      {"moe_permute", check_moe_permute,
       // Without slots there still are offsets and counters to write.
       [](const MoePermuteParams& /*args*/) { return false; }, cpu::moe_permute, cuda::moe_permute,
       no_workspace<MoePermuteParams>},
      params, context);
}

Status fused_moe(const FusedMoeParams& params, const ExecContext& context) {
  return dispatch<FusedMoeParams>(
      {"fused_moe", check_fused_moe, [](const FusedMoeParams& args) { return args.x.size[0] == 0; },
       cpu::fused_moe, cuda::fused_moe, fused_moe_workspace},
      params, context);
}

Status fused_experts_packed(const FusedExpertsPackedParams& params, const ExecContext& context) {
  return dispatch<FusedExpertsPackedParams>(
      {"fused_experts_packed", check_fused_experts_packed,
       [](const FusedExpertsPackedParams& args) { return args.x.numel() == 0; },
       cpu::fused_experts_packed, cuda::fused_experts_packed, packed_workspace},
      params, context);
}

Status moe_combine(const MoeCombineParams& params, const ExecContext& context) {
  return dispatch<MoeCombineParams>(
      {"moe_combine", check_moe_combine,
       [](const MoeCombineParams& args) { return args.out.numel() == 0; }, cpu::moe_combine,
       cuda::moe_combine, no_workspace<MoeCombineParams>},
      params, context);
}

}  // namespace diffulex
