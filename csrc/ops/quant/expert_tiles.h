// SPDX-License-Identifier: Apache-2.0
#pragma once

// Experts of 4 bits in the tiles of linear_w4a16: [L, N / 8, K / 64, 32, 8].

#include "diffulex/core/status.h"
#include "diffulex/ops/moe.h"

namespace diffulex {

/// Whether the experts of a call are in tiles.
[[nodiscard]] inline bool has_expert_tiles(const FusedMoeParams& params) {
  return params.w13.rank == 5 && params.w13.dtype == DType::kU8;
}

/// Checks the dtype of the rows, the tiles and the groups of a call that has some, not what they
/// share with experts by row.
[[nodiscard]] Status check_expert_tiles(const char* op, const FusedMoeParams& params);

/// A call with tiles with experts [L, N, K / 2] in the same memory, which have the shape but not
/// the order of rows; others as they are.
[[nodiscard]] FusedMoeParams in_shape_of_rows(const FusedMoeParams& params);

}  // namespace diffulex
