// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <initializer_list>
#include <string>
#include <utility>

#include "ops/checks.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

/// One tensor argument and what it has to be.
struct Argument {
  const char* name;
  const TensorRef& tensor;
  DType dtype;
};

/// Extents of the blocks.
struct BlockShape {
  int64_t num_blocks = 0;
  int64_t block_size = 0;
};

Status check_tokens(const char* op, const TensorRef& tokens, BlockShape* shape) {
  const ArgumentCheck check(op, "tokens", tokens);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kI64}, {kAnyExtent, kAnyExtent}));
  shape->num_blocks = tokens.size[0];
  shape->block_size = tokens.size[1];
  if (shape->block_size < 1 || shape->block_size > kMaxAcceptPositions) {
    return check.error(StatusCode::kInvalidArgument,
                       "blocks of 1 to " + std::to_string(kMaxAcceptPositions) + " positions",
                       shape_text(tokens));
  }
  return {};
}

/// [Nb] each.
Status check_vectors(const char* op, const BlockShape& shape,
                     std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, argument.name, argument.tensor)
                                 .matches({argument.dtype}, {shape.num_blocks}));
  }
  return {};
}

/// [Nb, B] each.
Status check_grids(const char* op, const BlockShape& shape,
                   std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, argument.name, argument.tensor)
                                 .matches({argument.dtype}, {shape.num_blocks, shape.block_size}));
  }
  return {};
}

Status check_valid_len(const char* op, const BlockShape& shape, const TensorRef& valid_len) {
  return valid_len.present() ? check_vectors(op, shape, {{"valid_len", valid_len, DType::kI32}})
                             : Status::ok_status();
}

Status check_rows(const char* op, const TensorRef& ids, const TensorRef& stats) {
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "ids", ids).matches({DType::kI64}, {kAnyExtent}));
  return ArgumentCheck(op, "stats", stats)
      .matches({DType::kF32}, {ids.size[0], kTokenStatsColumns});
}

/// [R] int64 of any stride: a column of a wider tensor will do.
Status check_argmax_ids(const char* op, const TensorRef& argmax_ids, int64_t num_rows) {
  const ArgumentCheck check(op, "argmax_ids", argmax_ids);
  DIFFULEX_RETURN_IF_ERROR(check.dtype({DType::kI64}));
  if (argmax_ids.rank != 1 || argmax_ids.size[0] != num_rows) {
    return check.error(StatusCode::kInvalidArgument, "shape [" + std::to_string(num_rows) + "]",
                       shape_text(argmax_ids));
  }
  return {};
}

