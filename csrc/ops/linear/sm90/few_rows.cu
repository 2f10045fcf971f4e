// SPDX-License-Identifier: Apache-2.0
//
// linear_few_rows: tensor maps, clusters and launches of the dense product for few rows.
#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/cuda_ops.h"
#include "ops/linear/config.h"
#include "ops/linear/sm90/product.cuh"
#include "ops/prepare.h"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::linear_few_rows";
/// Shared memory of a CTA, alone on its processor.
constexpr int32_t kSmemLimit = 227 * 1024;

using sm90::LinearArgs;
using sm90::LinearTraits;
using sm90::TensorMapShape;

/// W as runs of eight rows: neighbouring runs, or a gate and an up run, lie side by side in a tile.
TensorMapShape weight_shape(const LinearFewRowsParams& params, int32_t box_rows) {
  const int64_t rows = params.weight.size[0];
  const int64_t row = params.weight.stride[0];
  const bool has_gate = params.act.has_value();
  TensorMapShape shape;
  shape.rank = 4;
  shape.data = params.weight.data;
  const int64_t sizes[] = {params.weight.size[1], 8, 2, rows / 16};
  const int64_t strides[] = {1, row, has_gate ? rows / 2 * row : 8 * row,
                             has_gate ? 8 * row : 16 * row};
  const int32_t boxes[] = {static_cast<int32_t>(kFewRowsDepth), 8, 2, box_rows / 16};
  std::copy_n(sizes, 4, shape.size);
  std::copy_n(strides, 4, shape.stride);
  std::copy_n(boxes, 4, shape.box);
  return shape;
}

TensorMapShape row_shape(const LinearFewRowsParams& params, int32_t box_rows) {
  TensorMapShape shape;
  shape.rank = 2;
  shape.data = params.x.data;
  shape.size[0] = params.x.size[1];
  shape.size[1] = params.x.size[0];
  shape.stride[0] = 1;
  shape.stride[1] = params.x.stride[0];
  shape.box[0] = static_cast<int32_t>(kFewRowsDepth);
  shape.box[1] = box_rows;
  return shape;
}

template <typename Traits>
Status prepare_tile(int32_t device_index) {
  return allow_shared_memory<sm90::linear_kernel<Traits>>(kWhere, device_index, kSmemLimit);
}

template <typename T, int kRows>
Status launch(const LinearFewRowsParams& params, const ExecContext& context) {
  using Traits = LinearTraits<T, kRows>;
  DIFFULEX_RETURN_IF_ERROR(prepare_tile<Traits>(context.device_index));
  int processors = 0;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(
      kWhere,
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, context.device_index)));
  const int64_t depth = params.x.size[1];
  const LinearPlan plan =
      linear_plan(params.x.size[0], params.weight.size[0], depth, processors, kSmemLimit);
  CUtensorMap weight_map;
  CUtensorMap row_map;
  DIFFULEX_RETURN_IF_ERROR(sm90::encode_tensor_map(kWhere, weight_shape(params, plan.tile_rows),
                                                   params.weight.dtype, &weight_map));
  DIFFULEX_RETURN_IF_ERROR(sm90::encode_tensor_map(
      kWhere, row_shape(params, static_cast<int32_t>(params.x.size[0])), params.x.dtype, &row_map));
  LinearArgs args{};
  args.out = params.out.data;
  args.bias = params.bias.data;
  args.out_stride = params.out.stride[0];
  args.num_rows = static_cast<int32_t>(params.x.size[0]);
  args.num_columns = static_cast<int32_t>(params.out.size[1]);
  args.tile_rows = plan.tile_rows;
  args.num_tiles = plan.num_tiles;
  args.num_steps = static_cast<int32_t>(ceil_div(depth, plan.lines * kFewRowsDepth));
  args.splits = plan.splits;
  args.lines = plan.lines;
  args.stages = plan.stages;
  args.paced_stages = plan.paced_stages;
  args.stage_bytes = plan.stage_bytes;
  args.row_bytes = args.num_rows * plan.lines * Traits::kLineBytes;
  args.partial_bytes = plan.partial_bytes;
  args.warps = plan.tile_rows / 16;
  args.act = params.act.has_value() ? static_cast<int32_t>(*params.act) : -1;
  LaunchShape shape;
  shape.cluster = static_cast<unsigned>(plan.splits);
  shape.grid = dim3(static_cast<unsigned>(plan.num_clusters) * shape.cluster);
  shape.block = dim3(static_cast<unsigned>(ceil_div(plan.tile_rows, 64) * 128 + 32));
  shape.smem_bytes = static_cast<size_t>(plan.smem_bytes);
  shape.stream = stream_of(context);
  return cuda_status(kWhere, launch_dependent(sm90::linear_kernel<Traits>, shape,
                                              context.weights_settled, weight_map, row_map, args));
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
