// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of a product of e4m3 codes that are quantised on their way, with the bits of quantize_rows:
// a launch less where few positions share a tile, and its weights take longer than its rows.

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "ops/moe/sm90/pipeline.cuh"
#include "ops/quant/code.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda::sm90 {

/// A producer warp, which brings every third line of 128 columns: four columns a lane, so that
/// three lines are on their way, and the next one of the warp while it rounds.
template <typename Traits>
class RowQuantiser final {
 public:
  __device__ __forceinline__ RowQuantiser(const MoeList<Traits::kSorts>& list,
                                          const MoeSmem<Traits>& smem)
      : list_(list), gemm_(list.gemm), smem_(smem), lane_(static_cast<int>(threadIdx.x) % 32) {}

  /// All items; `warp` of the three.
  __device__ __forceinline__ void run(int warp) {
    const int steps = depth_steps<Traits>(gemm_);
    int done = 0;  // steps of earlier items
    for (MoeWalk<Traits> walk(list_); walk.has_item(); walk.advance(), done += steps) {
      find_sources(walk.tile());
      const int first = (kWarps + warp - done % kWarps) % kWarps;
      Rows rows;
      if (first < steps) {
        load(first, 0, rows);
      }
      for (int step = first; step < steps; step += kWarps) {
        Rows next;
        if (step + kWarps < steps) {
          load(step + kWarps, 0, next);
        }
        bring(done + step, step, rows);
        rows = next;
      }
    }
  }

 private:
  using T = std::conditional_t<Traits::kGateUp, __nv_bfloat16, float>;
  static constexpr int kWarps = kRowThreads / 32;
  static constexpr int kTogether = Traits::kRowsTogether;
  static constexpr int kHeld = (Traits::kColumns + 31) / 32;
  struct Rows {
    Vec<T, 4> values[kTogether];
  };

  /// Rows of the operand, 32 apart in a lane.
  __device__ __forceinline__ void find_sources(const MoeTile& tile) {
    count_ = tile.count;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = i * 32 + lane_;
      if (row < tile.count) {
        const int64_t target = list_.target(gemm_.gather, int64_t{tile.start} + row);
        sources_[i] = static_cast<uint32_t>(target) / static_cast<uint32_t>(gemm_.top_k);
      }
    }
  }

  /// Of the rows from `begin` on, the columns of a line; zeros past the depth.
  __device__ __forceinline__ void load(int step, int begin, Rows& rows) const {
    const int column = step * Traits::kDepth + lane_ * 4;
    const T* x = static_cast<const T*>(gemm_.rows) + column;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      rows.values[i] = {};
      const int row = begin + i;
      const uint32_t held = row < 32 ? sources_[0] : sources_[kHeld - 1];
      const uint32_t source = __shfl_sync(kFullWarp, held, row % 32);
      if (row < count_ && column < gemm_.depth) {
        rows.values[i] =
            *reinterpret_cast<const Vec<T, 4>*>(x + source * gemm_.row_map.inner_stride);
      }
    }
  }

  /// Fills the rows of a stage, the first of which are loaded.
  __device__ __forceinline__ void bring(int index, int step, Rows& rows) const {
    const int stage = index % Traits::kStages;
    const auto parity = static_cast<uint32_t>(index / Traits::kStages % 2);
    ptx::mbarrier_wait(smem_.empty + stage * 8, parity ^ 1);
    for (int begin = 0; begin < count_; begin += kTogether) {
      if (begin > 0) {
        load(step, begin, rows);
      }
      write(stage, begin, rows);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive(smem_.full + stage * 8);
    }
  }

  __device__ __forceinline__ void write(int stage, int begin, const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = begin + i;
      float values[4];
      float largest = 0.0F;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        values[k] = to_float(rows.values[i].values[k]);
        largest = fmaxf(largest, fabsf(values[k]));
      }
      const CodeScale code = code_scale(warp_max(largest), E4m3Code::kMax);
      uint32_t codes = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        codes |= static_cast<uint32_t>(E4m3Code::of(values[k], code.factor)) << (8 * k);
      }
      if (row < count_) {
        const int chunk = (lane_ / 4) ^ (row & 7);
        ptx::shared_store(smem_.rows(stage) + row * Traits::kRowBytes + chunk * 16 + lane_ % 4 * 4,
                          codes);
        if (lane_ == 0) {
          ptx::shared_store(smem_.scales(stage) + row * 4, __float_as_uint(code.scale));
        }
      }
    }
  }

  const MoeList<Traits::kSorts>& list_;
  const ExpertGemm& gemm_;
  const MoeSmem<Traits>& smem_;
  int lane_;
  int count_ = 0;
  uint32_t sources_[kHeld] = {};
};

}  // namespace diffulex::cuda::sm90
