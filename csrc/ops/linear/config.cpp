// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/config.h"

#include <algorithm>

#include "diffulex/ops/linear.h"

namespace diffulex {
namespace {

constexpr int32_t kLineBytes = static_cast<int32_t>(2 * kFewRowsDepth);
constexpr int32_t kRowStep = static_cast<int32_t>(kFewRowsColumns);

int64_t divide_up(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// What the slowest CTA costs, in elements of W that it could read meanwhile: its tiles, the rows
/// of x beside them (from the L2 cache, so that 32 count less) and the exchange of partial sums.
/// Constants count elements of 16 bits; `narrowness` elements of W have the bits of one.
int64_t plan_cost(int64_t rounds, const SteppedWeight& weight, const TileChoice& tile) {
  constexpr int64_t kRowsOfX = 24;
  constexpr int64_t kTile = 4096;
  constexpr int64_t kExchange = 16384;
  const int64_t narrowness = weight.narrowness;
  return rounds * ((tile.tile_rows + narrowness * kRowsOfX) * weight.depth / tile.splits +
                   narrowness * (kTile + (tile.splits - 1) * kExchange));
}

/// The shared memory of a CTA whose tile is `plan->tile_rows` of W and `rows` of x, in stages of at
/// most `max_lines` lines with `extra_bytes` beside each line.
void fit_ring(int32_t rows, int32_t smem_limit, int32_t max_lines, int32_t extra_bytes,
              LinearPlan* plan) {
  constexpr int32_t kMaxStages = 14;
  constexpr int32_t kBarrierBytes = 384;
  constexpr int32_t kShortTile = 96;  // rows of W whose stages want two lines
  plan->lines = plan->tile_rows <= kShortTile ? max_lines : 1;
  const int32_t weight_bytes = plan->tile_rows * kLineBytes * plan->lines;
  plan->paced_stages = std::max(2, kLinearPacedBytes / weight_bytes);
  plan->stage_bytes = (plan->tile_rows + rows) * kLineBytes * plan->lines;
  // Half of the sums of every 16 rows of W: 512 bytes for eight rows of x.
  plan->partial_bytes = plan->splits > 1 ? plan->tile_rows / 16 * (rows / 8) / 2 * 512 : 0;
  // The last warpgroup reads 64 rows wherever the tile ends.
  const int32_t overhang = (64 - plan->tile_rows % 64) % 64 * kLineBytes;
  const int32_t fixed = std::max(overhang, plan->partial_bytes + kBarrierBytes);
  const int32_t bytes = plan->stage_bytes + plan->lines * extra_bytes;
  plan->stages = std::min(kMaxStages, (smem_limit - fixed) / bytes);
  plan->smem_bytes = fixed + plan->stages * bytes;
}

/// As fit_ring, for tiles of kManyRowsTile rows of x.
void fit_many_rows(int32_t smem_limit, ManyRowsPlan* plan) {
  constexpr int32_t kMaxStages = 6;
  constexpr int32_t kBarrierBytes = 256;
  LinearPlan& linear = plan->linear;
  const auto sums = static_cast<int32_t>(kManyRowsTile * linear.tile_rows * sizeof(float));
  linear.paced_stages = 2;
  linear.stage_bytes = (linear.tile_rows + kManyRowsTile) * kLineBytes;
  linear.partial_bytes = linear.splits > 1 ? sums / 2 : 0;
  plan->held_bytes = linear.splits == 1 && plan->second_share > 0 ? sums : 0;
  const int32_t fixed = linear.partial_bytes + plan->held_bytes + kBarrierBytes;
  const int32_t bytes = linear.stage_bytes + kManyRowsScaleBytes;
  linear.stages = std::min(kMaxStages, (smem_limit - fixed) / bytes);
  plan->scale_bytes = linear.stages * kManyRowsScaleBytes;
  linear.smem_bytes = fixed + linear.stages * bytes;
}

}  // namespace

int32_t linear_tile_rows(int64_t num_rows) {
  int32_t rows = 16;
  while (rows < num_rows && rows < kMaxFewRows) {
    rows *= 2;
  }
  return rows;
}

TileChoice choose_tile(const SteppedWeight& weight, int32_t num_processors) {
  TileChoice best;
  int64_t least = 0;
  const int32_t most_splits = weight.depth > 2 * weight.step_depth && num_processors > 1 ? 2 : 1;
  for (int32_t splits = 1; splits <= most_splits; ++splits) {
    for (int32_t tile_rows = kLinearTileWeightRows; tile_rows > 0; tile_rows -= kRowStep) {
      const TileChoice tile{tile_rows, splits};
      const int64_t rounds = divide_up(divide_up(weight.rows, tile_rows), num_processors / splits);
      const int64_t cost = plan_cost(rounds, weight, tile);
      if (best.tile_rows == 0 || cost < least) {
        least = cost;
        best = tile;
      }
    }
  }
  return best;
}

void deal_tiles(int64_t weight_rows, int64_t row_tiles, int32_t num_processors, LinearPlan* plan) {
  plan->num_tiles = static_cast<int32_t>(divide_up(weight_rows, plan->tile_rows));
  const int64_t tiles = plan->num_tiles * row_tiles;
  const int64_t rounds = divide_up(tiles, num_processors / plan->splits);
  plan->num_clusters = static_cast<int32_t>(divide_up(tiles, rounds));
}

LinearPlan linear_plan(int64_t num_rows, int64_t weight_rows, int64_t depth, int32_t num_processors,
                       int32_t smem_limit) {
  LinearPlan plan;
  const TileChoice tile = choose_tile({weight_rows, depth, kFewRowsDepth, 1}, num_processors);
  plan.tile_rows = tile.tile_rows;
  plan.splits = tile.splits;
  fit_ring(linear_tile_rows(num_rows), smem_limit, 2, 0, &plan);
  deal_tiles(weight_rows, 1, num_processors, &plan);
  return plan;
}

ScaledPlan scaled_plan(int64_t num_rows, int64_t weight_rows, int64_t depth, int32_t num_processors,
                       int32_t smem_limit) {
  const int32_t rows = linear_tile_rows(num_rows);
  ScaledPlan plan;
  plan.num_lines = static_cast<int32_t>(divide_up(depth, kLineBytes));
  // A line of codes has the bytes of one of 64 elements of 16 bits.
  plan.linear = linear_plan(num_rows, weight_rows, plan.num_lines * kFewRowsDepth, num_processors,
                            smem_limit);
  LinearPlan& linear = plan.linear;
  const auto line_scales = static_cast<int32_t>(rows * sizeof(float));
  fit_ring(rows, smem_limit, 2, line_scales, &linear);
  plan.scale_bytes = linear.stages * linear.lines * line_scales;
  deal_tiles(weight_rows, 1, num_processors, &linear);
  return plan;
}

ManyRowsPlan many_rows_plan(int64_t num_rows, const SteppedWeight& weight, bool has_blocks,
                            int32_t num_processors, int32_t smem_limit) {
  ManyRowsPlan plan;
  plan.row_tiles = static_cast<int32_t>(divide_up(num_rows, kManyRowsTile));
  plan.num_lines = static_cast<int32_t>(divide_up(weight.depth, kLineBytes));
  const SteppedWeight lines{weight.rows, plan.num_lines * kFewRowsDepth, kFewRowsDepth, 1};
  if (choose_tile(lines, num_processors).splits > 1) {
    plan.second_share = (plan.num_lines + 1) / 4 * 2;
  }
  const int32_t longer_share = plan.num_lines - plan.second_share;
  LinearPlan& linear = plan.linear;
  int64_t least = 0;
  for (int32_t splits = 1; splits <= (plan.second_share > 0 ? 2 : 1); ++splits) {
    for (const int32_t tile_rows : {kManyRowsPairedTile, kManyRowsWideTile}) {
      const bool is_wide = tile_rows > kManyRowsPairedTile;
      // There is no room to hold the sums of a wide tile.
      if (is_wide && (has_blocks || (splits == 1 && plan.second_share > 0))) {
        continue;
      }
      // Cycles of a line, and of the end of a tile, on an H200: of both kinds of tiles relative to
      // each other, as times of whole products fit them.
      const int64_t cycles =
          (splits == 1 ? plan.num_lines : longer_share) * (is_wide ? 1010 : 740) +
          (is_wide ? 4000 : 2200) * splits;
      const int64_t tiles = divide_up(weight.rows, tile_rows) * plan.row_tiles;
      const int64_t cost = divide_up(tiles, num_processors / splits) * cycles;
      if (least == 0 || cost < least) {
        least = cost;
        linear.tile_rows = tile_rows;
        linear.splits = splits;
      }
    }
  }
  fit_many_rows(smem_limit, &plan);
  deal_tiles(weight.rows, plan.row_tiles, num_processors, &linear);
  return plan;
}

}  // namespace diffulex
