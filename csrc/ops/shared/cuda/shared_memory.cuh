// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::cuda {

/// Lets `kKernel` use `bytes` of dynamic shared memory on the current device `device_index`; the
/// driver is asked once per device and process.
template <auto kKernel>
[[nodiscard]] Status allow_shared_memory(const char* where, int32_t device_index, size_t bytes) {
  constexpr int32_t kMaxDevices = 64;
  static std::once_flag flags[kMaxDevices];
  static cudaError_t errors[kMaxDevices];
  if (device_index < 0 || device_index >= kMaxDevices) {
    return make_error(StatusCode::kUnsupported, where, ": device: expected an index below ",
                      kMaxDevices, ", got ", device_index);
  }
  std::call_once(flags[device_index], [&] {
    errors[device_index] = cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  });
  return cuda_status(where, errors[device_index]);
}

/// Shared memory that nothing uses; a multiprocessor has room for two. A launch that starts while
/// the one before holds most multiprocessors would pile its CTAs on the few others.
inline constexpr int32_t kSpreadBytes = 100 * 1024;

/// As launch_dependent(), at most two CTAs to a multiprocessor where all of them run at once.
template <auto kKernel, typename... Args>
Status launch_spread(const char* where, LaunchShape shape, int32_t device_index, Args&&... args) {
  const bool is_dependent = can_launch_dependent(device_index);
  if (is_dependent && device_shared_memory(device_index) >= 2 * kSpreadBytes &&
      int64_t{shape.grid.x} * shape.grid.y <= int64_t{2} * device_processors(device_index)) {
    DIFFULEX_RETURN_IF_ERROR(allow_shared_memory<kKernel>(where, device_index, kSpreadBytes));
    shape.smem_bytes = kSpreadBytes;
  }
  return cuda_status(where,
                     launch_dependent(kKernel, shape, is_dependent, std::forward<Args>(args)...));
}

}  // namespace diffulex::cuda
