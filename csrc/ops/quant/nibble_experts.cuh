// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tensor-core kernel of the expert products with weights of 4 bits. Nibbles stream as they are,
// 128 columns a step, and become bfloat16 in the registers of the lane that multiplies them. Rows
// of float16 times such weights are products of TF32, which holds both exactly.
//
// Of a line of 64 columns a lane multiplies 16 in a row: two words of a row of W, two chunks of a
// row of x. Which columns are multiplied at once is free, as both operands agree: here a pair of
// values has columns i and 4 + i of a word.

#include <cstdint>
#include <type_traits>

#include "ops/moe/mma.cuh"
#include "ops/quant/code.cuh"

namespace diffulex::cuda {

template <typename Traits>
class NibbleProduct;

/// Of every other pair of rows of W the halves are swapped, so that eight lie in different banks.
template <typename T, int kRows, bool kIsGateUp>
struct MoeNibbleTraits : MoeMmaTraits<T, kRows, kIsGateUp> {
  using Base = MoeMmaTraits<T, kRows, kIsGateUp>;
  using Weight = uint8_t;
  using Product = NibbleProduct<MoeNibbleTraits>;
  static constexpr int kLines = 2;
  static constexpr int kDepth = kLines * Base::kDepth;
  static constexpr int kWeightBytes = kDepth / 2;
  static constexpr int kWeightStart = kLines * kRows * Base::kRowBytes;
  static constexpr int kStages = kRows <= 32 ? 4 : (kRows == 64 ? 3 : 2);
  static constexpr int kStageBytes = kWeightStart + Base::kWeightRows * kWeightBytes;
  static constexpr int kSmemBytes = kStages * kStageBytes;
  static_assert(kSmemBytes <= 99 * 1024, "sm_86 has 99 KiB of shared memory for one CTA");

  __device__ __forceinline__ static int swizzle(int piece, int row) { return piece ^ (row & 2); }
};

/// Adds the product of 16 columns.
template <typename T>
__device__ __forceinline__ void multiply_widened(float (&sums)[4], const uint32_t (&left)[4],
                                                 uint32_t first, uint32_t second) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    ptx::mma_16816<T>(sums, left, first, second);
  } else {
    const uint32_t right[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 above = __half22float2(*reinterpret_cast<const __half2*>(&left[2 * i]));
      const float2 below = __half22float2(*reinterpret_cast<const __half2*>(&left[2 * i + 1]));
      const uint32_t values[4] = {__float_as_uint(above.x), __float_as_uint(below.x),
                                  __float_as_uint(above.y), __float_as_uint(below.y)};
      ptx::mma_1688_tf32(sums, values, right[i] << 16, right[i] & 0xFFFF0000U);
    }
  }
}

/// The product of a lane, whose scales are read a step ahead.
template <typename Traits>
class NibbleProduct final {
 public:
  using T = typename Traits::Element;
  static constexpr int kNTiles = Traits::kNTiles;

