// SPDX-License-Identifier: Apache-2.0
//
// The product of few rows in a library built without the Hopper kernels.
#include "ops/cuda_ops.h"
#include "ops/prepare.h"

namespace diffulex::cuda {

Status linear_few_rows(const LinearFewRowsParams& /*params*/, const ExecContext& /*context*/) {
  return make_error(StatusCode::kNoKernel, "diffulex::linear_few_rows",
                    ": device: expected a library with sm_90a kernels, got none");
}

Status prepare_linear_few_rows(const ExecContext& /*context*/) {
  return Status::ok_status();
}

}  // namespace diffulex::cuda
