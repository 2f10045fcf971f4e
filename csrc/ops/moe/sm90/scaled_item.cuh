// SPDX-License-Identifier: Apache-2.0
#pragma once

// What differs where experts are e4m3 codes: the rows come with their scales, the product of a
// stage goes to float32 sums as in the dense product of codes (csrc/ops/quant/sm90/product.cuh) and
// in its order, and the gate-up product writes float32, from which slots are quantised.

#include <cstdint>

#include "ops/moe/gemm.h"
#include "ops/moe/sm90/epilogue.cuh"
#include "ops/moe/sm90/pipeline.cuh"
#include "ops/moe/sm90/scaled_traits.cuh"
#include "ops/quant/sm90/line.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// The rows and their scales: gathered, 16 bytes a thread into the swizzled layout, or by boxes of
/// the copy engine. Each of 96 threads arrives once a stage, when its pieces have landed.
template <typename Traits>
__device__ __forceinline__ void produce_scaled_rows(const MoeList<Traits::kSorts>& list,
                                                    const MoeMaps& maps,
                                                    const MoeSmem<Traits>& smem, int thread) {
  constexpr int kRowsPerPass = kRowThreads / kChunks;
  constexpr int kBarrier = 1 + Traits::kConsumers;
  const ExpertGemm& gemm = list.gemm;
  const int chunk = thread % kChunks;
  const uint8_t* codes = static_cast<const uint8_t*>(gemm.rows) + chunk * 16;
  const auto row_bytes = static_cast<uint64_t>(gemm.row_map.inner_stride);
  uint32_t* sources = smem.sources();
  const int steps = depth_steps<Traits>(gemm);
  StageCursor<Traits> cursor;
  for (MoeWalk<Traits> walk(list); walk.has_item(); walk.advance()) {
    const MoeTile tile = walk.tile();
    if constexpr (Traits::kGathers) {
      ptx::named_barrier_sync(kBarrier, kRowThreads);  // the last sources were used
      for (int row = thread; row < tile.count; row += kRowThreads) {
        sources[row] =
            static_cast<uint32_t>(list.target(gemm.gather, tile.start + row)) / gemm.top_k;
      }
      ptx::named_barrier_sync(kBarrier, kRowThreads);
    }
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(smem.empty + cursor.stage * 8, cursor.parity ^ 1);
      const float* scales = gemm.scales.rows + step * gemm.scales.row_stride;
      for (int row = thread; row < tile.count; row += kRowThreads) {
        const uint32_t source = Traits::kGathers ? sources[row] : tile.start + row;
        ptx::cp_async4(smem.scales(cursor.stage) + row * 4, scales + source);
      }
      const uint32_t target = smem.rows(cursor.stage);
      if constexpr (Traits::kGathers) {
        // Past the depth zeros are written, and the row's first bytes not read.
        const bool is_inside = step * Traits::kDepth + chunk * 16 < gemm.depth;
        const uint8_t* column = codes + (is_inside ? step * Traits::kDepth : 0);
#pragma unroll 4
        for (int row = thread / kChunks; row < tile.count; row += kRowsPerPass) {
          ptx::cp_async16(target + row * Traits::kRowBytes + ((chunk ^ (row & 7)) * 16),
                          column + sources[row] * row_bytes, is_inside);
        }
      } else if (thread < 32) {
        if (ptx::elect_one()) {
          for (int row = 0; row < tile.count; row += Traits::kBoxRows) {
            ptx::tma_load(target + row * Traits::kRowBytes, &maps.rows,
                          smem.full + cursor.stage * 8, step * Traits::kDepth, tile.start + row, 0);
          }
        }
        __syncwarp();
      }
      ptx::cp_async_arrive(smem.full + cursor.stage * 8);
    }
  }
}

/// The part of an item that a consumer warpgroup multiplies.
struct ScaledPart {
  const ExpertGemm& gemm;
  int expert;
  int first;  // column of the item
  int group;
};

/// Scales of the weight rows of a warp: of its upper and its lower eight, or of gate and up.
template <typename Traits>
class ExpertWeightScales final {
 public:
  __device__ __forceinline__ explicit ExpertWeightScales(const ScaledPart& part)
      : scales_(part.gemm.scales),
        weight_(scales_.weight + part.expert * scales_.expert_stride),
        width_(part.gemm.width),
        column_(part.first + part.group * Traits::kGroupColumns) {}

  [[nodiscard]] __device__ __forceinline__ bool has_blocks() const {
    return scales_.block_stride != 0;
  }
  /// Of one line of blocks. The rows of a warpgroup lie in one block, or in one of gate and up.
  [[nodiscard]] __device__ __forceinline__ float2 of_line(int line) const {
    constexpr int kBlock = 128;
    static_assert(kBlock % Traits::kGroupColumns == 0, "one block");
    const int row = min(column_, width_ - 1) / kBlock;
    const float* above = weight_ + row * scales_.block_stride + line;
    const int64_t up = Traits::kGateUp ? scales_.up_blocks * scales_.block_stride : 0;
    return make_float2(__ldg(above), __ldg(above + up));
  }
  /// Of the row of this lane in each half of the 16 of its warp.
  [[nodiscard]] __device__ __forceinline__ float2 of_rows(int block) const {
    constexpr int kWarpColumns = Traits::kGateUp ? 8 : 16;
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    const int column =
        column_ + (block * 4 + warp) * kWarpColumns + static_cast<int>(threadIdx.x) % 32 / 4;
    const int below = Traits::kGateUp ? column : column + 8;
    return make_float2(
        column < width_ ? __ldg(weight_ + column) : 0.0F,
        below < width_ ? __ldg(weight_ + (Traits::kGateUp ? width_ : 0) + below) : 0.0F);
  }

