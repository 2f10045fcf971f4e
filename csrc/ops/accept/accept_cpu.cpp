// SPDX-License-Identifier: Apache-2.0
//
// The acceptance ops: checks of the data, and the rules of the core over every block.
#include "diffulex/core/acceptance.h"
#include "ops/accept/block_cpu.h"
#include "ops/accept/config.h"
#include "ops/cpu_ops.h"

namespace diffulex::cpu {
namespace {

/// Blocks a thread should take at least; a block is a few hundred nanoseconds.
constexpr int64_t kBlockGrain = 64;
/// As above for canvases, which are sorted: some microseconds each.
constexpr int64_t kCanvasGrain = 4;

Status check_block(const AcceptMaskFillParams& params, int64_t block) {
  constexpr const char* kOp = "accept_mask_fill";
  DIFFULEX_RETURN_IF_ERROR(check_editable_range(kOp, params, block));
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX));
  const auto* tokens = row_of<const int64_t>(params.tokens, block);
  const int64_t end = valid_end(params, block);
  for (int64_t position = index_at(params.editable_start, block); position < end; ++position) {
    if (tokens[position] == params.mask_token_id) {
      DIFFULEX_RETURN_IF_ERROR(check_block_row(kOp, params, block, position));
    }
  }
  return {};
}

Status check_block(const AcceptEditParams& params, int64_t block) {
  constexpr const char* kOp = "accept_edit";
  DIFFULEX_RETURN_IF_ERROR(check_editable_block(kOp, params, block));
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX));
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "post_edit_steps", params.post_edit_steps, block, 0, INT32_MAX));
  return check_block_value(kOp, "max_post_edit_steps", params.max_post_edit_steps, block, 0,
                           INT32_MAX);
}

Status check_block(const AcceptDmaxParams& params, int64_t block) {
  constexpr const char* kOp = "accept_dmax";
  DIFFULEX_RETURN_IF_ERROR(check_editable_block(kOp, params, block));
  return check_block_value(kOp, "open_steps", params.open_steps, block, 0, INT32_MAX);
}

Status check_block(const AcceptGemmaParams& params, int64_t block) {
  constexpr const char* kOp = "accept_gemma";
  if (params.valid_len.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(kOp, "valid_len", params.valid_len, block, 0, params.tokens.size[1]));
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_block_value(kOp, "stable_run", params.stable_run, block, -1, INT32_MAX));
  const int64_t end = valid_end(params, block);
  if (end > 0) {
    DIFFULEX_RETURN_IF_ERROR(
        check_block_value(kOp, "steps_left", params.steps_left, block, 1, INT32_MAX));
  }
  for (int64_t position = 0; position < end; ++position) {
    DIFFULEX_RETURN_IF_ERROR(check_block_row(kOp, params, block, position));
    const int64_t renoise = row_of<const int64_t>(params.renoise_ids, block)[position];
    if (renoise < 0) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": renoise_ids[", block, "][",
                        position, "]: expected an id >= 0, got ", renoise);
    }
  }
  return {};
}

void set_lists(const AcceptDmaxParams& params, DmaxStep& step) {
  if (params.topk_ids.present()) {
    step.topk_ids = params.topk_ids.as<const int64_t>();
    step.topk_ids_stride = params.topk_ids.stride[0];
    step.topk_probs = params.topk_probs.as<const float>();
    step.topk_probs_stride = params.topk_probs.stride[0];
  }
  if (params.argmax_ids.present()) {
    step.argmax_ids = params.argmax_ids.as<const int64_t>();
    step.argmax_stride = params.argmax_ids.stride[0];
  }
}

void set_descriptors(const AcceptDmaxParams& params, int64_t block, DmaxStep& step) {
  if (!params.merge_valid.present()) {
    return;
  }
  step.merge_valid = row_of<uint8_t>(params.merge_valid, block);
  step.merge_ids = row_of<int64_t>(params.merge_ids, block);
  step.merge_probs = row_of<float>(params.merge_probs, block);
  step.merge_residual = row_of<float>(params.merge_residual, block);
  step.merge_ids_stride = params.merge_ids.stride[1];
  step.merge_probs_stride = params.merge_probs.stride[1];
  step.merge_count = static_cast<int32_t>(params.merge_ids.size[2]);
}

