// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T of e4m3 codes. The pipeline is that of csrc/ops/linear/sm90/ring.cuh: a copying
// warp streams W ahead of the kernels in front, warpgroups multiply 64 rows of W each, two CTAs may
// share the depth. What differs:
//
//   line    the product of 128 columns starts at 0 and goes to the float32 sums times its scales:
//           the tensor cores keep too few bits of long sums
//   scales  of the rows of x lie beside the stages; those of W come from memory, a line ahead
//
// The order of the sums does not depend on the number of rows, of x or of a tile.

#include <cstdint>

#include <cuda.h>

#include "ops/linear/sm90/epilogue.cuh"
#include "ops/linear/sm90/ring.cuh"
#include "ops/quant/sm90/line.cuh"
#include "ops/quant/sm90/traits.cuh"

namespace diffulex::cuda::sm90 {

/// What this CTA does. A line past the depth is all zeros.
struct ScaledWork final : RingWork {
  /// Shares of the depth end at an even line whatever a step has, not as those of whole steps.
  __device__ __forceinline__ explicit ScaledWork(const ScaledLinearArgs& args) : RingWork(args) {
    const int32_t pairs = (args.num_lines + 1) / 2;
    const int32_t first = 2 * ((pairs * split) >> bits);
    const int32_t end = min(2 * ((pairs * (split + 1)) >> bits), args.num_lines);
    set_share(first, (end - first + args.lines - 1) / args.lines, args.stages);
  }
};

/// The copies of a stage: lines of W, of x and the scales of its rows, which lie beside the stages.
template <typename Traits>
class ScaledCopies : public RingCopies<ScaledLinearArgs, ScaledWork> {
 public:
  __device__ __forceinline__ ScaledCopies(const ScaledLinearArgs& args, const RingSmem& smem,
                                          const CUtensorMap* weight_map, const CUtensorMap* row_map)
      : RingCopies(args, smem, weight_map, row_map), policy_(ptx::policy_evict_first()) {}

  struct Place final {
    int32_t weights;      // pairs of runs of W
    int32_t scale_bytes;  // of the rows of x, in whole runs of 16
  };
  /// Warps.
  static __device__ __forceinline__ uint32_t num_readers(const ScaledLinearArgs& /*args*/) {
    return blockDim.x / 32 - 1;
  }
  __device__ __forceinline__ int32_t num_tiles() const { return args_.num_tiles; }
  __device__ __forceinline__ Place place_of(int32_t tile) const {
    return {tile * (args_.tile_rows / 16), (args_.num_rows + 3) / 4 * 16};
  }
  __device__ __forceinline__ int32_t weight_bytes(const Place& /*place*/) const {
    return Traits::kLines * line_bytes();
  }
  __device__ __forceinline__ int32_t row_bytes(const Place& place) const {
    return Traits::kLines * row_line_bytes(place);
  }
  __device__ __forceinline__ int32_t stage_bytes(const Place& place) const {
    return Traits::kLines * (line_bytes() + row_line_bytes(place));
  }
  __device__ __forceinline__ void load_weights(int32_t stage, const Place& place, int32_t step,
                                               uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes;
    const int32_t first = work_.begin + step * Traits::kLines;
#pragma unroll
    for (int32_t line = 0; line < Traits::kLines; ++line) {
      // Depth, 8 rows, two runs of them, pairs of runs.
      ptx::tma_load_hinted(target, weight_map_, barrier, policy_,
                           (first + line) * Traits::kLineBytes, 0, 0, place.weights);
      target += line_bytes();
    }
  }
  __device__ __forceinline__ void load_rows(int32_t stage, const Place& place, int32_t step,
                                            uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes + weight_bytes(place);
    uint32_t scales = smem_.extra + stage * Traits::kLines * Traits::kLineScales;
    const int32_t first = work_.begin + step * Traits::kLines;
#pragma unroll
    for (int32_t line = 0; line < Traits::kLines; ++line) {
      ptx::tma_load(target, row_map_, barrier, (first + line) * Traits::kLineBytes, 0);
      // Of a line past the depth any scale will do.
      const int32_t block = min(first + line, args_.num_lines - 1);
      ptx::bulk_load(scales, args_.x_scale + block * args_.x_scale_stride,
                     static_cast<uint32_t>(place.scale_bytes), barrier);
      target += Traits::kRows * Traits::kLineBytes;
      scales += Traits::kLineScales;
    }
  }

