// SPDX-License-Identifier: Apache-2.0
#include "ops/quant/scaled_launch.cuh"

namespace diffulex::cuda {

Status launch_scaled_int8(const char* where, const ScaledArgs& args, DType out, int64_t height,
                          int64_t max_tiles, const ExecContext& context) {
  return launch_scaled<int32_t>(where, args, out, height, max_tiles, context);
}

Status prepare_scaled_int8(int32_t device_index) {
  return prepare_scaled_kernels<int32_t>(device_index);
}

}  // namespace diffulex::cuda
