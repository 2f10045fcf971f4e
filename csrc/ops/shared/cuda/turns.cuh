// SPDX-License-Identifier: Apache-2.0
#pragma once

// Two warpgroups take turns on the tensor cores: one issues its products while the other works on
// its sums.

#include <cstdint>

#include "ops/shared/cuda/mbarrier.cuh"

namespace diffulex::cuda::ptx {

/// Turns of two warpgroups, `group` 0 and 1, which wait and pass equally often; nothing where not
/// `kActive`. `open` comes first, once. Named barriers 1 and 2 are theirs.
template <bool kActive>
struct Turns final {
  static constexpr uint32_t kFirstBarrier = 1;
  static constexpr uint32_t kThreads = 256;  // of both

  __device__ static __forceinline__ void open(int group) {
    if (kActive && group == 1) {
      named_barrier_arrive(kFirstBarrier, kThreads);
    }
  }
  __device__ static __forceinline__ void wait(int group) {
    if constexpr (kActive) {
      named_barrier_sync(kFirstBarrier + group, kThreads);
    }
  }
  __device__ static __forceinline__ void pass(int group) {
    if constexpr (kActive) {
      named_barrier_arrive(kFirstBarrier + 1 - group, kThreads);
    }
  }
};

}  // namespace diffulex::cuda::ptx
