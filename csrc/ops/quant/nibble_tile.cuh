// SPDX-License-Identifier: Apache-2.0
#pragma once

// The portable products of rows and a weight of 4 bits: on tensor cores, where a weight becomes
// bfloat16 as it is multiplied, and a plain one for other types and shapes.

#include <cstdint>

#include <cuda_bf16.h>

#include "diffulex/ops/quantize.h"
#include "ops/quant/scaled_tile.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

struct NibbleArgs final {
  const void* x;          // [T, K]
  const uint8_t* weight;  // [N, K / 2]
  const void* scales;     // [K / group, N] bfloat16 or float32
  const uint8_t* zeros;   // [K / group, N] or null
  const float* bias;      // [N] or null
  void* out;              // [T, N]
  int64_t x_stride;
  int64_t weight_stride;
  int64_t scale_stride;
  int64_t zero_stride;
  int64_t out_stride;
  int32_t num_rows;
  int32_t depth;
  int32_t width;
  int32_t group;
  bool has_float_scales;
};

/// What turns a nibble of one group of one row of W to a weight.
struct NibbleScale final {
  float scale = 0.0F;
  int32_t zero = 0;

  /// Of a row that may not exist.
  __device__ __forceinline__ void read(const NibbleArgs& args, int32_t group, int32_t row) {
    if (row >= args.width) {
      return;
    }
    scale = scale_at(args.scales, args.has_float_scales, group * args.scale_stride + row);
    zero = args.zeros == nullptr ? kInt4Zero : args.zeros[group * args.zero_stride + row];
  }
  /// The two nibbles of a byte.
  __device__ __forceinline__ uint32_t pair(uint32_t byte) const {
    const __nv_bfloat162 both(nibble_value(byte, scale, zero),
                              nibble_value(byte >> 4, scale, zero));
    return *reinterpret_cast<const uint32_t*>(&both);
  }
};

inline constexpr int kNibbleStep = 64;                    // columns
inline constexpr int kNibbleLine = kNibbleStep / 2 + 16;  // bytes of a row of W, padded

/// The tile of one CTA: 16 kTiles rows of x times 64 rows of W.
template <int kTiles>
struct NibbleTile final {
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kWeights = kRows * kScaledLine;  // where those of W begin in a stage
  static constexpr int kStageBytes = kWeights + kScaledWeightRows * kNibbleLine;

  const NibbleArgs& args;
  int32_t first_row;
  int32_t column;

  /// Starts the copy of 64 columns from `start` on.
  __device__ __forceinline__ void load(uint8_t* stage, int32_t start) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const uint8_t* x = static_cast<const uint8_t*>(args.x);
    for (int32_t chunk = thread; chunk < kRows * 8; chunk += kScaledThreads) {
      const int32_t row = first_row + chunk / 8;
      const int32_t k = start + chunk % 8 * 8;
      const bool is_inside = row < args.num_rows && k < args.depth;
      ptx::cp_async16(ptx::smem_address(stage + chunk / 8 * kScaledLine + chunk % 8 * 16),
                      is_inside ? x + 2 * (row * args.x_stride + k) : x, is_inside);
    }
    constexpr int kChunks = kNibbleStep / 32;  // of 16 bytes
    for (int32_t chunk = thread; chunk < kScaledWeightRows * kChunks; chunk += kScaledThreads) {
      const int32_t row = column + chunk / kChunks;
      const int32_t k = start + chunk % kChunks * 32;
      const bool is_inside = row < args.width && k < args.depth;
      uint8_t* target = stage + kWeights + chunk / kChunks * kNibbleLine + chunk % kChunks * 16;
      ptx::cp_async16(ptx::smem_address(target),
                      is_inside ? args.weight + row * args.weight_stride + k / 2 : args.weight,
                      is_inside);
    }
    ptx::cp_async_commit();
  }

  template <typename Out>
  __device__ __forceinline__ void store(const float (&sums)[kTiles][2][4]) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 8 * kTiles; ++i) {
      const int32_t row = first_row + i / 8 * 16 + (i & 2) * 4 + thread % 32 / 4;
      const int32_t target = column + thread / 32 * 16 + (i & 4) * 2 + 2 * (thread % 4) + (i & 1);
      if (row < args.num_rows && target < args.width) {
        const float bias = args.bias == nullptr ? 0.0F : args.bias[target];
        static_cast<Out*>(args.out)[row * args.out_stride + target] =
            from_float<Out>(sums[i / 8][(i & 4) / 4][i & 3] + bias);
      }
    }
  }
};

