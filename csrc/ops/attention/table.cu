// SPDX-License-Identifier: Apache-2.0
//
// Attention kernels of the build profile.
#include <array>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/generic.h"
#include "ops/attention/table.h"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda {
namespace {

template <typename T, int kDim, int kRows, int kStages, typename Cached>
TensorCoreEntry entry_of() {
  return {std::is_same_v<T, __half> ? DType::kF16 : DType::kBF16,
          {kDim, kRows, kStages},
          sm80::attention_instance<T, kDim, kRows, kStages, Cached>(),
          std::is_same_v<Cached, KvCode>};
}

template <typename T>
GenericKernel generic_of(bool is_coded) {
  return is_coded ? GenericKernel{&launch_generic<T, KvCode>, &prepare_generic<T, KvCode>}
                  : GenericKernel{&launch_generic<T>, &prepare_generic<T>};
}

}  // namespace

TensorCoreKernels tensor_core_kernels() {
  static const std::array entries = {
#define DIFFULEX_INSTANCE(...) entry_of<__VA_ARGS__>(),
#include "ops/attention/sm80/instances.def"
  };
  return TensorCoreKernels{entries.data(), static_cast<int32_t>(entries.size())};
}

GenericKernel generic_kernel_of(DType dtype, bool is_coded) {
  if (dtype == DType::kBF16) {
    return generic_of<__nv_bfloat16>(is_coded);
  }
  if (dtype == DType::kF32) {
    return generic_of<float>(is_coded);
  }
#ifndef DIFFULEX_CUDA_MINIMAL
  if (dtype == DType::kF16) {
    return generic_of<__half>(is_coded);
  }
#endif
  return GenericKernel{};
}

}  // namespace diffulex::cuda