  __device__ __forceinline__ NibbleProduct(const ExpertGemm& gemm, const MoeTile& tile,
                                           int32_t first, int warp_n)
      : gemm_(gemm),
        scales_(static_cast<const __nv_bfloat16*>(gemm.nibbles.values) +
                tile.expert * gemm.nibbles.expert_stride) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const auto lane_row = static_cast<int32_t>(threadIdx.x % 32 / 4);
      rows_[n] = weight_row<Traits>(gemm, first, warp_n * 32 + n * 8 + lane_row);
    }
    read_scales(0);
  }

  __device__ __forceinline__ void add(uint32_t stage, int step, int warp_m, int warp_n,
                                      float (&sums)[Traits::kMTiles][kNTiles][4]) {
    const uint32_t row = threadIdx.x % 32 / 4;
    const uint32_t lane = threadIdx.x % 4;
    const uint32_t weights = stage + Traits::kWeightStart + lane * 8 +
                             (warp_n * 32 + row) * Traits::kWeightBytes + (row & 2U) * 16;
    uint2 words[Traits::kLines][kNTiles];
    __nv_bfloat16 scales[Traits::kLines][kNTiles];
    bool are_small = true;
#pragma unroll
    for (int i = 0; i < Traits::kLines * kNTiles; ++i) {
      const int line = i / kNTiles;
      const int n = i % kNTiles;
      words[line][n] =
          ptx::shared_load_pair((weights + n * 8 * Traits::kWeightBytes) ^ (line * 32));
      scales[line][n] = next_[line][n];
      are_small = are_small && NibbleFactors::can_hold(scales[line][n]);
    }
    read_scales(step + 1);
    const uint32_t rows = stage + (warp_m * Traits::kWarpRows + row) * Traits::kRowBytes;
    if (__all_sync(0xFFFFFFFFU, are_small) != 0) {
      multiply<NibbleFactors>(words, scales, rows, sums);
    } else {
      multiply<NibbleScaling>(words, scales, rows, sums);
    }
  }

 private:
  /// Adds the products of a step; `rows`: the first one of this lane in the stage.
  template <typename Scale>
  __device__ __forceinline__ static void multiply(
      const uint2 (&words)[Traits::kLines][kNTiles],
      const __nv_bfloat16 (&scales)[Traits::kLines][kNTiles], uint32_t rows,
      float (&sums)[Traits::kMTiles][kNTiles][4]) {
    const uint32_t row = threadIdx.x % 32 / 4;
    const uint32_t lane = threadIdx.x % 4;
#pragma unroll
    for (int line = 0; line < Traits::kLines; ++line) {
      Scale of_rows[kNTiles];
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        of_rows[n] = Scale(scales[line][n]);
      }
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        uint32_t right[kNTiles][4];
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          of_rows[n].widen(word == 0 ? words[line][n].x : words[line][n].y, right[n]);
        }
        const uint32_t of_word =
            rows + line * Traits::kTileRows * Traits::kRowBytes + ((2 * lane + word) ^ row) * 16;
#pragma unroll
        for (int m = 0; m < Traits::kMTiles; ++m) {
          uint32_t above[4];
          uint32_t below[4];
          read_pairs(of_word + m * 16 * Traits::kRowBytes, above);
          read_pairs(of_word + (m * 16 + 8) * Traits::kRowBytes, below);
#pragma unroll
          for (int k = 0; k < 4; k += 2) {
            const uint32_t left[4] = {above[k], below[k], above[k + 1], below[k + 1]};
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
              multiply_widened<T>(sums[m][n], left, right[n][k], right[n][k + 1]);
            }
          }
        }
      }
    }
  }

  /// Of the columns of this lane in a step; 0 for rows and columns that do not exist.
  __device__ __forceinline__ void read_scales(int step) {
#pragma unroll
    for (int line = 0; line < Traits::kLines; ++line) {
      const int32_t column = step * Traits::kDepth + line * Traits::Base::kDepth +
                             static_cast<int32_t>(threadIdx.x % 4) * 16;
      const __nv_bfloat16* of_group =
          scales_ + column / gemm_.nibbles.group * gemm_.nibbles.group_stride;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const bool is_read = column < gemm_.depth && rows_[n] >= 0;
        next_[line][n] = is_read ? of_group[rows_[n]] : __nv_bfloat16{0.0F};
      }
    }
  }

  /// Eight columns of a row, in the pairs of a word.
  __device__ __forceinline__ static void read_pairs(uint32_t address, uint32_t (&pairs)[4]) {
    const float4 chunk = ptx::shared_load4(address);
    const uint32_t first[2] = {__float_as_uint(chunk.x), __float_as_uint(chunk.y)};
    const uint32_t second[2] = {__float_as_uint(chunk.z), __float_as_uint(chunk.w)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __byte_perm(first[i / 2], second[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
    }
  }

  const ExpertGemm& gemm_;
  const __nv_bfloat16* scales_;
  int32_t rows_[kNTiles];
  __nv_bfloat16 next_[Traits::kLines][kNTiles];
};

/// `gemm` with weights of the dtype of its rows or of 4 bits.
template <typename T>
Status launch_moe_any(const ExpertGemm& gemm, const ExecContext& context) {
  return gemm.nibbles.values == nullptr ? launch_moe_mma<MoeMmaTraits, T>(gemm, context)
                                        : launch_moe_mma<MoeNibbleTraits, T>(gemm, context);
}

template <typename T>
Status prepare_moe_any(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_moe_mma_dtype<MoeNibbleTraits, T>(device_index)));
  return prepare_moe_mma_dtype<MoeMmaTraits, T>(device_index);
}

}  // namespace diffulex::cuda