/// As scaled_kernel, in steps of 64 columns.
template <typename Out, int kTiles>
__global__ void __launch_bounds__(kScaledThreads)
    nibble_kernel(const __grid_constant__ NibbleArgs args, int32_t row_tiles) {
  using Tile = NibbleTile<kTiles>;
  __shared__ __align__(16) uint8_t stages[2][Tile::kStageBytes];
  const Tile tile{args, static_cast<int32_t>(blockIdx.x) % row_tiles * Tile::kRows,
                  static_cast<int32_t>(blockIdx.x) / row_tiles * kScaledWeightRows};
  const int32_t lane_row = static_cast<int32_t>(threadIdx.x) % 32 / 4;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 4;
  float sums[kTiles][2][4] = {};
  NibbleScale scales[2];
  int32_t group = -1;
  tile.load(stages[0], 0);
  for (int32_t start = 0, stage = 0; start < args.depth; start += kNibbleStep, stage ^= 1) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    if (start + kNibbleStep < args.depth) {
      tile.load(stages[stage ^ 1], start + kNibbleStep);
    }
    const uint8_t* rows = stages[stage] + lane_row * kScaledLine;
    const uint8_t* weights = stages[stage] + Tile::kWeights + (warp * 16 + lane_row) * kNibbleLine;
#pragma unroll
    for (int step = 0; step < kNibbleStep / 16; ++step) {
      const int32_t k = start + 16 * step;
      if (k >= args.depth) {
        break;
      }
      if (k / args.group != group) {
        group = k / args.group;
        const int32_t row = tile.column + warp * 16 + lane_row;
        scales[0].read(args, group, row);
        scales[1].read(args, group, row + 8);
      }
      uint32_t b[2][2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const uint8_t* bytes = weights + side * 8 * kNibbleLine + 8 * step + 2 * lane;
        b[side][0] = scales[side].pair(bytes[0]);
        b[side][1] = scales[side].pair(bytes[1]);
      }
#pragma unroll
      for (int part = 0; part < kTiles; ++part) {
        const uint8_t* line = rows + part * 16 * kScaledLine + 32 * step + 8 * lane;
        const uint2 above = *reinterpret_cast<const uint2*>(line);
        const uint2 below = *reinterpret_cast<const uint2*>(line + 8 * kScaledLine);
        const uint32_t a[4] = {above.x, below.x, above.y, below.y};
        ptx::mma_16816<__nv_bfloat16>(sums[part][0], a, b[0][0], b[0][1]);
        ptx::mma_16816<__nv_bfloat16>(sums[part][1], a, b[1][0], b[1][1]);
      }
    }
  }
  tile.template store<Out>(sums);
}

inline constexpr int kPlainThreads = 256;
inline constexpr int kPlainRows = 16;
inline constexpr int kPlainColumns = 16;
inline constexpr int kPlainDepth = 32;

/// A thread for each result, sums over ascending columns.
template <typename T, typename Out>
__global__ void __launch_bounds__(kPlainThreads)
    plain_nibble_kernel(const __grid_constant__ NibbleArgs args) {
  __shared__ float left[kPlainRows][kPlainDepth + 1];
  __shared__ float right[kPlainColumns][kPlainDepth + 1];
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int64_t first_row = int64_t{blockIdx.y} * kPlainRows;
  const auto first_column = static_cast<int32_t>(blockIdx.x) * kPlainColumns;
  const int32_t row = thread / kPlainColumns;
  const int32_t column = thread % kPlainColumns;
  float sum = 0.0F;
  for (int32_t start = 0; start < args.depth; start += kPlainDepth) {
    for (int32_t i = thread; i < kPlainRows * kPlainDepth; i += kPlainThreads) {
      const int32_t k = start + i % kPlainDepth;
      const int32_t line = i / kPlainDepth;
      float value = 0.0F;
      if (first_row + line < args.num_rows && k < args.depth) {
        value = to_float(static_cast<const T*>(args.x)[(first_row + line) * args.x_stride + k]);
      }
      left[line][i % kPlainDepth] = value;
      value = 0.0F;
      if (first_column + line < args.width && k < args.depth) {
        NibbleScale scale;
        scale.read(args, k / args.group, first_column + line);
        const uint32_t byte = args.weight[(first_column + line) * args.weight_stride + k / 2];
        value = __bfloat162float(nibble_value(byte >> (k % 2 * 4), scale.scale, scale.zero));
      }
      right[line][i % kPlainDepth] = value;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kPlainDepth; ++k) {
      sum = fmaf(left[row][k], right[column][k], sum);
    }
    __syncthreads();
  }
  if (first_row + row < args.num_rows && first_column + column < args.width) {
    const int32_t target = first_column + column;
    const float bias = args.bias == nullptr ? 0.0F : args.bias[target];
    static_cast<Out*>(args.out)[(first_row + row) * args.out_stride + target] =
        from_float<Out>(sum + bias);
  }
}

}  // namespace diffulex::cuda
