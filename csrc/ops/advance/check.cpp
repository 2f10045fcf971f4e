// SPDX-License-Identifier: Apache-2.0
#include "ops/advance/check.h"

#include <initializer_list>
#include <limits>
#include <string>

#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr const char* kOp = "advance_decode";

/// One tensor argument and what it has to be.
struct Argument {
  const char* name;
  const TensorRef& tensor;
  DType dtype;
};

Status check_dense(std::initializer_list<int64_t> shape,
                   std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, argument.name, argument.tensor).dense({argument.dtype}, shape));
  }
  return {};
}

/// The eight merge arrays, or none.
Status check_merge(const AdvanceDecodeParams& params, int64_t num_rows) {
  if (!params.merge_valid.present()) {
    for (const Argument& argument : {
             Argument{"merge_ids", params.merge_ids, DType::kI64},
             Argument{"merge_probs", params.merge_probs, DType::kF32},
             Argument{"merge_residual", params.merge_residual, DType::kF32},
             Argument{"row_merge_mask", params.row_merge_mask, DType::kU8},
             Argument{"row_merge_ids", params.row_merge_ids, DType::kI64},
             Argument{"row_merge_probs", params.row_merge_probs, DType::kF32},
             Argument{"row_merge_residual", params.row_merge_residual, DType::kF32},
         }) {
      DIFFULEX_RETURN_IF_ERROR(
          ArgumentCheck(kOp, argument.name, argument.tensor).absent("merge_valid is absent"));
    }
    return {};
  }
  const int64_t num_blocks = params.tokens.size[0];
  const int64_t width = params.tokens.size[1];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "merge_ids", params.merge_ids)
                               .dense({DType::kI64}, {num_blocks, width, kAnyExtent}));
  const int64_t top_k = params.merge_ids.size[2];
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_blocks, width, top_k}, {{"merge_probs", params.merge_probs, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_blocks, width}, {{"merge_valid", params.merge_valid, DType::kU8},
                                        {"merge_residual", params.merge_residual, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_rows}, {{"row_merge_mask", params.row_merge_mask, DType::kU8},
                               {"row_merge_residual", params.row_merge_residual, DType::kF32}}));
  return check_dense({num_rows, top_k}, {{"row_merge_ids", params.row_merge_ids, DType::kI64},
                                         {"row_merge_probs", params.row_merge_probs, DType::kF32}});
}

/// The two arrays of shifted logits, or none.
Status check_carry(const AdvanceDecodeParams& params, int64_t num_reqs, int64_t num_rows) {
  if (!params.last_row_index.present()) {
    return ArgumentCheck(kOp, "logits_source", params.logits_source)
        .absent("last_row_index is absent");
  }
  // Records of slots follow, and indices are int32.
  const int64_t last = std::numeric_limits<int32_t>::max() - num_reqs;
  if (params.first_saved_row < num_rows || params.first_saved_row > last) {
    const std::string range = std::to_string(num_rows) + " to " + std::to_string(last);
    return scalar_error(kOp, "first_saved_row", range.c_str(), params.first_saved_row);
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_reqs}, {{"last_row_index", params.last_row_index, DType::kI32}}));
  return check_dense({num_rows}, {{"logits_source", params.logits_source, DType::kI32}});
}

/// The arrays of a dual cache, or none.
Status check_dual_cache(const AdvanceDecodeParams& params, int64_t num_reqs) {
  if (!params.seed_row.present()) {
    return ArgumentCheck(kOp, "pending_next_token", params.pending_next_token)
        .absent("seed_row is absent");
  }
  for (const Argument& argument : {
           Argument{"merge_valid", params.merge_valid, DType::kU8},
           Argument{"last_row_index", params.last_row_index, DType::kI32},
           Argument{"prev_argmax", params.prev_argmax, DType::kI64},
       }) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, argument.name, argument.tensor).absent("seed_row is present"));
  }
  return check_dense({num_reqs}, {{"pending_next_token", params.pending_next_token, DType::kI64},
                                  {"seed_row", params.seed_row, DType::kI32}});
}

