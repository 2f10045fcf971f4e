// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tile list in shared memory. Where the slots are few, every CTA of a product sorts them
// itself, which takes less time than a launch in front: each expert has a bit per slot, counts and
// places are numbers of set bits, and the order within an expert is that of the slots.

#include <cstdint>

#include "ops/moe/gemm.h"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/mbarrier.cuh"

namespace diffulex::cuda::sm90 {

/// What the roles of a CTA read of the sorted slots.
struct SortedSlots {
  static constexpr int kMaxTiles = kMoeMaxSortedSlots / 16 + kMoeMaxSortedExperts;
  struct Tile {
    uint16_t expert;
    uint16_t start;  // first position
    uint16_t count;  // positions
  };
  int32_t num_tiles;
  uint16_t slots[kMoeMaxSortedSlots];  // by position
  Tile tiles[kMaxTiles];
};

/// Shared memory that the sort needs until it ends.
struct SortScratch {
  static constexpr int kMaxWords = kMoeMaxSortedSlots / 32 + 1;  // odd, against bank conflicts
  uint64_t sums[33];
  uint16_t begins[kMoeMaxSortedExperts];
  uint32_t masks[kMoeMaxSortedExperts * kMaxWords];
};

/// 32-bit words of an expert's mask.
__device__ __forceinline__ int mask_words(const SlotRoutes& routes) {
  return (routes.num_slots + 31) / 32 | 1;
}

/// Empties the masks, which needs nothing of an earlier launch. The whole CTA.
template <int kThreads>
__device__ __forceinline__ void clear_masks(const SlotRoutes& routes, SortScratch& scratch) {
  const int words = routes.num_local * mask_words(routes);
  for (int i = threadIdx.x; i < words; i += kThreads) {
    scratch.masks[i] = 0;
  }
  __syncthreads();
}

/// Gives each expert the positions of its slots and its tiles, from the masks. The whole CTA.
template <int kThreads>
__device__ __forceinline__ void list_tiles(const SlotRoutes& routes, int height,
                                           SortScratch& scratch, SortedSlots& sorted) {
  const int words = mask_words(routes);
  uint64_t done = 0;  // slots in the low half, tiles in the high half
  for (int base = 0; base < routes.num_local; base += kThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    int count = 0;
    if (expert < routes.num_local) {
      for (int word = 0; word < words; ++word) {
        count += __popc(scratch.masks[expert * words + word]);
      }
    }
    const int tiles = (count + height - 1) / height;
    uint64_t sum = 0;
    const uint64_t before =
        done +
        block_exclusive_sum<kThreads / 32>(
            static_cast<uint64_t>(tiles) << 32 | static_cast<uint32_t>(count), scratch.sums, &sum);
    done += sum;
    if (expert < routes.num_local) {
      const int begin = static_cast<int>(static_cast<uint32_t>(before));
      scratch.begins[expert] = static_cast<uint16_t>(begin);
      for (int i = 0; i < tiles; ++i) {
        const int left = count - i * height;
        sorted.tiles[(before >> 32) + i] = {static_cast<uint16_t>(expert),
                                            static_cast<uint16_t>(begin + i * height),
                                            static_cast<uint16_t>(left < height ? left : height)};
      }
    }
  }
  if (threadIdx.x == 0) {
    sorted.num_tiles = static_cast<int32_t>(done >> 32);
  }
}

/// Sorts the slots into tiles of `height` positions. The whole CTA, after clear_masks; afterwards
/// the copy engine may write over the scratch.
template <int kThreads>
__device__ __forceinline__ void sort_slots(const SlotRoutes& routes, int height,
                                           SortScratch& scratch, SortedSlots& sorted) {
  constexpr int kHeld = (kMoeMaxSortedSlots + kThreads - 1) / kThreads;
  const int words = mask_words(routes);
  int experts[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = i * kThreads + static_cast<int>(threadIdx.x);
    experts[i] = slot < routes.num_slots ? local_expert(routes, slot) : -1;
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = i * kThreads + static_cast<int>(threadIdx.x);
    if (experts[i] >= 0) {
      atomicOr(&scratch.masks[experts[i] * words + slot / 32], 1U << slot % 32);
    }
  }
  __syncthreads();
  list_tiles<kThreads>(routes, height, scratch, sorted);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int slot = i * kThreads + static_cast<int>(threadIdx.x);
    if (experts[i] >= 0) {
      const uint32_t* mask = scratch.masks + experts[i] * words;
      int place = scratch.begins[experts[i]] + __popc(mask[slot / 32] & ((1U << slot % 32) - 1));
      for (int word = 0; word < slot / 32; ++word) {
        place += __popc(mask[word]);
      }
      sorted.slots[place] = static_cast<uint16_t>(slot);
    }
  }
  ptx::fence_proxy_async();
  __syncthreads();
}

/// The work tiles and the slots by position: sorted here, or by the launch in front.
template <bool kSorts>
struct MoeList {
  const ExpertGemm& gemm;
  const SortedSlots* sorted;  // read with kSorts where the product has routes

  __device__ __forceinline__ bool is_sorted_here() const {
    return kSorts && gemm.routes.ids != nullptr;
  }
  __device__ __forceinline__ int32_t num_tiles() const {
    return is_sorted_here() ? sorted->num_tiles : gemm.counters[0];
  }
  __device__ __forceinline__ MoeTile tile(int32_t index, int32_t height) const {
    if (is_sorted_here()) {
      const SortedSlots::Tile& own = sorted->tiles[index];
      return {own.expert, own.start, own.count};
    }
    return moe_tile(gemm, index, height);
  }
  /// moe_target for one of the slot lists of the product.
  __device__ __forceinline__ int64_t target(const int32_t* slots, int64_t position) const {
    return is_sorted_here() && slots != nullptr ? sorted->slots[position]
                                                : moe_target(slots, position);
  }
};

}  // namespace diffulex::cuda::sm90
