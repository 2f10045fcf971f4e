// SPDX-License-Identifier: Apache-2.0
#pragma once

// Router logits of bfloat16 rows and weights on mma.sync. The eight warps of a CTA share the
// columns: warp w adds chunks of 32 columns w, w + 8, ... in ascending order, and the warps meet in
// order, so that an element is the same bits whatever T and E are.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/moe/router_args.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda {

/// Columns of a step: two products of 16.
inline constexpr int kRouterChunk = 32;

/// A CTA computes 16 kTokenTiles tokens times 8 kExpertTiles experts; kBatch chunks of a warp are
/// in flight at a time.
template <int kTokenTileCount, int kExpertTileCount, int kBatchCount>
struct RouterTile final {
  static constexpr int kTokenTiles = kTokenTileCount;
  static constexpr int kExpertTiles = kExpertTileCount;
  static constexpr int kBatch = kBatchCount;
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTokens = 16 * kTokenTiles;
  static constexpr int kExperts = 8 * kExpertTiles;
};

using SmallRouterTile = RouterTile<1, 1, 8>;
using MediumRouterTile = RouterTile<2, 2, 4>;
using LargeRouterTile = RouterTile<2, 4, 2>;

/// Eight columns of row `row`, clamped to the last of `rows`; zeros past the last chunk. A plain
/// load: a load of data that no kernel writes might be moved across pdl_wait(), either way.
__device__ __forceinline__ uint4 router_piece(const void* data, int64_t stride, int64_t row,
                                              int64_t rows, int column, int hidden) {
  const int64_t clamped = row < rows ? row : rows - 1;
  const auto* source = static_cast<const __nv_bfloat16*>(data) + clamped * stride + column;
  return column < hidden ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
}

/// Half `half` of a chunk. A lane holds eight neighbouring columns where the product wants pairs of
/// 16; x and w are permuted alike, so the sum is over the same columns.
__device__ __forceinline__ void multiply_half(float (&sums)[4], const uint4& low, const uint4& high,
                                              const uint4& weight, int half) {
  const uint32_t a[4] = {half == 0 ? low.x : low.z, half == 0 ? high.x : high.z,
                         half == 0 ? low.y : low.w, half == 0 ? high.y : high.w};
  ptx::mma_16816<__nv_bfloat16>(sums, a, half == 0 ? weight.x : weight.z,
                                half == 0 ? weight.y : weight.w);
}

/// Grid: tokens / Tile::kTokens by experts / Tile::kExperts. `hidden` is a multiple of the chunk
/// and rows are aligned to 16 bytes.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 2)
    router_mma_kernel(const __grid_constant__ RouterArgs args) {
  constexpr int kTokenTiles = Tile::kTokenTiles;
  constexpr int kExpertTiles = Tile::kExpertTiles;
  constexpr int kBatch = Tile::kBatch;
  __shared__ float partial[Tile::kWarps][Tile::kTokens][Tile::kExperts];
  pdl_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int group = (static_cast<int>(threadIdx.x) & 31) / 4;
  const int lane_column = static_cast<int>(threadIdx.x) % 4 * 8;
  const int64_t first_token = static_cast<int64_t>(blockIdx.x) * Tile::kTokens;
  const int first_expert = static_cast<int>(blockIdx.y) * Tile::kExperts;
  constexpr int kStep = kRouterChunk * Tile::kWarps;

  uint4 weights[kBatch][kExpertTiles];
  const auto load_weights = [&](int column) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int e = 0; e < kExpertTiles; ++e) {
        weights[i][e] = router_piece(args.w, args.w_stride, first_expert + 8 * e + group,
                                     args.num_experts, column + i * kStep, args.hidden);
      }
    }
  };
  int column = warp * kRouterChunk + lane_column;
  load_weights(column);  // no kernel in front writes them: can_read_ahead()
  pdl_wait();

  float sums[kTokenTiles][kExpertTiles][4] = {};
  while (column < args.hidden) {
    uint4 rows[kBatch][kTokenTiles][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows[i][t][half] =
              router_piece(args.x, args.x_stride, first_token + 16 * t + 8 * half + group,
                           args.num_tokens, column + i * kStep, args.hidden);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int e = 0; e < kExpertTiles; ++e) {
            multiply_half(sums[t][e], rows[i][t][0], rows[i][t][1], weights[i][e], half);
          }
        }
      }
    }
    column += kBatch * kStep;
    if (column < args.hidden) {
      load_weights(column);
    }
  }

#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
    for (int e = 0; e < kExpertTiles; ++e) {
      const int expert = 8 * e + static_cast<int>(threadIdx.x) % 4 * 2;
      *reinterpret_cast<float2*>(&partial[warp][16 * t + group][expert]) =
          make_float2(sums[t][e][0], sums[t][e][1]);
      *reinterpret_cast<float2*>(&partial[warp][16 * t + 8 + group][expert]) =
          make_float2(sums[t][e][2], sums[t][e][3]);
    }
  }
  __syncthreads();
  for (int index = static_cast<int>(threadIdx.x); index < Tile::kTokens * Tile::kExperts;
       index += Tile::kThreads) {
    const int token = index / Tile::kExperts;
    const int expert = index % Tile::kExperts;
    float sum = partial[0][token][expert];
#pragma unroll
    for (int other = 1; other < Tile::kWarps; ++other) {
      sum += partial[other][token][expert];
    }
    if (first_token + token < args.num_tokens && first_expert + expert < args.num_experts) {
      args.logits[(first_token + token) * args.logits_stride + first_expert + expert] = sum;
    }
  }
}

}  // namespace diffulex::cuda
