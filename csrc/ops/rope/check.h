// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/rope.h"

namespace diffulex {

[[nodiscard]] Status check_rotary_embedding(const RotaryParams& params);
[[nodiscard]] Status check_qk_norm_rope(const QkNormRopeParams& params);
[[nodiscard]] Status check_qk_norm_rope_store(const QkNormRopeParams& params);

}  // namespace diffulex
