// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/params.h"

/// The checks in front of every op: shapes, dtypes, strides and scalars, no data.
namespace diffulex {

#define DIFFULEX_OP(name, Params, ...) [[nodiscard]] Status check_##name(const Params& params);
#include "ops/ops.def"

}  // namespace diffulex
