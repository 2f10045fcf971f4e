// SPDX-License-Identifier: Apache-2.0
#pragma once

// Online softmax of a warp's 16 rows in base 2. A thread owns rows lane / 4 and lane / 4 + 8 and,
// in every 8-column group, columns 2 * (lane % 4) and the next.

#include <cstdint>

#include "diffulex/ops/row_interval.h"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

/// cap * tanh(x / cap) through one exponential; absolute error below 1e-6 * cap.
__device__ __forceinline__ float soft_capped(float x, float inverse_cap, float cap) {
  const float power = ptx::exp2_approx(x * inverse_cap * (2.0F * kLog2E));
  return cap - __fdividef(2.0F * cap, 1.0F + power);
}

/// Running maximum and sum of the two rows of a thread. `factor` turns scores into base-2 units.
struct OnlineSoftmax final {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0F, 0.0F};  // of this thread's columns until finish()
  float factor = 1.0F;

  /// Replaces scores by probabilities relative to the new maximum and returns in `rescale` what the
  /// accumulators of each row must be multiplied by. With kLazy a maximum that grew by at most a
  /// factor of 2^8 stays, so that `rescale` is mostly 1: probabilities may then exceed 1, which
  /// costs no accuracy in floating point.
  template <bool kLazy = false, int kGroups>
  __device__ __forceinline__ void update(float (&scores)[kGroups][4], float (&rescale)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float next = maximum[row];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        next = fmaxf(next, fmaxf(scores[group][2 * row], scores[group][2 * row + 1]));
      }
      next = fmaxf(next, __shfl_xor_sync(kFullWarp, next, 1));
      next = fmaxf(next, __shfl_xor_sync(kFullWarp, next, 2));
      if constexpr (kLazy) {
        constexpr float kSlack = 8.0F;
        next = (next - maximum[row]) * factor <= kSlack ? maximum[row] : next;
      }
      // A row that has seen no key keeps -inf; subtracting 0 instead avoids -inf minus -inf.
      const float shift = next == -INFINITY ? 0.0F : next * factor;
      rescale[row] = ptx::exp2_approx(maximum[row] * factor - shift);
      maximum[row] = next;
      float total = 0.0F;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          float& score = scores[group][2 * row + column];
          score = ptx::exp2_approx(fmaf(score, factor, -shift));
          total += score;
        }
      }
      sum[row] = sum[row] * rescale[row] + total;
    }
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(kFullWarp, sum[row], 1);
      sum[row] += __shfl_xor_sync(kFullWarp, sum[row], 2);
    }
  }
};

}  // namespace diffulex::cuda
