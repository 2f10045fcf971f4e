// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex {

/// Most rows of W (columns of the result) of one tile of linear_few_rows.
inline constexpr int32_t kLinearTileWeightRows = 192;

/// Bytes of W on their way to a CTA while the kernels in front run: enough for the memory
/// bandwidth, and not so much that other reads wait long.
inline constexpr int32_t kLinearPacedBytes = 40 * 1024;

/// How W and the depth of one linear_few_rows are dealt to CTAs, and what a CTA keeps in its shared
/// memory: a ring of stages, then partial sums, then barriers.
struct LinearPlan final {
  int32_t tile_rows = 0;      // of W: a multiple of 16 up to kLinearTileWeightRows
  int32_t splits = 1;         // shares of the depth: 1, or 2 as the CTAs of a cluster
  int32_t lines = 1;          // of a stage, 64 elements of depth each: 1 or 2
  int32_t stages = 0;         // of the ring
  int32_t paced_stages = 0;   // of W on their way at a time before x may be read
  int32_t num_tiles = 0;      // of tile_rows rows of W
  int32_t num_clusters = 0;   // that take tiles in turn
  int32_t stage_bytes = 0;    // of W, then of x
  int32_t partial_bytes = 0;  // that a CTA gets from the other one
  int32_t smem_bytes = 0;
};

/// Rows of x a tile holds: 16, 32, 64 or 128.
[[nodiscard]] int32_t linear_tile_rows(int64_t num_rows);

/// W [rows, depth], in steps of `step_depth`. An element of x has the bits of `narrowness` of W.
struct SteppedWeight final {
  int64_t rows = 0;
  int64_t depth = 0;
  int64_t step_depth = 0;
  int64_t narrowness = 1;
};

/// `tile_rows` and `splits` of a LinearPlan.
struct TileChoice final {
  int32_t tile_rows = 0;
  int32_t splits = 1;
};

/// The tiles with which the slowest CTA costs least.
[[nodiscard]] TileChoice choose_tile(const SteppedWeight& weight, int32_t num_processors);

/// Deals the tiles of W, times `row_tiles` of x, to as few clusters as take them in the same time.
void deal_tiles(int64_t weight_rows, int64_t row_tiles, int32_t num_processors, LinearPlan* plan);

/// The plan for `num_rows` rows of x, W [weight_rows, depth] and a device of `num_processors` with
/// `smem_limit` bytes a CTA. A function of shapes alone; `splits`, which decides the order of sums,
/// does not depend on num_rows.
[[nodiscard]] LinearPlan linear_plan(int64_t num_rows, int64_t weight_rows, int64_t depth,
                                     int32_t num_processors, int32_t smem_limit);

/// Rows of x up to which the product of 8-bit codes takes the plan of few rows.
inline constexpr int32_t kScaledFewRows = 64;

/// The plan for products of 8-bit codes, whose lines are 128 elements: for `num_rows` rows of x, at
/// most kScaledFewRows. `scale_bytes` counts the scales of the rows of x, which lie between partial
/// sums and barriers. A row's sums are in the same order for any num_rows.
struct ScaledPlan final {
  LinearPlan linear;
  int32_t num_lines = 0;  // of the depth
  int32_t scale_bytes = 0;
};
[[nodiscard]] ScaledPlan scaled_plan(int64_t num_rows, int64_t weight_rows, int64_t depth,
                                     int32_t num_processors, int32_t smem_limit);

/// Products of 8-bit codes with more than kScaledFewRows rows of x: rows of a tile of x, and of the
/// copies that bring them; rows of W of a tile, the lower one with two lines on their way; bytes of
/// the scales of a tile of x, from a multiple of four rows on.
inline constexpr int32_t kManyRowsTile = 128;
inline constexpr int32_t kManyRowsBox = 64;
inline constexpr int32_t kManyRowsPairedTile = 128;
inline constexpr int32_t kManyRowsWideTile = 192;
inline constexpr int32_t kManyRowsScaleBytes = (kManyRowsTile + 4) * 4;

/// Their plan. The shares of the depth are those of scaled_plan, and so the order of the sums,
/// whether two CTAs have one each or one has both.
struct ManyRowsPlan final {
  LinearPlan linear;         // its tile is kManyRowsPairedTile or kManyRowsWideTile rows of W
  int32_t row_tiles = 0;     // of x
  int32_t num_lines = 0;     // of the depth
  int32_t second_share = 0;  // its first line; 0: one share
  int32_t scale_bytes = 0;   // of all stages
  int32_t held_bytes = 0;    // for the first share's sums, where a CTA has both
};

/// `has_blocks`: W has a scale for each block of 128 x 128, of which a tile must have whole ones.
[[nodiscard]] ManyRowsPlan many_rows_plan(int64_t num_rows, const SteppedWeight& weight,
                                          bool has_blocks, int32_t num_processors,
                                          int32_t smem_limit);

}  // namespace diffulex
