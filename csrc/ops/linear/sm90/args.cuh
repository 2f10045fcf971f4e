// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of the ring of products for few rows take; those of codes and nibbles add more.

#include <cstdint>

namespace diffulex::cuda::sm90 {

struct LinearArgs {
  void* out;         // [num_rows, num_columns]
  const void* bias;  // [rows of W] or null; null with a gate
  int64_t out_stride;
  int32_t num_rows;
  int32_t num_columns;
  int32_t tile_rows;      // of W
  int32_t num_tiles;      // of W
  int32_t num_steps;      // of depth, a stage each; at least `splits`
  int32_t splits;         // shares of the depth: 1 or 2
  int32_t lines;          // of a stage
  int32_t stages;         // of the ring
  int32_t paced_stages;   // on their way at a time while the kernels in front run
  int32_t stage_bytes;    // of W, then of x
  int32_t row_bytes;      // of x that a stage gets; the products of later bytes are ignored
  int32_t partial_bytes;  // from the other share, a tile; 0 without one
  int32_t warps;          // that hold sums: tile_rows / 16, or 8 with many rows
  int32_t act;            // Activation of gate and up rows that alternate by eight, or -1
};

}  // namespace diffulex::cuda::sm90
