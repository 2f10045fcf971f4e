// SPDX-License-Identifier: Apache-2.0
//
// Entries that the tables of both profiles have.
#pragma once

#include <cuda_bf16.h>

#include "ops/attention/generic.h"
#include "ops/attention/table.h"
#include "ops/kv/codes.cuh"

namespace diffulex::cuda {

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

}  // namespace diffulex::cuda
