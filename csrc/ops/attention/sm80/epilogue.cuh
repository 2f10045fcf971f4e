// SPDX-License-Identifier: Apache-2.0
#pragma once

// Results of a row tile: final rows through shared memory, or fp32 partials of a split.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/online_softmax.cuh"
#include "ops/attention/sm80/loader.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda::sm80 {

/// Where the rows of a tile go.
struct TileRows final {
  int32_t request;
  int32_t first_row;    // token index inside the request
  int32_t first_token;  // packed row of it
  int32_t num_rows;     // packed rows token * G + g of the tile
  int32_t kv_head;
};

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  Vec<T, 2> pair;
  pair.values[0] = from_float<T>(low);
  pair.values[1] = from_float<T>(high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Writes out and lse. `staging` is the query buffer, free by now.
template <typename Traits>
__device__ void store_final(const AttentionArgs& args, const TileRows& rows,
                            const OnlineSoftmax& softmax,
                            const float (&acc)[Traits::kValueDims / 8][4], uint8_t* staging) {
  using T = typename Traits::Element;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int warp_row = warp % Traits::kRowWarps * 16;
  const int part = warp / Traits::kRowWarps;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp_row + lane / 4 + half * 8;
    const float sum = softmax.sum[half];
    const float inverse = sum != 0.0F ? 1.0F / sum : 0.0F;
#pragma unroll
    for (int group = 0; group < Traits::kValueDims / 8; ++group) {
      const int chunk = part * (Traits::kValueDims / 8) + group;
      *reinterpret_cast<uint32_t*>(staging + swizzled<Traits::kChunks>(row, chunk) + lane % 4 * 4) =
          pack_pair<T>(acc[group][2 * half] * inverse, acc[group][2 * half + 1] * inverse);
    }
    if (args.lse != nullptr && part == 0 && lane % 4 == 0 && row < rows.num_rows) {
      const int64_t token = rows.first_token + row / args.group;
      const int64_t head = rows.kv_head * args.group + row % args.group;
      args.lse[token * args.lse_stride[0] + head * args.lse_stride[1]] =
          sum != 0.0F ? (softmax.maximum[half] * softmax.factor + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
  __syncthreads();
  T* out = static_cast<T*>(args.out);
  const int chunk = threadIdx.x % Traits::kChunks;
  for (int row = threadIdx.x / Traits::kChunks; row < rows.num_rows; row += Traits::kRowsPerPass) {
    const int64_t token = rows.first_token + row / args.group;
    const int64_t head = rows.kv_head * args.group + row % args.group;
    *reinterpret_cast<uint4*>(out + token * args.out_stride[0] + head * args.out_stride[1] +
                              chunk * 8) =
        *reinterpret_cast<const uint4*>(staging + swizzled<Traits::kChunks>(row, chunk));
  }
}

/// Writes the unnormalised rows of one split; a row without keys writes its statistics only.
template <typename Traits>
__device__ void store_partial(const AttentionArgs& args, const TileRows& rows, int32_t split,
                              const OnlineSoftmax& softmax,
                              const float (&acc)[Traits::kValueDims / 8][4]) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int part = warp / Traits::kRowWarps;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp % Traits::kRowWarps * 16 + lane / 4 + half * 8;
    if (row >= rows.num_rows) {
      continue;
    }
    const int64_t record =
        partial_index(args, split, rows.request, rows.first_row + row / args.group,
                      rows.kv_head * args.group + row % args.group);
    if (part == 0 && lane % 4 == 0) {
      args.partial_stats[record] =
          make_float2(softmax.maximum[half] * softmax.factor, softmax.sum[half]);
    }
    if (softmax.sum[half] == 0.0F) {
      continue;
    }
    float* target =
        args.partial_out + record * Traits::kHeadDim + part * Traits::kValueDims + lane % 4 * 2;
#pragma unroll
    for (int group = 0; group < Traits::kValueDims / 8; ++group) {
      *reinterpret_cast<float2*>(target + group * 8) =
          make_float2(acc[group][2 * half], acc[group][2 * half + 1]);
    }
  }
}

}  // namespace diffulex::cuda::sm80
