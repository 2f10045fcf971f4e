// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the roles of an expert product share: the ring of stages in shared memory, the items of a
// CTA, and the walk of a producer warp along them.

#include <cstdint>

#include <cuda.h>

#include "ops/moe/gemm.h"
#include "ops/moe/sm90/pair_tile.cuh"
#include "ops/moe/sm90/sort_slots.cuh"
#include "ops/moe/tiles.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda::sm90 {

/// Both operands as the copy engine sees them.
struct MoeMaps {
  CUtensorMap weight;
  CUtensorMap rows;
};

inline constexpr int kRowThreads = 96;    // producer threads of gathered rows
inline constexpr int kChunks = 8;         // 16-byte pieces of a line
inline constexpr int kLineElements = 64;  // of 16 bits

/// Position in the ring of stages.
template <typename Traits>
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == Traits::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Shared addresses of a CTA.
template <typename Traits>
struct MoeSmem {
  uint32_t stages;
  uint32_t staged;
  uint32_t full;
  uint32_t empty;
  uint8_t* tables;

  __device__ __forceinline__ explicit MoeSmem(uint8_t* raw) {
    const uint32_t base = ptx::smem_address(raw);
    const uint32_t shift = (Traits::kAlignment - base % Traits::kAlignment) % Traits::kAlignment;
    stages = base + shift;
    staged = stages + Traits::kStages * Traits::kStageBytes;
    full =
        staged + Traits::kConsumers * Traits::kStagedBytes + Traits::kStages * Traits::kScaleBytes;
    empty = full + Traits::kStages * 8;
    tables = raw + (full - base) + Traits::kBarrierBytes;
  }
  __device__ __forceinline__ uint32_t weights(int stage) const {
    return stages + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t rows(int stage) const {
    return weights(stage) + Traits::kWeightBytes;
  }
  /// Scales of the positions' codes; or of the weights' nibbles.
  __device__ __forceinline__ uint32_t scales(int stage) const {
    return full - (Traits::kStages - stage) * Traits::kScaleBytes;
  }
  /// Per consumer; before them lies what the epilogue keeps about the positions.
  __device__ __forceinline__ MoeTile* tiles(int group) const {
    return reinterpret_cast<MoeTile*>(tables + Traits::kPositionBytes) +
           group * Traits::kTilesAhead;
  }
  /// Rows that positions are gathered from, after the tiles.
  __device__ __forceinline__ uint32_t* sources() const {
    return reinterpret_cast<uint32_t*>(tiles(Traits::kConsumers));
  }
  /// After the tables; only with kSorts.
  __device__ __forceinline__ SortedSlots* sorted() const {
    return reinterpret_cast<SortedSlots*>(tables + Traits::kTableBytes);
  }
};

/// The items of this CTA, or of its cluster.
template <typename Traits>
struct MoeWork {
  int32_t items;
  int32_t parts;  // weight tiles of an expert
  int32_t first;
  int32_t stride;

  __device__ __forceinline__ MoeWork(const ExpertGemm& gemm, int32_t num_tiles) {
    parts = (gemm.width + Traits::kOutColumns - 1) / Traits::kOutColumns;
    items = num_tiles * parts;
    first = static_cast<int32_t>(blockIdx.x) / Traits::kCtas;
    stride = static_cast<int32_t>(gridDim.x) / Traits::kCtas;
  }
  __device__ __forceinline__ int32_t tile(int32_t item) const { return item / parts; }
  /// First result column.
  __device__ __forceinline__ int32_t column(int32_t item) const {
    return item % parts * Traits::kOutColumns;
  }
};

/// What this CTA computes of tile `index` of the list.
template <typename Traits>
__device__ __forceinline__ MoeTile own_tile(const MoeList<Traits::kSorts>& list, int32_t index) {
  if constexpr (Traits::kCtas > 1) {
    return pair_tile(list.gemm, index);
  } else {
    return list.tile(index, Traits::kColumns);
  }
}

/// What a producer warp brings, item by item: looked up 32 at a time, one a lane, so that the
/// pipeline seldom waits for the list. The whole warp constructs and advances.
template <typename Traits>
class MoeWalk final {
 public:
  __device__ __forceinline__ explicit MoeWalk(const MoeList<Traits::kSorts>& list)
      : list_(list), work_(list.gemm, list.num_tiles()), item_(work_.first) {
    set_tile();
  }
  __device__ __forceinline__ bool has_item() const { return item_ < work_.items; }
  __device__ __forceinline__ const MoeTile& tile() const { return tile_; }
  __device__ __forceinline__ int column() const { return work_.column(item_); }
  __device__ __forceinline__ void advance() {
    item_ += work_.stride;
    ++index_;
    set_tile();
  }

 private:
  __device__ __forceinline__ void set_tile() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (index_ % 32 == 0) {
      const int64_t own = item_ + int64_t{lane} * work_.stride;
      held_ = own < work_.items ? own_tile<Traits>(list_, work_.tile(static_cast<int>(own)))
                                : MoeTile{0, 0, 0};
    }
    tile_ = {__shfl_sync(kFullWarp, held_.expert, index_ % 32),
             __shfl_sync(kFullWarp, held_.start, index_ % 32),
             __shfl_sync(kFullWarp, held_.count, index_ % 32)};
  }

  const MoeList<Traits::kSorts>& list_;
  const MoeWork<Traits> work_;
  MoeTile held_ = {0, 0, 0};  // of this lane
  MoeTile tile_;
  int item_;
  int index_ = 0;
};

template <typename Traits>
inline constexpr bool kHasCodes = Traits::kOperands == MoeOperands::kCodes;
template <typename Traits>
inline constexpr bool kHasNibbles = Traits::kOperands == MoeOperands::kNibbles;

template <typename Traits>
__device__ __forceinline__ bool is_gathered(const ExpertGemm& gemm) {
  return Traits::kGathers && gemm.gather != nullptr;
}

/// Bytes of the positions' rows of one stage that the copy engine brings.
template <typename Traits>
__device__ __forceinline__ int row_bytes(const ExpertGemm& gemm, int count) {
  const int boxes = (count + Traits::kBoxRows - 1) / Traits::kBoxRows;
  const int line = boxes * Traits::kBoxRows * Traits::kRowBytes;
  return is_gathered<Traits>(gemm) ? 0 : Traits::kLines * line;
}

/// Stages of an item. Past the depth codes are zeros.
template <typename Traits>
__device__ __forceinline__ int depth_steps(const ExpertGemm& gemm) {
  return (gemm.depth + (kHasCodes<Traits> ? Traits::kDepth - 1 : 0)) / Traits::kDepth;
}

/// Arrivals that fill a stage.
template <typename Traits>
__device__ __forceinline__ int full_arrivals(const ExpertGemm& gemm) {
  return kHasCodes<Traits> || is_gathered<Traits>(gemm) ? 1 + kRowThreads : 1;
}

/// Arrivals that empty a stage: of warps that read scales in it, or of consumers.
template <typename Traits>
inline constexpr int kEmptyArrivals =
    Traits::kConsumers * (Traits::kOperands == MoeOperands::kHalves ? Traits::kCtas : 4);

}  // namespace diffulex::cuda::sm90