/// The eight arrays of a canvas, or none.
Status check_canvas(const AdvanceDecodeParams& params, int64_t num_reqs) {
  if (!params.prev_argmax.present()) {
    for (const Argument& argument : {
             Argument{"canvas_argmax", params.canvas_argmax, DType::kI64},
             Argument{"stable_run", params.stable_run, DType::kI32},
             Argument{"steps_left", params.steps_left, DType::kI32},
             Argument{"renoise_ids", params.renoise_ids, DType::kI64},
             Argument{"block_slot", params.block_slot, DType::kI32},
             Argument{"row_pass_kind", params.row_pass_kind, DType::kU8},
             Argument{"row_self_cond", params.row_self_cond, DType::kI32},
         }) {
      DIFFULEX_RETURN_IF_ERROR(
          ArgumentCheck(kOp, argument.name, argument.tensor).absent("prev_argmax is absent"));
    }
    return {};
  }
  for (const Argument& argument : {
           Argument{"merge_valid", params.merge_valid, DType::kU8},
           Argument{"last_row_index", params.last_row_index, DType::kI32},
       }) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, argument.name, argument.tensor).absent("prev_argmax is present"));
  }
  const int64_t width = params.tokens.size[1];
  if (params.tokens.size[0] != num_reqs) {
    return ArgumentCheck(kOp, "tokens", params.tokens)
        .error(StatusCode::kInvalidArgument, "one canvas for each request",
               shape_text(params.tokens));
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_reqs, width}, {{"prev_argmax", params.prev_argmax, DType::kI64},
                                      {"canvas_argmax", params.canvas_argmax, DType::kI64},
                                      {"renoise_ids", params.renoise_ids, DType::kI64}}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_reqs * width}, {{"row_pass_kind", params.row_pass_kind, DType::kU8},
                                       {"row_self_cond", params.row_self_cond, DType::kI32}}));
  return check_dense({num_reqs}, {{"stable_run", params.stable_run, DType::kI32},
                                  {"steps_left", params.steps_left, DType::kI32},
                                  {"block_slot", params.block_slot, DType::kI32}});
}

/// Strategies whose steps see other keys in turn say which.
Status check_mask_kinds(const AdvanceDecodeParams& params, int64_t num_reqs) {
  if (!params.seed_row.present() && !params.prev_argmax.present()) {
    return ArgumentCheck(kOp, "mask_kinds", params.mask_kinds)
        .absent("seed_row and prev_argmax are absent");
  }
  return check_dense({num_reqs}, {{"mask_kinds", params.mask_kinds, DType::kI32}});
}

}  // namespace

