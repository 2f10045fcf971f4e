// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

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

/// Most rows of linear_few_rows.
inline constexpr int64_t kMaxFewRows = 128;
/// Its weight rows and its depth are multiples of these.
inline constexpr int64_t kFewRowsColumns = 16;
inline constexpr int64_t kFewRowsDepth = 64;

/// Arguments of `diffulex::linear_few_rows`: out = x W^T + bias for at most kMaxFewRows rows x,
/// whose cost is that of reading W once, or out = act(gate) * up where W holds the rows of gate,
/// then those of up. Sums and what follows them are float32, rounded once. With
/// ExecContext::weights_settled W is read before the launches in front have ended: none of them may
/// then write it.
struct LinearFewRowsParams {
  TensorRef x;       // [M, K] bfloat16 or float16, rows 16-byte aligned
  TensorRef weight;  // [N, K] of the same type, rows 16-byte aligned
  TensorRef bias;    // absent or [N] of the same type; absent with an activation
  TensorRef out;  // [M, N], or [M, N / 2] with an activation, of the same type, memory of its own
  std::optional<Activation> act;
};

/// On CUDA compute capability 9.0 only; elsewhere dense products belong to cuBLAS. Deterministic: a
/// row's result depends on that row, W and the bias alone, not on the other rows.
[[nodiscard]] DIFFULEX_API Status linear_few_rows(const LinearFewRowsParams& params,
                                                  const ExecContext& context);

}  // namespace diffulex
