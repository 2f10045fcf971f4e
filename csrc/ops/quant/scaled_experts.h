// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "ops/quant/scaled_tile.h"

namespace diffulex::cuda {

/// A product over at most `max_tiles` tiles of `height` rows, 16 or 64. Where there are experts
/// they are the work tiles of moe_permute, and `args.experts` says whose rows they are.
[[nodiscard]] Status launch_scaled_tiles(const char* where, const ScaledArgs& args, DType codes,
                                         DType out, int64_t height, int64_t max_tiles,
                                         const ExecContext& context);

}  // namespace diffulex::cuda
