// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two products of every expert over tiles of rows, shared by fused_moe and
// fused_experts_packed.

#include <cstdint>

#include "diffulex/ops/moe.h"

namespace diffulex::cpu {

/// Where the rows of a tensor [R, n] or [A, B, n] begin.
struct RowPlaces {
  int64_t inner = 0;  // B; rows of a matrix are all inner
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  [[nodiscard]] static RowPlaces of(const TensorRef& tensor) {
    if (tensor.rank == 2) {
      return {tensor.size[0], 0, tensor.stride[0]};
    }
    return {tensor.size[1], tensor.stride[0], tensor.stride[1]};
  }
  [[nodiscard]] int64_t offset(int64_t row) const {
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

/// Work tiles: at most kMoeCpuTile consecutive positions of one expert.
struct MoeTiles {
  int32_t* expert = nullptr;      // [num_tiles]
  int32_t* start = nullptr;       // [num_tiles]
  const int32_t* ends = nullptr;  // end of the positions of each expert
  int64_t num_tiles = 0;
};

/// One call of the expert products.
struct MoeExperts {
  const TensorRef& x;
  const TensorRef& w13;
  const TensorRef& w2;
  Activation act = Activation::kSilu;
  MoeTiles tiles = {};
  const int32_t* sorted_slots = nullptr;  // position -> slot; null: position = row of x and out
  int32_t top_k = 1;                      // slot / top_k = row of x
  const float* input_weights = nullptr;   // [slots] applied to gate and up; null = 1
  int64_t input_weight_stride = 1;
  const float* output_weights = nullptr;  // [rows] applied to the result; null = 1
  float* activated = nullptr;             // [positions, I] scratch
  void* out = nullptr;                    // rows by slot (or position), dtype of x
  RowPlaces out_rows = {};
};

/// Computes every tile.
void run_experts(const MoeExperts& experts, const ExecContext& context);

}  // namespace diffulex::cpu
