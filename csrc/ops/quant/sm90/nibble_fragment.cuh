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
  NibbleScaling scaling;

  /// Number `place` of those of a stage, in tiles of `tile_rows` rows of W.
  __device__ __forceinline__ void read(uint32_t stage, int32_t place, int32_t /*tile_rows*/) {
    scaling = NibbleScaling(ptx::shared_load_bf16(stage + place * 2));
  }
  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
    scaling.widen(word, pairs);
  }
};

template <typename Traits>
struct NibbleScales<Traits, true> final {
  float scale;
  __nv_bfloat162 zero;

  __device__ __forceinline__ void read(uint32_t stage, int32_t place, int32_t tile_rows) {
    const uint32_t zeros = stage + Traits::kScaleRows * tile_rows * 4;
    scale = ptx::shared_load1(stage + place * 4);
    zero = __bfloat162bfloat162(
        __hadd(ptx::shared_load_bf16(zeros + place * 2), __float2bfloat16_rn(128.0F)));
  }
  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
    widen_pairs(word, scale, zero, pairs);
  }
};

/// Where one lane finds its nibbles and scales in a stage of tiles of W as `Tile` describes them.
template <typename Traits, typename Tile = const NibbleLinearArgs&>
class NibbleLane final {
 public:
  /// `stripe`: of 16 rows of W in the tile, those of this warp; it may lie behind the tile.
  __device__ __forceinline__ NibbleLane(Tile args, int32_t stripe)
      : args_(args), is_inside_(args.has_stripe(stripe)) {
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

  /// Reads what a stage begins with: scales, and the nibbles of as many pieces as registers hold.
  __device__ __forceinline__ void begin_stage(uint32_t weights, uint32_t scales) {
    weights_ = weights;
    stage_ = scales;
    if (!is_inside_) {
      return;
    }
    if constexpr (kReadsAhead) {
#pragma unroll
      for (int32_t line = 0; line < 2; ++line) {
        ahead_[line] = read_line(line);
      }
    }
    if constexpr (kIsFused) {
      bool are_small = true;
#pragma unroll
      for (int32_t row = 0; row < Traits::kScaleRows; ++row) {
        const int32_t place = row * args_.tile_rows + above_;
#pragma unroll
        for (int32_t side = 0; side < 2; ++side) {
          const __nv_bfloat16 scale =
              ptx::shared_load_bf16(stage_ + (place + side * args_.below_scales) * 2);
          factors_[row][side] = NibbleFactors(scale);
          are_small = are_small && NibbleFactors::can_hold(scale);
        }
      }
      are_small_ = __all_sync(0xFFFFFFFFU, are_small);
    } else if constexpr (!kReadsLate) {
#pragma unroll
      for (int32_t row = 0; row < Traits::kScaleRows; ++row) {
        read_row(row, scales_[row]);
      }
    }
  }

  /// Fragments of a piece, 16 columns each: rows lane / 4 and eight below, or gate and up. Those of
  /// a warp behind the tile stay as they are.
  __device__ __forceinline__ void fragments_of(
      int32_t piece, uint32_t (&fragments)[Traits::kPieceSteps][4]) const {
    if (!is_inside_) {
      return;
    }
    if constexpr (Traits::kPieceSteps == 4) {
      const Line line = kReadsAhead ? ahead_[piece] : read_line(piece);
      widen_halves<2>({line.above.x, line.above.y}, {line.below.x, line.below.y}, 2 * piece,
                      fragments);
    } else {
      const uint32_t half = weights_ + piece % 2 * 4;
      widen_halves<1>({__float_as_uint(ptx::shared_load1(half + places_[piece / 2]))},
                      {__float_as_uint(ptx::shared_load1(half + places_[2 + piece / 2]))}, piece,
                      fragments);
    }
  }

 private:
  /// The nibbles of this lane of 64 columns.
  struct Line final {
    uint2 above;
    uint2 below;
  };
  static constexpr int32_t kStripeBytes = 16 * kNibbleStageDepth / 2;
  /// Whether scales are read where they are needed: registers do not hold those of a stage.
  static constexpr bool kReadsLate = Traits::kScaleRows == 4 ||
                                     (Traits::kIsExact && Traits::kIsFull) ||
                                     (Traits::kScaleRows == 2 && Traits::kHasCopyingGroup);
  /// Whether nibbles become values by factors, where those are finite: not with a scale for 32
  /// columns, which takes as long to turn to factors as they save, nor beside sums that leave no
  /// register for them.
  static constexpr bool kIsFused = !Traits::kIsExact && !kReadsLate && !Traits::kHasCopyingGroup;
  /// Whether the nibbles of a stage are read at once, where registers hold them.
  static constexpr bool kReadsAhead =
      !Traits::kIsFull && Traits::kScaleRows == 1 && !Traits::kIsExact;

  __device__ __forceinline__ Line read_line(int32_t line) const {
    return {ptx::shared_load_pair(weights_ + places_[line]),
            ptx::shared_load_pair(weights_ + places_[2 + line])};
  }

  __device__ __forceinline__ void read_row(int32_t row, NibbleScales<Traits> (&scales)[2]) const {
    const int32_t place = row * args_.tile_rows + above_;
    scales[0].read(stage_, place, args_.tile_rows);
    scales[1].read(stage_, place + args_.below_scales, args_.tile_rows);
  }

  /// 32 columns for each of kCount words of both rows, from number `quarter` of the stage on.
  template <int kCount>
  __device__ __forceinline__ void widen_halves(
      const uint32_t (&above)[kCount], const uint32_t (&below)[kCount], int32_t quarter,
      uint32_t (&fragments)[Traits::kPieceSteps][4]) const {
    if (kIsFused && are_small_) {
#pragma unroll
      for (int32_t half = 0; half < kCount; ++half) {
        const auto& factors = factors_[(quarter + half) * Traits::kScaleRows / 4];
        widen_half(above[half], below[half], factors, fragments[2 * half], fragments[2 * half + 1]);
      }
      return;
    }
#pragma unroll
    for (int32_t half = 0; half < kCount; ++half) {
      const int32_t row = (quarter + half) * Traits::kScaleRows / 4;
      if constexpr (kIsFused || kReadsLate) {
        NibbleScales<Traits> scales[2];
        read_row(row, scales);
        widen_half(above[half], below[half], scales, fragments[2 * half], fragments[2 * half + 1]);
      } else {
        widen_half(above[half], below[half], scales_[row], fragments[2 * half],
                   fragments[2 * half + 1]);
      }
    }
  }

  template <typename Scales>
  __device__ __forceinline__ static void widen_half(uint32_t above, uint32_t below,
                                                    const Scales (&scales)[2], uint32_t (&first)[4],
                                                    uint32_t (&second)[4]) {
    uint32_t upper[4];
    uint32_t lower[4];
    scales[0].widen(above, upper);
    scales[1].widen(below, lower);
#pragma unroll
    for (int32_t k = 0; k < 2; ++k) {
      first[2 * k] = upper[k];
      first[2 * k + 1] = lower[k];
      second[2 * k] = upper[2 + k];
      second[2 * k + 1] = lower[2 + k];
    }
  }

  Tile args_;
  const bool is_inside_;
  int32_t places_[4];  // of the lines of its upper row, then of its lower
  int32_t above_;
  uint32_t weights_ = 0;  // of the stage
  uint32_t stage_ = 0;    // its scales
  Line ahead_[kReadsAhead ? 2 : 1];
  NibbleScales<Traits> scales_[kReadsLate || kIsFused ? 1 : Traits::kScaleRows][2];
  NibbleFactors factors_[kIsFused ? Traits::kScaleRows : 1][2];
  bool are_small_ = false;
};

}  // namespace diffulex::cuda::sm90
