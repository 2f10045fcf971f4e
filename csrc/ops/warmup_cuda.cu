// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include "diffulex/ops/warmup.h"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex {
namespace cuda {

Status warmup(const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status("diffulex::warmup"));
#define DIFFULEX_KERNELS(name) DIFFULEX_RETURN_IF_ERROR(prepare_##name(context));
#include "ops/ops.def"
  return {};
}

}  // namespace cuda

Status warmup(const ExecContext& context) {
  return context.device == Device::kCuda ? cuda::warmup(context) : Status::ok_status();
}

}  // namespace diffulex
