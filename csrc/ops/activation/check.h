// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/activation.h"

namespace diffulex {

[[nodiscard]] Status check_act_and_mul(const ActAndMulParams& params);

}  // namespace diffulex
