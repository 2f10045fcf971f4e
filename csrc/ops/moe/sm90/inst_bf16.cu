// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {

Status launch_moe_bf16(const ExpertGemm& gemm, const ExecContext& context) {
  return launch_moe<__nv_bfloat16>(gemm, context);
}

Status prepare_moe_bf16(int32_t device_index) {
  return prepare_moe<__nv_bfloat16>(device_index);
}

}  // namespace diffulex::cuda::sm90
