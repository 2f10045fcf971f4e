// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/accept.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

void accept_edit(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                 const OptionalTensor& valid_len, const Tensor& gate,
                 const Tensor& accept_threshold, const Tensor& edit_threshold,
                 const Tensor& open_steps, const Tensor& post_edit_steps, const Tensor& ids,
                 const Tensor& stats, const Tensor& write_ids, const Tensor& confidence,
                 const Tensor& masks_left, const Tensor& flags, const Tensor& same_token_ratio,
                 int64_t mask_token_id, int64_t max_post_edit_steps, int64_t confidence_kind,
                 bool raw_confidence) {
  OpArguments arguments("accept_edit");
  AcceptEditParams params;
  params.tokens = arguments.input("tokens", tokens);
  params.row_index = arguments.input("row_index", row_index);
  params.editable_start = arguments.input("editable_start", editable_start);
  params.valid_len = arguments.input("valid_len", valid_len);
  params.gate = arguments.input("gate", gate);
  params.accept_threshold = arguments.input("accept_threshold", accept_threshold);
  params.edit_threshold = arguments.input("edit_threshold", edit_threshold);
  params.open_steps = arguments.input("open_steps", open_steps);
  params.post_edit_steps = arguments.input("post_edit_steps", post_edit_steps);
  params.ids = arguments.input("ids", ids);
  params.stats = arguments.input("stats", stats);
  params.write_ids = arguments.output("write_ids", write_ids);
  params.confidence = arguments.output("confidence", confidence);
  params.masks_left = arguments.output("masks_left", masks_left);
  params.flags = arguments.output("flags", flags);
  params.same_token_ratio = arguments.output("same_token_ratio", same_token_ratio);
  params.mask_token_id = mask_token_id;
  params.max_post_edit_steps = arguments.int32("max_post_edit_steps", max_post_edit_steps);
  params.confidence_kind =
      arguments.enumeration<ConfidenceKind>("confidence_kind", confidence_kind);
  params.raw_confidence = raw_confidence;
  arguments.run(&diffulex::accept_edit, params);
}

void accept_dmax(const Tensor& tokens, const Tensor& row_index, const Tensor& editable_start,
                 const OptionalTensor& valid_len, const Tensor& gate,
                 const Tensor& accept_threshold, const Tensor& open_steps, const Tensor& ids,
                 const Tensor& stats, const OptionalTensor& argmax_ids,
                 const OptionalTensor& topk_ids, const OptionalTensor& topk_probs,
                 const Tensor& write_ids, const Tensor& confidence, const Tensor& masks_left,
                 const Tensor& flags, const Tensor& same_token_ratio,
                 const OptionalTensor& merge_valid, const OptionalTensor& merge_ids,
                 const OptionalTensor& merge_probs, const OptionalTensor& merge_residual,
                 int64_t mask_token_id, bool fast_path) {
  OpArguments arguments("accept_dmax");
  AcceptDmaxParams params;
  params.tokens = arguments.input("tokens", tokens);
  params.row_index = arguments.input("row_index", row_index);
  params.editable_start = arguments.input("editable_start", editable_start);
  params.valid_len = arguments.input("valid_len", valid_len);
  params.gate = arguments.input("gate", gate);
  params.accept_threshold = arguments.input("accept_threshold", accept_threshold);
  params.open_steps = arguments.input("open_steps", open_steps);
  params.ids = arguments.input("ids", ids);
  params.stats = arguments.input("stats", stats);
  params.argmax_ids = arguments.input("argmax_ids", argmax_ids);
  params.topk_ids = arguments.input("topk_ids", topk_ids);
  params.topk_probs = arguments.input("topk_probs", topk_probs);
  params.write_ids = arguments.output("write_ids", write_ids);
  params.confidence = arguments.output("confidence", confidence);
  params.masks_left = arguments.output("masks_left", masks_left);
  params.flags = arguments.output("flags", flags);
  params.same_token_ratio = arguments.output("same_token_ratio", same_token_ratio);
  params.merge_valid = arguments.output("merge_valid", merge_valid);
  params.merge_ids = arguments.output("merge_ids", merge_ids);
  params.merge_probs = arguments.output("merge_probs", merge_probs);
  params.merge_residual = arguments.output("merge_residual", merge_residual);
  params.mask_token_id = mask_token_id;
  params.fast_path = fast_path;
  arguments.run(&diffulex::accept_dmax, params);
}

void accept_gemma(const Tensor& tokens, const Tensor& row_index, const OptionalTensor& valid_len,
                  const Tensor& prev_argmax, const Tensor& stable_run, const Tensor& steps_left,
                  const Tensor& renoise_ids, const Tensor& ids, const Tensor& stats,
                  const Tensor& argmax_ids, const Tensor& write_ids, const Tensor& argmax,
                  const Tensor& confidence, const Tensor& flags, double entropy_bound,
                  int64_t stability_threshold, double confidence_threshold) {
  OpArguments arguments("accept_gemma");
  AcceptGemmaParams params;
  params.tokens = arguments.input("tokens", tokens);
  params.row_index = arguments.input("row_index", row_index);
  params.valid_len = arguments.input("valid_len", valid_len);
  params.prev_argmax = arguments.input("prev_argmax", prev_argmax);
  params.stable_run = arguments.input("stable_run", stable_run);
  params.steps_left = arguments.input("steps_left", steps_left);
  params.renoise_ids = arguments.input("renoise_ids", renoise_ids);
  params.ids = arguments.input("ids", ids);
  params.stats = arguments.input("stats", stats);
  params.argmax_ids = arguments.input("argmax_ids", argmax_ids);
  params.write_ids = arguments.output("write_ids", write_ids);
  params.argmax = arguments.output("argmax", argmax);
  params.confidence = arguments.output("confidence", confidence);
  params.flags = arguments.output("flags", flags);
  params.entropy_bound = static_cast<float>(entropy_bound);
  params.stability_threshold = arguments.int32("stability_threshold", stability_threshold);
  params.confidence_threshold = static_cast<float>(confidence_threshold);
  arguments.run(&diffulex::accept_gemma, params);
}

}  // namespace diffulex::torch_ops
