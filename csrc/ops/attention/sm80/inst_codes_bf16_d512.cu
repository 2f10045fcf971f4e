// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/sm80/launch.cuh"

namespace diffulex::cuda::sm80 {

template AttentionKernel attention_instance<__nv_bfloat16, 512, 64, 2, KvCode>();
template AttentionKernel attention_instance<__nv_bfloat16, 512, 32, 2, KvCode>();

}  // namespace diffulex::cuda::sm80
