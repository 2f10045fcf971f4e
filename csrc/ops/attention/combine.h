// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

struct AttentionArgs;

/// Adds the partials of all requests with more than one split.
[[nodiscard]] Status attention_combine(const AttentionArgs& args, DType dtype,
                                       const ExecContext& context);

/// Loads the kernels on the current device.
[[nodiscard]] Status prepare_attention_combine();

}  // namespace diffulex::cuda
