// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/attention_generic.cuh"

namespace diffulex::cuda {

template Status launch_generic<__nv_bfloat16>(const AttentionArgs& args, void* stream);
template Status prepare_generic<__nv_bfloat16>();

}  // namespace diffulex::cuda
