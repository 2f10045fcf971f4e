// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/sampling.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void token_stats(const Tensor& logits, const OptionalTensor& extra_logits,
                 const OptionalTensor& row_index, const OptionalTensor& inv_temperature,
                 const OptionalTensor& uniforms, const OptionalTensor& forbidden_ids,
                 const OptionalTensor& penalty_ids, const Tensor& ids, const Tensor& stats,
                 const OptionalTensor& topk_ids, const OptionalTensor& topk_probs,
                 const OptionalTensor& workspace, int64_t vocab_limit, double softcap,
                 double penalty, int64_t exclusion, int64_t vocab_start, bool partial) {
  OpArguments arguments("token_stats");
  TokenStatsParams params;
  params.logits = arguments.input("logits", logits);
  params.extra_logits = arguments.input("extra_logits", extra_logits);
  params.row_index = arguments.input("row_index", row_index);
  params.inv_temperature = arguments.input("inv_temperature", inv_temperature);
  params.uniforms = arguments.input("uniforms", uniforms);
  params.forbidden_ids = arguments.input("forbidden_ids", forbidden_ids);
  params.penalty_ids = arguments.input("penalty_ids", penalty_ids);
  params.ids = arguments.output("ids", ids);
  params.stats = arguments.output("stats", stats);
  params.topk_ids = arguments.output("topk_ids", topk_ids);
  params.topk_probs = arguments.output("topk_probs", topk_probs);
  arguments.set_workspace(workspace);
  params.vocab_limit = vocab_limit;
  params.softcap = static_cast<float>(softcap);
  params.penalty = static_cast<float>(penalty);
  params.exclusion = arguments.enumeration<ExclusionMode>("exclusion", exclusion);
  params.vocab_start = vocab_start;
  params.partial = partial;
  arguments.run(&diffulex::token_stats, params);
}

void merge_token_stats(const Tensor& part_ids, const Tensor& part_stats,
                       const OptionalTensor& part_topk_ids, const OptionalTensor& part_topk_vals,
                       const Tensor& ids, const Tensor& stats, const OptionalTensor& topk_ids,
                       const OptionalTensor& topk_probs) {
  OpArguments arguments("merge_token_stats");
  MergeTokenStatsParams params;
  params.part_ids = arguments.input("part_ids", part_ids);
  params.part_stats = arguments.input("part_stats", part_stats);
  params.part_topk_ids = arguments.input("part_topk_ids", part_topk_ids);
  params.part_topk_vals = arguments.input("part_topk_vals", part_topk_vals);
  params.ids = arguments.output("ids", ids);
  params.stats = arguments.output("stats", stats);
  params.topk_ids = arguments.output("topk_ids", topk_ids);
  params.topk_probs = arguments.output("topk_probs", topk_probs);
  arguments.run(&diffulex::merge_token_stats, params);
}

void sample_filtered(const Tensor& logits, const OptionalTensor& extra_logits,
                     const OptionalTensor& row_index, const Tensor& inv_temperature,
                     const Tensor& uniforms, const OptionalTensor& top_k,
                     const OptionalTensor& top_p, const OptionalTensor& min_p,
                     const OptionalTensor& forbidden_ids, const Tensor& ids, const Tensor& stats,
                     const OptionalTensor& workspace, int64_t vocab_limit, double softcap,
                     int64_t exclusion, int64_t filter_order, int64_t confidence_space) {
  OpArguments arguments("sample_filtered");
  SampleFilteredParams params;
  params.logits = arguments.input("logits", logits);
  params.extra_logits = arguments.input("extra_logits", extra_logits);
  params.row_index = arguments.input("row_index", row_index);
  params.inv_temperature = arguments.input("inv_temperature", inv_temperature);
  params.uniforms = arguments.input("uniforms", uniforms);
  params.top_k = arguments.input("top_k", top_k);
  params.top_p = arguments.input("top_p", top_p);
  params.min_p = arguments.input("min_p", min_p);
  params.forbidden_ids = arguments.input("forbidden_ids", forbidden_ids);
  params.ids = arguments.output("ids", ids);
  params.stats = arguments.output("stats", stats);
  arguments.set_workspace(workspace);
  params.vocab_limit = vocab_limit;
  params.softcap = static_cast<float>(softcap);
  params.exclusion = arguments.enumeration<ExclusionMode>("exclusion", exclusion);
  params.filter_order = arguments.enumeration<FilterOrder>("filter_order", filter_order);
  params.confidence_space =
      arguments.enumeration<ConfidenceSpace>("confidence_space", confidence_space);
  arguments.run(&diffulex::sample_filtered, params);
}

void entropy_bound_mask(const Tensor& entropy, const Tensor& segments, const Tensor& mask,
                        double bound) {
  OpArguments arguments("entropy_bound_mask");
  EntropyBoundMaskParams params;
  params.entropy = arguments.input("entropy", entropy);
  params.segments = arguments.input("segments", segments);
  params.mask = arguments.output("mask", mask);
  params.bound = static_cast<float>(bound);
  arguments.run(&diffulex::entropy_bound_mask, params);
}

void accept_mask_fill(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                      const OptionalTensor& valid_len, const Tensor& gate,
                      const Tensor& accept_threshold, const Tensor& open_steps, const Tensor& ids,
                      const Tensor& stats, const Tensor& write_ids, const Tensor& confidence,
                      const Tensor& masks_left, const Tensor& flags, int64_t mask_token_id,
                      int64_t rule, int64_t confidence_kind, bool raw_confidence,
                      int64_t denoising_steps, bool force_accept_last_step, double factor,
                      double entropy_bound, double low_threshold) {
  OpArguments arguments("accept_mask_fill");
  AcceptMaskFillParams params;
  params.tokens = arguments.input("tokens", tokens);
  params.row_index = arguments.input("row_index", row_index);
  params.editable_start = arguments.input("editable_start", editable_start);
  params.valid_len = arguments.input("valid_len", valid_len);
  params.gate = arguments.input("gate", gate);
  params.accept_threshold = arguments.input("accept_threshold", accept_threshold);
  params.open_steps = arguments.input("open_steps", open_steps);
  params.ids = arguments.input("ids", ids);
  params.stats = arguments.input("stats", stats);
  params.write_ids = arguments.output("write_ids", write_ids);
  params.confidence = arguments.output("confidence", confidence);
  params.masks_left = arguments.output("masks_left", masks_left);
  params.flags = arguments.output("flags", flags);
  params.mask_token_id = mask_token_id;
  params.rule = arguments.enumeration<AcceptRule>("rule", rule);
  params.confidence_kind =
      arguments.enumeration<ConfidenceKind>("confidence_kind", confidence_kind);
  params.raw_confidence = raw_confidence;
  params.denoising_steps = arguments.int32("denoising_steps", denoising_steps);
  params.force_accept_last_step = force_accept_last_step;
  params.factor = static_cast<float>(factor);
  params.entropy_bound = static_cast<float>(entropy_bound);
  params.low_threshold = static_cast<float>(low_threshold);
  arguments.run(&diffulex::accept_mask_fill, params);
}

}  // namespace diffulex::torch_ops