/// What the rules that decide masked positions have in common, and the vectors [Nb] of one of them.
template <typename Params>
Status check_block_arguments(const char* op, const BlockShape& shape, const Params& params,
                             std::initializer_list<Argument> vectors) {
  DIFFULEX_RETURN_IF_ERROR(check_grids(op, shape, {{"row_index", params.row_index, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(check_valid_len(op, shape, params.valid_len));
  DIFFULEX_RETURN_IF_ERROR(
      check_vectors(op, shape,
                    {{"editable_start", params.editable_start, DType::kI32},
                     {"gate", params.gate, DType::kU8},
                     {"accept_threshold", params.accept_threshold, DType::kF32},
                     {"open_steps", params.open_steps, DType::kI32},
                     {"masks_left", params.masks_left, DType::kI32},
                     {"flags", params.flags, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(check_vectors(op, shape, vectors));
  DIFFULEX_RETURN_IF_ERROR(check_rows(op, params.ids, params.stats));
  return check_grids(op, shape,
                     {{"write_ids", params.write_ids, DType::kI64},
                      {"confidence", params.confidence, DType::kF32}});
}

Status check_mask_token(const char* op, int64_t mask_token_id) {
  return mask_token_id < 0 ? scalar_error(op, "mask_token_id", "a value >= 0", mask_token_id)
                           : Status::ok_status();
}

Status check_confidence_kind(const char* op, ConfidenceKind value) {
  const auto kind = static_cast<int32_t>(value);
  if (kind < static_cast<int32_t>(ConfidenceKind::kMaxProb) ||
      kind > static_cast<int32_t>(ConfidenceKind::kNegEntropy)) {
    return scalar_error(op, "confidence_kind", "0 (max_prob), 1 (margin) or 2 (neg_entropy)", kind);
  }
  return {};
}

Status check_mask_fill_scalars(const char* op, const AcceptMaskFillParams& params) {
  const auto rule = static_cast<int32_t>(params.rule);
  if (rule < static_cast<int32_t>(AcceptRule::kThreshold) ||
      rule > static_cast<int32_t>(AcceptRule::kHierarchy)) {
    return scalar_error(op, "rule",
                        "0 (threshold), 1 (threshold_non_strict), 2 (static), 3 (dynamic), "
                        "4 (sequential), 5 (factor), 6 (entropy_bound), 7 (leftmost_prefix) or "
                        "8 (hierarchy)",
                        rule);
  }
  DIFFULEX_RETURN_IF_ERROR(check_confidence_kind(op, params.confidence_kind));
  DIFFULEX_RETURN_IF_ERROR(check_mask_token(op, params.mask_token_id));
  if (params.denoising_steps < 0) {
    return scalar_error(op, "denoising_steps", "a value >= 0", params.denoising_steps);
  }
  const std::pair<const char*, float> numbers[] = {{"factor", params.factor},
                                                   {"entropy_bound", params.entropy_bound},
                                                   {"low_threshold", params.low_threshold}};
  for (const auto& [name, value] : numbers) {
    if (std::isnan(value)) {
      return scalar_error(op, name, "a number", value);
    }
  }
  return {};
}

/// Given exactly when `wanted`.
Status check_presence(const char* op, const char* name, const TensorRef& tensor, bool wanted,
                      const char* reason) {
  if (tensor.present() == wanted) {
    return {};
  }
  return ArgumentCheck(op, name, tensor)
      .error(StatusCode::kInvalidArgument,
             std::string(wanted ? "a tensor with " : "none without ") + reason,
             wanted ? "none" : "a tensor of shape " + shape_text(tensor));
}

Status check_dmax_lists(const char* op, const AcceptDmaxParams& params) {
  const int64_t num_rows = params.ids.size[0];
  const bool has_lists = params.topk_ids.present();
  DIFFULEX_RETURN_IF_ERROR(
      check_presence(op, "topk_probs", params.topk_probs, has_lists, "topk_ids"));
  if (params.argmax_ids.present()) {
    DIFFULEX_RETURN_IF_ERROR(check_argmax_ids(op, params.argmax_ids, num_rows));
    DIFFULEX_RETURN_IF_ERROR(check_presence(op, "topk_ids", params.topk_ids, true, "argmax_ids"));
  }
  if (!has_lists) {
    return {};
  }
  const ArgumentCheck check(op, "topk_ids", params.topk_ids);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kI64}, {num_rows, kAnyExtent}));
  if (params.topk_ids.size[1] < 1) {
    return check.error(StatusCode::kInvalidArgument, "at least one column",
                       shape_text(params.topk_ids));
  }
  return ArgumentCheck(op, "topk_probs", params.topk_probs)
      .matches({DType::kF32}, {num_rows, params.topk_ids.size[1]});
}

Status check_dmax_merge(const char* op, const AcceptDmaxParams& params, const BlockShape& shape) {
  const bool is_wanted = params.merge_valid.present();
  const struct {
    const char* name;
    const TensorRef& tensor;
  } others[] = {{"merge_ids", params.merge_ids},
                {"merge_probs", params.merge_probs},
                {"merge_residual", params.merge_residual}};
  for (const auto& other : others) {
    DIFFULEX_RETURN_IF_ERROR(
        check_presence(op, other.name, other.tensor, is_wanted, "merge_valid"));
  }
  if (!is_wanted) {
    return {};
  }
  DIFFULEX_RETURN_IF_ERROR(check_grids(op, shape,
                                       {{"merge_valid", params.merge_valid, DType::kU8},
                                        {"merge_residual", params.merge_residual, DType::kF32}}));
  const ArgumentCheck ids_check(op, "merge_ids", params.merge_ids);
  DIFFULEX_RETURN_IF_ERROR(
      ids_check.matches({DType::kI64}, {shape.num_blocks, shape.block_size, kAnyExtent}));
  const int64_t count = params.merge_ids.size[2];
  const int64_t listed = params.topk_ids.present() ? params.topk_ids.size[1] : 1;
  if (count < 1 || count > listed) {
    return ids_check.error(StatusCode::kInvalidArgument,
                           "1 to " + std::to_string(listed) +
                               " entries per position (the columns of topk_ids, 1 without)",
                           std::to_string(count));
  }
  return ArgumentCheck(op, "merge_probs", params.merge_probs)
      .matches({DType::kF32}, {shape.num_blocks, shape.block_size, count});
}

}  // namespace

Status check_accept_mask_fill(const AcceptMaskFillParams& params) {
  constexpr const char* kOp = "accept_mask_fill";
  const ArgumentCheck tokens_check(kOp, "tokens", params.tokens);
  DIFFULEX_RETURN_IF_ERROR(tokens_check.matches({DType::kI64}, {kAnyExtent, kAnyExtent}));
  // The CPU takes blocks of any size.
  const BlockShape shape{params.tokens.size[0], params.tokens.size[1]};
  if (shape.block_size < 1 || shape.block_size > INT32_MAX) {
    return tokens_check.error(StatusCode::kInvalidArgument, "at least one position per block",
                              shape_text(params.tokens));
  }
  DIFFULEX_RETURN_IF_ERROR(check_block_arguments(kOp, shape, params, {}));
  return check_mask_fill_scalars(kOp, params);
}

Status check_accept_edit(const AcceptEditParams& params) {
  constexpr const char* kOp = "accept_edit";
  BlockShape shape;
  DIFFULEX_RETURN_IF_ERROR(check_tokens(kOp, params.tokens, &shape));
  DIFFULEX_RETURN_IF_ERROR(
      check_block_arguments(kOp, shape, params,
                            {{"edit_threshold", params.edit_threshold, DType::kF32},
                             {"post_edit_steps", params.post_edit_steps, DType::kI32},
                             {"max_post_edit_steps", params.max_post_edit_steps, DType::kI32},
                             {"same_token_ratio", params.same_token_ratio, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(check_mask_token(kOp, params.mask_token_id));
  return check_confidence_kind(kOp, params.confidence_kind);
}

Status check_accept_dmax(const AcceptDmaxParams& params) {
  constexpr const char* kOp = "accept_dmax";
  BlockShape shape;
  DIFFULEX_RETURN_IF_ERROR(check_tokens(kOp, params.tokens, &shape));
  DIFFULEX_RETURN_IF_ERROR(check_block_arguments(
      kOp, shape, params, {{"same_token_ratio", params.same_token_ratio, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(check_dmax_lists(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_dmax_merge(kOp, params, shape));
  return check_mask_token(kOp, params.mask_token_id);
}

Status check_accept_gemma(const AcceptGemmaParams& params) {
  constexpr const char* kOp = "accept_gemma";
  BlockShape shape;
  DIFFULEX_RETURN_IF_ERROR(check_tokens(kOp, params.tokens, &shape));
  DIFFULEX_RETURN_IF_ERROR(check_valid_len(kOp, shape, params.valid_len));
  DIFFULEX_RETURN_IF_ERROR(check_vectors(kOp, shape,
                                         {{"stable_run", params.stable_run, DType::kI32},
                                          {"steps_left", params.steps_left, DType::kI32},
                                          {"flags", params.flags, DType::kI32}}));
  DIFFULEX_RETURN_IF_ERROR(check_grids(kOp, shape,
                                       {{"row_index", params.row_index, DType::kI32},
                                        {"prev_argmax", params.prev_argmax, DType::kI64},
                                        {"renoise_ids", params.renoise_ids, DType::kI64},
                                        {"write_ids", params.write_ids, DType::kI64},
                                        {"argmax", params.argmax, DType::kI64},
                                        {"confidence", params.confidence, DType::kF32}}));
  DIFFULEX_RETURN_IF_ERROR(check_rows(kOp, params.ids, params.stats));
  DIFFULEX_RETURN_IF_ERROR(check_argmax_ids(kOp, params.argmax_ids, params.ids.size[0]));
  if (std::isnan(params.entropy_bound)) {
    return scalar_error(kOp, "entropy_bound", "a number", params.entropy_bound);
  }
  if (params.stability_threshold < 0) {
    return scalar_error(kOp, "stability_threshold", "a value >= 0", params.stability_threshold);
  }
  if (std::isnan(params.confidence_threshold)) {
    return scalar_error(kOp, "confidence_threshold", "a number", params.confidence_threshold);
  }
  return {};
}

}  // namespace diffulex
