// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime.h>

namespace diffulex::cuda {

/// True when the device has compute capability 9.0 and the environment does not ask for the kernels
/// of the sm_80 class (DIFFULEX_FORCE_SM80=1, for tests).
[[nodiscard]] inline bool is_hopper_device(int32_t device_index) {
  static const bool is_forced_off = [] {
    const char* text = std::getenv("DIFFULEX_FORCE_SM80");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  if (is_forced_off) {
    return false;
  }
  int major = 0;
  int minor = 0;
  const bool is_known = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                               device_index) == cudaSuccess &&
                        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor,
                                               device_index) == cudaSuccess;
  if (!is_known) {
    cudaGetLastError();  // the answer is no; leave no error behind
  }
  return is_known && major == 9 && minor == 0;
}

}  // namespace diffulex::cuda
