// SPDX-License-Identifier: Apache-2.0
//
// entropy_bound_mask: one CTA per segment, one thread per row.
#include <cstdint>

#include "ops/accept/entropy_order.cuh"
#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::entropy_bound_mask";

struct MaskArgs {
  const float* entropy;     // [R]
  const int32_t* segments;  // [S + 1]
  uint8_t* mask;            // [R]
  int64_t num_rows;         // R
  float bound;
};

__global__ void __launch_bounds__(kMaxOrdered, 1)
    mask_kernel(const __grid_constant__ MaskArgs args) {
  __shared__ EntropyShared shared;
  const int64_t begin = args.segments[blockIdx.x];
  int64_t end = args.segments[blockIdx.x + 1];
  if (begin < 0 || begin >= end || begin >= args.num_rows) {
    return;
  }
  end = end < args.num_rows ? end : args.num_rows;
  const int64_t length = end - begin;
  const auto count = static_cast<int32_t>(length < kMaxOrdered ? length : kMaxOrdered);
  const auto index = static_cast<int32_t>(threadIdx.x);
  const float entropy = index < count ? args.entropy[begin + index] : 0.0F;
  order_entropies(entropy, count, args.bound, shared);
  if (index < count) {
    args.mask[begin + index] = args.bound < 0.0F ? 1 : shared.is_accepted[index];
  }
  // Rows past the largest segment cannot be ordered.
  for (int64_t row = begin + kMaxOrdered + index; row < end; row += kMaxOrdered) {
    args.mask[row] = 0;
  }
}

}  // namespace

Status entropy_bound_mask(const EntropyBoundMaskParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kWhere, "segments", params.segments, params.entropy.size[0], context));
  MaskArgs args{};
  args.entropy = params.entropy.as<const float>();
  args.segments = params.segments.as<const int32_t>();
  args.mask = params.mask.as<uint8_t>();
  args.num_rows = params.entropy.size[0];
  args.bound = params.bound;
  mask_kernel<<<static_cast<unsigned>(params.segments.size[0] - 1), kMaxOrdered, 0,
                stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_entropy_bound_mask(const ExecContext& /*context*/) {
  return touch_kernel(kWhere, mask_kernel);
}

}  // namespace diffulex::cuda
