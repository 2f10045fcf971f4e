// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/linear/config.h"

namespace diffulex {

/// Columns of a weight of 4 bits that a stage of the ring holds.
inline constexpr int32_t kNibbleStageDepth = 128;
/// Most rows of x of a tile: more sums do not fit the registers of so many warps.
inline constexpr int32_t kNibbleMaxRows = 128;
/// Rows of a tile of x whose sums warpgroups hand to each other at once: the ring needs the memory
/// for those of more.
constexpr int32_t nibble_share_rows(int32_t tile_rows) {
  return tile_rows < kNibbleMaxRows ? tile_rows : 32;
}
/// Most warpgroups of a CTA that multiply.
inline constexpr int32_t kNibbleWarpgroups = 4;

/// How the Hopper product of a weight of 4 bits is dealt out: as LinearPlan, whose lines do not
/// count here. Warpgroups of 64 rows of W stand side by side in `blocks`; where that leaves some
/// over, `phases` of them take the stages of a tile in turn and their sums are added in ascending
/// order. The number of stages is a multiple of the number of phases, so the warpgroups of one
/// phase wait for every round of a stage within a tile (csrc/ops/linear/sm90/ring.cuh says why they
/// must); beside up to 32 rows, where they hold two stages, at least twice as many. Behind the
/// partial sums of the other share, `share_bytes` hold those of a phase, of nibble_share_rows()
/// at a time, then `scale_bytes` the scales of all stages.
struct NibblePlan final {
  LinearPlan linear;
  int32_t tile_rows = 0;  // of x: 16, 32, 64 or 128
  int32_t row_tiles = 0;  // of x
  int32_t num_steps = 0;  // of the depth
  int32_t blocks = 0;
  int32_t phases = 0;
  int32_t share_bytes = 0;
  int32_t scale_bytes = 0;
};

/// Bytes of what turns the nibbles of a group to values: a scale of bfloat16; or one of float32 and
/// a zero point of bfloat16.
inline constexpr int32_t kNibbleScaleBytes = 2;
inline constexpr int32_t kNibbleExactBytes = 6;

/// The plan for `num_rows` rows of x and W [weight_rows, depth] with `scale_bytes` for `group`
/// columns, a divisor of kNibbleStageDepth. What decides the order of sums is the same for all
/// numbers of rows of one tile, of up to kNibbleMaxRows, and for all others where
/// `is_batch_invariant`: else more tiles of x may have larger ones of W.
[[nodiscard]] NibblePlan nibble_plan(int64_t num_rows, int64_t weight_rows, int64_t depth,
                                     int32_t group, int32_t scale_bytes, bool is_batch_invariant,
                                     int32_t num_processors, int32_t smem_limit);

}  // namespace diffulex
