// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Gate nonlinearity of act_and_mul.
enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2 };

/// Arguments of `diffulex::act_and_mul`: out = act(gate) * up. With `codes` also what quantize_rows
/// makes of out, the same bits.
struct ActAndMulParams {
  TensorRef x;      // [..., 2 I] float, gate first
  TensorRef out;    // [..., I] dtype of x
  TensorRef codes;  // absent, or [T, I] float8_e4m3fn or int8 of x [T, 2 I]
  TensorRef scale;  // with codes: [ceil(I / 128) or, for one of a row, 1, at least T] float32
  Activation act = Activation::kSilu;
  bool codes_only = false;  // with codes: what the result itself holds is not specified
};

[[nodiscard]] DIFFULEX_API Status act_and_mul(const ActAndMulParams& params,
                                              const ExecContext& context);

}  // namespace diffulex
