// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/advance.h"
#include "ops/advance/row.h"

namespace diffulex {

/// Pointers and extents of checked arguments.
[[nodiscard]] AdvanceArgs make_advance_args(const AdvanceDecodeParams& params);

}  // namespace diffulex
