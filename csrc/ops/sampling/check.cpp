// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "ops/checks.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

/// Present exactly with `partner`.
Status check_pair(const char* op, const char* name, const TensorRef& tensor,
                  const char* partner_name, const TensorRef& partner) {
  if (tensor.present() == partner.present()) {
    return {};
  }
  const bool missing = !tensor.present();
  return ArgumentCheck(op, name, tensor)
      .error(StatusCode::kInvalidArgument,
             std::string(missing ? "a tensor with " : "none without ") + partner_name,
             missing ? "none" : "a tensor of shape " + shape_text(tensor));
}

Status check_topk(const char* op, const TensorRef& ids, const TensorRef& probs, int64_t num_rows) {
  DIFFULEX_RETURN_IF_ERROR(check_pair(op, "topk_probs", probs, "topk_ids", ids));
  if (!ids.present()) {
    return {};
  }
  const ArgumentCheck check(op, "topk_ids", ids);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kI64}, {num_rows, kAnyExtent}));
  if (ids.size[1] < 1 || ids.size[1] > kStatsMaxTopK) {
    return check.error(StatusCode::kInvalidArgument,
                       "1 to " + std::to_string(kStatsMaxTopK) + " columns",
                       std::to_string(ids.size[1]));
  }
  return ArgumentCheck(op, "topk_probs", probs).matches({DType::kF32}, {num_rows, ids.size[1]});
}

// What ops over rows of logits have in common.

template <typename Params>
Status check_logits(const char* op, const Params& params) {
  const ArgumentCheck check(op, "logits", params.logits);
  DIFFULEX_RETURN_IF_ERROR(
      check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  if (params.logits.size[1] < 1 || params.logits.size[1] > INT32_MAX) {
    return check.error(StatusCode::kInvalidArgument, "1 to 2147483647 columns",
                       shape_text(params.logits));
  }
  if (params.extra_logits.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(op, "extra_logits", params.extra_logits)
            .matches({params.logits.dtype}, {kAnyExtent, params.logits.size[1]}));
  }
  return params.row_index.present() ? ArgumentCheck(op, "row_index", params.row_index)
                                          .matches({DType::kI32, DType::kI64}, {kAnyExtent})
                                    : Status::ok_status();
}

template <typename Params>
int64_t num_rows_of(const Params& params) {
  return (params.row_index.present() ? params.row_index : params.logits).size[0];
}

template <typename Params>
Status check_forbidden(const char* op, const Params& params) {
  if (!params.forbidden_ids.present()) {
    return {};
  }
  const ArgumentCheck check(op, "forbidden_ids", params.forbidden_ids);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kI64}, {kAnyExtent}));
  if (params.forbidden_ids.size[0] > kStatsMaxForbidden) {
    return check.error(StatusCode::kInvalidArgument,
                       "at most " + std::to_string(kStatsMaxForbidden) + " ids",
                       std::to_string(params.forbidden_ids.size[0]));
  }
  return {};
}

template <typename Params>
Status check_scalars(const char* op, const Params& params) {
  if (params.vocab_limit < -1) {
    return scalar_error(op, "vocab_limit", "a value >= -1", params.vocab_limit);
  }
  if (!(std::isfinite(params.softcap) && params.softcap >= 0.0F)) {
    return scalar_error(op, "softcap", "a finite value >= 0", params.softcap);
  }
  if (params.exclusion != ExclusionMode::kExclude &&
      params.exclusion != ExclusionMode::kRenormalize && params.exclusion != ExclusionMode::kOff) {
    return scalar_error(op, "exclusion", "0 (exclude), 1 (renormalize) or 2 (off)",
                        static_cast<int32_t>(params.exclusion));
  }
  return {};
}

Status check_row_vectors(const char* op, const TokenStatsParams& params, int64_t num_rows) {
  if (params.inv_temperature.present()) {
    const ArgumentCheck check(op, "inv_temperature", params.inv_temperature);
    DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kF32}, {num_rows}));
    if (params.partial) {
      return check.error(StatusCode::kInvalidArgument, "none with partial",
                         "a tensor of shape " + shape_text(params.inv_temperature));
    }
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_pair(op, "uniforms", params.uniforms, "inv_temperature", params.inv_temperature));
  if (params.uniforms.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(op, "uniforms", params.uniforms).matches({DType::kF64}, {num_rows}));
  }
  DIFFULEX_RETURN_IF_ERROR(check_forbidden(op, params));
  DIFFULEX_RETURN_IF_ERROR(
      check_pair(op, "penalties", params.penalties, "penalty_ids", params.penalty_ids));
  if (params.penalty_ids.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(op, "penalty_ids", params.penalty_ids).matches({DType::kI64}, {num_rows}));
    return ArgumentCheck(op, "penalties", params.penalties).matches({DType::kF32}, {num_rows});
  }
  return {};
}

