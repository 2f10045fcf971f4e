// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

/// The factors of kCount columns of a norm: weight + offset, 1 without a weight. `data` is [H] of T
/// or of float; with kVec the address of the column is aligned for a Vec.
template <typename T, int kCount, bool kVec>
__device__ __forceinline__ void load_norm_weight(const void* data, bool is_float, float offset,
                                                 int32_t column, float (&weight)[kCount]) {
  if (data == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      weight[i] = 1.0F;
    }
    return;
  }
  if (is_float) {
    load_floats<kCount, kVec>(static_cast<const float*>(data) + column, weight);
  } else {
    load_floats<kCount, kVec>(static_cast<const T*>(data) + column, weight);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weight[i] += offset;
  }
}

}  // namespace diffulex::cuda
