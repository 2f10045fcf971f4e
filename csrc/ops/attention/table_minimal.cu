// SPDX-License-Identifier: Apache-2.0
//
// Attention kernels of the minimal profile.
#include <array>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/table_entries.cuh"

namespace diffulex::cuda {

TensorCoreKernels tensor_core_kernels() {
  using sm80::attention_instance;
  static const std::array<TensorCoreEntry, 12> entries = {{
      {DType::kBF16, {64, 128, 3}, attention_instance<__nv_bfloat16, 64, 128, 3>()},
      {DType::kBF16, {64, 64, 3}, attention_instance<__nv_bfloat16, 64, 64, 3>()},
      {DType::kBF16, {128, 128, 3}, attention_instance<__nv_bfloat16, 128, 128, 3>()},
      {DType::kBF16, {128, 128, 2}, attention_instance<__nv_bfloat16, 128, 128, 2>()},
      {DType::kBF16, {128, 64, 3}, attention_instance<__nv_bfloat16, 128, 64, 3>()},
      {DType::kBF16, {128, 64, 2}, attention_instance<__nv_bfloat16, 128, 64, 2>()},
      coded_entry<64, 128, 3>(),
      coded_entry<64, 64, 3>(),
      coded_entry<128, 128, 3>(),
      coded_entry<128, 128, 2>(),
      coded_entry<128, 64, 3>(),
      coded_entry<128, 64, 2>(),
  }};
  return TensorCoreKernels{entries.data(), static_cast<int32_t>(entries.size())};
}

GenericKernel generic_kernel_of(DType dtype, bool is_coded) {
  if (dtype == DType::kBF16) {
    return generic_of<__nv_bfloat16>(is_coded);
  }
  if (dtype == DType::kF32) {
    return generic_of<float>(is_coded);
  }
  return GenericKernel{};
}

}  // namespace diffulex::cuda