Status check_filter_vectors(const char* op, const SampleFilteredParams& params, int64_t num_rows) {
  const struct {
    const char* name;
    const TensorRef& tensor;
    DType dtype;
    bool required;
  } vectors[] = {
      {"inv_temperature", params.inv_temperature, DType::kF32, true},
      {"uniforms", params.uniforms, DType::kF64, true},
      {"top_k", params.top_k, DType::kI32, false},
      {"top_p", params.top_p, DType::kF32, false},
      {"min_p", params.min_p, DType::kF32, false},
      {"ids", params.ids, DType::kI64, true},
  };
  for (const auto& vector : vectors) {
    if (vector.required || vector.tensor.present()) {
      DIFFULEX_RETURN_IF_ERROR(
          ArgumentCheck(op, vector.name, vector.tensor).matches({vector.dtype}, {num_rows}));
    }
  }
  return ArgumentCheck(op, "stats", params.stats)
      .matches({DType::kF32}, {num_rows, kTokenStatsColumns});
}

Status check_filter_kinds(const char* op, const SampleFilteredParams& params) {
  const auto order = static_cast<int32_t>(params.filter_order);
  if (params.filter_order != FilterOrder::kTopPFirst &&
      params.filter_order != FilterOrder::kTopKFirst) {
    return scalar_error(op, "filter_order", "0 (top_p, min_p, top_k) or 1 (top_k, min_p, top_p)",
                        order);
  }
  const auto space = static_cast<int32_t>(params.confidence_space);
  if (params.confidence_space != ConfidenceSpace::kProcessed &&
      params.confidence_space != ConfidenceSpace::kTempered) {
    return scalar_error(op, "confidence_space", "0 (processed) or 1 (tempered)", space);
  }
  return {};
}

}  // namespace

Status check_token_stats(const TokenStatsParams& params) {
  constexpr const char* kOp = "token_stats";
  DIFFULEX_RETURN_IF_ERROR(check_logits(kOp, params));
  const int64_t num_rows = num_rows_of(params);
  DIFFULEX_RETURN_IF_ERROR(check_row_vectors(kOp, params, num_rows));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "ids", params.ids).matches({DType::kI64}, {num_rows}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "stats", params.stats)
                               .matches({DType::kF32}, {num_rows, kTokenStatsColumns}));
  DIFFULEX_RETURN_IF_ERROR(check_topk(kOp, params.topk_ids, params.topk_probs, num_rows));
  DIFFULEX_RETURN_IF_ERROR(check_scalars(kOp, params));
  return params.vocab_start < 0
             ? scalar_error(kOp, "vocab_start", "a value >= 0", params.vocab_start)
             : Status::ok_status();
}

Status check_merge_token_stats(const MergeTokenStatsParams& params) {
  constexpr const char* kOp = "merge_token_stats";
  const ArgumentCheck ids_check(kOp, "part_ids", params.part_ids);
  DIFFULEX_RETURN_IF_ERROR(ids_check.matches({DType::kI64}, {kAnyExtent, kAnyExtent}));
  const int64_t parts = params.part_ids.size[0];
  const int64_t num_rows = params.part_ids.size[1];
  if (parts < 1) {
    return ids_check.error(StatusCode::kInvalidArgument, "at least one part",
                           shape_text(params.part_ids));
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "part_stats", params.part_stats)
                               .matches({DType::kF32}, {parts, num_rows, kTokenStatsColumns}));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "ids", params.ids).matches({DType::kI64}, {num_rows}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "stats", params.stats)
                               .matches({DType::kF32}, {num_rows, kTokenStatsColumns}));
  DIFFULEX_RETURN_IF_ERROR(check_pair(kOp, "part_topk_vals", params.part_topk_vals, "part_topk_ids",
                                      params.part_topk_ids));
  DIFFULEX_RETURN_IF_ERROR(check_topk(kOp, params.topk_ids, params.topk_probs, num_rows));
  DIFFULEX_RETURN_IF_ERROR(
      check_pair(kOp, "topk_ids", params.topk_ids, "part_topk_ids", params.part_topk_ids));
  if (!params.topk_ids.present()) {
    return {};
  }
  const int64_t top_k = params.topk_ids.size[1];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "part_topk_ids", params.part_topk_ids)
                               .matches({DType::kI64}, {parts, num_rows, top_k}));
  return ArgumentCheck(kOp, "part_topk_vals", params.part_topk_vals)
      .matches({DType::kF32}, {parts, num_rows, top_k});
}

Status check_sample_filtered(const SampleFilteredParams& params) {
  constexpr const char* kOp = "sample_filtered";
  DIFFULEX_RETURN_IF_ERROR(check_logits(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_filter_vectors(kOp, params, num_rows_of(params)));
  DIFFULEX_RETURN_IF_ERROR(check_forbidden(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_scalars(kOp, params));
  return check_filter_kinds(kOp, params);
}

Status check_entropy_bound_mask(const EntropyBoundMaskParams& params) {
  constexpr const char* kOp = "entropy_bound_mask";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "entropy", params.entropy).matches({DType::kF32}, {kAnyExtent}));
  const ArgumentCheck segments_check(kOp, "segments", params.segments);
  DIFFULEX_RETURN_IF_ERROR(segments_check.matches({DType::kI32}, {kAnyExtent}));
  if (params.segments.size[0] < 1) {
    return segments_check.error(StatusCode::kInvalidArgument, "at least one offset",
                                shape_text(params.segments));
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "mask", params.mask).matches({DType::kU8}, {params.entropy.size[0]}));
  if (std::isnan(params.bound)) {
    return scalar_error(kOp, "bound", "a number", params.bound);
  }
  return {};
}

}  // namespace diffulex
