// SPDX-License-Identifier: Apache-2.0
#pragma once

// Programmatic dependent launch (PTX 7.8, sm_90): a kernel may start while the one before it in the
// stream still runs. Before it reads what an earlier kernel wrote, or writes what one may still
// read, it calls pdl_wait(). Weights are read before it, by launches that can_read_ahead() allows.
// On older architectures both calls do nothing and the launch is plain.

#include <cstdint>

#include <cuda_runtime.h>

#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

/// griddepcontrol.wait: returns when the kernels before this one have completed.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents: the next kernel may start once every CTA has said so or ended.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

/// Brings arguments into the constant cache, a line a warp, instead of a miss for each line later.
template <int kWarps, typename Args>
__device__ __forceinline__ void warm_arguments(const Args& args, int warp) {
  constexpr int kLine = 16;  // words
  static_assert(sizeof(Args) <= kWarps * 4 * kLine, "a line for each warp");
  const auto* const words = reinterpret_cast<const uint32_t*>(&args);
  const int last = static_cast<int>(sizeof(Args) / 4) - 1;
  asm volatile("" ::"r"(words[warp * kLine < last ? warp * kLine : last]));
}

/// Where and how large a launch is.
struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t smem_bytes = 0;
  cudaStream_t stream = nullptr;
  unsigned cluster = 1;  // CTAs of a cluster, along x
};

/// True when the device runs code compiled for its own architecture, 9.0 or later. Code of an older
/// one, compiled at load time, holds no pdl_wait() and must be launched plainly. Static: the list
/// of architectures differs between the groups of sources, and each must get its own answer.
[[nodiscard]] static inline bool can_launch_dependent(int device_index) {
  int major = 0;
  int minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index) !=
          cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index) !=
          cudaSuccess) {
    cudaGetLastError();  // the answer is no; leave no error behind
    return false;
  }
#ifdef __CUDA_ARCH_LIST__
  for (const int arch : {__CUDA_ARCH_LIST__}) {
    if (major >= 9 && arch == major * 100 + minor * 10) {
      return true;
    }
  }
#endif
  return false;
}

/// As above for a kernel that reads weights before its pdl_wait(): only where the caller promises
/// that no launch in front writes them. An ordinary launch starts after all of those.
[[nodiscard]] static inline bool can_read_ahead(const ExecContext& context) {
  return context.weights_settled && can_launch_dependent(context.device_index);
}

/// Launches a kernel that calls pdl_wait() so that it may overlap the end of the one before it;
/// `is_dependent` false (a device without the feature) is an ordinary launch.
template <typename... Params, typename... Args>
cudaError_t launch_dependent(void (*kernel)(Params...), const LaunchShape& shape, bool is_dependent,
                             Args&&... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (is_dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.smem_bytes;
  config.stream = shape.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
}

}  // namespace diffulex::cuda
