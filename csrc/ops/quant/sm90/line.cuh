// SPDX-License-Identifier: Apache-2.0
#pragma once

// A line of a product of e4m3 codes: 128 columns by the tensor cores, then to the float32 sums.

#include <cstdint>

#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

inline constexpr int kCodeLine = 128;  // columns, and bytes

/// 128 columns of 64 rows of one operand and of 8 kGroups rows of the other, by their descriptors.
template <int kGroups>
__device__ __forceinline__ void issue_codes(float (&product)[kGroups][4], uint64_t tall,
                                            uint64_t wide) {
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    // A step of 32 codes is 32 bytes; descriptors count 16.
    ptx::wgmma_e4m3(product, ptx::move_descriptor(tall, 2 * k), ptx::move_descriptor(wide, 2 * k),
                    k > 0);
  }
  ptx::wgmma_commit();
}

/// sums += product times the scales `x` of two rows of x and of the rows of W.
__device__ __forceinline__ void promote_group(float (&sums)[4], const float (&product)[4], float2 x,
                                              bool has_blocks, float2 weight) {
  float factor[4] = {x.x, x.y, x.x, x.y};
  if (has_blocks) {
    factor[0] = __fmul_rn(x.x, weight.x);
    factor[1] = __fmul_rn(x.y, weight.x);
    factor[2] = __fmul_rn(x.x, weight.y);
    factor[3] = __fmul_rn(x.y, weight.y);
  }
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    sums[i] = fmaf(factor[i], product[i], sums[i]);
  }
}

/// The scales of this thread's two rows of x in an accumulator group, of those from `scales` on.
__device__ __forceinline__ float2 row_scales(uint32_t scales, int32_t group) {
  return ptx::shared_load2(scales + threadIdx.x % 4 * 8 + group * 32);
}

/// sums += scales of x, which begin at `scales`, and of W times a product.
template <int kGroups>
__device__ __forceinline__ void promote(float (&sums)[kGroups][4],
                                        const float (&product)[kGroups][4], uint32_t scales,
                                        bool has_blocks, float2 weight) {
#pragma unroll
  for (int32_t group = 0; group < kGroups; ++group) {
    promote_group(sums[group], product[group], row_scales(scales, group), has_blocks, weight);
  }
}

/// Says that this warp has read a line. The whole warp.
__device__ __forceinline__ void release_line(uint32_t empty) {
  __syncwarp();  // every lane has read the scales
  if (threadIdx.x % 32 == 0) {
    ptx::mbarrier_arrive(empty);
  }
}

}  // namespace diffulex::cuda::sm90
