// SPDX-License-Identifier: Apache-2.0
#pragma once

// Work tiles of the experts, written by one CTA: (expert, first position) for every `tile`
// positions of an expert, in ascending order of experts and positions. The products read them.

#include <cstdint>

#include "ops/moe/gemm.h"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

/// Threads of the CTA that sorts slots or lists tiles.
inline constexpr int kMoeSortThreads = 1024;

/// Exclusive prefix sum over a CTA of kWarps warps; `total` receives the sum. `scratch` holds 32
/// values and may be reused after the next barrier.
template <int kWarps, typename T>
__device__ __forceinline__ T block_exclusive_sum(T value, T* scratch, T* total) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  T inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  __syncthreads();
  if (lane == 31) {
    scratch[warp] = inclusive;
  }
  __syncthreads();
  if (warp == 0) {
    T sum = lane < kWarps ? scratch[lane] : 0;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const T other = __shfl_up_sync(kFullWarp, sum, offset);
      sum += lane >= offset ? other : 0;
    }
    scratch[lane] = sum;
  }
  __syncthreads();
  *total = scratch[31];
  return inclusive - value + (warp == 0 ? 0 : scratch[warp - 1]);
}

/// Local expert of a slot, -1 = none.
__device__ __forceinline__ int local_expert(const SlotRoutes& routes, int slot) {
  int64_t index = slot;
  if (routes.ids_stride != routes.top_k) {
    const int token = slot / routes.top_k;
    index = token * routes.ids_stride + (slot - token * routes.top_k);
  }
  const int id = routes.ids[index];
  if (id < 0 || id >= routes.num_experts) {
    return -1;
  }
  const int local = routes.expert_map == nullptr ? id : routes.expert_map[id];
  return local < 0 || local >= routes.num_local ? -1 : local;
}

/// Where the tile list goes.
struct TileList {
  int32_t* expert;    // [capacity]
  int32_t* start;     // [capacity]
  int32_t* counters;  // [0] = number of tiles
  int32_t capacity;
  int32_t tile;
};

/// Lists the `count` tiles of an expert whose positions start at `first`, from entry `index` on.
__device__ __forceinline__ void write_expert_tiles(const TileList& list, int expert, int first,
                                                   int count, int index) {
  for (int i = 0; i < count && index + i < list.capacity; ++i) {
    list.expert[index + i] = expert;
    list.start[index + i] = first + i * list.tile;
  }
}

/// Marks the entries past the last tile with -1 and stores the number of tiles. The whole CTA.
__device__ __forceinline__ void end_tiles(const TileList& list, int num_tiles) {
  num_tiles = num_tiles < list.capacity ? num_tiles : list.capacity;
  for (int index = num_tiles + static_cast<int>(threadIdx.x); index < list.capacity;
       index += kMoeSortThreads) {
    list.expert[index] = -1;
    list.start[index] = -1;
  }
  if (threadIdx.x == 0) {
    list.counters[0] = num_tiles;
  }
}

/// Lists the tiles of [begin(e), end(e)) for e in [0, num_experts); entries past them are -1.
template <typename Begin, typename End>
__device__ __forceinline__ void write_tiles(const TileList& list, int num_experts, int* scratch,
                                            const Begin& begin, const End& end) {
  int num_tiles = 0;
  for (int base = 0; base < num_experts; base += kMoeSortThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const int first = expert < num_experts ? begin(expert) : 0;
    const int last = expert < num_experts ? end(expert) : 0;
    // The usual form of the round-up overflows with a large tile.
    const int own = last > first ? (last - first - 1) / list.tile + 1 : 0;
    int total = 0;
    const int index = num_tiles + block_exclusive_sum<kMoeSortThreads / 32>(own, scratch, &total);
    write_expert_tiles(list, expert, first, own, index);
    num_tiles += total;
  }
  end_tiles(list, num_tiles);
}

/// The tile of this CTA.
struct MoeTile {
  int32_t expert;
  int32_t start;  // first position
  int32_t count;  // positions, at most the tile height; 0 = nothing to do
};

/// End of the last existing expert's positions (exclusive).
__device__ __forceinline__ int32_t expert_end(const ExpertGemm& gemm, int32_t expert) {
  int64_t end = gemm.ends[expert];
  if (gemm.rows_per_expert > 0) {
    end = end < gemm.rows_per_expert ? end : gemm.rows_per_expert;
    end += int64_t{expert} * gemm.rows_per_expert;
  }
  return static_cast<int32_t>(end < gemm.num_positions ? end : gemm.num_positions);
}

/// Tile `index` of the list, clamped to its expert and to the positions that exist.
__device__ __forceinline__ MoeTile moe_tile(const ExpertGemm& gemm, int32_t index, int32_t height) {
  if (index >= gemm.counters[0]) {
    return {0, 0, 0};
  }
  const int32_t expert = gemm.tile_expert[index];
  const int32_t start = gemm.tile_start[index];
  const int32_t count = expert_end(gemm, expert) - start;
  return {expert, start, count < height ? (count > 0 ? count : 0) : height};
}

/// Row that position reads or writes, before the division by top_k.
__device__ __forceinline__ int64_t moe_target(const int32_t* slots, int64_t position) {
  return slots == nullptr ? position : slots[position];
}

}  // namespace diffulex::cuda
