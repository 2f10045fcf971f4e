// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/sm90/launch.cuh"

namespace diffulex::cuda::sm90 {

Status launch_moe_f16(const ExpertGemm& gemm, const ExecContext& context) {
  return launch_moe<__half>(gemm, context);
}

Status prepare_moe_f16(int32_t device_index) {
  return prepare_moe<__half>(device_index);
}

}  // namespace diffulex::cuda::sm90