/// Checks the data of every block, then calls run(block) for each.
template <typename Params, typename Run>
Status for_each_block(const Params& params, int64_t grain, const ExecContext& context,
                      const Run& run) {
  const int64_t num_blocks = params.tokens.size[0];
  for (int64_t block = 0; block < num_blocks; ++block) {
    DIFFULEX_RETURN_IF_ERROR(check_block(params, block));
  }
  parallel_ranges(context, num_blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      *row_of<int32_t>(params.flags, block) = run(block);
    }
  });
  return {};
}

}  // namespace

Status accept_mask_fill(const AcceptMaskFillParams& params, const ExecContext& context) {
  const MaskFillRules rules = mask_fill_rules(params);
  return for_each_block(params, kBlockGrain, context, [&](int64_t block) {
    MaskFillStep step;
    step.threshold = value_at<float>(params.accept_threshold, block);
    step.gate = value_at<uint8_t>(params.gate, block) != 0;
    step.open_steps = value_at<int32_t>(params.open_steps, block);
    const AcceptOutcome outcome =
        accept_mask_fill_block(rules, step, editable_block(params, block));
    *row_of<int32_t>(params.masks_left, block) = outcome.masks_left;
    return outcome.flags;
  });
}

Status accept_edit(const AcceptEditParams& params, const ExecContext& context) {
  const EditRules rules = edit_rules(params);
  return for_each_block(params, kBlockGrain, context, [&](int64_t block) {
    EditStep step;
    step.accept_threshold = value_at<float>(params.accept_threshold, block);
    step.edit_threshold = value_at<float>(params.edit_threshold, block);
    step.gate = value_at<uint8_t>(params.gate, block) != 0;
    step.open_steps = value_at<int32_t>(params.open_steps, block);
    step.post_edit_steps = value_at<int32_t>(params.post_edit_steps, block);
    step.max_post_edit_steps = value_at<int32_t>(params.max_post_edit_steps, block);
    const AcceptOutcome outcome = accept_edit_block(rules, step, editable_block(params, block));
    *row_of<int32_t>(params.masks_left, block) = outcome.masks_left;
    *row_of<float>(params.same_token_ratio, block) = outcome.same_token_ratio;
    return outcome.flags;
  });
}

Status accept_dmax(const AcceptDmaxParams& params, const ExecContext& context) {
  const DmaxRules rules = dmax_rules(params);
  return for_each_block(params, kBlockGrain, context, [&](int64_t block) {
    DmaxStep step;
    step.threshold = value_at<float>(params.accept_threshold, block);
    step.gate = value_at<uint8_t>(params.gate, block) != 0;
    step.open_steps = value_at<int32_t>(params.open_steps, block);
    set_lists(params, step);
    set_descriptors(params, block, step);
    const AcceptOutcome outcome = accept_dmax_block(rules, step, editable_block(params, block));
    *row_of<int32_t>(params.masks_left, block) = outcome.masks_left;
    *row_of<float>(params.same_token_ratio, block) = outcome.same_token_ratio;
    return outcome.flags;
  });
}

Status accept_gemma(const AcceptGemmaParams& params, const ExecContext& context) {
  const GemmaRules rules = gemma_rules(params);
  return for_each_block(params, kCanvasGrain, context, [&](int64_t block) {
    CanvasStep step;
    step.prev_argmax = row_of<const int64_t>(params.prev_argmax, block);
    step.renoise_ids = row_of<const int64_t>(params.renoise_ids, block);
    step.argmax_ids = params.argmax_ids.as<const int64_t>();
    step.argmax_stride = params.argmax_ids.stride[0];
    step.stable_run = value_at<int32_t>(params.stable_run, block);
    step.steps_left = value_at<int32_t>(params.steps_left, block);
    step.argmax = row_of<int64_t>(params.argmax, block);
    return accept_canvas_block(rules, step, block_of(params, block)).flags;
  });
}

}  // namespace diffulex::cpu
