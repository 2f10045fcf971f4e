// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/linear.h"

namespace diffulex {

[[nodiscard]] Status check_linear_packed(const LinearPackedParams& params);

[[nodiscard]] Status check_linear_few_rows(const LinearFewRowsParams& params);

}  // namespace diffulex
