// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "ops/checks.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr const char* kOp = "sample_filtered";

Status check_logits(const SampleFilteredParams& params) {
  const ArgumentCheck check(kOp, "logits", params.logits);
  DIFFULEX_RETURN_IF_ERROR(
      check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  if (params.logits.size[1] < 1 || params.logits.size[1] > INT32_MAX) {
    return check.error(StatusCode::kInvalidArgument, "1 to 2147483647 columns",
                       shape_text(params.logits));
  }
  if (params.extra_logits.present()) {
    return ArgumentCheck(kOp, "extra_logits", params.extra_logits)
        .matches({params.logits.dtype}, {kAnyExtent, params.logits.size[1]});
  }
  return {};
}

Status check_row_vectors(const SampleFilteredParams& params, int64_t num_rows) {
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
          ArgumentCheck(kOp, vector.name, vector.tensor).matches({vector.dtype}, {num_rows}));
    }
  }
  return ArgumentCheck(kOp, "stats", params.stats)
      .matches({DType::kF32}, {num_rows, kTokenStatsColumns});
}

Status check_forbidden(const SampleFilteredParams& params) {
  if (!params.forbidden_ids.present()) {
    return {};
  }
  const ArgumentCheck check(kOp, "forbidden_ids", params.forbidden_ids);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kI64}, {kAnyExtent}));
  if (params.forbidden_ids.size[0] > kStatsMaxForbidden) {
    return check.error(StatusCode::kInvalidArgument,
                       "at most " + std::to_string(kStatsMaxForbidden) + " ids",
                       std::to_string(params.forbidden_ids.size[0]));
  }
  return {};
}

Status check_scalars(const SampleFilteredParams& params) {
  if (params.vocab_limit < -1) {
    return scalar_error(kOp, "vocab_limit", "a value >= -1", params.vocab_limit);
  }
  if (!(std::isfinite(params.softcap) && params.softcap >= 0.0F)) {
    return scalar_error(kOp, "softcap", "a finite value >= 0", params.softcap);
  }
  const auto exclusion = static_cast<int32_t>(params.exclusion);
  if (exclusion < static_cast<int32_t>(ExclusionMode::kExclude) ||
      exclusion > static_cast<int32_t>(ExclusionMode::kOff)) {
    return scalar_error(kOp, "exclusion", "0 (exclude), 1 (renormalize) or 2 (off)", exclusion);
  }
  const auto order = static_cast<int32_t>(params.filter_order);
  if (params.filter_order != FilterOrder::kTopPFirst &&
      params.filter_order != FilterOrder::kTopKFirst) {
    return scalar_error(kOp, "filter_order", "0 (top_p, min_p, top_k) or 1 (top_k, min_p, top_p)",
                        order);
  }
  const auto space = static_cast<int32_t>(params.confidence_space);
  if (params.confidence_space != ConfidenceSpace::kProcessed &&
      params.confidence_space != ConfidenceSpace::kTempered) {
    return scalar_error(kOp, "confidence_space", "0 (processed) or 1 (tempered)", space);
  }
  return {};
}

}  // namespace

Status check_sample_filtered(const SampleFilteredParams& params) {
  DIFFULEX_RETURN_IF_ERROR(check_logits(params));
  int64_t num_rows = params.logits.size[0];
  if (params.row_index.present()) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "row_index", params.row_index)
                                 .matches({DType::kI32, DType::kI64}, {kAnyExtent}));
    num_rows = params.row_index.size[0];
  }
  DIFFULEX_RETURN_IF_ERROR(check_row_vectors(params, num_rows));
  DIFFULEX_RETURN_IF_ERROR(check_forbidden(params));
  return check_scalars(params);
}

Status check_entropy_bound_mask(const EntropyBoundMaskParams& params) {
  constexpr const char* kMaskOp = "entropy_bound_mask";
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kMaskOp, "entropy", params.entropy).matches({DType::kF32}, {kAnyExtent}));
  const ArgumentCheck segments_check(kMaskOp, "segments", params.segments);
  DIFFULEX_RETURN_IF_ERROR(segments_check.matches({DType::kI32}, {kAnyExtent}));
  if (params.segments.size[0] < 1) {
    return segments_check.error(StatusCode::kInvalidArgument, "at least one offset",
                                shape_text(params.segments));
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kMaskOp, "mask", params.mask).matches({DType::kU8}, {params.entropy.size[0]}));
  if (std::isnan(params.bound)) {
    return scalar_error(kMaskOp, "bound", "a number", params.bound);
  }
  return {};
}

}  // namespace diffulex
