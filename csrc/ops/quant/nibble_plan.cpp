// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/nibble_plan.h"

#include <algorithm>

#include "diffulex/ops/linear.h"

namespace diffulex {
namespace {

constexpr int32_t kRowStep = static_cast<int32_t>(kFewRowsColumns);

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// What the slowest CTA costs, in bytes of W that it could read meanwhile: as in linear_plan, but
/// beside four times as few of them.
int64_t plan_cost(int64_t rounds, int64_t depth, int64_t tile_rows, int64_t splits) {
  constexpr int64_t kBytesOfX = 48;  // for each column of the depth
  constexpr int64_t kTile = 8192;
  constexpr int64_t kExchange = 32768;
  return rounds * ((tile_rows / 2 + kBytesOfX) * depth / splits + kTile + (splits - 1) * kExchange);
}

}  // namespace

NibblePlan nibble_plan(int64_t num_rows, int64_t weight_rows, int64_t depth, int32_t group,
                       int32_t num_processors, int32_t smem_limit) {
  constexpr int32_t kMaxStages = 16;
  constexpr int32_t kBarrierBytes = 8 * (3 * kMaxStages + 4);  // whole runs of 16
  constexpr int32_t kPacedBytes = 40 * 1024;                   // as in linear_plan
  NibblePlan plan;
  LinearPlan& linear = plan.linear;
  int64_t least = 0;
  const int64_t most_splits = depth > 2 * kNibbleStageDepth && num_processors > 1 ? 2 : 1;
  for (int64_t splits = 1; splits <= most_splits; ++splits) {
    for (int32_t tile_rows = kLinearTileWeightRows; tile_rows > 0; tile_rows -= kRowStep) {
      const int64_t rounds = divide_up(divide_up(weight_rows, tile_rows), num_processors / splits);
      const int64_t cost = plan_cost(rounds, depth, tile_rows, splits);
      if (linear.tile_rows == 0 || cost < least) {
        least = cost;
        linear.tile_rows = tile_rows;
        linear.splits = static_cast<int32_t>(splits);
      }
    }
  }
  const int32_t rows = std::min(linear_tile_rows(num_rows), kNibbleMaxRows);
  plan.tile_rows = rows;
  plan.row_tiles = static_cast<int32_t>(divide_up(num_rows, rows));
  plan.num_steps = static_cast<int32_t>(depth / kNibbleStageDepth);
  plan.blocks = static_cast<int32_t>(divide_up(linear.tile_rows, 64));
  plan.phases = kNibbleWarpgroups / plan.blocks;
  const int32_t weight_bytes = linear.tile_rows * kNibbleStageDepth / 2;
  linear.paced_stages = std::max(2, kPacedBytes / weight_bytes);
  // Rows of x are of 16 bits. Those of the last warpgroup that W does not have are not read.
  linear.stage_bytes = weight_bytes + rows * kNibbleStageDepth * 2;
  const int32_t stage_scales = linear.tile_rows * 2 * (kNibbleStageDepth / group);
  // Half of the sums of every 16 rows of W: 512 bytes for eight rows of x.
  linear.partial_bytes = linear.splits > 1 ? linear.tile_rows / 16 * (rows / 8) / 2 * 512 : 0;
  plan.share_bytes = plan.phases > 1 ? plan.blocks * 64 * rows * 4 : 0;
  const int32_t fixed = linear.partial_bytes + plan.share_bytes + kBarrierBytes;
  const int32_t bytes = linear.stage_bytes + stage_scales;
  linear.stages = std::min(kMaxStages, (smem_limit - fixed) / bytes);
  linear.stages -= linear.stages % plan.phases;  // whole turns
  linear.smem_bytes = fixed + linear.stages * bytes;
  plan.scale_bytes = linear.stages * stage_scales;
  linear.num_tiles = static_cast<int32_t>(divide_up(weight_rows, linear.tile_rows));
  const int64_t tiles = int64_t{linear.num_tiles} * plan.row_tiles;
  const int64_t rounds = divide_up(tiles, num_processors / linear.splits);
  linear.num_clusters = static_cast<int32_t>(divide_up(tiles, rounds));
  return plan;
}

}  // namespace diffulex
