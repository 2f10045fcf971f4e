// SPDX-License-Identifier: Apache-2.0
#pragma once

// Nibbles of a stage to the left operands of warpgroup products.
//
// W lies as [N / 8, K / 64, 32, 8] bytes: 32 lanes with eight bytes each for eight rows and 64
// columns. Lane l has row l / 4, and of each 16 columns those at 2 (l % 4), one after, and eight
// behind both: the pairs that it owns of a fragment. Each of its two words has 32 columns, nibble i
// the first and nibble 4 + i the second value of pair i.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/quant/code.cuh"
#include "ops/quant/sm90/nibble_traits.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm90 {

/// What turns the nibbles of a group of a row to values.
template <typename Traits, bool kIsExact = Traits::kIsExact>
struct NibbleScales final {
  __nv_bfloat162 scale;

  /// Number `place` of those of a stage.
  __device__ __forceinline__ void read(const NibbleLinearArgs& /*args*/, uint32_t stage,
                                       int32_t place) {
    scale = __bfloat162bfloat162(ptx::shared_load_bf16(stage + place * 2));
  }
  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
    widen_pairs(word, scale, pairs);
  }
};

template <typename Traits>
struct NibbleScales<Traits, true> final {
  float scale;
  __nv_bfloat162 zero;

  __device__ __forceinline__ void read(const NibbleLinearArgs& args, uint32_t stage,
                                       int32_t place) {
    const uint32_t zeros = stage + Traits::kScaleRows * args.tile_rows * 4;
    scale = ptx::shared_load1(stage + place * 4);
    zero = __bfloat162bfloat162(
        __hadd(ptx::shared_load_bf16(zeros + place * 2), __float2bfloat16_rn(128.0F)));
  }
  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
    widen_pairs(word, scale, zero, pairs);
  }
};

/// Where one lane finds its nibbles and scales in a stage.
template <typename Traits>
class NibbleLane final {
 public:
  /// `stripe`: of 16 rows of W in the tile, those of this warp; it may lie behind the tile.
  __device__ __forceinline__ NibbleLane(const NibbleLinearArgs& args, int32_t stripe)
      : args_(args), is_inside_(stripe < args.warps) {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t half = lane / 16;
    // Lines of 128 bytes, whose runs of 16 are swizzled by the number of the line.
    const int32_t swizzled = half * 128 + ((lane / 2 % 8) ^ half) * 16 + lane % 2 * 8;
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) {
      places_[pair] = stripe * kStripeBytes + pair * 256 + (swizzled ^ (pair * 32));
    }
    above_ = stripe * args.stripe_scales + lane / 4;
  }

  /// Reads the scales of a stage.
  __device__ __forceinline__ void begin_stage(uint32_t scales) {
    stage_ = scales;
    if (!kReadsLate && is_inside_) {
#pragma unroll
      for (int32_t row = 0; row < Traits::kScaleRows; ++row) {
        read_row(row, scales_[row]);
      }
    }
  }

  /// Fragments of a piece, 16 columns each: rows lane / 4 and eight below, or gate and up. Those of
  /// a warp behind the tile stay as they are.
  __device__ __forceinline__ void fragments_of(
      uint32_t weights, int32_t piece, uint32_t (&fragments)[Traits::kPieceSteps][4]) const {
    if (!is_inside_) {
      return;
    }
    if constexpr (Traits::kPieceSteps == 4) {
      const uint2 above = ptx::shared_load_pair(weights + places_[piece]);
      const uint2 below = ptx::shared_load_pair(weights + places_[2 + piece]);
      widen_half(above.x, below.x, 2 * piece, fragments[0], fragments[1]);
      widen_half(above.y, below.y, 2 * piece + 1, fragments[2], fragments[3]);
    } else {
      const uint32_t half = weights + piece % 2 * 4;
      widen_half(__float_as_uint(ptx::shared_load1(half + places_[piece / 2])),
                 __float_as_uint(ptx::shared_load1(half + places_[2 + piece / 2])), piece,
                 fragments[0], fragments[1]);
    }
  }

 private:
  static constexpr int32_t kStripeBytes = 16 * kNibbleStageDepth / 2;
  /// Whether scales are read where they are needed: registers do not hold those of a stage.
  static constexpr bool kReadsLate =
      Traits::kScaleRows == 4 || (Traits::kIsExact && Traits::kRows == kNibbleMaxRows);

  __device__ __forceinline__ void read_row(int32_t row, NibbleScales<Traits> (&scales)[2]) const {
    const int32_t place = row * args_.tile_rows + above_;
    scales[0].read(args_, stage_, place);
    scales[1].read(args_, stage_, place + args_.below_scales);
  }

  /// 32 columns, number `quarter` of the stage.
  __device__ __forceinline__ void widen_half(uint32_t above, uint32_t below, int32_t quarter,
                                             uint32_t (&first)[4], uint32_t (&second)[4]) const {
    uint32_t upper[4];
    uint32_t lower[4];
    if constexpr (kReadsLate) {
      NibbleScales<Traits> scales[2];
      read_row(quarter * Traits::kScaleRows / 4, scales);
      scales[0].widen(above, upper);
      scales[1].widen(below, lower);
    } else {
      const NibbleScales<Traits>(&scales)[2] = scales_[quarter * Traits::kScaleRows / 4];
      scales[0].widen(above, upper);
      scales[1].widen(below, lower);
    }
#pragma unroll
    for (int32_t k = 0; k < 2; ++k) {
      first[2 * k] = upper[k];
      first[2 * k + 1] = lower[k];
      second[2 * k] = upper[2 + k];
      second[2 * k + 1] = lower[2 + k];
    }
  }

  const NibbleLinearArgs& args_;
  const bool is_inside_;
  int32_t places_[4];  // of the lines of its upper row, then of its lower
  int32_t above_;
  uint32_t stage_ = 0;  // scales of the stage
  NibbleScales<Traits> scales_[kReadsLate ? 1 : Traits::kScaleRows][2];
};

}  // namespace diffulex::cuda::sm90
