// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/advance.h"
#include "torch/ops.h"

namespace diffulex::torch_ops {

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
                    bool has_block_cache, bool is_entry) {
  OpArguments arguments("advance_decode");
  AdvanceDecodeParams params;
  params.requests = arguments.output("requests", requests);
  params.windows = arguments.output("windows", windows);
  params.page_tables = arguments.input("page_tables", page_tables);
  params.write_ids = arguments.input("write_ids", write_ids);
  params.flags = arguments.input("flags", flags);
  params.same_token_ratio = arguments.input("same_token_ratio", same_token_ratio);
  params.input_ids = arguments.output("input_ids", input_ids);
  params.positions = arguments.output("positions", positions);
  params.slot_mapping = arguments.output("slot_mapping", slot_mapping);
  params.context_lens = arguments.output("context_lens", context_lens);
  params.valid_slices = arguments.output("valid_slices", valid_slices);
  params.tokens = arguments.output("tokens", tokens);
  params.row_index = arguments.output("row_index", row_index);
  params.editable_start = arguments.output("editable_start", editable_start);
  params.valid_len = arguments.output("valid_len", valid_len);
  params.gate = arguments.output("gate", gate);
  params.accept_threshold = arguments.output("accept_threshold", accept_threshold);
  params.edit_threshold = arguments.output("edit_threshold", edit_threshold);
  params.open_steps = arguments.output("open_steps", open_steps);
  params.total_steps = arguments.output("total_steps", total_steps);
  params.post_edit_steps = arguments.output("post_edit_steps", post_edit_steps);
  params.inv_temperature = arguments.output("inv_temperature", inv_temperature);
  params.uniforms = arguments.output("uniforms", uniforms);
  params.top_k = arguments.output("top_k", top_k);
  params.top_p = arguments.output("top_p", top_p);
  params.min_p = arguments.output("min_p", min_p);
  params.merge_valid = arguments.input("merge_valid", merge_valid);
  params.merge_ids = arguments.input("merge_ids", merge_ids);
  params.merge_probs = arguments.input("merge_probs", merge_probs);
  params.merge_residual = arguments.input("merge_residual", merge_residual);
  params.row_merge_mask = arguments.output("row_merge_mask", row_merge_mask);
  params.row_merge_ids = arguments.output("row_merge_ids", row_merge_ids);
  params.row_merge_probs = arguments.output("row_merge_probs", row_merge_probs);
  params.row_merge_residual = arguments.output("row_merge_residual", row_merge_residual);
  params.last_row_index = arguments.output("last_row_index", last_row_index);
  params.logits_source = arguments.output("logits_source", logits_source);
  params.pending_next_token = arguments.input("pending_next_token", pending_next_token);
  params.seed_row = arguments.output("seed_row", seed_row);
  params.mask_kinds = arguments.output("mask_kinds", mask_kinds);
  params.prev_argmax = arguments.output("prev_argmax", prev_argmax);
  params.canvas_argmax = arguments.input("canvas_argmax", canvas_argmax);
  params.stable_run = arguments.output("stable_run", stable_run);
  params.steps_left = arguments.output("steps_left", steps_left);
  params.renoise_ids = arguments.output("renoise_ids", renoise_ids);
  params.block_slot = arguments.output("block_slot", block_slot);
  params.row_pass_kind = arguments.output("row_pass_kind", row_pass_kind);
  params.row_self_cond = arguments.output("row_self_cond", row_self_cond);
  params.page_size = arguments.int32("page_size", page_size);
  params.first_saved_row = arguments.int32("first_saved_row", first_saved_row);
  params.masked_rows_only = masked_rows_only;
  params.has_block_cache = has_block_cache;
  params.is_entry = is_entry;
  arguments.run(&diffulex::advance_decode, params);
}

}  // namespace diffulex::torch_ops
