// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "diffulex/ops/comm.h"
#include "ops/comm/sum_row.cuh"

namespace diffulex::cuda {

/// Arguments of one sum over ranks.
struct AllReduceArgs {
  RowOutput output;          // writes x itself
  const void* x;             // [T, H]
  char* buffers[kMaxRanks];  // of the ranks
  int64_t* state;
  int64_t num_rows;     // T
  int64_t owned_rows;   // of a rank, for two-shot
  int64_t epoch_bytes;  // distance of epochs
  int64_t used_bytes;   // of an epoch by this sum
  int32_t world;
  int32_t rank;
  bool is_two_shot;
};

/// Launches the kernel of one dtype; `max_ctas` 0 is what the device holds.
template <typename T>
cudaError_t launch_all_reduce(const AllReduceArgs& args, int32_t max_ctas,
                              const ExecContext& context);
/// Loads the kernels of one dtype.
template <typename T>
Status touch_all_reduce();

}  // namespace diffulex::cuda
