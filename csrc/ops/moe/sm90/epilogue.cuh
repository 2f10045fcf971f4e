// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a consumer warpgroup does with its sums: weights and activation in registers, transposition
// through shared memory, rows of 16-byte pieces to global memory.

#include <cstdint>
#include <cstring>

#include "ops/activation/gate.cuh"
#include "ops/moe/gemm.h"
#include "ops/moe/sm90/sort_slots.cuh"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda::sm90 {

template <typename T>
__device__ __forceinline__ uint32_t pack_two(float low, float high) {
  const T values[2] = {from_float<T>(low), from_float<T>(high)};
  uint32_t packed;
  memcpy(&packed, values, sizeof(packed));
  return packed;
}

/// The gate nonlinearity of a product that is rounded to 16 bits, with the fast exponential: silu
/// is g / (1 + exp(-g)), and the tanh form of gelu is g / (1 + exp(-2 u)).
template <Activation kAct>
__device__ __forceinline__ float gate_value(float gate) {
  if constexpr (kAct == Activation::kGeluErf) {
    return activate<Activation::kGeluErf>(gate);
  } else if constexpr (kAct == Activation::kGeluTanh) {
    constexpr float kSqrt8OverPi = 1.5957691216057308F;
    const float twice = kSqrt8OverPi * (gate + 0.044715F * gate * gate * gate);
    return __fdividef(gate, 1.0F + __expf(-twice));
  } else {
    return __fdividef(gate, 1.0F + __expf(-gate));
  }
}

template <typename Traits>
class MoeEpilogue final {
 public:
  using T = typename Traits::Element;

  __device__ __forceinline__ MoeEpilogue(const MoeList<Traits::kSorts>& list, uint32_t staged,
                                         uint8_t* tables, int group)
      : list_(list),
        gemm_(list.gemm),
        staged_(staged + group * Traits::kStagedBytes),
        targets_(reinterpret_cast<int64_t*>(tables) + group * Traits::kColumns),
        factors_(reinterpret_cast<float*>(tables + Traits::kConsumers * Traits::kColumns * 8) +
                 group * Traits::kColumns),
        group_(group),
        thread_(static_cast<int>(threadIdx.x) % 128) {}

