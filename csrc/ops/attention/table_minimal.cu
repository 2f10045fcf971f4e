// SPDX-License-Identifier: Apache-2.0
//
// Attention kernels of the minimal profile.
#include <array>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/generic.h"
#include "ops/attention/table.h"

namespace diffulex::cuda {

TensorCoreKernels tensor_core_kernels() {
  using sm80::attention_instance;
  static const std::array<TensorCoreEntry, 6> entries = {{
      {DType::kBF16, {64, 128, 3}, attention_instance<__nv_bfloat16, 64, 128, 3>()},
      {DType::kBF16, {64, 64, 3}, attention_instance<__nv_bfloat16, 64, 64, 3>()},
      {DType::kBF16, {128, 128, 3}, attention_instance<__nv_bfloat16, 128, 128, 3>()},
      {DType::kBF16, {128, 128, 2}, attention_instance<__nv_bfloat16, 128, 128, 2>()},
      {DType::kBF16, {128, 64, 3}, attention_instance<__nv_bfloat16, 128, 64, 3>()},
      {DType::kBF16, {128, 64, 2}, attention_instance<__nv_bfloat16, 128, 64, 2>()},
  }};
  return TensorCoreKernels{entries.data(), static_cast<int32_t>(entries.size())};
}

GenericKernel generic_kernel_of(DType dtype) {
  if (dtype == DType::kBF16) {
    return GenericKernel{&launch_generic<__nv_bfloat16>, &prepare_generic<__nv_bfloat16>};
  }
  if (dtype == DType::kF32) {
    return GenericKernel{&launch_generic<float>, &prepare_generic<float>};
  }
  return GenericKernel{};
}

}  // namespace diffulex::cuda
