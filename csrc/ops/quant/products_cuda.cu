// SPDX-License-Identifier: Apache-2.0
//
// linear_scaled and linear_w4a16: the choice of kernels, and the portable ones.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/quant/nibble_product.h"
#include "ops/quant/nibble_tile.cuh"
#include "ops/quant/scaled_experts.h"
#include "ops/quant/scaled_product.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kScaled = "diffulex::linear_scaled";
constexpr const char* kNibbles = "diffulex::linear_w4a16";

ScaledArgs scaled_args(const LinearScaledParams& params) {
  ScaledArgs args{};
  args.x = params.x.as<const uint8_t>();
  args.x_scale = params.x_scale.as<const float>();
  args.weight = params.weight.as<const uint8_t>();
  args.weight_scale = params.weight_scale.as<const float>();
  args.bias = params.bias.present() ? params.bias.as<const float>() : nullptr;
  args.out = params.out.data;
  args.x_stride = params.x.stride[0];
  args.x_scale_stride = params.x_scale.stride[0];
  args.weight_stride = params.weight.stride[0];
  args.block_stride = params.weight_scale.rank == 2 ? params.weight_scale.stride[0] : 0;
  args.out_stride = params.out.stride[0];
  args.num_rows = static_cast<int32_t>(params.x.size[0]);
  args.depth = static_cast<int32_t>(params.x.size[1]);
  args.width = static_cast<int32_t>(params.out.size[1]);
  args.up_blocks = static_cast<int32_t>(ceil_div(args.width, kQuantBlock));
  args.act = params.act.has_value() ? static_cast<int32_t>(*params.act) : -1;
  return args;
}

NibbleArgs nibble_args(const LinearW4a16Params& params) {
  NibbleArgs args{};
  args.x = params.x.data;
  args.weight = params.weight.as<const uint8_t>();
  args.scales = params.scales.data;
  args.zeros = params.zeros.present() ? params.zeros.as<const uint8_t>() : nullptr;
  args.bias = params.bias.present() ? params.bias.as<const float>() : nullptr;
  args.out = params.out.data;
  args.x_stride = params.x.stride[0];
  args.weight_stride = params.weight.stride[0];
  args.scale_stride = params.scales.stride[0];
  args.zero_stride = params.zeros.present() ? params.zeros.stride[0] : 0;
  args.out_stride = params.out.stride[0];
  args.num_rows = static_cast<int32_t>(params.x.size[0]);
  args.depth = static_cast<int32_t>(params.x.size[1]);
  args.width = static_cast<int32_t>(params.out.size[1]);
  args.group = params.group;
  args.has_float_scales = params.scales.dtype == DType::kF32;
  return args;
}

template <typename Out, int kTiles>
void launch_nibbles(const NibbleArgs& args, cudaStream_t stream) {
  const int64_t row_tiles = ceil_div(args.num_rows, 16 * kTiles);
  const int64_t grid = row_tiles * ceil_div(args.width, kScaledWeightRows);
  nibble_kernel<Out, kTiles><<<static_cast<unsigned>(grid), kScaledThreads, 0, stream>>>(
      args, static_cast<int32_t>(row_tiles));
}

/// Whether the tensor cores can take the call: bfloat16 rows and nibbles in runs of 16 bytes, and
/// sixteen columns with one scale.
bool is_regular(const LinearW4a16Params& params) {
  return params.x.dtype == DType::kBF16 && params.group % 16 == 0 && params.x.size[1] % 32 == 0 &&
         params.x.stride[0] % 8 == 0 && is_aligned16(params.x.data) &&
         params.weight.stride[0] % 16 == 0 && is_aligned16(params.weight.data);
}

template <typename T, typename Out>
void launch_plain_nibbles(const NibbleArgs& args, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(args.width, kPlainColumns)),
                  static_cast<unsigned>(ceil_div(args.num_rows, kPlainRows)));
  plain_nibble_kernel<T, Out><<<grid, kPlainThreads, 0, stream>>>(args);
}

Status check_row_major(const char* op, const TensorRef& weight) {
  return weight.rank == 2
             ? Status{}
             : make_error(StatusCode::kUnsupported, op,
                          ": weight: expected row-major codes on cuda, got panels of the CPU");
}

}  // namespace

Status linear_scaled(const LinearScaledParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kScaled));
  DIFFULEX_RETURN_IF_ERROR(check_row_major(kScaled, params.weight));
  if (has_wgmma_product(params, context.device_index)) {
    return launch_wgmma_product(params, context);
  }
  int64_t height = params.x.size[0] <= kScaledMiddleRows ? kScaledMiddleRows : kScaledTallRows;
  if (params.x.size[0] <= kScaledShortRows) {
    height = kScaledShortRows;
  }
  return launch_scaled_tiles(kScaled, scaled_args(params), params.x.dtype, params.out.dtype, height,
                             ceil_div(params.x.size[0], height), context);
}

Status linear_w4a16(const LinearW4a16Params& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kNibbles));
  if (is_nibble_tiles(params.weight)) {
    return launch_nibble_tiles(params, context);
  }
  DIFFULEX_RETURN_IF_ERROR(check_row_major(kNibbles, params.weight));
  if (params.act.has_value()) {
    return make_error(StatusCode::kUnsupported, kNibbles,
                      ": act: expected none beside row-major codes on cuda, got an activation");
  }
  const NibbleArgs args = nibble_args(params);
  return dispatch_dtype(kNibbles, params.out.dtype, [&](auto out_tag) {
    using Out = typename decltype(out_tag)::type;
    if (is_regular(params)) {
      args.num_rows <= kScaledShortRows ? launch_nibbles<Out, 1>(args, stream_of(context))
                                        : launch_nibbles<Out, 4>(args, stream_of(context));
      return check_launch(kNibbles);
    }
    return dispatch_dtype(kNibbles, params.x.dtype, [&](auto tag) {
      launch_plain_nibbles<typename decltype(tag)::type, Out>(args, stream_of(context));
      return check_launch(kNibbles);
    });
  });
}

Status prepare_quantized_products(const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(for_each_dtype(kNibbles, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kNibbles, nibble_kernel<T, 1>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kNibbles, nibble_kernel<T, 4>));
    return for_each_dtype(kNibbles, [](auto x_tag) {
      return touch_kernel(kNibbles, plain_nibble_kernel<typename decltype(x_tag)::type, T>);
    });
  }));
  DIFFULEX_RETURN_IF_ERROR(prepare_scaled_e4m3(context.device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_scaled_int8(context.device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_nibble_tiles(context.device_index));
  return prepare_wgmma_product(context.device_index);
}

}  // namespace diffulex::cuda
