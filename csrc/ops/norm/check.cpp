// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "ops/checks.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

Status check_common(const char* op, const RmsNormParams& params) {
  const ArgumentCheck x_check(op, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(x_check.activation());
  const int64_t hidden = params.x.last();
  if (hidden < 1) {
    return x_check.error(StatusCode::kInvalidArgument, "a last dimension >= 1",
                         shape_text(params.x));
  }
  if (params.weight.present()) {
    const ArgumentCheck weight_check(op, "weight", params.weight);
    DIFFULEX_RETURN_IF_ERROR(params.x.dtype == DType::kF32
                                 ? weight_check.matches({DType::kF32}, {hidden})
                                 : weight_check.matches({params.x.dtype, DType::kF32}, {hidden}));
  }
  if (!(params.eps >= 0.0F)) {
    return scalar_error(op, "eps", "a value >= 0", params.eps);
  }
  return {};
}

Status check_like_x(const char* op, const char* name, const TensorRef& tensor, const TensorRef& x) {
  const ArgumentCheck check(op, name, tensor);
  DIFFULEX_RETURN_IF_ERROR(check.dtype({x.dtype}));
  DIFFULEX_RETURN_IF_ERROR(check.same_shape("x", x));
  return check.last_contiguous();
}

}  // namespace

Status check_rms_norm(const RmsNormParams& params) {
  constexpr const char* kOp = "rms_norm";
  DIFFULEX_RETURN_IF_ERROR(check_common(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_like_x(kOp, "out", params.out, params.x));
  return check_code_rows(kOp, "x", params.x, params.codes, params.scale);
}

Status check_add_rms_norm(const RmsNormParams& params) {
  constexpr const char* kOp = "add_rms_norm";
  DIFFULEX_RETURN_IF_ERROR(check_common(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_like_x(kOp, "residual", params.residual, params.x));
  if (params.x.numel() > 0 && params.residual.data == params.x.data) {
    return ArgumentCheck(kOp, "residual", params.residual)
        .error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  return check_code_rows(kOp, "x", params.x, params.codes, params.scale);
}

Status check_rms_norm_add(const RmsNormParams& params) {
  constexpr const char* kOp = "rms_norm_add";
  DIFFULEX_RETURN_IF_ERROR(check_common(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_like_x(kOp, "residual", params.residual, params.x));
  if (params.out_scale.present()) {
    const ArgumentCheck check(kOp, "out_scale", params.out_scale);
    DIFFULEX_RETURN_IF_ERROR(params.x.dtype == DType::kF32
                                 ? check.dtype({DType::kF32})
                                 : check.dtype({DType::kF32, params.x.dtype}));
    if (params.out_scale.numel() != 1) {
      return check.error(StatusCode::kInvalidArgument, "one element", shape_text(params.out_scale));
    }
  }
  return check_like_x(kOp, "out", params.out, params.x);
}

}  // namespace diffulex
