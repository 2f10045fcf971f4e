// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scores, mask and value product of one (query tile, key tile) pair on the tensor cores.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/sm80/epilogue.cuh"
#include "ops/attention/sm80/loader.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm80 {

/// Query fragments of a warp's 16 rows: in registers, or read again for every key tile.
template <typename Traits>
struct QueryFragments final {
  static constexpr int kSteps = Traits::kHeadDim / 16;
  uint32_t held[Traits::kQueryInRegisters ? kSteps : 1][4];
  uint32_t base;
  int row;

  __device__ void init(uint32_t queries) {
    base = queries;
    row = (threadIdx.x >> 5) % Traits::kRowWarps * 16 + (threadIdx.x & 15);
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        load(held[step], step);
      }
    }
  }

  __device__ __forceinline__ void load(uint32_t (&fragment)[4], int step) const {
    const int chunk = step * 2 + ((threadIdx.x & 31) >> 4);
    ptx::ldmatrix_x4(fragment, base + swizzled<Traits::kChunks>(row, chunk));
  }
};

/// scores = Q K^T for 16 rows and all keys of the tile.
template <typename Traits>
__device__ __forceinline__ void multiply_keys(const QueryFragments<Traits>& queries, uint32_t keys,
                                              float (&scores)[Traits::kTileKeys / 8][4]) {
  const int lane = threadIdx.x & 31;
  const int key_row = (lane & 7) + (lane >> 4) * 8;
  const int key_chunk = (lane >> 3) & 1;
#pragma unroll
  for (int group = 0; group < Traits::kTileKeys / 8; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[group][i] = 0.0F;
    }
  }
#pragma unroll
  for (int step = 0; step < Traits::kHeadDim / 16; ++step) {
    uint32_t fragment[4];
    if constexpr (!Traits::kQueryInRegisters) {
      queries.load(fragment, step);
    }
#pragma unroll
    for (int pair = 0; pair < Traits::kTileKeys / 16; ++pair) {
      uint32_t key[4];
      ptx::ldmatrix_x4(key,
                       keys + swizzled<Traits::kChunks>(pair * 16 + key_row, step * 2 + key_chunk));
      if constexpr (Traits::kQueryInRegisters) {
        ptx::mma_16816<typename Traits::Element>(scores[2 * pair], queries.held[step], key[0],
                                                 key[1]);
        ptx::mma_16816<typename Traits::Element>(scores[2 * pair + 1], queries.held[step], key[2],
                                                 key[3]);
      } else {
        ptx::mma_16816<typename Traits::Element>(scores[2 * pair], fragment, key[0], key[1]);
        ptx::mma_16816<typename Traits::Element>(scores[2 * pair + 1], fragment, key[2], key[3]);
      }
    }
  }
}

/// acc += P V; P is rounded to the element type.
template <typename Traits>
__device__ __forceinline__ void multiply_values(
    const float (&probabilities)[Traits::kTileKeys / 8][4], uint32_t values,
    float (&acc)[Traits::kValueDims / 8][4]) {
  using T = typename Traits::Element;
  const int lane = threadIdx.x & 31;
  const int part = (threadIdx.x >> 5) / Traits::kRowWarps;
  const int first_chunk = part * (Traits::kValueDims / 8) + (lane >> 4);
#pragma unroll
  for (int step = 0; step < Traits::kTileKeys / 16; ++step) {
    const uint32_t fragment[4] = {
        pack_pair<T>(probabilities[2 * step][0], probabilities[2 * step][1]),
        pack_pair<T>(probabilities[2 * step][2], probabilities[2 * step][3]),
        pack_pair<T>(probabilities[2 * step + 1][0], probabilities[2 * step + 1][1]),
        pack_pair<T>(probabilities[2 * step + 1][2], probabilities[2 * step + 1][3])};
#pragma unroll
    for (int pair = 0; pair < Traits::kValueDims / 16; ++pair) {
      uint32_t value[4];
      ptx::ldmatrix_x4_trans(value, values + swizzled<Traits::kChunks>(step * 16 + (lane & 15),
                                                                       first_chunk + pair * 2));
      ptx::mma_16816<T>(acc[2 * pair], fragment, value[0], value[1]);
      ptx::mma_16816<T>(acc[2 * pair + 1], fragment, value[2], value[3]);
    }
  }
}

/// Sets scores of invisible keys to -inf. `rows` are the intervals of the thread's two rows inside
/// the tile; `flags` is null when all pages are mapped.
template <int kGroups>
__device__ __forceinline__ void mask_scores(float (&scores)[kGroups][4], const KeyRange (&rows)[2],
                                            const KeyRange& hole, int32_t base,
                                            const uint8_t* flags) {
  const int first = (threadIdx.x & 3) * 2;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int offset = group * 8 + first + column;
      const int32_t key = base + offset;
      const bool is_hidden = contains(hole, key) || (flags != nullptr && flags[offset] == 0);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (is_hidden || !contains(rows[row], key)) {
          scores[group][2 * row + column] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace diffulex::cuda::sm80
