// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "ops/attention/sm80/kernel.cuh"
#include "ops/attention/sm80/launch.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/shared_memory.cuh"

namespace diffulex::cuda::sm80 {

inline constexpr const char* kAttentionWhere = "diffulex::block_attention";

/// Allows the kernel its shared memory, once per device.
template <typename Traits>
Status prepare_attention(int32_t device_index) {
  return allow_shared_memory<attention_kernel<Traits>>(kAttentionWhere, device_index,
                                                       Traits::kSmemBytes);
}

template <typename Traits>
Status launch_attention(const AttentionArgs& args, int32_t device_index, void* stream) {
  DIFFULEX_RETURN_IF_ERROR(prepare_attention<Traits>(device_index));
  const int64_t grid =
      int64_t{args.num_reqs} * args.num_kv_heads * args.num_splits * args.tiles_per_request +
      int64_t{args.num_reqs + 1} * args.tiles_per_request;
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  attention_kernel<Traits>
      <<<static_cast<unsigned>(grid < kMaxGrid ? grid : kMaxGrid), Traits::kThreads,
         Traits::kSmemBytes, static_cast<cudaStream_t>(stream)>>>(
          static_cast<const typename Traits::Args&>(args));
  return check_launch(kAttentionWhere);
}

template <typename T, int kDim, int kRows, int kStages, typename Cached>
AttentionKernel attention_instance() {
  using Traits = AttentionTraits<T, kDim, kRows, kStages, Cached>;
  return AttentionKernel{&launch_attention<Traits>, &prepare_attention<Traits>};
}

}  // namespace diffulex::cuda::sm80
