// SPDX-License-Identifier: Apache-2.0
//
// linear_scaled of e4m3 codes on Hopper: tensor maps, clusters and launches.
#include <algorithm>
#include <cstdint>

#include "ops/linear/config.h"
#include "ops/quant/scaled_product.h"
#include "ops/quant/sm90/product.cuh"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::linear_scaled";
/// Shared memory of a CTA, alone on its processor.
constexpr int32_t kSmemLimit = 227 * 1024;
constexpr int32_t kLine = 128;  // codes, and bytes

using sm90::ScaledLinearArgs;
using sm90::ScaledTraits;
using sm90::TensorMapShape;

/// W as runs of eight rows: neighbouring runs, or a gate and an up run, lie side by side in a tile.
TensorMapShape weight_shape(const LinearScaledParams& params, int32_t box_rows) {
  const int64_t rows = params.weight.size[0];
  const int64_t row = params.weight.stride[0];
  const bool has_gate = params.act.has_value();
  TensorMapShape shape;
  shape.rank = 4;
  shape.data = params.weight.data;
  const int64_t sizes[] = {params.weight.size[1], 8, 2, rows / 16};
  const int64_t strides[] = {1, row, has_gate ? rows / 2 * row : 8 * row,
                             has_gate ? 8 * row : 16 * row};
  const int32_t boxes[] = {kLine, 8, 2, box_rows / 16};
  std::copy_n(sizes, 4, shape.size);
  std::copy_n(strides, 4, shape.stride);
  std::copy_n(boxes, 4, shape.box);
  return shape;
}

TensorMapShape row_shape(const LinearScaledParams& params, int32_t box_rows) {
  TensorMapShape shape;
  shape.rank = 2;
  shape.data = params.x.data;
  shape.size[0] = params.x.size[1];
  shape.size[1] = params.x.size[0];
  shape.stride[0] = 1;
  shape.stride[1] = params.x.stride[0];
  shape.box[0] = kLine;
  shape.box[1] = box_rows;
  return shape;
}

template <typename Traits>
Status prepare_tile(int32_t device_index) {
  return allow_shared_memory<sm90::scaled_linear_kernel<Traits>>(kWhere, device_index, kSmemLimit);
}

ScaledLinearArgs scaled_args(const LinearScaledParams& params, const ScaledPlan& plan) {
  const LinearPlan& linear = plan.linear;
  ScaledLinearArgs args{};
  args.out = params.out.data;
  args.bias = params.bias.data;
  args.out_stride = params.out.stride[0];
  args.num_rows = static_cast<int32_t>(params.x.size[0]);
  args.num_columns = static_cast<int32_t>(params.out.size[1]);
  args.tile_rows = linear.tile_rows;
  args.num_tiles = linear.num_tiles;
  args.splits = linear.splits;
  args.lines = linear.lines;
  args.stages = linear.stages;
  args.paced_stages = linear.paced_stages;
  args.stage_bytes = linear.stage_bytes;
  args.partial_bytes = linear.partial_bytes;
  args.warps = linear.tile_rows / 16;
  args.act = params.act.has_value() ? static_cast<int32_t>(*params.act) : -1;
  args.x_scale = params.x_scale.as<const float>();
  args.weight_scale = params.weight_scale.as<const float>();
  args.x_scale_stride = params.x_scale.stride[0];
  args.block_stride = params.weight_scale.rank == 2 ? params.weight_scale.stride[0] : 0;
  args.weight_rows = static_cast<int32_t>(params.weight.size[0]);
  args.num_lines = plan.num_lines;
  args.row_tiles = plan.row_tiles;
  args.scale_bytes = plan.scale_bytes;
  return args;
}

template <int kRows, int kLines>
Status launch(const LinearScaledParams& params, const ScaledPlan& plan,
              const ExecContext& context) {
  using Traits = ScaledTraits<kRows, kLines>;
  DIFFULEX_RETURN_IF_ERROR(prepare_tile<Traits>(context.device_index));
  ScaledLinearArgs args = scaled_args(params, plan);
  args.box_rows = std::min(args.num_rows, kRows);
  CUtensorMap weight_map;
  CUtensorMap row_map;
  DIFFULEX_RETURN_IF_ERROR(sm90::encode_tensor_map(kWhere, weight_shape(params, args.tile_rows),
                                                   DType::kF8E4M3, &weight_map));
  DIFFULEX_RETURN_IF_ERROR(
      sm90::encode_tensor_map(kWhere, row_shape(params, args.box_rows), DType::kF8E4M3, &row_map));
  LaunchShape shape;
  shape.cluster = static_cast<unsigned>(args.splits);
  shape.grid = dim3(static_cast<unsigned>(plan.linear.num_clusters) * shape.cluster);
  shape.block = dim3(static_cast<unsigned>(ceil_div(args.tile_rows, 64) * 128 + 32));
  shape.smem_bytes = static_cast<size_t>(plan.linear.smem_bytes);
  shape.stream = stream_of(context);
  return cuda_status(kWhere, launch_dependent(sm90::scaled_linear_kernel<Traits>, shape,
                                              context.weights_settled, weight_map, row_map, args));
}

template <int kRows>
Status prepare_short(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<ScaledTraits<kRows, 1>>(device_index)));
  return prepare_tile<ScaledTraits<kRows, 2>>(device_index);
}

}  // namespace

bool has_wgmma_product(const LinearScaledParams& params, int32_t device_index) {
  constexpr int64_t kAligned = 16;
  const int64_t padded_rows = ceil_div(params.x.size[0], 4) * 4;
  return params.x.dtype == DType::kF8E4M3 && params.out.dtype == DType::kBF16 &&
         params.x.size[1] % kAligned == 0 && params.weight.size[0] % kAligned == 0 &&
         params.x.stride[0] % kAligned == 0 && params.weight.stride[0] % kAligned == 0 &&
         is_aligned16(params.x.data) && is_aligned16(params.weight.data) &&
         params.x_scale.size[1] >= padded_rows && params.x_scale.stride[0] % 4 == 0 &&
         is_aligned16(params.x_scale.data) && params.out.stride[0] % 2 == 0 &&
         reinterpret_cast<uintptr_t>(params.out.data) % 4 == 0 && is_hopper_device(device_index);
}

Status launch_wgmma_product(const LinearScaledParams& params, const ExecContext& context) {
  int processors = 0;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(
      kWhere,
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, context.device_index)));
  const ScaledPlan plan = scaled_plan(params.x.size[0], params.weight.size[0], params.x.size[1],
                                      processors, kSmemLimit);
  const bool is_pair = plan.linear.lines == 2;
  switch (linear_tile_rows(params.x.size[0])) {
    case 16:
      return is_pair ? launch<16, 2>(params, plan, context) : launch<16, 1>(params, plan, context);
    case 32:
      return is_pair ? launch<32, 2>(params, plan, context) : launch<32, 1>(params, plan, context);
    case 64:
      return is_pair ? launch<64, 2>(params, plan, context) : launch<64, 1>(params, plan, context);
    default:
      return launch<128, 1>(params, plan, context);
  }
}

Status prepare_wgmma_product(int32_t device_index) {
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_short<16>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_short<32>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_short<64>(device_index));
  return prepare_tile<ScaledTraits<128, 1>>(device_index);
}

}  // namespace diffulex::cuda
