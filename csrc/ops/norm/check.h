// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/norm.h"

namespace diffulex {

[[nodiscard]] Status check_rms_norm(const RmsNormParams& params);
[[nodiscard]] Status check_add_rms_norm(const RmsNormParams& params);
[[nodiscard]] Status check_rms_norm_add(const RmsNormParams& params);

}  // namespace diffulex
