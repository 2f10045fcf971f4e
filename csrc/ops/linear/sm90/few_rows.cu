// SPDX-License-Identifier: Apache-2.0
//
// linear_few_rows: tensor maps, clusters and launches of the dense product for few rows.
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/cuda_ops.h"
#include "ops/linear/config.h"
#include "ops/linear/sm90/launch.cuh"
#include "ops/linear/sm90/product.cuh"
#include "ops/prepare.h"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::linear_few_rows";

using sm90::LinearArgs;
using sm90::LinearTraits;

template <typename Traits>
Status prepare_tile(int32_t device_index) {
  return sm90::prepare_ring<sm90::linear_kernel<Traits>>(kWhere, device_index);
}

template <typename T, int kRows>
Status launch(const LinearFewRowsParams& params, const ExecContext& context) {
  using Traits = LinearTraits<T, kRows>;
  int processors = 0;
  DIFFULEX_RETURN_IF_ERROR(sm90::count_processors(kWhere, context.device_index, &processors));
  constexpr auto kLine = static_cast<int32_t>(kFewRowsDepth);
  const int64_t depth = params.x.size[1];
  const LinearPlan plan =
      linear_plan(params.x.size[0], params.weight.size[0], depth, processors, sm90::kRingSmemLimit);
  LinearArgs args{};
  sm90::set_call(params, plan, &args);
  args.num_steps = static_cast<int32_t>(ceil_div(depth, plan.lines * kFewRowsDepth));
  args.row_bytes = args.num_rows * plan.lines * Traits::kLineBytes;
  return sm90::launch_ring<sm90::linear_kernel<Traits>>(
      kWhere,
      {sm90::weight_shape(params.weight, params.act.has_value(), kLine, plan.tile_rows),
       params.weight.dtype, sm90::row_shape(params.x, kLine, args.num_rows), params.x.dtype,
       ceil_div(plan.tile_rows, 64)},
      args, plan, context);
}

template <typename T>
Status launch_rows(const LinearFewRowsParams& params, const ExecContext& context) {
  switch (linear_tile_rows(params.x.size[0])) {
    case 16:
      return launch<T, 16>(params, context);
    case 32:
      return launch<T, 32>(params, context);
    case 64:
      return launch<T, 64>(params, context);
    default:
      return launch<T, 128>(params, context);
  }
}

template <typename T>
Status prepare_dtype(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<LinearTraits<T, 16>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<LinearTraits<T, 32>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<LinearTraits<T, 64>>(device_index)));
  return prepare_tile<LinearTraits<T, 128>>(device_index);
}

}  // namespace

Status linear_few_rows(const LinearFewRowsParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  if (!is_hopper_device(context.device_index)) {
    return make_error(StatusCode::kNoKernel, kWhere,
                      ": device: expected compute capability 9.0, got another");
  }
  return params.x.dtype == DType::kBF16 ? launch_rows<__nv_bfloat16>(params, context)
                                        : launch_rows<__half>(params, context);
}

Status prepare_linear_few_rows(const ExecContext& context) {
  if (!is_hopper_device(context.device_index)) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_dtype<__half>(context.device_index));
  return prepare_dtype<__nv_bfloat16>(context.device_index);
}

}  // namespace diffulex::cuda
