// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/nibble_plan.h"

#include <cstdint>
#include <utility>

#include <gtest/gtest.h>

namespace diffulex::test {
namespace {

constexpr int32_t kSmemLimit = 227 * 1024;
/// Groups, and bytes of what they have.
constexpr std::pair<int32_t, int32_t> kScales[] = {
    {32, kNibbleScaleBytes}, {64, kNibbleScaleBytes}, {128, kNibbleScaleBytes},
    {32, kNibbleExactBytes}, {64, kNibbleExactBytes}, {128, kNibbleExactBytes}};

/// Tiles cover W and x, no share of the depth is empty, all CTAs run at once and fit, the ring has
/// whole turns of the phases; the order of sums does not depend on the rows of x, up to those of
/// one tile or where it is asked for.
TEST(NibblePlanTest, PlansAreSoundAndSumInOneOrder) {
  for (const int32_t processors : {1, 78, 132}) {
    for (const int64_t weight_rows : {16, 48, 512, 3072, 4096, 6144, 24576, 151936}) {
      for (const int64_t depth : {128, 256, 384, 4096, 12288}) {
        for (const auto& [group, scale_bytes] : kScales) {
          const auto plan_for = [&](int64_t rows, bool is_batch_invariant) {
            return nibble_plan(rows, weight_rows, depth, group, scale_bytes, is_batch_invariant,
                               processors, kSmemLimit);
          };
          const NibblePlan first = plan_for(1, false);
          for (const int64_t rows : {1, 16, 17, 32, 33, 64, 65, 128, 129, 300, 8192}) {
            const NibblePlan asked = plan_for(rows, true);
            EXPECT_EQ(asked.linear.splits, first.linear.splits);
            EXPECT_EQ(asked.phases, first.phases);
            const NibblePlan plan = plan_for(rows, false);
            const LinearPlan& linear = plan.linear;
            if (rows <= kNibbleMaxRows) {
              EXPECT_EQ(linear.splits, first.linear.splits);
              EXPECT_EQ(plan.phases, first.phases);
            }
            EXPECT_EQ(plan.num_steps * kNibbleStageDepth, depth);
            EXPECT_LE(linear.splits, plan.num_steps);
            EXPECT_GE(int64_t{plan.row_tiles} * plan.tile_rows, rows);
            EXPECT_LE(plan.tile_rows, kNibbleMaxRows);
            EXPECT_GE(int64_t{linear.num_tiles} * linear.tile_rows, weight_rows);
            EXPECT_LE(linear.num_clusters * linear.splits, processors);
            EXPECT_GE(plan.blocks * 64, linear.tile_rows);
            EXPECT_LE(plan.blocks * plan.phases, kNibbleWarpgroups);
            EXPECT_EQ(linear.stages % plan.phases, 0);
            EXPECT_GE(linear.stages,
                      (plan.tile_rows > 32 ? 1 : 2) * plan.phases);  // those it holds
            EXPECT_GE(linear.stages, 3);
            EXPECT_EQ(linear.stage_bytes % 1024, 0);
            EXPECT_EQ(plan.scale_bytes % 16, 0);
            EXPECT_EQ(plan.scale_bytes,
                      linear.stages * linear.tile_rows * scale_bytes * kNibbleStageDepth / group);
            const int32_t handed_rows = plan.tile_rows > 64 ? 32 : plan.tile_rows;
            EXPECT_EQ(plan.share_bytes, plan.phases > 1 ? plan.blocks * 64 * handed_rows * 4 : 0);
            const int32_t barriers = (3 * linear.stages + 3) * 8;
            EXPECT_GE(linear.smem_bytes, linear.stages * linear.stage_bytes + linear.partial_bytes +
                                             plan.share_bytes + plan.scale_bytes + barriers);
            EXPECT_LE(linear.smem_bytes, kSmemLimit);
          }
        }
      }
    }
  }
}

/// The products of SDAR-8B: tiles of whole warpgroups for nearly all processors, larger ones
/// beside two tiles of x.
TEST(NibblePlanTest, ProductsOfAModel) {
  const auto plan_for = [](int64_t rows, int64_t weight_rows, int64_t depth) {
    return nibble_plan(rows, weight_rows, depth, 128, kNibbleScaleBytes, false, 132, kSmemLimit);
  };
  const NibblePlan gate_up = plan_for(32, 24576, 4096);
  EXPECT_EQ(gate_up.linear.tile_rows, 192);
  EXPECT_EQ(gate_up.linear.splits, 1);
  EXPECT_EQ(gate_up.phases, 1);
  const NibblePlan down = plan_for(32, 4096, 12288);
  EXPECT_EQ(down.linear.tile_rows, 64);
  EXPECT_EQ(down.linear.splits, 2);
  EXPECT_EQ(down.phases, 4);
  const NibblePlan many = plan_for(256, 4096, 12288);
  EXPECT_EQ(many.linear.tile_rows, 128);
  EXPECT_EQ(many.linear.splits, 2);
  EXPECT_EQ(many.phases, 2);
  EXPECT_EQ(many.tile_rows, 128);
  // Low tiles of W, of LLaDA2-mini, keep more stages.
  const NibblePlan low = plan_for(128, 3072, 2048);
  EXPECT_EQ(low.linear.tile_rows, 48);
  EXPECT_EQ(low.tile_rows, 64);
  EXPECT_EQ(low.row_tiles, 2);
}

}  // namespace
}  // namespace diffulex::test
