// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/linear_config.h"

#include <cstdint>

#include <gtest/gtest.h>

#include "diffulex/kernels/linear.h"

namespace diffulex::test {
namespace {

/// W of `tiles` tiles, the last not whole.
LinearPlan plan_of(int64_t rows, int64_t tiles, int64_t steps, int32_t processors, int32_t ctas) {
  return linear_plan(rows, tiles * kLinearTileWeightRows - 16, steps * kFewRowsDepth, processors,
                     ctas);
}

/// Every tile belongs to one item, no share of the depth is empty, and all CTAs run at once.
void expect_sound(const LinearPlan& plan, int64_t tiles, int64_t steps, int64_t slots) {
  EXPECT_LE(plan.splits, steps);
  EXPECT_LE(plan.splits * plan.shares, 8);  // clusters that every device takes
  EXPECT_GE(int64_t{plan.num_items} * plan.shares, tiles);
  EXPECT_LT((int64_t{plan.num_items} - 1) * plan.shares, tiles);
  EXPECT_GE(plan.num_clusters, 1);
  EXPECT_LE(plan.num_clusters, plan.num_items);
  EXPECT_LE(int64_t{plan.num_clusters} * plan.splits * plan.shares, slots);
}

TEST(LinearConfigTest, TileRowsHoldTheRows) {
  for (int64_t rows = 1; rows <= kMaxFewRows; ++rows) {
    const int32_t tile = linear_tile_rows(rows);
    EXPECT_GE(tile, rows);
    EXPECT_TRUE(tile == 16 || tile < 2 * rows) << rows;
    EXPECT_EQ(tile & (tile - 1), 0) << rows;
  }
}

TEST(LinearConfigTest, PlansAreSoundAndSumInOneOrder) {
  for (const int32_t processors : {8, 78, 132}) {
    for (int64_t tiles = 1; tiles < 2000; tiles = tiles * 5 / 4 + 1) {
      for (const int64_t steps : {1, 2, 3, 4, 64, 296}) {
        const int32_t splits = plan_of(1, tiles, steps, processors, 2).splits;
        for (const int64_t rows : {1, 16, 32, 64, 256}) {
          const int32_t ctas = rows <= 64 ? 2 : 1;
          const LinearPlan plan = plan_of(rows, tiles, steps, processors, ctas);
          expect_sound(plan, tiles, steps, int64_t{processors} * ctas);
          EXPECT_EQ(plan.splits, splits);
        }
      }
    }
  }
}

TEST(LinearConfigTest, DecodeShapesOnAnH200) {
  EXPECT_EQ(linear_plan(32, 6144, 4096, 132, 2).splits, 4);
  EXPECT_EQ(linear_plan(32, 4096, 12288, 132, 2).splits, 4);
  EXPECT_EQ(linear_plan(32, 151936, 4096, 132, 2).splits, 1);
}

}  // namespace
}  // namespace diffulex::test
