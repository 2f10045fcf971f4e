// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "ops/attention/config.h"
#include "ops/attention/sm80/launch.h"

namespace diffulex::cuda {

/// A tensor-core instantiation and what it serves.
struct TensorCoreEntry final {
  DType dtype = DType::kBF16;
  AttentionTile tile;
  sm80::AttentionKernel kernel;
  bool is_coded = false;  // caches of codes
};

/// The generic kernel of one dtype of rows and kind of caches; null members when the profile leaves
/// it out.
struct GenericKernel final {
  Status (*launch)(const AttentionArgs& args, int32_t device_index, void* stream) = nullptr;
  Status (*prepare)(int32_t device_index) = nullptr;
};

/// The tensor-core instantiations, for range-based loops.
struct TensorCoreKernels final {
  const TensorCoreEntry* entries = nullptr;
  int32_t count = 0;

  [[nodiscard]] const TensorCoreEntry* begin() const { return entries; }
  [[nodiscard]] const TensorCoreEntry* end() const { return entries + count; }
};

/// Instantiations of the build profile (table.cu).
[[nodiscard]] TensorCoreKernels tensor_core_kernels();
[[nodiscard]] GenericKernel generic_kernel_of(DType dtype, bool is_coded);

}  // namespace diffulex::cuda
