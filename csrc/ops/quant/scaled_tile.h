// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arguments of the portable product of rows and a weight of 8 bits.

#include <cstdint>

namespace diffulex::cuda {

/// Rows of x and of W, sorted by expert: see MoePermuteParams. Without `tile_expert` there is none.
struct ExpertTiles final {
  const int32_t* tile_expert;
  const int32_t* tile_start;
  const int32_t* counters;  // [0] = number of tiles
  const int32_t* ends;      // one past the last position of each expert
  const int32_t* slots;     // by position: the row of the result, and of x times `top_k`
  int64_t weight_stride;    // between experts
  int64_t scale_stride;     // between experts, of the scales of W
  int32_t top_k;
};

struct ScaledArgs final {
  const uint8_t* x;           // [T, K] codes
  const float* x_scale;       // [ceil(K / 128), T]
  const uint8_t* weight;      // [N, K]
  const float* weight_scale;  // [N], or [blocks of rows, ceil(K / 128)]
  const float* bias;          // [N] or null
  void* out;                  // [T, width]
  int64_t x_stride;
  int64_t x_scale_stride;
  int64_t weight_stride;
  int64_t block_stride;  // of weight_scale in blocks; 0: it has one a row
  int64_t out_stride;
  int32_t num_rows;
  int32_t depth;
  int32_t width;      // of the result
  int32_t up_blocks;  // rows of blocks before those of up
  int32_t act;        // Activation where W holds gate and up, `width` rows each; -1: W has `width`
  ExpertTiles experts;
};

}  // namespace diffulex::cuda
