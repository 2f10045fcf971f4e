// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Arguments shared by the RMSNorm family. H = last extent, contiguous; leading strides free.
/// rms_norm:      out = norm(x) * (weight + weight_offset); out may alias x.
/// add_rms_norm:  residual <- round(x + residual); x <- norm of the unrounded sum (in place).
/// rms_norm_add:  out = (norm(x) + residual) * out_scale[0].
/// With `codes` the first two also write what quantize_rows makes of the result, the same bits.
/// With ExecContext::weights_settled `weight` is read before the launches in front have ended: none
/// of them may then write it.
struct RmsNormParams {
  TensorRef x;          // [..., H] float
  TensorRef residual;   // [..., H] dtype of x; add_rms_norm writes it; absent for rms_norm
  TensorRef weight;     // [H] dtype of x or float32; absent = 1
  TensorRef out_scale;  // [1] float32 or dtype of x; rms_norm_add only; absent = 1
  TensorRef out;        // [..., H] dtype of x; absent for add_rms_norm
  TensorRef codes;      // absent, or [T, H] float8_e4m3fn or int8 of x [T, H]; not rms_norm_add
  TensorRef scale;      // with codes: [ceil(H / 128) or, for one of a row, 1, at least T] float32
  float eps = 1e-6F;    // >= 0
  float weight_offset = 0.0F;
  bool codes_only = false;  // with codes: what the result itself holds is not specified
};

[[nodiscard]] DIFFULEX_API Status rms_norm(const RmsNormParams& params, const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status add_rms_norm(const RmsNormParams& params,
                                               const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status rms_norm_add(const RmsNormParams& params,
                                               const ExecContext& context);

}  // namespace diffulex
