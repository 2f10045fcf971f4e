// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a warp that owns weight rows does with its sums: weights and activation in registers, then
// some positions at a time through its part of shared memory to rows of 16-byte pieces in global
// memory. Warps do not wait for each other, so that those of one consumer write while the other
// multiplies.

#include <cstdint>

#include "ops/moe/gemm.h"
#include "ops/moe/sm90/epilogue.cuh"
#include "ops/moe/sm90/sort_slots.cuh"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda::sm90 {

template <typename Traits>
class WarpEpilogue final {
 public:
  using T = typename Traits::Element;

  __device__ __forceinline__ WarpEpilogue(const MoeList<Traits::kSorts>& list, uint32_t staged,
                                          uint8_t* /*tables*/, int group)
      : gemm_(list.gemm),
        staged_(staged +
                (group * 4 + static_cast<int>(threadIdx.x) % 128 / 32) * Traits::kWarpStagedBytes),
        group_(group) {}

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group_, 128); }

  /// Asks for where the positions of a tile go; they arrive while it is multiplied.
  __device__ __forceinline__ void fetch(const MoeTile& tile) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * 32 + lane();
      targets_[i] = row < tile.count
                        ? static_cast<int32_t>(moe_target(gemm_.scatter, int64_t{tile.start} + row))
                        : 0;
    }
  }

  /// Writes the results of this warp; `first` is the first column of the item.
  template <int kGroups>
  __device__ __forceinline__ void finish(const MoeTile& tile, int first,
                                         float (&sums)[Traits::kBlocks][kGroups][4]) const {
    if (gemm_.row_weights != nullptr) {
      scale(tile, sums);
    }
    if constexpr (Traits::kGateUp) {
      gate(tile, sums);
    }
    const int piece = lane() % kPieces;
    const int row = lane() / kPieces;
    const int column = first + group_ * Traits::kGroupColumns + warp() * kWarpColumns + piece * 8;
    T* out = static_cast<T*>(gemm_.out) + column;
    const bool is_inside = column < gemm_.width;
#pragma unroll
    for (int begin = 0; begin < kGroups; begin += kBatch * kStep) {
      if (begin * 8 >= tile.count) {
        break;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int group = begin + i * kStep;
        if (group < kGroups) {
          stage(sums, group, staged_ + i * kBufferBytes);
        }
      }
      __syncwarp();
      float4 results[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (begin + i * kStep < kGroups) {
          results[i] = ptx::shared_load4(staged_piece(staged_ + i * kBufferBytes, row, piece));
        }
      }
      __syncwarp();  // the buffers were read
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int first_row = (begin + i * kStep) * 8;
        if (begin + i * kStep < kGroups) {
          const int32_t target =
              __shfl_sync(kFullWarp, targets_[first_row / 32], first_row % 32 + row);
          if (is_inside && first_row + row < tile.count) {
            *reinterpret_cast<float4*>(out + gemm_.out_map.offset(target)) = results[i];
          }
        }
      }
    }
  }

 private:
  static constexpr int kHeld = (Traits::kColumns + 31) / 32;      // positions of a lane
  static constexpr int kWarpColumns = Traits::kGroupColumns / 4;  // results of a position
  static constexpr int kPieces = kWarpColumns / 8;                // the same in 16 bytes
  static constexpr int kBufferBytes = 512;
  static constexpr int kStep = kBufferBytes / 16 / kPieces / 8;  // groups of a buffer
  static constexpr int kBatch = Traits::kWarpStagedBytes / kBufferBytes;
  static_assert(kPieces == (Traits::kGateUp ? 2 : 4), "four matrices are one store");

  [[nodiscard]] __device__ __forceinline__ static int lane() {
    return static_cast<int>(threadIdx.x) % 32;
  }
  [[nodiscard]] __device__ __forceinline__ static int warp() {
    return static_cast<int>(threadIdx.x) % 128 / 32;
  }

  /// Address of a 16-byte piece of a staged row; pieces are permuted against bank conflicts.
  [[nodiscard]] __device__ __forceinline__ static uint32_t staged_piece(uint32_t buffer, int row,
                                                                        int piece) {
    const int turn = row / (8 / kPieces) % kPieces;
    return buffer + (row * kPieces + (piece ^ turn)) * 16;
  }

  template <int kGroups>
  __device__ __forceinline__ void scale(const MoeTile& tile,
                                        float (&sums)[Traits::kBlocks][kGroups][4]) const {
    float factors[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * 32 + lane();
      const int64_t position = int64_t{tile.start} + row;
      factors[i] =
          row < tile.count
              ? gemm_
                    .row_weights[moe_target(gemm_.weight_slots, position) * gemm_.row_weight_stride]
              : 0.0F;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float factor =
            __shfl_sync(kFullWarp, factors[group * 8 / 32], group * 8 % 32 + lane() % 4 * 2 + i);
#pragma unroll
        for (int block = 0; block < Traits::kBlocks; ++block) {
          sums[block][group][i] *= factor;
          sums[block][group][i + 2] *= factor;
        }
      }
    }
  }

  /// The choice stays outside the loop, so that its exponentials overlap.
  template <int kGroups>
  __device__ __forceinline__ void gate(const MoeTile& tile,
                                       float (&sums)[Traits::kBlocks][kGroups][4]) const {
    switch (gemm_.act) {
      case Activation::kGeluTanh:
        return gate_all<Activation::kGeluTanh>(tile, sums);
      case Activation::kGeluErf:
        return gate_all<Activation::kGeluErf>(tile, sums);
      default:
        return gate_all<Activation::kSilu>(tile, sums);
    }
  }

  /// In pieces of four groups; what lies past the tile is finite or not, and never written.
  template <Activation kAct, int kGroups>
  __device__ __forceinline__ void gate_all(const MoeTile& tile,
                                           float (&sums)[Traits::kBlocks][kGroups][4]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group % 4 == 0 && group * 8 >= tile.count) {
        break;
      }
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        sums[block][group][0] = gate_value<kAct>(sums[block][group][0]) * sums[block][group][2];
        sums[block][group][1] = gate_value<kAct>(sums[block][group][1]) * sums[block][group][3];
      }
    }
  }

  /// Stages kStep groups of 8 positions from `group` on.
  template <int kGroups>
  __device__ __forceinline__ void stage(const float (&sums)[Traits::kBlocks][kGroups][4], int group,
                                        uint32_t buffer) const {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Traits::kGateUp) {
        // Two groups of 8 positions by the 8 results of each block.
        const float (&sum)[4] = sums[i % 2][group + i / 2];
        packed[i] = pack_two<T>(sum[0], sum[1]);
      } else {
        // The two halves of the 16 weight rows of each block.
        const float (&sum)[4] = sums[i / 2][group];
        packed[i] = pack_two<T>(sum[i % 2 * 2], sum[i % 2 * 2 + 1]);
      }
    }
    const int matrix = lane() / 8;
    const int row = matrix / kPieces * 8 + lane() % 8;
    ptx::stmatrix_x4_trans(staged_piece(buffer, row, matrix % kPieces), packed);
  }

  const ExpertGemm& gemm_;
  uint32_t staged_;
  int32_t targets_[kHeld] = {};  // rows of the results of positions i * 32 + lane
  int group_;
};

}  // namespace diffulex::cuda::sm90
