// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "ops/quant/scaled_tile.h"

namespace diffulex::cuda {

/// A product of every expert over the work tiles of moe_permute with `tile` positions, 16 or 64;
/// at most `max_tiles` of them. `args.experts` says whose rows they are.
[[nodiscard]] Status launch_scaled_experts(const ScaledArgs& args, DType codes, DType out,
                                           int32_t tile, int64_t max_tiles,
                                           const ExecContext& context);

}  // namespace diffulex::cuda
