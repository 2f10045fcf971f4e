// SPDX-License-Identifier: Apache-2.0
//
// Attention kernels of the minimal profile.
#include <array>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/attention/generic.h"
#include "ops/attention/table.h"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda {

namespace {

/// Of bf16 rows; caches of codes beside rows of other types are read by the generic kernel.
template <int kDim, int kRows, int kStages>
TensorCoreEntry coded_entry() {
  return {DType::kBF16,
          {kDim, kRows, kStages},
          sm80::attention_instance<__nv_bfloat16, kDim, kRows, kStages, KvCode>(),
          true};
}

template <typename T>
GenericKernel generic_of(bool is_coded) {
  return is_coded ? GenericKernel{&launch_generic<T, KvCode>, &prepare_generic<T, KvCode>}
                  : GenericKernel{&launch_generic<T>, &prepare_generic<T>};
}

}  // namespace

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
