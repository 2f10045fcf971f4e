// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums of a tile of a weight of 4 bits on their way out: as LinearEpilogue, with a bias of float32
// and tiles of x.

#include <cstdint>

#include "ops/linear/sm90/epilogue.cuh"
#include "ops/quant/sm90/nibble_traits.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm90 {

template <typename Traits>
class NibbleEpilogue final : public LinearExchange<Traits> {
 public:
  __device__ __forceinline__ NibbleEpilogue(const NibbleLinearArgs& args, uint32_t partials,
                                            uint32_t full, uint32_t empty, int32_t split)
      : LinearExchange<Traits>(args, partials, full, empty, split), nibbles_(args) {}

  /// Whole warps of phase 0 that have rows of the tile.
  __device__ __forceinline__ void finish(float (&sums)[Traits::kGroups][4], int32_t tile,
                                         bool is_last) {
    this->exchange(sums, is_last);
    const int32_t weight_tile = tile / nibbles_.row_tiles;
    const int32_t first_row = tile % nibbles_.row_tiles * Traits::kRows;
    const bool has_gate = nibbles_.act >= 0;
    const int32_t column = has_gate ? weight_tile * (nibbles_.tile_rows / 2) + warp_ * 8
                                    : weight_tile * nibbles_.tile_rows + warp_ * 16;
    const float above = bias_of(column + lane_ / 4);
    const float below = bias_of(column + lane_ / 4 + 8);
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      const int32_t row = first_row + group * 8;
      if (!this->is_mine(group) || row >= nibbles_.num_rows) {
        continue;
      }
      const float (&sum)[4] = sums[group];
      if (has_gate) {
        this->put_gated(row, column, sum);
      } else {
        this->put(row, column, sum[0] + above, sum[1] + above);
        this->put(row, column + 8, sum[2] + below, sum[3] + below);
      }
    }
  }

 private:
  using LinearExchange<Traits>::warp_;
  using LinearExchange<Traits>::lane_;

  __device__ __forceinline__ float bias_of(int32_t column) const {
    const bool is_read = nibbles_.bias != nullptr && column < nibbles_.num_columns;
    return is_read ? static_cast<const float*>(nibbles_.bias)[column] : 0.0F;
  }

  const NibbleLinearArgs& nibbles_;
};

}  // namespace diffulex::cuda::sm90