 private:
  /// Of W.
  __device__ __forceinline__ int32_t line_bytes() const {
    return args_.tile_rows * Traits::kLineBytes;
  }
  /// Of x, with its scales.
  __device__ __forceinline__ int32_t row_line_bytes(const Place& place) const {
    return args_.box_rows * Traits::kLineBytes + place.scale_bytes;
  }

  const uint64_t policy_;
};

/// Scales of the rows of W of a warp: its upper and its lower eight, or gate and up.
class WeightScales final {
 public:
  __device__ __forceinline__ explicit WeightScales(const ScaledLinearArgs& args) : args_(args) {}

  /// First column of the result of this warp, and the rows of W of its two runs.
  __device__ __forceinline__ void begin_tile(int32_t tile) {
    const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
    if (args_.act >= 0) {
      column_ = tile * (args_.tile_rows / 2) + warp * 8;
      above_ = column_;
      below_ = args_.num_columns + column_;
    } else {
      column_ = tile * args_.tile_rows + warp * 16;
      above_ = column_;
      below_ = column_ + 8;
    }
  }
  /// Of one line of blocks, 0 for rows that do not exist.
  __device__ __forceinline__ float2 of_line(int32_t line) const {
    return make_float2(block(above_, line), block(below_, line));
  }
  /// Of the row of this lane in each run.
  __device__ __forceinline__ float2 of_rows(const float* values, float missing) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32 / 4;
    return make_float2(above_ + lane < args_.weight_rows ? values[above_ + lane] : missing,
                       below_ + lane < args_.weight_rows ? values[below_ + lane] : missing);
  }
  __device__ __forceinline__ int32_t column() const { return column_; }

 private:
  __device__ __forceinline__ float block(int32_t row, int32_t line) const {
    constexpr int32_t kBlock = 128;
    return row < args_.weight_rows
               ? __ldg(args_.weight_scale + row / kBlock * args_.block_stride + line)
               : 0.0F;
  }

  const ScaledLinearArgs& args_;
  int32_t column_ = 0;
  int32_t above_ = 0;
  int32_t below_ = 0;
};

/// Sums of a tile on their way out: the other share, scales of rows of W and bias, or gate, one
/// rounding, the transpose to rows of x.
template <typename Traits>
class ScaledEpilogue final : public LinearExchange<Traits> {
 public:
  __device__ __forceinline__ ScaledEpilogue(const ScaledLinearArgs& args, const RingSmem& smem,
                                            int32_t split)
      : LinearExchange<Traits>(args, smem.partials, smem.partials_full, smem.partials_empty, split),
        scaled_(args) {}

  __device__ __forceinline__ void finish(float (&sums)[Traits::kGroups][4],
                                         const WeightScales& scales, bool is_last) {
    if (warp_ >= scaled_.warps) {
      return;
    }
    this->exchange(sums, is_last);
    float2 factor = make_float2(1.0F, 1.0F);
    float2 bias = make_float2(0.0F, 0.0F);
    if (scaled_.block_stride == 0) {
      factor = scales.of_rows(scaled_.weight_scale, 1.0F);
    }
    if (scaled_.bias != nullptr) {
      bias = scales.of_rows(static_cast<const float*>(scaled_.bias), 0.0F);
    }
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      if (this->is_mine(group) && group * 8 < scaled_.num_rows) {
        float (&sum)[4] = sums[group];
        sum[0] = fmaf(sum[0], factor.x, bias.x);
        sum[1] = fmaf(sum[1], factor.x, bias.x);
        sum[2] = fmaf(sum[2], factor.y, bias.y);
        sum[3] = fmaf(sum[3], factor.y, bias.y);
        write(sum, group * 8, scales.column());
      }
    }
  }

 private:
  using LinearExchange<Traits>::warp_;

  __device__ __forceinline__ void write(const float (&sum)[4], int32_t row, int32_t column) {
    if (scaled_.act >= 0) {
      this->put_gated(row, column, sum);
      return;
    }
    this->put(row, column, sum[0], sum[1]);
    this->put(row, column + 8, sum[2], sum[3]);
  }

  const ScaledLinearArgs& scaled_;
};

/// The stages of a consumer, in turn.
template <typename Traits>
class StageFeed final {
 public:
  __device__ __forceinline__ StageFeed(const ScaledLinearArgs& args, const RingSmem& smem,
                                       const ScaledWork& work)
      : args_(args),
        smem_(smem),
        work_(work),
        scales_(args),
        own_weights_(static_cast<uint32_t>(threadIdx.x) / 128 * 64 * Traits::kLineBytes),
        rows_(static_cast<uint32_t>(Traits::kLines * args.tile_rows * Traits::kLineBytes)) {}

