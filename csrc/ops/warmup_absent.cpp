// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/warmup.h"
#include "ops/cuda_ops.h"

namespace diffulex {
namespace cuda {

Status warmup(const ExecContext& /*context*/) {
  return make_error(StatusCode::kNoKernel,
                    "diffulex::warmup: device: expected a build with CUDA, got a cuda device and "
                    "a library built without CUDA");
}

}  // namespace cuda

Status warmup(const ExecContext& context) {
  return context.device == Device::kCuda ? cuda::warmup(context) : Status::ok_status();
}

}  // namespace diffulex
