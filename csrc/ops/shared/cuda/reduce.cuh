// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex::cuda {

inline constexpr unsigned kFullWarp = 0xffffffffU;

/// Sum over the warp, the same bits in every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

/// The largest of kLanes neighbouring lanes, a power of two, in each of them; the others may be
/// away.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float value) {
  const unsigned first = threadIdx.x & 31U & ~(kLanes - 1U);
  const unsigned lanes = (kFullWarp >> (32 - kLanes)) << first;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(lanes, value, offset));
  }
  return value;
}

/// The largest value of a CTA of kWarps warps, in all threads.
template <int kWarps>
__device__ __forceinline__ float block_max(float value) {
  __shared__ float parts[kWarps];
  value = warp_max(value);
  if ((threadIdx.x & 31) == 0) {
    parts[threadIdx.x >> 5] = value;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    value = fmaxf(value, parts[warp]);
  }
  return value;
}

/// Sum over a CTA of kWarps warps in a tree that depends on kWarps alone. `scratch` holds kWarps
/// floats and may be reused after the next barrier.
template <int kWarps>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if ((threadIdx.x & 31) == 0) {
    scratch[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  float total = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    total += scratch[warp];
  }
  return total;
}

}  // namespace diffulex::cuda
