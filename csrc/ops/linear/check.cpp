// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>

#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {

Status check_linear_packed(const LinearPackedParams& params) {
  constexpr const char* kOp = "linear_packed";
  const ArgumentCheck x_check(kOp, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(x_check.matches({DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t in_features = params.x.size[1];
  if (in_features < 1) {
    return x_check.error(StatusCode::kInvalidArgument, "a last dimension >= 1",
                         shape_text(params.x));
  }
  if (params.out_features < 1) {
    return scalar_error(kOp, "out_features", "a value >= 1", params.out_features);
  }
  const int64_t out_features = params.out_features;
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "packed_weight", params.packed_weight)
          .dense({DType::kF32, DType::kBF16},
                 {(out_features - 1) / kLinearPanelColumns + 1, in_features, kLinearPanelColumns}));
  const ArgumentCheck out_check(kOp, "out", params.out);
  DIFFULEX_RETURN_IF_ERROR(out_check.matches({DType::kF32}, {params.x.size[0], out_features}));
  if (params.x.size[0] > 0 && params.out.data == params.x.data) {
    return out_check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  return {};
}

Status check_linear_few_rows(const LinearFewRowsParams& params) {
  constexpr const char* kOp = "linear_few_rows";
  constexpr int64_t kAlignedElements = 8;  // 16 bytes
  const ArgumentCheck x_check(kOp, "x", params.x);
  const ArgumentCheck weight_check(kOp, "weight", params.weight);
  DIFFULEX_RETURN_IF_ERROR(x_check.matches({DType::kBF16, DType::kF16}, {kAnyExtent, kAnyExtent}));
  const int64_t num_rows = params.x.size[0];
  const int64_t depth = params.x.size[1];
  if (num_rows > kMaxFewRows || depth < kFewRowsDepth || depth % kFewRowsDepth != 0) {
    return x_check.error(StatusCode::kInvalidArgument,
                         "at most " + std::to_string(kMaxFewRows) + " rows of a multiple of " +
                             std::to_string(kFewRowsDepth) + " elements",
                         shape_text(params.x));
  }
  DIFFULEX_RETURN_IF_ERROR(weight_check.matches({params.x.dtype}, {kAnyExtent, depth}));
  const int64_t weight_rows = params.weight.size[0];
  if (weight_rows < kFewRowsColumns || weight_rows % kFewRowsColumns != 0) {
    return weight_check.error(StatusCode::kInvalidArgument,
                              "a multiple of " + std::to_string(kFewRowsColumns) + " rows",
                              shape_text(params.weight));
  }
  const bool has_act = params.act.has_value();
  const ArgumentCheck bias_check(kOp, "bias", params.bias);
  if (has_act) {
    DIFFULEX_RETURN_IF_ERROR(check_act(kOp, *params.act));
    DIFFULEX_RETURN_IF_ERROR(bias_check.absent("a gated product has no bias"));
  } else if (params.bias.data != nullptr) {
    DIFFULEX_RETURN_IF_ERROR(bias_check.matches({params.x.dtype}, {weight_rows}));
  }
  if (params.x.stride[0] % kAlignedElements != 0 ||
      params.weight.stride[0] % kAlignedElements != 0 ||
      reinterpret_cast<uintptr_t>(params.x.data) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(params.weight.data) % 16 != 0) {
    return x_check.error(StatusCode::kInvalidArgument, "rows of x and weight aligned to 16 bytes",
                         "others");
  }
  const ArgumentCheck out_check(kOp, "out", params.out);
  const int64_t num_columns = has_act ? weight_rows / 2 : weight_rows;
  DIFFULEX_RETURN_IF_ERROR(out_check.matches({params.x.dtype}, {num_rows, num_columns}));
  if (params.out.stride[0] % 2 != 0 || reinterpret_cast<uintptr_t>(params.out.data) % 4 != 0) {
    return out_check.error(StatusCode::kInvalidArgument, "rows aligned to 4 bytes", "others");
  }
  if (num_rows > 0 && params.out.data == params.x.data) {
    return out_check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  return {};
}

}  // namespace diffulex
