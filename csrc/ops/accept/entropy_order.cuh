// SPDX-License-Identifier: Apache-2.0
#pragma once

// The entropy bound over the positions of one CTA: ascending entropy, ties by position, accepted
// while the sum of the entropies before stays within the bound. One thread per position.

#include <cstdint>

#include "diffulex/ops/sampling.h"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

inline constexpr int32_t kMaxOrdered = static_cast<int32_t>(kMaxAcceptPositions);

struct EntropyShared final {
  uint64_t keys[kMaxOrdered];
  double warp_sums[kMaxOrdered / 32];
  uint8_t is_accepted[kMaxOrdered];
};

/// Bitonic sort, ascending, of one key per thread; `width` is a power of two, at least 32 and at
/// most blockDim.x, beyond which all keys are UINT64_MAX.
__device__ inline uint64_t sort_keys(uint64_t key, uint32_t width, uint64_t* scratch) {
  for (uint32_t span = 2; span <= width; span *= 2) {
    for (uint32_t step = span / 2; step > 0; step /= 2) {
      uint64_t other = 0;
      if (step >= 32) {
        __syncthreads();
        scratch[threadIdx.x] = key;
        __syncthreads();
        other = threadIdx.x < width ? scratch[threadIdx.x ^ step] : key;
      } else {
        other = __shfl_xor_sync(kFullWarp, key, static_cast<int>(step));
      }
      const bool keeps_lower = ((threadIdx.x & step) == 0) == ((threadIdx.x & span) == 0);
      key = (other < key) == keeps_lower ? other : key;
    }
  }
  return key;
}

/// Smallest power of two that is at least 32 and `count`.
__device__ __forceinline__ uint32_t sort_width(int32_t count) {
  return count <= 32 ? 32U : 1U << (32 - __clz(count - 1));
}

/// Sets shared.is_accepted for positions 0..count-1 and returns the sum of the entropies. Every
/// thread of the CTA calls it, with its own entropy if threadIdx.x < count. Ends with a barrier.
__device__ inline double order_entropies(float entropy, int32_t count, float bound,
                                         EntropyShared& shared) {
  const bool is_member = static_cast<int32_t>(threadIdx.x) < count;
  uint64_t key = UINT64_MAX;
  if (is_member) {
    key = static_cast<uint64_t>(ordered_bits(ordering_entropy(entropy))) << 32 | threadIdx.x;
  }
  key = sort_keys(key, sort_width(count), shared.keys);
  const double value =
      is_member ? static_cast<double>(ordered_value(static_cast<uint32_t>(key >> 32))) : 0.0;
  double before = 0.0;  // sum of the lower ranks of this warp
  double inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += (threadIdx.x & 31) >= offset ? other : 0.0;
  }
  before = __shfl_up_sync(kFullWarp, inclusive, 1);
  before = (threadIdx.x & 31) == 0 ? 0.0 : before;
  if ((threadIdx.x & 31) == 31) {
    shared.warp_sums[threadIdx.x >> 5] = inclusive;
  }
  __syncthreads();
  double total = 0.0;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) {
    if (warp == threadIdx.x >> 5) {
      before += total;
    }
    total += shared.warp_sums[warp];
  }
  if (is_member) {
    shared.is_accepted[static_cast<uint32_t>(key)] =
        is_within_entropy_bound(threadIdx.x, before, bound) ? 1 : 0;
  }
  __syncthreads();
  return total;
}

}  // namespace diffulex::cuda
