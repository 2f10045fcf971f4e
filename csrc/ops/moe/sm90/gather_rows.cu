// SPDX-License-Identifier: Apache-2.0
//
// out[p] = x[slots[p] / K] for the active positions: brings the rows of large tiles together, so
// that the copy engine loads them by box. One warp per row.
#include <cstdint>

#include "ops/moe/sm90/launch.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTogether = 8;  // pieces of a lane that are loaded before the first is stored

__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(const __grid_constant__ GatherRows gather) {
  pdl_wait();
  pdl_launch_dependents();
  const int lane = threadIdx.x & 31;
  const int64_t pieces = gather.row_bytes / 16;
  const int32_t active = gather.counters[1];
  for (int64_t position = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5); position < active;
       position += int64_t{gridDim.x} * kWarps) {
    const int64_t row = gather.slots[position] / gather.top_k;
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(gather.rows) +
                                                        row * gather.stride_bytes);
    auto* target =
        reinterpret_cast<uint4*>(static_cast<uint8_t*>(gather.out) + position * gather.row_bytes);
    for (int64_t base = lane; base < pieces; base += 32 * kTogether) {
      uint4 values[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (base + i * 32 < pieces) {
          values[i] = source[base + i * 32];
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (base + i * 32 < pieces) {
          target[base + i * 32] = values[i];
        }
      }
    }
  }
}

}  // namespace

Status launch_gather_rows(const GatherRows& gather, const ExecContext& context) {
  const int64_t most = int64_t{16} * device_processors(context.device_index);
  const int64_t blocks = ceil_div(gather.num_positions, kWarps);
  const LaunchShape shape{dim3(static_cast<unsigned>(blocks < most ? blocks : most)),
                          dim3(kThreads), 0, stream_of(context)};
  return cuda_status("diffulex::fused_moe",
                     launch_dependent(gather_rows_kernel, shape, true, gather));
}

Status prepare_gather_rows() {
  return touch_kernel("diffulex::fused_moe", gather_rows_kernel);
}

}  // namespace diffulex::cuda
