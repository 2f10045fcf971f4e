// SPDX-License-Identifier: Apache-2.0
//
// linear_w4a16 of tiles on Hopper: tensor maps, clusters and launches.
#include <algorithm>
#include <cstdint>

#include "ops/linear/sm90/launch.cuh"
#include "ops/quant/nibble_plan.h"
#include "ops/quant/nibble_product.h"
#include "ops/quant/sm90/nibble_product.cuh"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/tensor_map.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::linear_w4a16";
constexpr int32_t kLine = 128;  // bytes

using sm90::NibbleLinearArgs;
using sm90::NibbleTraits;
using sm90::TensorMapShape;

/// W as runs of eight rows: neighbouring runs, or a gate and an up run, lie side by side in a tile.
TensorMapShape tile_shape(const LinearW4a16Params& params, int32_t box_rows) {
  const int64_t runs = params.weight.size[0];
  const int64_t run = params.x.size[1] * 8 / 2;  // bytes
  const bool has_gate = params.act.has_value();
  TensorMapShape shape;
  shape.rank = 4;
  shape.data = params.weight.data;
  const int64_t sizes[] = {kLine, run / kLine, 2, runs / 2};
  const int64_t strides[] = {1, kLine, has_gate ? runs / 2 * run : run, has_gate ? run : 2 * run};
  const int32_t boxes[] = {kLine, kNibbleStageDepth * 8 / 2 / kLine, 2, box_rows / 16};
  std::copy_n(sizes, 4, shape.size);
  std::copy_n(strides, 4, shape.stride);
  std::copy_n(boxes, 4, shape.box);
  return shape;
}

template <typename Traits>
Status prepare_tile(int32_t device_index) {
  return sm90::prepare_ring<sm90::nibble_linear_kernel<Traits>>(kWhere, device_index);
}

NibbleLinearArgs nibble_args(const LinearW4a16Params& params, const NibblePlan& plan) {
  NibbleLinearArgs args{};
  sm90::set_call(params, plan.linear, &args);
  args.num_steps = plan.num_steps;
  args.scales = params.scales.as<const uint8_t>();
  args.zeros = params.zeros.as<const uint8_t>();
  args.scale_stride = params.scales.stride[0] * dtype_bytes(params.scales.dtype);
  args.zero_stride = params.zeros.stride[0] * dtype_bytes(params.zeros.dtype);
  args.row_tiles = plan.row_tiles;
  args.scale_bytes = plan.scale_bytes;
  args.stripe_scales = args.act >= 0 ? 8 : 16;
  args.below_scales = args.act >= 0 ? args.tile_rows / 2 : 8;
  args.share_bytes = plan.share_bytes;
  args.blocks = plan.blocks;
  args.phases = plan.phases;
  return args;
}

template <int kRows, int kScaleRows, bool kIsExact>
Status launch(const LinearW4a16Params& params, const NibblePlan& plan, const ExecContext& context) {
  using Traits = NibbleTraits<kRows, kScaleRows, kIsExact>;
  NibbleLinearArgs args = nibble_args(params, plan);
  args.box_rows = std::min(args.num_rows, kRows);
  return sm90::launch_ring<sm90::nibble_linear_kernel<Traits>>(
      kWhere,
      {tile_shape(params, args.tile_rows), DType::kF8E4M3,
       sm90::row_shape(params.x, kLine / 2, args.box_rows), DType::kBF16, plan.blocks * plan.phases,
       Traits::kCopyingThreads},
      args, plan.linear, context);
}

template <int kRows, bool kIsExact>
Status launch_groups(const LinearW4a16Params& params, const NibblePlan& plan,
                     const ExecContext& context) {
  switch (kNibbleStageDepth / params.group) {
    case 1:
      return launch<kRows, 1, kIsExact>(params, plan, context);
    case 2:
      return launch<kRows, 2, kIsExact>(params, plan, context);
    default:
      return launch<kRows, 4, kIsExact>(params, plan, context);
  }
}

template <int kRows>
Status launch_rows(const LinearW4a16Params& params, const NibblePlan& plan,
                   const ExecContext& context) {
  return params.zeros.present() ? launch_groups<kRows, true>(params, plan, context)
                                : launch_groups<kRows, false>(params, plan, context);
}

template <int kRows, bool kIsExact>
Status prepare_groups(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<NibbleTraits<kRows, 1, kIsExact>>(device_index)));
  DIFFULEX_RETURN_IF_ERROR((prepare_tile<NibbleTraits<kRows, 2, kIsExact>>(device_index)));
  return prepare_tile<NibbleTraits<kRows, 4, kIsExact>>(device_index);
}

template <int kRows>
Status prepare_rows(int32_t device_index) {
  DIFFULEX_RETURN_IF_ERROR((prepare_groups<kRows, false>(device_index)));
  return prepare_groups<kRows, true>(device_index);
}

bool has_aligned_groups(const TensorRef& scales) {
  return scales.stride[0] * dtype_bytes(scales.dtype) % 16 == 0 && is_aligned16(scales.data);
}

/// What the copies cannot address, or results not be written to in pairs; nullptr: nothing.
const char* unaligned_part(const LinearW4a16Params& params) {
  if (params.x.stride[0] % 8 != 0 || !is_aligned16(params.x.data)) {
    return "x: expected rows that begin at multiples of 16 bytes";
  }
  if (!is_aligned16(params.weight.data)) {
    return "weight: expected tiles that begin at a multiple of 16 bytes";
  }
  if (!has_aligned_groups(params.scales)) {
    return "scales: expected groups that begin at multiples of 16 bytes";
  }
  if (!has_aligned_groups(params.zeros)) {
    return "zeros: expected groups that begin at multiples of 16 bytes";
  }
  if (params.out.stride[0] % 2 != 0 || reinterpret_cast<uintptr_t>(params.out.data) % 4 != 0) {
    return "out: expected rows that begin at multiples of 4 bytes";
  }
  return nullptr;
}

}  // namespace

Status launch_nibble_tiles(const LinearW4a16Params& params, const ExecContext& context) {
  if (!is_hopper_device(context.device_index)) {
    return make_error(StatusCode::kNoKernel, kWhere,
                      ": weight: expected row-major codes on a device of another compute capability"
                      " than 9.0, got tiles");
  }
  if (const char* part = unaligned_part(params)) {
    return make_error(StatusCode::kUnsupported, kWhere, ": ", part, " beside tiles, got others");
  }
  int processors = 0;
  DIFFULEX_RETURN_IF_ERROR(sm90::count_processors(kWhere, context.device_index, &processors));
  const int64_t weight_rows = params.out.size[1] * (params.act.has_value() ? 2 : 1);
  const NibblePlan plan =
      nibble_plan(params.x.size[0], weight_rows, params.x.size[1], params.group,
                  params.zeros.present() ? kNibbleExactBytes : kNibbleScaleBytes,
                  context.batch_invariant, processors, sm90::kRingSmemLimit);
  switch (plan.tile_rows) {
    case 16:
      return launch_rows<16>(params, plan, context);
    case 32:
      return launch_rows<32>(params, plan, context);
    case 64:
      return launch_rows<64>(params, plan, context);
    default:
      return launch_rows<kNibbleMaxRows>(params, plan, context);
  }
}

Status prepare_nibble_tiles(int32_t device_index) {
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(prepare_rows<16>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_rows<32>(device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_rows<64>(device_index));
  return prepare_rows<kNibbleMaxRows>(device_index);
}

}  // namespace diffulex::cuda
