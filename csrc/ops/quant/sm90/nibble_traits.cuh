// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the product of a weight of 4 bits: as LinearTraits, of which it shares the tiles of W,
// the ring and the exchange of partial sums. A stage is 128 columns: two lines of x.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/linear/sm90/args.cuh"
#include "ops/quant/nibble_plan.h"

namespace diffulex::cuda::sm90 {

template <int kRowCount, int kScaleCount, bool kHasExactScales>
struct NibbleTraits final {
  using T = __nv_bfloat16;                        // of x and of the result
  static constexpr int kRows = kRowCount;         // of x
  static constexpr int kScaleRows = kScaleCount;  // of a stage: 128 / group
  /// Whether scales are float32, with zero points; those of a stage lie behind its scales.
  static constexpr bool kIsExact = kHasExactScales;
  static constexpr int kScaleBytes = kIsExact ? kNibbleExactBytes : kNibbleScaleBytes;
  static constexpr int kGroups = kRows / 8;  // accumulators of a thread, four floats each
  static constexpr int kLineBytes = 128;     // of a row of x: the swizzle
  static constexpr int kLines = 2 * kNibbleStageDepth / kLineBytes;
  /// Whether the sums leave few registers.
  static constexpr bool kIsFull = kRows > 32;
  // A piece of a stage, whose left operand is made at a time: a line, or half of one. Stages that
  // follow each other without a break.
  static constexpr int kPieceSteps = kIsFull ? 2 : 4;  // of 16 columns
  static constexpr int kPieces = kNibbleStageDepth / (16 * kPieceSteps);
  static constexpr int kTurn = kIsFull ? 1 : 2;
  // Beside most rows the copying warp has a warpgroup of its own, which leaves its registers to the
  // others: of the 96 of a thread of five warpgroups.
  static constexpr bool kHasCopyingGroup = kRows == kNibbleMaxRows;
  static constexpr int kCopyingThreads = kHasCopyingGroup ? 128 : 32;
  static constexpr int kCopyingRegisters = 32;
  static constexpr int kConsumerRegisters = 112;
  static constexpr int kMaxThreads = kNibbleWarpgroups * 128 + kCopyingThreads;

  static_assert(kRows <= kNibbleMaxRows, "the registers do not hold more sums");
  static_assert(!kHasCopyingGroup || kCopyingRegisters + kNibbleWarpgroups * kConsumerRegisters <=
                                         65536 / kMaxThreads / 8 * 8 * (kMaxThreads / 128),
                "more would be waited for in vain");
};

struct NibbleLinearArgs final : LinearArgs {
  const uint8_t* scales;  // [K / group, rows of W]
  const uint8_t* zeros;   // the same, of exact scales
  int64_t scale_stride;   // in bytes
  int64_t zero_stride;
  int32_t row_tiles;      // of x; those of one tile of W follow each other
  int32_t box_rows;       // of x that a copy brings
  int32_t scale_bytes;    // of all stages
  int32_t stripe_scales;  // scales from the first of a warp to that of the next one
  int32_t below_scales;   // scales from that of its first to that of its second eight rows
  int32_t share_bytes;    // of the sums of a phase
  int32_t blocks;         // warpgroups side by side
  int32_t phases;         // warpgroups that take stages in turn

  __device__ __forceinline__ bool has_stripe(int32_t stripe) const { return stripe < warps; }
};

}  // namespace diffulex::cuda::sm90
