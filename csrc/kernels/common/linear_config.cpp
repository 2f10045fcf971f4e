// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/linear_config.h"

#include <algorithm>

#include "diffulex/kernels/linear.h"

namespace diffulex {
namespace {

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// Shares of the depth so that the tiles, none of which waits for a second round, keep all
/// processors busy: as many as two CTAs on each allow.
int32_t choose_splits(int64_t num_tiles, int64_t num_steps, int64_t num_processors) {
  constexpr int32_t kMaxSplits = 4;
  int32_t splits = 1;
  while (splits < kMaxSplits && 2 * splits <= num_steps &&
         num_tiles * 2 * splits <= 2 * num_processors) {
    splits *= 2;
  }
  return splits;
}

}  // namespace

int32_t linear_tile_rows(int64_t num_rows) {
  int32_t rows = 16;
  while (rows < num_rows && rows < kMaxFewRows) {
    rows *= 2;
  }
  return rows;
}

LinearPlan linear_plan(int64_t num_rows, int64_t weight_rows, int64_t depth, int32_t num_processors,
                       int32_t ctas_per_processor) {
  const int64_t num_tiles = divide_up(weight_rows, kLinearTileWeightRows);
  const int64_t num_steps = depth / kFewRowsDepth;
  LinearPlan plan;
  plan.splits = choose_splits(num_tiles, num_steps, num_processors);
  // A part of a box must be whole swizzle patterns of eight rows.
  plan.shares = linear_tile_rows(num_rows) > 16 && num_tiles % 2 == 0 ? 2 : 1;
  plan.num_items = static_cast<int32_t>(divide_up(num_tiles, plan.shares));
  // Tiles that need rounds stay one to a processor: the launch behind finds room there.
  const bool is_one_round = num_tiles * plan.splits > num_processors &&
                            num_tiles * plan.splits <= num_processors * ctas_per_processor;
  const int64_t slots = is_one_round ? num_processors * ctas_per_processor : num_processors;
  const int64_t most = std::max<int64_t>(1, slots / (plan.splits * plan.shares));
  const int64_t rounds = divide_up(plan.num_items, most);
  plan.num_clusters = static_cast<int32_t>(divide_up(plan.num_items, rounds));
  return plan;
}

}  // namespace diffulex
