// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/mma.cuh"

namespace diffulex::cuda {

Status launch_moe_mma_f16(const ExpertGemm& gemm, const ExecContext& context) {
  return launch_moe_mma<__half>(gemm, context);
}

Status prepare_moe_mma_f16(int32_t device_index) {
  return prepare_moe_mma_dtype<__half>(device_index);
}

}  // namespace diffulex::cuda
