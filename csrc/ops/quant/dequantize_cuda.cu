// SPDX-License-Identifier: Apache-2.0
//
// dequantize_nibbles: what the products of a weight of 4 bits make of its nibbles, for libraries
// that multiply bfloat16. A warp has a tile, or a thread eight columns of a row.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/quant/code.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::dequantize_nibbles";
constexpr int kThreads = 256;
constexpr int32_t kPiece = 8;  // columns that a thread writes at once

struct DequantizeArgs final {
  const uint8_t* weight;
  const void* scales;
  const void* zeros;
  __nv_bfloat16* out;
  int64_t weight_stride;
  int64_t scale_stride;
  int64_t zero_stride;
  int64_t out_stride;
  int64_t items;  // warps or threads that have something to do
  int32_t depth;
  int32_t group;
  bool has_float_scales;
};

/// What turns the nibbles of one group of one row to values.
template <typename Zero>
struct RowScale final {
  float scale;
  int32_t zero;

  __device__ __forceinline__ RowScale(const DequantizeArgs& args, int32_t group, int64_t row)
      : scale(scale_at(args.scales, args.has_float_scales, group * args.scale_stride + row)),
        zero(args.zeros == nullptr
                 ? kInt4Zero
                 : static_cast<int32_t>(static_cast<float>(
                       static_cast<const Zero*>(args.zeros)[group * args.zero_stride + row]))) {}

  [[nodiscard]] __device__ __forceinline__ uint32_t pair(uint32_t first, uint32_t second) const {
    const __nv_bfloat162 both(nibble_value(first, scale, zero), nibble_value(second, scale, zero));
    return *reinterpret_cast<const uint32_t*>(&both);
  }
};

/// Of the four words of lanes lane ^ 0 .. lane ^ 3, that of each lane of the quad in its order.
__device__ __forceinline__ void sort_quad(uint32_t (&words)[4], int32_t lane) {
  const auto swap = [&](bool is_swapped, int32_t i, int32_t j) {
    const uint32_t held = words[i];
    words[i] = is_swapped ? words[j] : held;
    words[j] = is_swapped ? held : words[j];
  };
  swap((lane & 1) != 0, 0, 1);
  swap((lane & 1) != 0, 2, 3);
  swap((lane & 2) != 0, 0, 2);
  swap((lane & 2) != 0, 1, 3);
}

/// Lanes of a quad have the pairs of a row; each collects those of eight columns that lie together,
/// in both halves of the 64.
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const __grid_constant__ DequantizeArgs args) {
  const int64_t tile = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (tile >= args.items) {
    return;
  }
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t place = lane % 4;
  const auto words = *reinterpret_cast<const uint2*>(
      args.weight + tile * (kNibbleTileLanes * kNibbleLaneBytes) + lane * kNibbleLaneBytes);
  uint32_t pairs[4];  // nibbles 0 and 4 of eight columns, 1 and 5 of those of the other half
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t shift = (place ^ i) * 4;
    const uint32_t mine = (words.x >> shift & 0x000F000FU) | (words.y >> shift & 0x000F000FU) << 4;
    pairs[i] = __shfl_xor_sync(kFullWarp, mine, i);
  }
  sort_quad(pairs, place);
  const auto depth_tiles = static_cast<int32_t>(args.depth / kNibbleTileDepth);
  const int64_t row = tile / depth_tiles * kNibbleTileRows + lane / 4;
  const auto first = static_cast<int32_t>(tile % depth_tiles * kNibbleTileDepth) + place * kPiece;
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    const int32_t column = first + half * 32;
    const RowScale<__nv_bfloat16> scale(args, column / args.group, row);
    uint32_t values[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const uint32_t pair = pairs[i] >> (4 * half);
      values[i] = scale.pair(pair, pair >> 16);
    }
    *reinterpret_cast<uint4*>(args.out + row * args.out_stride + column) =
        make_uint4(values[0], values[1], values[2], values[3]);
  }
}

/// Eight columns of a row by a thread, `kWide` at once.
template <bool kWide>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ DequantizeArgs args) {
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (item >= args.items) {
    return;
  }
  const int32_t pieces = (args.depth + kPiece - 1) / kPiece;
  const int64_t row = item / pieces;
  const auto first = static_cast<int32_t>(item % pieces) * kPiece;
  const uint8_t* codes = args.weight + row * args.weight_stride + first / 2;
  __nv_bfloat16* out = args.out + row * args.out_stride + first;
  if constexpr (kWide) {
    const RowScale<uint8_t> scale(args, first / args.group, row);
    const uint32_t word = *reinterpret_cast<const uint32_t*>(codes);
    uint32_t values[4];
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      values[i] = scale.pair(word >> (8 * i), word >> (8 * i + 4));
    }
    *reinterpret_cast<uint4*>(out) = make_uint4(values[0], values[1], values[2], values[3]);
  } else {
    for (int32_t k = 0; k < kPiece && first + k < args.depth; ++k) {
      const RowScale<uint8_t> scale(args, (first + k) / args.group, row);
      out[k] = nibble_value(codes[k / 2] >> (k % 2 * 4), scale.scale, scale.zero);
    }
  }
}

}  // namespace

Status dequantize_nibbles(const DequantizeNibblesParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DequantizeArgs args{};
  args.weight = params.weight.as<const uint8_t>();
  args.scales = params.scales.data;
  args.zeros = params.zeros.data;
  args.out = params.out.as<__nv_bfloat16>();
  args.weight_stride = params.weight.stride[0];
  args.scale_stride = params.scales.stride[0];
  args.zero_stride = params.zeros.present() ? params.zeros.stride[0] : 0;
  args.out_stride = params.out.stride[0];
  args.depth = static_cast<int32_t>(params.out.size[1]);
  args.group = params.group;
  args.has_float_scales = params.scales.dtype == DType::kF32;
  const int64_t rows = params.out.size[0];
  const bool has_wide_rows = args.out_stride % kPiece == 0 && is_aligned16(args.out);
  const auto grid_of = [](int64_t threads) {
    return static_cast<unsigned>(ceil_div(threads, kThreads));
  };
  if (is_nibble_tiles(params.weight)) {
    if (!has_wide_rows || !is_aligned16(args.weight)) {
      return make_error(StatusCode::kUnsupported, kWhere,
                        ": out: expected tiles, and rows that begin at multiples of 16 bytes, got"
                        " others");
    }
    args.items = rows / kNibbleTileRows * (args.depth / kNibbleTileDepth);
    tiles_kernel<<<grid_of(args.items * 32), kThreads, 0, stream_of(context)>>>(args);
    return check_launch(kWhere);
  }
  const bool is_wide = has_wide_rows && args.depth % kPiece == 0 && args.group % kPiece == 0 &&
                       args.weight_stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(args.weight) % 4 == 0;
  args.items = rows * ceil_div(args.depth, kPiece);
  const unsigned grid = grid_of(args.items);
  is_wide ? rows_kernel<true><<<grid, kThreads, 0, stream_of(context)>>>(args)
          : rows_kernel<false><<<grid, kThreads, 0, stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_dequantize_nibbles(const ExecContext& /*context*/) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, tiles_kernel));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rows_kernel<true>));
  return touch_kernel(kWhere, rows_kernel<false>);
}

}  // namespace diffulex::cuda
