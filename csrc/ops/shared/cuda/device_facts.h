// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

namespace diffulex::cuda {

/// An attribute of a device, 0 if the driver does not tell.
[[nodiscard]] inline int32_t device_attribute(cudaDeviceAttr attribute, int32_t device_index) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device_index) != cudaSuccess) {
    cudaGetLastError();  // the question is answered; leave no error behind
    return 0;
  }
  return value;
}

[[nodiscard]] inline int32_t device_processors(int32_t device_index) {
  return device_attribute(cudaDevAttrMultiProcessorCount, device_index);
}

/// Bytes of shared memory that a CTA takes besides its own, since compute capability 8.0.
inline constexpr int32_t kReservedSharedMemory = 1024;

/// Bytes of shared memory that a CTA may opt in to.
[[nodiscard]] inline int32_t device_shared_memory(int32_t device_index) {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_index);
}

}  // namespace diffulex::cuda
