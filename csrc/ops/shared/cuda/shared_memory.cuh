// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>

#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "ops/shared/cuda/launch.cuh"

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

}  // namespace diffulex::cuda
