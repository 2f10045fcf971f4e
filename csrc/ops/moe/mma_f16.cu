// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/nibble_experts.cuh"

namespace diffulex::cuda {

Status launch_moe_mma_f16(const ExpertGemm& gemm, const ExecContext& context) {
  return launch_moe_any<__half>(gemm, context);
}

Status prepare_moe_mma_f16(int32_t device_index) {
  return prepare_moe_any<__half>(device_index);
}

}  // namespace diffulex::cuda