Status check_advance_decode(const AdvanceDecodeParams& params) {
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "tokens", params.tokens).dense({DType::kI64}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "requests", params.requests)
          .dense({DType::kU8}, {kAnyExtent, static_cast<int64_t>(sizeof(DecodeRequest))}));
  const int64_t num_reqs = params.requests.size[0];
  const int64_t num_blocks = params.tokens.size[0];
  const int64_t width = params.tokens.size[1];
  const int64_t buffer_size = num_reqs > 0 ? num_blocks / num_reqs : 0;
  if (num_reqs > 0 &&
      (buffer_size < 1 || buffer_size > kMaxBufferBlocks || buffer_size * num_reqs != num_blocks)) {
    return ArgumentCheck(kOp, "tokens", params.tokens)
        .error(StatusCode::kInvalidArgument,
               "1 to " + std::to_string(kMaxBufferBlocks) + " blocks for each of " +
                   std::to_string(num_reqs) + " requests",
               shape_text(params.tokens));
  }
  if (reinterpret_cast<uintptr_t>(params.requests.data) % alignof(DecodeRequest) != 0) {
    return ArgumentCheck(kOp, "requests", params.requests)
        .error(StatusCode::kInvalidArgument,
               "memory aligned to " + std::to_string(alignof(DecodeRequest)) + " bytes",
               "another address");
  }
  if (params.page_size < 1) {
    return scalar_error(kOp, "page_size", ">= 1", params.page_size);
  }
  const int64_t num_rows = num_blocks * width;
  const int64_t window =
      num_reqs > 0 ? window_len(static_cast<int32_t>(buffer_size * width)) : kAnyExtent;
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_reqs, window}, {{"windows", params.windows, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "page_tables", params.page_tables)
                               .matches({DType::kI32}, {num_reqs, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_blocks, width}, {{"write_ids", params.write_ids, DType::kI64},
                                        {"row_index", params.row_index, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_blocks}, {{"flags", params.flags, DType::kI32},
                                 {"same_token_ratio", params.same_token_ratio, DType::kF32},
                                 {"editable_start", params.editable_start, DType::kI32},
                                 {"valid_len", params.valid_len, DType::kI32},
                                 {"gate", params.gate, DType::kU8},
                                 {"accept_threshold", params.accept_threshold, DType::kF32},
                                 {"open_steps", params.open_steps, DType::kI32},
                                 {"total_steps", params.total_steps, DType::kI32},
                                 {"post_edit_steps", params.post_edit_steps, DType::kI32}}));
  if (params.edit_threshold.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        check_dense({num_blocks}, {{"edit_threshold", params.edit_threshold, DType::kF32}}));
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_rows}, {{"input_ids", params.input_ids, DType::kI64},
                               {"positions", params.positions, DType::kI64},
                               {"slot_mapping", params.slot_mapping, DType::kI32},
                               {"inv_temperature", params.inv_temperature, DType::kF32},
                               {"uniforms", params.uniforms, DType::kF64},
                               {"top_k", params.top_k, DType::kI32},
                               {"top_p", params.top_p, DType::kF32},
                               {"min_p", params.min_p, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(
      check_dense({num_reqs}, {{"context_lens", params.context_lens, DType::kI32},
                               {"valid_slices", params.valid_slices, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(check_dual_cache(params, num_reqs));
  DIFFULEX_RETURN_IF_ERROR(check_canvas(params, num_reqs));
  DIFFULEX_RETURN_IF_ERROR(check_mask_kinds(params, num_reqs));
  DIFFULEX_RETURN_IF_ERROR(check_carry(params, num_reqs, num_rows));
  return check_merge(params, num_rows);
}

AdvanceArgs make_advance_args(const AdvanceDecodeParams& params) {
  AdvanceArgs args{};
  args.requests = params.requests.as<DecodeRequest>();
  args.windows = params.windows.as<int32_t>();
  args.page_tables = params.page_tables.as<const int32_t>();
  args.write_ids = params.write_ids.as<const int64_t>();
  args.flags = params.flags.as<const int32_t>();
  args.same_token_ratio = params.same_token_ratio.as<const float>();
  args.input_ids = params.input_ids.as<int64_t>();
  args.positions = params.positions.as<int64_t>();
  args.slot_mapping = params.slot_mapping.as<int32_t>();
  args.context_lens = params.context_lens.as<int32_t>();
  args.valid_slices = params.valid_slices.as<int32_t>();
  args.tokens = params.tokens.as<int64_t>();
  args.row_index = params.row_index.as<int32_t>();
  args.editable_start = params.editable_start.as<int32_t>();
  args.valid_len = params.valid_len.as<int32_t>();
  args.gate = params.gate.as<uint8_t>();
  args.accept_threshold = params.accept_threshold.as<float>();
  args.edit_threshold =
      params.edit_threshold.present() ? params.edit_threshold.as<float>() : nullptr;
  args.open_steps = params.open_steps.as<int32_t>();
  args.total_steps = params.total_steps.as<int32_t>();
  args.post_edit_steps = params.post_edit_steps.as<int32_t>();
  args.inv_temperature = params.inv_temperature.as<float>();
  args.uniforms = params.uniforms.as<double>();
  args.top_k = params.top_k.as<int32_t>();
  args.top_p = params.top_p.as<float>();
  args.min_p = params.min_p.as<float>();
  if (params.merge_valid.present()) {
    args.merge_valid = params.merge_valid.as<const uint8_t>();
    args.merge_ids = params.merge_ids.as<const int64_t>();
    args.merge_probs = params.merge_probs.as<const float>();
    args.merge_residual = params.merge_residual.as<const float>();
    args.row_merge_mask = params.row_merge_mask.as<uint8_t>();
    args.row_merge_ids = params.row_merge_ids.as<int64_t>();
    args.row_merge_probs = params.row_merge_probs.as<float>();
    args.row_merge_residual = params.row_merge_residual.as<float>();
    args.merge_top_k = static_cast<int32_t>(params.merge_ids.size[2]);
  }
  if (params.last_row_index.present()) {
    args.last_row_index = params.last_row_index.as<int32_t>();
    args.logits_source = params.logits_source.as<int32_t>();
    args.first_saved_row = params.first_saved_row;
  }
  if (params.seed_row.present()) {
    args.pending_next_token = params.pending_next_token.as<const int64_t>();
    args.seed_row = params.seed_row.as<int32_t>();
    args.mask_kinds = params.mask_kinds.as<int32_t>();
    args.has_block_cache = params.has_block_cache;
  }
  if (params.prev_argmax.present()) {
    args.mask_kinds = params.mask_kinds.as<int32_t>();
    args.prev_argmax = params.prev_argmax.as<int64_t>();
    args.canvas_argmax = params.canvas_argmax.as<const int64_t>();
    args.stable_run = params.stable_run.as<int32_t>();
    args.steps_left = params.steps_left.as<int32_t>();
    args.renoise_ids = params.renoise_ids.as<int64_t>();
    args.block_slot = params.block_slot.as<int32_t>();
    args.row_pass_kind = params.row_pass_kind.as<uint8_t>();
    args.row_self_cond = params.row_self_cond.as<int32_t>();
  }
  args.page_table_stride = params.page_tables.stride[0];
  args.block_size = static_cast<int32_t>(params.tokens.size[1]);
  args.buffer_size = static_cast<int32_t>(params.tokens.size[0] / params.requests.size[0]);
  args.page_size = params.page_size;
  args.masked_rows_only = params.masked_rows_only;
  args.is_entry = params.is_entry;
  return args;
}

}  // namespace diffulex
