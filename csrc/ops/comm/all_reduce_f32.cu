// SPDX-License-Identifier: Apache-2.0
#include "ops/comm/all_reduce.cuh"

namespace diffulex::cuda {

template cudaError_t launch_all_reduce<float>(const AllReduceArgs&, int32_t, const ExecContext&);
template Status touch_all_reduce<float>();

}  // namespace diffulex::cuda
