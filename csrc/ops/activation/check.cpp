// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "ops/checks.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {

Status check_act_and_mul(const ActAndMulParams& params) {
  constexpr const char* kOp = "act_and_mul";
  const ArgumentCheck x_check(kOp, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(x_check.activation());
  if (params.x.last() % 2 != 0) {
    return x_check.error(StatusCode::kInvalidArgument, "an even last dimension",
                         shape_text(params.x));
  }
  const ArgumentCheck out_check(kOp, "out", params.out);
  DIFFULEX_RETURN_IF_ERROR(out_check.dtype({params.x.dtype}));
  TensorRef expected = params.x;
  expected.size[expected.rank - 1] /= 2;
  bool equal = params.out.rank == expected.rank;
  for (int32_t dim = 0; equal && dim < expected.rank; ++dim) {
    equal = params.out.size[dim] == expected.size[dim];
  }
  if (!equal) {
    return out_check.error(StatusCode::kInvalidArgument, "shape " + shape_text(expected),
                           shape_text(params.out));
  }
  DIFFULEX_RETURN_IF_ERROR(out_check.last_contiguous());
  if (params.act != Activation::kSilu && params.act != Activation::kGeluTanh &&
      params.act != Activation::kGeluErf) {
    return scalar_error(kOp, "act", "0 (silu), 1 (gelu tanh) or 2 (gelu erf)",
                        static_cast<int32_t>(params.act));
  }
  return check_code_rows(kOp, "out", params.out, params.codes, params.scale);
}

}  // namespace diffulex
