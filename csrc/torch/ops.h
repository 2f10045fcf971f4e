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
                     const Tensor& out, const OptionalTensor& lse, const OptionalTensor& workspace,
                     double scale, double softcap, int64_t block_size, int64_t sliding_window,
                     int64_t max_seqlen_q, int64_t max_context_len, int64_t num_splits,
                     int64_t kv_layout);

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

void linear_few_rows(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const Tensor& out, int64_t act);

void moe_topk(const Tensor& logits, const OptionalTensor& bias, const OptionalTensor& expert_scale,
              const OptionalTensor& token_valid, const Tensor& weights, const Tensor& ids,
              int64_t top_k, int64_t scoring, bool renormalize, int64_t n_group, int64_t topk_group,
              int64_t group_score, double routed_scaling);

void router_gemm(const Tensor& x, const Tensor& w, const Tensor& logits);

void moe_permute(const Tensor& topk_ids, const OptionalTensor& expert_map,
                 const Tensor& sorted_slots, const Tensor& expert_offsets,
                 const Tensor& tile_expert, const Tensor& tile_start, const Tensor& counters,
                 int64_t num_local_experts, int64_t tile);

void fused_moe(const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& topk_weights,
               const Tensor& topk_ids, const OptionalTensor& expert_map,
               const OptionalTensor& w13_scale, const OptionalTensor& w2_scale,
               const OptionalTensor& addend, const Tensor& out, const Tensor& workspace,
               int64_t act, bool weight_on_input);

void fused_experts_packed(const Tensor& x, const Tensor& w13, const Tensor& w2,
                          const Tensor& expert_offsets, const OptionalTensor& row_weights,
                          const OptionalTensor& w13_scale, const OptionalTensor& w2_scale,
                          const Tensor& out, const Tensor& workspace, int64_t act,
                          int64_t rows_per_expert);

void moe_combine(const Tensor& slot_out, const Tensor& topk_weights, const Tensor& topk_ids,
                 const OptionalTensor& addend, const Tensor& out);

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

void sample_filtered(const Tensor& logits, const OptionalTensor& extra_logits,
                     const OptionalTensor& row_index, const Tensor& inv_temperature,
                     const Tensor& uniforms, const OptionalTensor& top_k,
                     const OptionalTensor& top_p, const OptionalTensor& min_p,
                     const OptionalTensor& forbidden_ids, const Tensor& ids, const Tensor& stats,
                     const OptionalTensor& workspace, int64_t vocab_limit, double softcap,
                     int64_t exclusion, int64_t filter_order, int64_t confidence_space);

void entropy_bound_mask(const Tensor& entropy, const Tensor& segments, const Tensor& mask,
                        double bound);

void accept_mask_fill(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                      const OptionalTensor& valid_len, const Tensor& gate,
                      const Tensor& accept_threshold, const Tensor& open_steps, const Tensor& ids,
                      const Tensor& stats, const Tensor& write_ids, const Tensor& confidence,
                      const Tensor& masks_left, const Tensor& flags, int64_t mask_token_id,
                      int64_t rule, int64_t confidence_kind, bool raw_confidence,
                      int64_t denoising_steps, bool force_accept_last_step, double factor,
                      double entropy_bound, double low_threshold);

void accept_edit(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                 const OptionalTensor& valid_len, const Tensor& gate,
                 const Tensor& accept_threshold, const Tensor& edit_threshold,
                 const Tensor& open_steps, const Tensor& post_edit_steps, const Tensor& ids,
                 const Tensor& stats, const Tensor& write_ids, const Tensor& confidence,
                 const Tensor& masks_left, const Tensor& flags, const Tensor& same_token_ratio,
                 int64_t mask_token_id, int64_t max_post_edit_steps, int64_t confidence_kind,
                 bool raw_confidence);