 private:
  const ExpertScales& scales_;
  const float* weight_;
  int width_;
  int column_;  // first one of this warpgroup
};

/// sums times the scales of their rows of W, one rounding.
template <int kGroups>
__device__ __forceinline__ void scale_rows(float (&sums)[kGroups][4], float2 factor) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[group][i] = fmaf(sums[group][i], i < 2 ? factor.x : factor.y, 0.0F);
    }
  }
}

/// Sums of one item, in float32 and with all scales.
template <typename Traits, int kGroups>
__device__ __forceinline__ void multiply_scaled_item(const MoeSmem<Traits>& smem,
                                                     const ScaledPart& part,
                                                     StageCursor<Traits>& cursor,
                                                     float (&sums)[Traits::kBlocks][kGroups][4]) {
  constexpr int kBlocks = Traits::kBlocks;
  constexpr int kBlockBytes = 64 * Traits::kRowBytes;
  const ExpertWeightScales<Traits> scales(part);
  const bool has_blocks = scales.has_blocks();
  const int steps = depth_steps<Traits>(part.gemm);
  float2 of_rows[kBlocks];
  float2 of_line = make_float2(1.0F, 1.0F);
  if (has_blocks) {
    of_line = scales.of_line(0);
  } else {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      of_rows[block] = scales.of_rows(block);
    }
  }
  for (int step = 0; step < steps; ++step, cursor.advance()) {
    const float2 next = has_blocks && step + 1 < steps ? scales.of_line(step + 1) : of_line;
    ptx::mbarrier_wait(smem.full + cursor.stage * 8, cursor.parity);
    if constexpr (Traits::kGathers) {
      ptx::fence_proxy_async();  // gathered rows were written by ordinary copies
    }
    const uint32_t weights = smem.weights(cursor.stage) + part.group * kBlocks * kBlockBytes;
    float products[kBlocks][kGroups][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::wgmma_hold(products[block]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      issue_codes(products[block],
                  ptx::swizzle128_descriptor(weights + block * kBlockBytes, 0, 1024),
                  ptx::swizzle128_descriptor(smem.rows(cursor.stage), 0, 1024));
    }
    ptx::wgmma_wait<kBlocks - 1>();
    ptx::wgmma_hold(products[0]);
    promote(sums[0], products[0], smem.scales(cursor.stage), has_blocks, of_line);
    if constexpr (kBlocks > 1) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(products[1]);
      promote(sums[1], products[1], smem.scales(cursor.stage), has_blocks, of_line);
    }
    of_line = next;
    release_line(smem.empty + cursor.stage * 8);
  }
  if (!has_blocks) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      scale_rows(sums[block], of_rows[block]);
    }
  }
}

/// Activation in registers, then float32 to the row of each position: eight neighbouring columns
/// are 32 bytes of a row.
template <typename Traits>
class FloatEpilogue final {
 public:
  __device__ __forceinline__ FloatEpilogue(const MoeList<Traits::kSorts>& list, uint32_t /*staged*/,
                                           uint8_t* /*tables*/, int group)
      : gemm_(list.gemm), group_(group) {}

  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + group_, 128); }
  __device__ __forceinline__ void fetch(const MoeTile& /*tile*/) const {}
  __device__ __forceinline__ void start(const MoeTile& /*tile*/) const {}

  /// Writes the results of this warpgroup; `first` is the first column of the item.
  template <int kGroups>
  __device__ __forceinline__ void finish(const MoeTile& tile, int first,
                                         const float (&sums)[Traits::kBlocks][kGroups][4]) const {
    switch (gemm_.act) {
      case Activation::kGeluTanh:
        return write<Activation::kGeluTanh>(tile, first, sums);
      case Activation::kGeluErf:
        return write<Activation::kGeluErf>(tile, first, sums);
      default:
        return write<Activation::kSilu>(tile, first, sums);
    }
  }

 private:
  template <Activation kAct, int kGroups>
  __device__ __forceinline__ void write(const MoeTile& tile, int first,
                                        const float (&sums)[Traits::kBlocks][kGroups][4]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) % 128 / 32;
    const int position = lane % 4 * 2;
    float* out = static_cast<float*>(gemm_.out) + int64_t{tile.start} * gemm_.out_map.inner_stride;
#pragma unroll
    for (int block = 0; block < Traits::kBlocks; ++block) {
      const int column = first + group_ * Traits::kGroupColumns + (block * 4 + warp) * 8 + lane / 4;
      if (column >= gemm_.width) {
        continue;
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group * 8 >= tile.count) {
          break;
        }
        const float (&sum)[4] = sums[block][group];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = group * 8 + position + i;
          if (row < tile.count) {
            out[row * gemm_.out_map.inner_stride + column] = gate_value<kAct>(sum[i]) * sum[i + 2];
          }
        }
      }
    }
  }

  const ExpertGemm& gemm_;
  int group_;
};

}  // namespace diffulex::cuda::sm90
