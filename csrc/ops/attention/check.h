// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/attention.h"

namespace diffulex {

/// Shape facts of arguments that passed the checks.
[[nodiscard]] AttentionShape attention_shape(const BlockAttentionParams& params);

/// A result [T, Hq, D] with codes as the rows [T, Hq D] that it is then.
[[nodiscard]] TensorRef attention_rows(const TensorRef& out);

}  // namespace diffulex