  __device__ __forceinline__ void begin_tile(int32_t tile) {
    early_ = tile == work_.tile ? work_.early : 0;
    scales_.begin_tile(tile);
  }
  [[nodiscard]] __device__ __forceinline__ const WeightScales& scales() const { return scales_; }

  /// Waits for a stage, the next one. The lines of its operands follow each other.
  __device__ __forceinline__ LineOperands wait(int32_t step) {
    if (step < early_) {
      ptx::mbarrier_wait(smem_.landed + 8 * cursor_.stage, 0);
    }
    ptx::mbarrier_wait(smem_.full + 8 * cursor_.stage, cursor_.parity);
    const uint32_t stage = smem_.stages + cursor_.stage * args_.stage_bytes;
    const LineOperands line{stage + own_weights_, stage + rows_,
                            smem_.extra + cursor_.stage * Traits::kLines * Traits::kLineScales,
                            smem_.empty + 8 * cursor_.stage};
    cursor_.advance(args_.stages);
    return line;
  }
  /// Scales of the rows of W in blocks; of a line past the depth any will do.
  [[nodiscard]] __device__ __forceinline__ float2 weight(int32_t step, int32_t line = 0) const {
    return scales_.of_line(min(work_.begin + step * Traits::kLines + line, args_.num_lines - 1));
  }

 private:
  const ScaledLinearArgs& args_;
  const RingSmem& smem_;
  const ScaledWork& work_;
  WeightScales scales_;
  const uint32_t own_weights_;  // of this warpgroup in a line
  const uint32_t rows_;         // in a stage
  RingCursor cursor_;
  int32_t early_ = 0;  // steps of this tile whose W has a barrier of its own
};

/// Each stage waited for, multiplied and promoted before the next one.
template <typename Traits>
__device__ __forceinline__ void multiply_stages(StageFeed<Traits>& feed, int32_t count,
                                                bool has_blocks, int32_t weight_bytes,
                                                float (&sums)[Traits::kGroups][4]) {
  for (int32_t step = 0; step < count; ++step) {
    float2 weight[Traits::kLines] = {};
    if (has_blocks) {
#pragma unroll
      for (int32_t line = 0; line < Traits::kLines; ++line) {
        weight[line] = feed.weight(step, line);
      }
    }
    const LineOperands stage = feed.wait(step);
    float products[Traits::kLines][Traits::kGroups][4];
#pragma unroll
    for (int32_t line = 0; line < Traits::kLines; ++line) {
      ptx::wgmma_hold(products[line]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t line = 0; line < Traits::kLines; ++line) {
      issue_codes(products[line], stage.weights + line * weight_bytes,
                  stage.rows + line * Traits::kRows * Traits::kLineBytes);
    }
    ptx::wgmma_wait<Traits::kLines - 1>();
    ptx::wgmma_hold(products[0]);
    promote(sums, products[0], stage.scales, has_blocks, weight[0]);
    if constexpr (Traits::kLines > 1) {
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(products[1]);
      promote(sums, products[1], stage.scales + Traits::kLineScales, has_blocks, weight[1]);
    }
    release_line(stage.empty);
  }
}

template <typename Traits>
__device__ __forceinline__ void consume_codes(const ScaledLinearArgs& args, const RingSmem& smem) {
  const ScaledWork work(args);
  const bool has_blocks = args.block_stride != 0;
  ScaledEpilogue<Traits> epilogue(args, smem, work.split);
  StageFeed<Traits> feed(args, smem, work);
  for (int32_t tile = work.tile; tile < args.num_tiles; tile += work.stride) {
    feed.begin_tile(tile);
    float sums[Traits::kGroups][4] = {};
    multiply_stages(feed, work.count, has_blocks, args.tile_rows * Traits::kLineBytes, sums);
    epilogue.finish(sums, feed.scales(), tile + work.stride >= args.num_tiles);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    scaled_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap row_map,
                         const __grid_constant__ ScaledLinearArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const RingSmem smem(raw, args, args.scale_bytes);
  run_ring<ScaledCopies<Traits>>(args, smem, &weight_map, &row_map,
                                 [&] { consume_codes<Traits>(args, smem); });
}

}  // namespace diffulex::cuda::sm90
