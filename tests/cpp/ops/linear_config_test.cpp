// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>

#include <gtest/gtest.h>

#include "diffulex/ops/linear.h"
#include "ops/linear/config.h"

namespace diffulex::test {
namespace {

constexpr int32_t kSmemLimit = 227 * 1024;

/// Tiles cover W once, no share of the depth is empty, all CTAs run at once and fit.
void expect_sound(const LinearPlan& plan, int64_t weight_rows, int64_t depth, int32_t processors) {
  EXPECT_EQ(plan.tile_rows % 16, 0);
  EXPECT_GE(plan.tile_rows, 16);
  EXPECT_LE(plan.tile_rows, kLinearTileWeightRows);
  EXPECT_GE(int64_t{plan.num_tiles} * plan.tile_rows, weight_rows);
  EXPECT_LT((int64_t{plan.num_tiles} - 1) * plan.tile_rows, weight_rows);
  EXPECT_GE(plan.num_clusters, 1);
  EXPECT_LE(plan.num_clusters, plan.num_tiles);
  EXPECT_LE(plan.num_clusters * plan.splits, processors);
  EXPECT_TRUE(plan.lines == 1 || plan.lines == 2);
  EXPECT_TRUE(plan.splits == 1 || plan.splits == 2);
  const int64_t step = plan.lines * kFewRowsDepth;
  EXPECT_LE(plan.splits, (depth + step - 1) / step);
  EXPECT_GE(plan.stages, 2);
  EXPECT_LE(plan.smem_bytes, kSmemLimit);
  EXPECT_EQ(plan.stage_bytes % 1024, 0);
  // What is on its way early: two stages, or as many as 40 KiB of W.
  const int32_t weight_bytes = plan.lines * plan.tile_rows * 128;
  EXPECT_GE(plan.paced_stages, 2);
  EXPECT_LE(plan.paced_stages * weight_bytes, std::max(2 * weight_bytes, 40 * 1024));
  // The three barriers of every stage, two of the partial sums, one of the kernels in front.
  const int32_t barriers = (3 * plan.stages + 3) * 8;
  EXPECT_GE(plan.smem_bytes, plan.stages * plan.stage_bytes + plan.partial_bytes + barriers);
  // Every warpgroup reads 64 rows of W.
  const int32_t last = plan.stages * plan.stage_bytes - plan.stage_bytes +
                       ((plan.lines - 1) * plan.tile_rows + (plan.tile_rows + 63) / 64 * 64) * 128;
  EXPECT_GE(plan.smem_bytes, last);
}

TEST(LinearConfigTest, TileRowsHoldTheRows) {
  for (int64_t rows = 1; rows <= kMaxFewRows; ++rows) {
    const int32_t tile = linear_tile_rows(rows);
    EXPECT_GE(tile, rows);
    EXPECT_TRUE(tile == 16 || tile < 2 * rows) << rows;
    EXPECT_EQ(tile & (tile - 1), 0) << rows;
  }
}

/// Tiles of codes fit beside their scales; how the depth is shared does not depend on the rows of
/// x.
TEST(LinearConfigTest, PlansOfCodesAreSoundAndSumInOneOrder) {
  for (const int32_t processors : {1, 78, 132}) {
    for (const int64_t weight_rows : {16, 48, 512, 3072, 4096, 6144, 24576, 151936}) {
      for (const int64_t depth : {16, 128, 384, 704, 4096, 12288}) {
        const ScaledPlan first = scaled_plan(1, weight_rows, depth, processors, kSmemLimit);
        for (const int64_t rows : {1, 16, 17, 33, 64}) {
          const ScaledPlan plan = scaled_plan(rows, weight_rows, depth, processors, kSmemLimit);
          const LinearPlan& linear = plan.linear;
          EXPECT_EQ(linear.splits, first.linear.splits);
          EXPECT_EQ(plan.num_lines, (depth + 127) / 128);
          EXPECT_LE(linear.splits, (plan.num_lines + 1) / 2);
          EXPECT_GE(int64_t{linear.num_tiles} * linear.tile_rows, weight_rows);
          EXPECT_LE(linear.num_clusters * linear.splits, processors);
          EXPECT_GE(linear.stages, 2);
          EXPECT_EQ(plan.scale_bytes, linear.stages * linear.lines * linear_tile_rows(rows) * 4);
          const int32_t barriers = (3 * linear.stages + 3) * 8;
          EXPECT_GE(linear.smem_bytes, linear.stages * linear.stage_bytes + linear.partial_bytes +
                                           plan.scale_bytes + barriers);
          EXPECT_LE(linear.smem_bytes, kSmemLimit);
        }
      }
    }
  }
}

void expect_sound(const ManyRowsPlan& plan, bool has_blocks) {
  const LinearPlan& linear = plan.linear;
  const int32_t sums = kManyRowsTile * linear.tile_rows * 4;
  EXPECT_TRUE(linear.tile_rows == kManyRowsPairedTile ||
              (linear.tile_rows == kManyRowsWideTile && !has_blocks));
  EXPECT_EQ(linear.partial_bytes, linear.splits == 2 ? sums / 2 : 0);
  EXPECT_EQ(plan.held_bytes, linear.splits == 1 && plan.second_share > 0 ? sums : 0);
  EXPECT_TRUE(plan.held_bytes == 0 || linear.tile_rows == kManyRowsPairedTile);
  // Two lines are on their way while others are copied.
  EXPECT_GE(linear.stages, 4);
  EXPECT_EQ(linear.stage_bytes, (linear.tile_rows + kManyRowsTile) * 128);
  EXPECT_EQ(plan.scale_bytes, linear.stages * kManyRowsScaleBytes);
  const int32_t barriers = (3 * linear.stages + 3) * 8;
  EXPECT_GE(linear.smem_bytes, linear.stages * linear.stage_bytes + linear.partial_bytes +
                                   plan.scale_bytes + plan.held_bytes + barriers);
  EXPECT_LE(linear.smem_bytes, kSmemLimit);
}

/// Shares of the depth are those of few rows, or sums would be in another order.
TEST(LinearConfigTest, PlansOfManyRowsAreSoundAndSumAsFewRows) {
  for (const int32_t processors : {1, 78, 132}) {
    for (const int64_t weight_rows : {16, 208, 528, 1728, 3584, 4096, 6144, 24576, 151936}) {
      for (const int64_t depth : {16, 128, 384, 704, 1664, 4096, 12288}) {
        const ScaledPlan few = scaled_plan(1, weight_rows, depth, processors, kSmemLimit);
        const int32_t pairs = (few.num_lines + 1) / 2;
        for (const int64_t rows : {65, 128, 129, 256, 300, 2049}) {
          for (const bool has_blocks : {false, true}) {
            const ManyRowsPlan plan = many_rows_plan(rows, {weight_rows, depth, 128, 1}, has_blocks,
                                                     processors, kSmemLimit);
            EXPECT_EQ(plan.second_share, few.linear.splits == 2 ? pairs / 2 * 2 : 0);
            EXPECT_EQ(plan.num_lines, few.num_lines);
            EXPECT_LT(plan.second_share, plan.num_lines);
            EXPECT_EQ(plan.row_tiles, (rows + kManyRowsTile - 1) / kManyRowsTile);
            EXPECT_GE(int64_t{plan.linear.num_tiles} * plan.linear.tile_rows, weight_rows);
            EXPECT_LE(plan.linear.num_clusters * plan.linear.splits, processors);
            expect_sound(plan, has_blocks);
          }
        }
      }
    }
  }
}

TEST(LinearConfigTest, ManyRowsOfDecodeStepsHaveTheirTilesOnAnH200) {
  struct Shape final {
    int64_t columns;
    int64_t depth;
    int32_t tile_rows;
    int32_t splits;
    int32_t clusters;
  };
  for (const Shape& shape : {Shape{6144, 4096, 192, 2, 64}, Shape{4096, 4096, 128, 2, 64},
                             Shape{24576, 4096, 192, 1, 128}, Shape{4096, 12288, 128, 2, 64}}) {
    const ManyRowsPlan plan =
        many_rows_plan(256, {shape.columns, shape.depth, 128, 1}, false, 132, kSmemLimit);
    EXPECT_EQ(plan.linear.tile_rows, shape.tile_rows);
    EXPECT_EQ(plan.linear.splits, shape.splits);
    EXPECT_EQ(plan.linear.num_clusters, shape.clusters);
  }
}

TEST(LinearConfigTest, PlansAreSoundAndSumInOneOrder) {
  for (const int32_t processors : {1, 8, 78, 132}) {
    for (int64_t weight_rows = 16; weight_rows < 300'000;
         weight_rows = (weight_rows * 5 / 4 + 16) / 16 * 16) {
      for (const int64_t steps : {1, 2, 3, 4, 64, 296}) {
        const int64_t depth = steps * kFewRowsDepth;
        const LinearPlan first = linear_plan(1, weight_rows, depth, processors, kSmemLimit);
        for (const int64_t rows : {1, 16, 17, 32, 64, 65, 128}) {
          const LinearPlan plan = linear_plan(rows, weight_rows, depth, processors, kSmemLimit);
          expect_sound(plan, weight_rows, depth, processors);
          EXPECT_EQ(plan.splits, first.splits);
          EXPECT_EQ(plan.tile_rows, first.tile_rows);
        }
      }
    }
  }
}

TEST(LinearConfigTest, DecodeShapesFillAnH200) {
  struct Shape final {
    int64_t columns;
    int64_t depth;
    int32_t rounds;
  };
  for (const Shape& shape : {Shape{6144, 4096, 1}, Shape{4096, 4096, 1}, Shape{24576, 4096, 1},
                             Shape{4096, 12288, 1}, Shape{151936, 4096, 6}}) {
    const LinearPlan plan = linear_plan(32, shape.columns, shape.depth, 132, kSmemLimit);
    EXPECT_GE(plan.num_clusters * plan.splits, 128) << shape.columns;
    EXPECT_LE(plan.num_tiles, shape.rounds * plan.num_clusters) << shape.columns;
  }
}

}  // namespace
}  // namespace diffulex::test
