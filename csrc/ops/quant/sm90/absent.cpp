// SPDX-License-Identifier: Apache-2.0
//
// The products of low precision in a library built without the Hopper kernels.
#include "ops/quant/nibble_product.h"
#include "ops/quant/scaled_product.h"

namespace diffulex::cuda {

bool has_wgmma_product(const LinearScaledParams& /*params*/, int32_t /*device_index*/) {
  return false;
}

Status launch_wgmma_product(const LinearScaledParams& /*params*/, const ExecContext& /*context*/) {
  return make_error(StatusCode::kNoKernel, "diffulex::linear_scaled",
                    ": device: expected a library with sm_90a kernels, got none");
}

Status prepare_wgmma_product(int32_t /*device_index*/) {
  return Status::ok_status();
}

Status launch_nibble_tiles(const LinearW4a16Params& /*params*/, const ExecContext& /*context*/) {
  return make_error(StatusCode::kNoKernel, "diffulex::linear_w4a16",
                    ": weight: expected row-major codes in a library without sm_90a kernels, got"
                    " tiles");
}

Status prepare_nibble_tiles(int32_t /*device_index*/) {
  return Status::ok_status();
}

}  // namespace diffulex::cuda
