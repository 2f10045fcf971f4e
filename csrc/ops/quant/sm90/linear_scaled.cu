// SPDX-License-Identifier: Apache-2.0
//
// linear_scaled of e4m3 codes on Hopper: tensor maps, clusters and launches.
#include <algorithm>
#include <cstdint>

#include "diffulex/ops/linear.h"
#include "ops/linear/config.h"
#include "ops/linear/sm90/launch.cuh"
#include "ops/quant/scaled_product.h"
#include "ops/quant/sm90/many_rows.cuh"
#include "ops/quant/sm90/product.cuh"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::linear_scaled";
constexpr int32_t kLine = 128;  // codes, and bytes

using sm90::ManyRowsArgs;
using sm90::ManyRowsTraits;
using sm90::ScaledLinearArgs;
using sm90::ScaledTraits;

using ByRow = ManyRowsTraits<kManyRowsPairedTile, false>;
using ByRowWide = ManyRowsTraits<kManyRowsWideTile, false>;
using ByBlock = ManyRowsTraits<kManyRowsPairedTile, true>;

template <typename Traits>
Status prepare_tile(int32_t device_index) {
  return sm90::prepare_ring<sm90::scaled_linear_kernel<Traits>>(kWhere, device_index);
}

template <typename Plan>
void set_scaled(const LinearScaledParams& params, const Plan& plan, ScaledLinearArgs* args) {
  sm90::set_call(params, plan.linear, args);
  args->x_scale = params.x_scale.as<const float>();
  args->weight_scale = params.weight_scale.as<const float>();
  args->x_scale_stride = params.x_scale.stride[0];
  args->block_stride = params.weight_scale.rank == 2 ? params.weight_scale.stride[0] : 0;
  args->weight_rows = static_cast<int32_t>(params.weight.size[0]);
  args->num_lines = plan.num_lines;
  args->scale_bytes = plan.scale_bytes;
}

template <int kRows, int kLines>
Status launch(const LinearScaledParams& params, const ScaledPlan& plan,
              const ExecContext& context) {
  using Traits = ScaledTraits<kRows, kLines>;
  ScaledLinearArgs args{};
  set_scaled(params, plan, &args);
  args.box_rows = std::min(args.num_rows, kRows);
  return sm90::launch_ring<sm90::scaled_linear_kernel<Traits>>(
      kWhere,
      {sm90::weight_shape(params.weight, params.act.has_value(), kLine, args.tile_rows),
       DType::kF8E4M3, sm90::row_shape(params.x, kLine, args.box_rows), DType::kF8E4M3,
       ceil_div(args.tile_rows, 64)},
      args, plan.linear, context);
}

template <typename Traits>
Status launch_many(const LinearScaledParams& params, const ManyRowsPlan& plan,
                   const ExecContext& context) {
  constexpr int32_t kConsumers = Traits::kConsumers / 128;
  ManyRowsArgs args{};
  set_scaled(params, plan, &args);
  args.warps = kConsumers * 4;
  args.box_rows = kManyRowsBox;
  args.row_tiles = plan.row_tiles;
  args.second_share = plan.second_share;
  args.held_bytes = plan.held_bytes;
  args.is_wide =
      params.out.stride[0] % 4 == 0 && reinterpret_cast<uintptr_t>(params.out.data) % 8 == 0;
  return sm90::launch_ring<sm90::many_rows_kernel<Traits>>(
      kWhere,
      {sm90::weight_shape(params.weight, params.act.has_value(), kLine, args.tile_rows),
       DType::kF8E4M3, sm90::row_shape(params.x, kLine, args.box_rows), DType::kF8E4M3, kConsumers,
       Traits::kThreads - Traits::kConsumers},
      args, plan.linear, context);
}

Status launch_many_rows(const LinearScaledParams& params, int32_t processors,
                        const ExecContext& context) {
  const bool has_blocks = params.weight_scale.rank == 2;
  const ManyRowsPlan plan =
      many_rows_plan(params.x.size[0], {params.weight.size[0], params.x.size[1], kLine, 1},
                     has_blocks, processors, sm90::kRingSmemLimit);
  if (has_blocks) {
    return launch_many<ByBlock>(params, plan, context);
  }
  return plan.linear.tile_rows == kManyRowsWideTile ? launch_many<ByRowWide>(params, plan, context)
                                                    : launch_many<ByRow>(params, plan, context);
}

template <typename Traits>
Status prepare_many(int32_t device_index) {
  return sm90::prepare_ring<sm90::many_rows_kernel<Traits>>(kWhere, device_index);
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
  DIFFULEX_RETURN_IF_ERROR(sm90::count_processors(kWhere, context.device_index, &processors));
  if (params.x.size[0] > kScaledFewRows) {
    return launch_many_rows(params, processors, context);
  }
  const ScaledPlan plan = scaled_plan(params.x.size[0], params.weight.size[0], params.x.size[1],
                                      processors, sm90::kRingSmemLimit);
  const bool is_pair = plan.linear.lines == 2;
  switch (linear_tile_rows(params.x.size[0])) {
    case 16:
      return is_pair ? launch<16, 2>(params, plan, context) : launch<16, 1>(params, plan, context);
    case 32:
      return is_pair ? launch<32, 2>(params, plan, context) : launch<32, 1>(params, plan, context);
    default:
      return is_pair ? launch<64, 2>(params, plan, context) : launch<64, 1>(params, plan, context);
  }
}

Status prepare_wgmma_product(int32_t device_index) {
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_short<16>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_short<32>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_short<64>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_many<ByRow>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_many<ByRowWide>(device_index));
  return prepare_many<ByBlock>(device_index);
}

}  // namespace diffulex::cuda
