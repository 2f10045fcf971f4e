// SPDX-License-Identifier: Apache-2.0
#pragma once

// How the two CTAs of a cluster divide the positions of an expert.

#include <cstdint>

#include "ops/moe/config.h"
#include "ops/moe/gemm.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/cluster.cuh"

namespace diffulex::cuda::sm90 {

/// The positions of this CTA in tile `index` of a list of tiles of kMoePairTile positions. The
/// tiles of an expert become equally high, multiples of 16, and each CTA takes half of one.
__device__ __forceinline__ MoeTile pair_tile(const ExpertGemm& gemm, int32_t index) {
  if (index >= gemm.counters[0]) {
    return {0, 0, 0};
  }
  const int32_t expert = gemm.tile_expert[index];
  const int32_t listed = gemm.tile_start[index];
  const int32_t end = expert_end(gemm, expert);
  int32_t begin = expert * gemm.rows_per_expert;
  if (gemm.rows_per_expert == 0) {
    begin = gemm.ends[expert - 1] > 0 ? gemm.ends[expert - 1] : 0;
  }
  const int32_t total = end - begin;
  const int32_t tiles = (total + kMoePairTile - 1) / kMoePairTile;
  const int32_t height = tiles > 0 ? ((total + tiles - 1) / tiles + 15) / 16 * 16 : 0;
  const int32_t half = height / 2;
  const int32_t start = begin + (listed - begin) / kMoePairTile * height +
                        static_cast<int32_t>(ptx::cluster_rank()) * half;
  const int32_t left = end - start;
  return {expert, start, left < half ? (left > 0 ? left : 0) : half};
}

}  // namespace diffulex::cuda::sm90