  /// Asks for where the positions of a tile go and what they are multiplied by.
  __device__ __forceinline__ void fetch(const MoeTile& tile) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int64_t position = int64_t{tile.start} + i * 128 + thread_;
      if (i * 128 + thread_ < tile.count) {
        fetched_[i] = static_cast<int32_t>(list_.target(gemm_.scatter, position));
        if (gemm_.row_weights != nullptr) {
          fetched_factors_[i] = gemm_.row_weights[list_.target(gemm_.weight_slots, position) *
                                                  gemm_.row_weight_stride];
        }
      }
    }
  }

  /// Begins the tile that was fetched last. The threads meet before the tables are read.
  __device__ __forceinline__ void start(const MoeTile& tile) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * 128 + thread_;
      if (row < tile.count) {
        targets_[row] = gemm_.out_map.offset(fetched_[i]);
        factors_[row] = fetched_factors_[i];
      }
    }
  }

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group_, 128); }

  /// Writes the results of this warpgroup; `first` is the first column of the tile.
  template <int kGroups>
  __device__ __forceinline__ void finish(const MoeTile& tile, int first,
                                         float (&sums)[Traits::kBlocks][kGroups][4]) {
    const int column = first + group_ * Traits::kGroupColumns;
    if (gemm_.row_weights != nullptr) {
      sync();  // the factors of the other threads
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        scale(tile, sums[block]);
      }
    }
    if constexpr (Traits::kGateUp) {
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        gate(tile, sums[block]);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < kGroups * 8; chunk += Traits::kStagedRows) {
      if (chunk < tile.count) {
#pragma unroll
        for (int block = 0; block < Traits::kBlocks; ++block) {
          stage(sums[block], chunk / 8, block * (kPieces / Traits::kBlocks));
        }
        sync();
        copy_out(tile, chunk, column);
        sync();  // the next chunk or tile overwrites what was read
      }
    }
  }

 private:
  static constexpr int kPieces = Traits::kGroupColumns / 8;     // 16-byte pieces of a staged row
  static constexpr int kHeld = (Traits::kColumns + 127) / 128;  // positions of a thread

  /// Address of a 16-byte piece of a staged row; pieces are permuted against bank conflicts.
  __device__ __forceinline__ uint32_t staged_piece(int row, int piece) const {
    const int turn = kPieces >= 8 ? row & 7 : row >> 1 & 3;
    return staged_ + (row * kPieces + (piece ^ turn)) * 16;
  }

  template <int kGroups>
  __device__ __forceinline__ void scale(const MoeTile& tile, float (&sums)[kGroups][4]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group * 8 < tile.count) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[group][i] *= factors_[group * 8 + thread_ % 4 * 2 + i % 2];
        }
      }
    }
  }

  /// The choice stays outside the loop, so that its exponentials overlap.
  template <int kGroups>
  __device__ __forceinline__ void gate(const MoeTile& tile, float (&sums)[kGroups][4]) const {
    switch (gemm_.act) {
      case Activation::kGeluTanh:
        return gate_all<Activation::kGeluTanh>(tile, sums);
      case Activation::kGeluErf:
        return gate_all<Activation::kGeluErf>(tile, sums);
      default:
        return gate_all<Activation::kSilu>(tile, sums);
    }
  }

  /// In pieces of eight groups; what lies past the tile is finite or not, and never written.
  template <Activation kAct, int kGroups>
  __device__ __forceinline__ void gate_all(const MoeTile& tile, float (&sums)[kGroups][4]) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group % 8 == 0 && group * 8 >= tile.count) {
        break;
      }
      sums[group][0] = gate_value<kAct>(sums[group][0]) * sums[group][2];
      sums[group][1] = gate_value<kAct>(sums[group][1]) * sums[group][3];
    }
  }

  /// Stages the positions from accumulator group `begin` on, a block of weight rows from
  /// `first_piece` on.
  template <int kGroups>
  __device__ __forceinline__ void stage(const float (&sums)[kGroups][4], int begin,
                                        int first_piece) const {
    const int lane = thread_ % 32;
    const int warp = thread_ / 32;
    constexpr int kStep = Traits::kGateUp ? 4 : 2;  // accumulator groups of one store
    constexpr int kStored = Traits::kStagedRows / 8;
#pragma unroll
    for (int group = 0; group < kStored; group += kStep) {
      if (begin + group >= kGroups) {
        break;  // widths between the multiples of what is staged
      }
      uint32_t packed[4];
      if constexpr (Traits::kGateUp) {
        // A matrix is 8 positions by the 8 results of the warp.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Tiles of 16 positions fill half of a store: the second half repeats the first.
          const int source = begin + group + (i < kStored ? i : i - kStored);
          packed[i] = pack_two<T>(sums[source][0], sums[source][1]);
        }
        const int row = (group + lane / 8) * 8 % Traits::kStagedRows + lane % 8;
        ptx::stmatrix_x4_trans(staged_piece(row, first_piece + warp), packed);
      } else {
        // Two groups of 8 positions by the two halves of the 16 weight rows of the warp.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int source = begin + group + i / 2;
          packed[i] = pack_two<T>(sums[source][i % 2 * 2], sums[source][i % 2 * 2 + 1]);
        }
        const int row = (group + lane / 16) * 8 + lane % 8;
        ptx::stmatrix_x4_trans(staged_piece(row, first_piece + warp * 2 + lane / 8 % 2), packed);
      }
    }
  }

  __device__ __forceinline__ void copy_out(const MoeTile& tile, int chunk, int column) const {
    constexpr int kRowsPerPass = 128 / kPieces;
    const int piece = thread_ % kPieces;
    if (column + piece * 8 >= gemm_.width) {
      return;
    }
    T* out = static_cast<T*>(gemm_.out) + column + piece * 8;
#pragma unroll
    for (int row = thread_ / kPieces; row < Traits::kStagedRows; row += kRowsPerPass) {
      if (chunk + row < tile.count) {
        uint4 value;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
                     : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                     : "r"(staged_piece(row, piece))
                     : "memory");
        *reinterpret_cast<uint4*>(out + targets_[chunk + row]) = value;
      }
    }
  }

  const MoeList<Traits::kSorts>& list_;
  const ExpertGemm& gemm_;
  uint32_t staged_;
  int64_t* targets_;  // where the row of a position begins, in elements
  float* factors_;
  int32_t fetched_[kHeld] = {};
  float fetched_factors_[kHeld] = {};
  int group_;
  int thread_;
};

}  // namespace diffulex::cuda::sm90
