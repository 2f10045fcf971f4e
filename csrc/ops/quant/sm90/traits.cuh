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
  static constexpr int kMaxTileRows = kLinearTileWeightRows;
  static constexpr int kMaxThreads = 128 * (kMaxTileRows / 64) + 32;

  static_assert(kRows <= kScaledFewRows, "the registers do not hold the products of more");
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
