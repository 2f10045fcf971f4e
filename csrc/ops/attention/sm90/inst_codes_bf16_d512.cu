// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {

template AttentionKernel attention_instance<__nv_bfloat16, 512, 64, KvCode>();

}  // namespace diffulex::cuda::sm90
