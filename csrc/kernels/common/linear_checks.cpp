// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/linear_checks.h"

#include "kernels/common/tensor_checks.h"

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

}  // namespace diffulex
