// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "torch/checks.h"

/// One function per op, argument for argument as in schemas.cpp. Every function serves CPU and CUDA
/// tensors alike: the kernel library picks the implementation from the device of the arguments.
/// All of them raise a RuntimeError `diffulex::<op>: <argument>: expected ..., got ...`.
namespace diffulex::torch_ops {

void block_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                     const Tensor& v_cache, const Tensor& page_table, const Tensor& cu_seqlens_q,
                     const Tensor& context_lens, const Tensor& valid_slices,
                     const Tensor& mask_kinds, const OptionalTensor& prefix_lens,
                     const OptionalTensor& padded_prefix_lens, const OptionalTensor& q_starts,
                     const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                     const OptionalTensor& plan, const Tensor& out, const OptionalTensor& lse,
                     const OptionalTensor& workspace, double scale, double softcap,
                     int64_t block_size, int64_t sliding_window, int64_t max_seqlen_q,
                     int64_t max_context_len, int64_t num_splits, int64_t kv_layout);

void attention_plan(const Tensor& cu_seqlens_q, const Tensor& context_lens,
                    const Tensor& valid_slices, const Tensor& mask_kinds, const Tensor& plan,
                    int64_t num_q_heads, int64_t num_kv_heads, int64_t head_dim,
                    int64_t sliding_window, int64_t max_seqlen_q, int64_t num_splits);

void store_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slot_mapping, const OptionalTensor& k_scale,
                    const OptionalTensor& v_scale, int64_t kv_layout);

void load_kv_cache(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_new,
                   const Tensor& v_new, const Tensor& page_table, const Tensor& context_lens,
                   const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                   const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                   const Tensor& k_out, const Tensor& v_out, int64_t kv_layout);

void copy_kv_pages(const Tensor& k_cache, const Tensor& v_cache, const Tensor& src_dst);

void rms_norm(const Tensor& x, const OptionalTensor& weight, const Tensor& out, double eps,
              double weight_offset);

void add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight, double eps,
                  double weight_offset);

void rms_norm_add(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                  const OptionalTensor& out_scale, const Tensor& out, double eps,
                  double weight_offset);

void rotary_embedding(const Tensor& positions, const Tensor& q, const Tensor& k,
                      const Tensor& cos_sin_cache, int64_t head_dim, bool neox);

void qk_norm_rope(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                  const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                  const OptionalTensor& v_out, int64_t num_q_heads, int64_t num_kv_heads,
                  int64_t head_dim, double eps, double weight_offset, bool neox, bool norm_v,
                  bool v_from_raw_k);

void qk_norm_rope_store(const Tensor& qkv, const Tensor& positions, const Tensor& cos_sin_cache,
                        const OptionalTensor& q_weight, const OptionalTensor& k_weight,
                        const OptionalTensor& v_out, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& slot_mapping, const OptionalTensor& k_scale,
                        const OptionalTensor& v_scale, int64_t num_q_heads, int64_t num_kv_heads,
                        int64_t head_dim, double eps, double weight_offset, bool neox, bool norm_v,
                        bool v_from_raw_k, int64_t kv_layout);

void act_and_mul(const Tensor& x, const Tensor& out, int64_t act);

void linear_packed(const Tensor& x, const Tensor& packed_weight, const Tensor& out,
                   int64_t out_features);

void token_stats(const Tensor& logits, const OptionalTensor& extra_logits,
                 const OptionalTensor& row_index, const OptionalTensor& inv_temperature,
                 const OptionalTensor& uniforms, const OptionalTensor& forbidden_ids,
                 const OptionalTensor& penalty_ids, const Tensor& ids, const Tensor& stats,
                 const OptionalTensor& topk_ids, const OptionalTensor& topk_probs,
                 const OptionalTensor& workspace, int64_t vocab_limit, double softcap,
                 double penalty, int64_t exclusion, int64_t vocab_start, bool partial);

void merge_token_stats(const Tensor& part_ids, const Tensor& part_stats,
                       const OptionalTensor& part_topk_ids, const OptionalTensor& part_topk_vals,
                       const Tensor& ids, const Tensor& stats, const OptionalTensor& topk_ids,
                       const OptionalTensor& topk_probs);

void accept_mask_fill(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                      const OptionalTensor& valid_len, const Tensor& gate,
                      const Tensor& accept_threshold, const Tensor& open_steps, const Tensor& ids,
                      const Tensor& stats, const Tensor& write_ids, const Tensor& confidence,
                      const Tensor& masks_left, const Tensor& flags, int64_t mask_token_id,
                      int64_t rule, int64_t confidence_kind, bool raw_confidence,
                      int64_t denoising_steps, bool force_accept_last_step, double factor,
                      double entropy_bound);

/// Registers all of the above for the dispatch key of `library`.
void register_ops(torch::stable::detail::StableLibrary& library);

}  // namespace diffulex::torch_ops
