// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/nibble_plan.h"

#include <algorithm>

namespace diffulex {
namespace {

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace

NibblePlan nibble_plan(int64_t num_rows, int64_t weight_rows, int64_t depth, int32_t group,
                       int32_t scale_bytes, bool is_batch_invariant, int32_t num_processors,
                       int32_t smem_limit) {
  constexpr int32_t kMaxStages = 16;
  constexpr int32_t kLowTile = 48;                             // rows of W
  constexpr int32_t kBarrierBytes = 8 * (3 * kMaxStages + 4);  // whole runs of 16
  NibblePlan plan;
  LinearPlan& linear = plan.linear;
  int32_t rows = std::min(linear_tile_rows(num_rows), kNibbleMaxRows);
  // Tiles of x occupy processors as rows of W do: a larger tile of W reads x less often.
  const int64_t all_rows =
      is_batch_invariant ? weight_rows : weight_rows * divide_up(num_rows, rows);
  const TileChoice tile = choose_tile({all_rows, depth, kNibbleStageDepth, 4}, num_processors);
  if (tile.tile_rows <= kLowTile) {
    rows = std::min(rows, 64);  // more stages: there is little to do in one
  }
  plan.tile_rows = rows;
  plan.row_tiles = static_cast<int32_t>(divide_up(num_rows, rows));
  linear.tile_rows = tile.tile_rows;
  linear.splits = tile.splits;
  plan.num_steps = static_cast<int32_t>(depth / kNibbleStageDepth);
  plan.blocks = static_cast<int32_t>(divide_up(linear.tile_rows, 64));
  plan.phases = kNibbleWarpgroups / plan.blocks;
  const int32_t weight_bytes = linear.tile_rows * kNibbleStageDepth / 2;
  linear.paced_stages = std::max(2, kLinearPacedBytes / weight_bytes);
  // Rows of x are of 16 bits. Those of the last warpgroup that W does not have are not read.
  linear.stage_bytes = weight_bytes + rows * kNibbleStageDepth * 2;
  const int32_t stage_scales = linear.tile_rows * scale_bytes * (kNibbleStageDepth / group);
  // Half of the sums of every 16 rows of W: 512 bytes for eight rows of x.
  linear.partial_bytes = linear.splits > 1 ? linear.tile_rows / 16 * (rows / 8) / 2 * 512 : 0;
  plan.share_bytes = plan.phases > 1 ? plan.blocks * 64 * nibble_share_rows(rows) * 4 : 0;
  const int32_t fixed = linear.partial_bytes + plan.share_bytes + kBarrierBytes;
  const int32_t bytes = linear.stage_bytes + stage_scales;
  linear.stages = std::min(kMaxStages, (smem_limit - fixed) / bytes);
  linear.stages -= linear.stages % plan.phases;  // whole turns
  linear.smem_bytes = fixed + linear.stages * bytes;
  plan.scale_bytes = linear.stages * stage_scales;
  deal_tiles(weight_rows, plan.row_tiles, num_processors, &linear);
  return plan;
}

}  // namespace diffulex
