// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the product of e4m3 codes: as LinearTraits, of which it shares the tiles of W, the ring
// and the exchange of partial sums. A line is 128 columns, and so the codes of one scale.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/linear/config.h"
#include "ops/linear/sm90/args.cuh"

namespace diffulex::cuda::sm90 {

template <int kRowCount, int kLineCount>
struct ScaledTraits final {
  using T = __nv_bfloat16;                   // of the result
  static constexpr int kRows = kRowCount;    // of x
  static constexpr int kLines = kLineCount;  // of a stage
  static constexpr int kGroups = kRows / 8;  // accumulators of a thread, four floats each
  static constexpr int kLineBytes = 128;     // the swizzle
  static constexpr int kLineScales = kRows * static_cast<int>(sizeof(float));
  static constexpr int kMaxTileRows =
      kRows > kScaledShortRows ? kScaledTallTile : kLinearTileWeightRows;
  /// Whether the sums of one piece of a line are promoted while the other is multiplied, where W
  /// has no scales of blocks: their factors took 7 % more time so than one after the other. Few
  /// rows wait for the memory, where a stage that is free sooner is worth more.
  static constexpr bool kOverlaps = kRows > kScaledShortRows;
  static constexpr int kMaxThreads = 128 * (kMaxTileRows / 64) + 32;

  static_assert(kLines == 1 || kRows <= kScaledShortRows,
                "with many rows the registers do not hold two products");
};

struct ScaledLinearArgs : LinearArgs {
  const float* x_scale;       // [ceil(K / 128), num_rows and padding]
  const float* weight_scale;  // [rows of W], or [blocks of rows, ceil(K / 128)]
  int64_t x_scale_stride;
  int64_t block_stride;  // of weight_scale in blocks; 0: it has one a row
  int32_t weight_rows;
  int32_t num_lines;    // of the depth
  int32_t box_rows;     // of x that a copy brings
  int32_t scale_bytes;  // of all stages
};

}  // namespace diffulex::cuda::sm90
