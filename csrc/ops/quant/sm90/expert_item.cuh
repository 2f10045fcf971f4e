// SPDX-License-Identifier: Apache-2.0
#pragma once

// What differs where experts are nibbles in tiles: how the copy engine brings them and their
// scales, and the sums of an item, which are made as those of the dense product
// (nibble_product.cuh) and in its order: ascending, the whole depth in one run.

#include <algorithm>
#include <cstdint>

#include <cuda.h>

#include "ops/moe/gemm.h"
#include "ops/moe/sm90/pipeline.cuh"
#include "ops/quant/sm90/expert_traits.cuh"
#include "ops/quant/sm90/line.cuh"
#include "ops/quant/sm90/nibble_fragment.cuh"
#include "ops/quant/sm90/nibble_turn.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tensor_map.h"
#include "ops/shared/cuda/tma.cuh"

namespace diffulex::cuda::sm90 {

/// The weights as runs of eight rows: neighbouring runs, or a gate and an up run, lie side by side.
template <typename Traits>
TensorMapShape nibble_shape(const ExpertGemm& gemm) {
  const int64_t runs = (Traits::kGateUp ? 2 : 1) * int64_t{gemm.width} / kNibbleTileRows;
  const int64_t run = int64_t{gemm.depth} * kNibbleTileRows / 2;  // bytes
  TensorMapShape shape;
  shape.data = gemm.weight;
  shape.rank = 5;
  const int64_t sizes[] = {Traits::kRowBytes, run / Traits::kRowBytes, 2, runs / 2,
                           gemm.num_experts};
  const int64_t strides[] = {1, Traits::kRowBytes, Traits::kGateUp ? runs / 2 * run : run,
                             Traits::kGateUp ? run : 2 * run, gemm.expert_stride};
  const int32_t boxes[] = {Traits::kRowBytes,
                           Traits::kDepth * kNibbleTileRows / 2 / Traits::kRowBytes, 2,
                           Traits::kWeightRows / 16, 1};
  std::copy_n(sizes, 5, shape.size);
  std::copy_n(strides, 5, shape.stride);
  std::copy_n(boxes, 5, shape.box);
  return shape;
}

/// Bytes of the scales of a run of rows of W, of one group of columns.
template <typename Traits>
__device__ __forceinline__ uint32_t scale_run_bytes(const ExpertGemm& gemm, int column) {
  return min(Traits::kOutColumns, gemm.width - column) * kNibbleScaleBytes;
}

/// Bytes of a stage that load_nibbles brings.
template <typename Traits>
__device__ __forceinline__ uint32_t nibble_bytes(const ExpertGemm& gemm, int column) {
  return Traits::kWeightBytes +
         Traits::kScaleRows * (Traits::kGateUp ? 2 : 1) * scale_run_bytes<Traits>(gemm, column);
}

/// The nibbles of stage `step` of an item, and their scales. One thread.
template <typename Traits>
__device__ __forceinline__ void load_nibbles(const ExpertGemm& gemm, const CUtensorMap& map,
                                             const MoeSmem<Traits>& smem, int stage,
                                             uint64_t policy, int step, int column, int expert) {
  const uint32_t full = smem.full + stage * 8;
  // 128 bytes of a run of eight rows, four of those, two runs, pairs of runs, expert.
  ptx::tma_load_hinted(smem.weights(stage), &map, full, policy, 0,
                       step * (Traits::kDepth * kNibbleTileRows / 2 / Traits::kRowBytes), 0,
                       column / (Traits::kGateUp ? 8 : 16), expert);
  const uint32_t bytes = scale_run_bytes<Traits>(gemm, column);
  const int64_t first = expert * gemm.nibbles.expert_stride +
                        int64_t{step} * Traits::kScaleRows * gemm.nibbles.group_stride + column;
  const auto* source = static_cast<const uint8_t*>(gemm.nibbles.values) + first * kNibbleScaleBytes;
  uint32_t target = smem.scales(stage);
#pragma unroll
  for (int row = 0; row < Traits::kScaleRows; ++row) {
    ptx::bulk_load(target, source, bytes, full);
    if constexpr (Traits::kGateUp) {
      ptx::bulk_load(target + Traits::kOutColumns * kNibbleScaleBytes,
                     source + int64_t{gemm.width} * kNibbleScaleBytes, bytes, full);
    }
    target += Traits::kWeightRows * kNibbleScaleBytes;
    source += gemm.nibbles.group_stride * kNibbleScaleBytes;
  }
}

/// The tile of W of an item, as NibbleLane reads it.
template <typename Traits>
struct ExpertTile final {
  static constexpr int32_t tile_rows = Traits::kWeightRows;
  static constexpr int32_t stripe_scales = Traits::kGateUp ? 8 : 16;
  static constexpr int32_t below_scales = Traits::kGateUp ? Traits::kOutColumns : 8;

