// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/kernels/exec_context.h"
#include "diffulex/kernels/tensor_ref.h"

namespace diffulex {

/// Output columns per panel of a packed weight.
inline constexpr int64_t kLinearPanelColumns = 32;

/// Arguments of `diffulex::linear_packed`: out = x W^T for the W [N, K] that `packed_weight` holds.
/// Panel p, row k, column c is W[32 p + c][k]; columns past N are 0. bfloat16 panels are widened
/// exactly and all arithmetic is float32, so that a W of bfloat16 values gives the same bits either
/// way.
struct LinearPackedParams {
  TensorRef x;              // [M, K] float32, any row stride
  TensorRef packed_weight;  // [ceil(N / 32), K, 32] float32 or bfloat16, contiguous
  TensorRef out;            // [M, N] float32, any row stride, memory of its own
  int32_t out_features = 0;
};

/// CPU only: on CUDA dense products belong to cuBLAS, and a CUDA context is an error. Every element
/// is one sum over ascending k, the same bits for any number of rows and of threads.
[[nodiscard]] DIFFULEX_API Status linear_packed(const LinearPackedParams& params,
                                                const ExecContext& context);

}  // namespace diffulex
