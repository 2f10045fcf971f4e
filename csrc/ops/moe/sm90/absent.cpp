// SPDX-License-Identifier: Apache-2.0
//
// The Hopper expert products of a library built without them.
#include "ops/moe/sm90/launch.h"

namespace diffulex::cuda {
namespace {

Status no_kernel() {
  return make_error(StatusCode::kNoKernel, "diffulex::fused_moe",
                    ": device: expected a library with sm_90a kernels, got none");
}

}  // namespace

bool has_moe_wgmma(DType /*dtype*/, int32_t /*device_index*/) {
  return false;
}

Status launch_moe_wgmma(const ExpertGemm& /*gemm*/, DType /*dtype*/,
                        const ExecContext& /*context*/) {
  return no_kernel();
}

Status launch_gather_rows(const GatherRows& /*gather*/, const ExecContext& /*context*/) {
  return no_kernel();
}

Status prepare_moe_wgmma(int32_t /*device_index*/) {
  return Status::ok_status();
}

}  // namespace diffulex::cuda