void accept_dmax(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                 const OptionalTensor& valid_len, const Tensor& gate,
                 const Tensor& accept_threshold, const Tensor& open_steps, const Tensor& ids,
                 const Tensor& stats, const OptionalTensor& argmax_ids,
                 const OptionalTensor& topk_ids, const OptionalTensor& topk_probs,
                 const Tensor& write_ids, const Tensor& confidence, const Tensor& masks_left,
                 const Tensor& flags, const Tensor& same_token_ratio,
                 const OptionalTensor& merge_valid, const OptionalTensor& merge_ids,
                 const OptionalTensor& merge_probs, const OptionalTensor& merge_residual,
                 int64_t mask_token_id, bool fast_path);

void accept_gemma(const Tensor& tokens, const Tensor& row_index, const OptionalTensor& valid_len,
                  const Tensor& prev_argmax, const Tensor& stable_run, const Tensor& steps_left,
                  const Tensor& renoise_ids, const Tensor& ids, const Tensor& stats,
                  const Tensor& argmax_ids, const Tensor& write_ids, const Tensor& argmax,
                  const Tensor& confidence, const Tensor& flags, double entropy_bound,
                  int64_t stability_threshold, double confidence_threshold);

void advance_decode(const Tensor& requests, const Tensor& windows, const Tensor& page_tables,
                    const Tensor& write_ids, const Tensor& flags, const Tensor& same_token_ratio,
                    const Tensor& input_ids, const Tensor& positions, const Tensor& slot_mapping,
                    const Tensor& context_lens, const Tensor& valid_slices, const Tensor& tokens,
                    const Tensor& row_index, const Tensor& editable_start, const Tensor& valid_len,
                    const Tensor& gate, const Tensor& accept_threshold,
                    const OptionalTensor& edit_threshold, const Tensor& open_steps,
                    const Tensor& total_steps, const Tensor& post_edit_steps,
                    const Tensor& inv_temperature, const Tensor& uniforms, const Tensor& top_k,
                    const Tensor& top_p, const Tensor& min_p, const OptionalTensor& merge_valid,
                    const OptionalTensor& merge_ids, const OptionalTensor& merge_probs,
                    const OptionalTensor& merge_residual, const OptionalTensor& row_merge_mask,
                    const OptionalTensor& row_merge_ids, const OptionalTensor& row_merge_probs,
                    const OptionalTensor& row_merge_residual, const OptionalTensor& last_row_index,
                    const OptionalTensor& logits_source, const OptionalTensor& pending_next_token,
                    const OptionalTensor& seed_row, const OptionalTensor& mask_kinds,
                    const OptionalTensor& prev_argmax, const OptionalTensor& canvas_argmax,
                    const OptionalTensor& stable_run, const OptionalTensor& steps_left,
                    const OptionalTensor& renoise_ids, const OptionalTensor& block_slot,
                    const OptionalTensor& row_pass_kind, const OptionalTensor& row_self_cond,
                    int64_t page_size, int64_t first_saved_row, bool masked_rows_only,
                    bool has_block_cache, bool is_entry);

void token_merge_embed(const Tensor& hidden, const Tensor& embedding, const Tensor& merge_mask,
                       const Tensor& topk_ids, const Tensor& topk_probs,
                       const Tensor& residual_probs, int64_t mask_token_id, int64_t merge_kind,
                       bool renormalize, double weight);

void token_merge_partial(const Tensor& embedding, const Tensor& merge_mask, const Tensor& topk_ids,
                         const Tensor& topk_probs, const Tensor& residual_probs,
                         const Tensor& partial, int64_t mask_token_id, int64_t merge_kind,
                         int64_t vocab_start);

void token_merge_finalize(const Tensor& partial, const Tensor& merge_mask, const Tensor& hidden,
                          int64_t merge_kind, bool renormalize, double weight);

void soft_embedding(const Tensor& logits, const Tensor& lse, const OptionalTensor& inv_temperature,
                    const Tensor& embedding, const OptionalTensor& row_valid, const Tensor& out,
                    const OptionalTensor& workspace, double normalizer, double softcap,
                    int64_t vocab_limit, int64_t vocab_start);

/// Registers all of the above for the dispatch key of `library`.
void register_ops(torch::stable::detail::StableLibrary& library);

}  // namespace diffulex::torch_ops