  __device__ __forceinline__ static constexpr bool has_stripe(int32_t /*stripe*/) { return true; }
};

/// The stages of an item, in turn.
template <typename Traits, typename Nibbles>
class ExpertFeed final {
 public:
  __device__ __forceinline__ ExpertFeed(const MoeSmem<Traits>& smem, int group,
                                        StageCursor<Traits>& cursor)
      : smem_(smem),
        cursor_(cursor),
        lane_({}, group * 4 + ptx::uniform(static_cast<int32_t>(threadIdx.x) % 128 / 32)),
        rows_(ptx::swizzle128_descriptor(smem.rows(0), 0, 8 * Traits::kRowBytes)) {}

  /// Waits for the next stage, and reads its scales. Gathered rows were written by ordinary copies:
  /// products that read them as the copy engine does wait for those.
  template <bool kIsOrdinary = false>
  __device__ __forceinline__ int32_t begin() {
    const int32_t stage = cursor_.stage;
    ptx::mbarrier_wait(smem_.full + stage * 8, cursor_.parity);
    if constexpr (Traits::kGathers && !kIsOrdinary) {
      ptx::fence_proxy_async();
    }
    lane_.begin_stage(smem_.weights(stage), smem_.scales(stage));
    cursor_.advance();
    return stage;
  }
  /// Starts the products of a piece of a stage.
  __device__ __forceinline__ void start(int32_t stage, int32_t piece,
                                        uint32_t (&fragments)[Nibbles::kPieceSteps][4],
                                        float (&sums)[Nibbles::kGroups][4]) {
    lane_.fragments_of(piece, fragments);
    const uint32_t offset = static_cast<uint32_t>(stage) * Traits::kStageBytes;
    multiply_piece<Nibbles, Traits::kColumns>(rows_, offset, piece, fragments, sums);
  }
  /// Adds the products of a piece by instructions of a warp.
  __device__ __forceinline__ void add(int32_t stage, int32_t piece,
                                      float (&sums)[Nibbles::kGroups][4]) const {
    static_assert(Nibbles::kPieceSteps == 4, "a piece is a line");
    uint32_t fragments[4][4];
    lane_.fragments_of(piece, fragments);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t line =
        smem_.rows(stage) + (piece * Traits::kColumns + lane % 8) * Traits::kRowBytes;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      // Four runs of eight columns, those of two steps, of eight positions each.
      const uint32_t place = line + (((half * 4 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
      for (int32_t group = 0; group < Nibbles::kGroups; ++group) {
        uint32_t right[4];
        ptx::ldmatrix_x4(right, place + group * 8 * Traits::kRowBytes);
        ptx::mma_16816<typename Nibbles::T>(sums[group], fragments[2 * half], right[0], right[1]);
        ptx::mma_16816<typename Nibbles::T>(sums[group], fragments[2 * half + 1], right[2],
                                            right[3]);
      }
    }
  }
  /// This warp has read a stage.
  __device__ __forceinline__ void release(int32_t stage) const {
    release_line(smem_.empty + 8 * stage);
  }

 private:
  const MoeSmem<Traits>& smem_;
  StageCursor<Traits>& cursor_;
  NibbleLane<Nibbles, ExpertTile<Traits>> lane_;
  uint64_t rows_;  // of the positions, of the first stage
};

/// Sums of an item: 64 rows of W times the first 8 kGroups positions. Few of those leave the
/// products of a warpgroup empty, whose fragments cost as many instructions as they: then each warp
/// multiplies for itself, without waiting for the others.
template <typename Traits, int kGroups>
__device__ __forceinline__ void multiply_nibble_item(const MoeSmem<Traits>& smem, int steps,
                                                     int group, StageCursor<Traits>& cursor,
                                                     float (&sums)[kGroups][4]) {
  constexpr bool kHasFew = kGroups <= 2;
  using Nibbles = NibbleTraits<8 * kGroups, Traits::kScaleRows, false>;
  ExpertFeed<Traits, Nibbles> feed(smem, group, cursor);
  if constexpr (kHasFew) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      const int32_t stage = feed.template begin<true>();
#pragma unroll
      for (int32_t piece = 0; piece < Nibbles::kPieces; ++piece) {
        feed.add(stage, piece, sums);
      }
      feed.release(stage);
    }
  } else {
    uint32_t fragments[2][Nibbles::kPieceSteps][4] = {};
#pragma unroll 1
    for (; steps >= Nibbles::kTurn; steps -= Nibbles::kTurn) {
      add_stages<Nibbles::kTurn, Nibbles>(feed, fragments, sums);
    }
    if (steps > 0) {
      add_stages<1, Nibbles>(feed, fragments, sums);
    }
  }
}

}  // namespace diffulex::cuda::sm90
