// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/generic.cuh"

namespace diffulex::cuda {

template Status launch_generic<float, KvCode>(const AttentionArgs& args, int32_t device_index,
                                              void* stream);
template Status prepare_generic<float, KvCode>(int32_t device_index);

}  // namespace diffulex::cuda
