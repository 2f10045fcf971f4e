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

/// Arguments of `diffulex::act_and_mul`: out = act(gate) * up.
struct ActAndMulParams {
  TensorRef x;    // [..., 2 I] float, gate first
  TensorRef out;  // [..., I] dtype of x
  Activation act = Activation::kSilu;
};

[[nodiscard]] DIFFULEX_API Status act_and_mul(const ActAndMulParams& params,
                                              const ExecContext& context);

}  // namespace diffulex
