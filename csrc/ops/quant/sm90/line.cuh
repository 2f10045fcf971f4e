// SPDX-License-Identifier: Apache-2.0
#pragma once

// A line of a product of e4m3 codes: 128 columns by the tensor cores, then to the float32 sums.

#include <cstdint>

#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// 128 columns: 64 rows of W at `weights` times the rows at `rows`.
template <int kGroups>
__device__ __forceinline__ void issue_codes(float (&product)[kGroups][4], uint32_t weights,
                                            uint32_t rows) {
  const uint64_t a = ptx::swizzle128_descriptor(weights, 0, 1024);
  const uint64_t b = ptx::swizzle128_descriptor(rows, 0, 1024);
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    // A step of 32 codes is 32 bytes; descriptors count 16.
    ptx::wgmma_e4m3(product, a + 2 * k, b + 2 * k, k > 0);
  }
  ptx::wgmma_commit();
}

/// sums += scales of x, which begin at `scales`, and of W times a product.
template <int kGroups>
__device__ __forceinline__ void promote(float (&sums)[kGroups][4],
                                        const float (&product)[kGroups][4], uint32_t scales,
                                        bool has_blocks, float2 weight) {
  const uint32_t mine = scales + threadIdx.x % 4 * 8;
#pragma unroll
  for (int32_t group = 0; group < kGroups; ++group) {
    const float2 x = ptx::shared_load2(mine + group * 32);
    float factor[4] = {x.x, x.y, x.x, x.y};
    if (has_blocks) {
      factor[0] = __fmul_rn(x.x, weight.x);
      factor[1] = __fmul_rn(x.y, weight.x);
      factor[2] = __fmul_rn(x.x, weight.y);
      factor[3] = __fmul_rn(x.y, weight.y);
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      sums[group][i] = fmaf(factor[i], product[group][i], sums[group][i]);
    }
  }
}

}  // namespace diffulex::cuda::sm90
