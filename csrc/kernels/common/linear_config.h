// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex {

/// Rows of W (columns of the result) of one tile of linear_few_rows.
inline constexpr int32_t kLinearTileWeightRows = 128;

/// How the tiles of W and the depth of one linear_few_rows are dealt to clusters of CTAs.
struct LinearPlan final {
  int32_t splits = 1;        // shares of the depth: 1, 2 or 4
  int32_t shares = 1;        // neighbouring tiles whose CTAs bring each other the rows of x
  int32_t num_items = 0;     // groups of `shares` tiles
  int32_t num_clusters = 0;  // of splits * shares CTAs
};

/// Rows of x a tile holds: 16, 32, 64, 128 or 256.
[[nodiscard]] int32_t linear_tile_rows(int64_t num_rows);

/// The plan for `num_rows` rows of x, W [weight_rows, depth] and a device of `num_processors` that
/// hold `ctas_per_processor` each. A function of shapes alone; `splits`, which decides the order of
/// sums, does not depend on num_rows.
[[nodiscard]] LinearPlan linear_plan(int64_t num_rows, int64_t weight_rows, int64_t depth,
                                     int32_t num_processors, int32_t ctas_per_processor);

}  // namespace diffulex
