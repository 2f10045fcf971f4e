// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T of e4m3 codes. The pipeline is that of csrc/ops/linear/sm90/ring.cuh: a copying
// warp streams W ahead of the kernels in front, warpgroups multiply 64 rows of W each, two CTAs may
// share the depth. What differs:
//
//   line    the product of 128 columns starts at 0 and goes to the float32 sums times its scales:
//           the tensor cores keep too few bits of long sums
//   scales  of the rows of x lie beside the stages; those of W come from memory, asked for before
//           a line is waited for
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

/// The lines of a consumer, in turn. Where registers are enough one is promoted while the next one
/// is multiplied.
template <typename Traits, bool kHasBlocks>
class LineFeed final {
 public:
  using Product = float[Traits::kGroups][4];
  /// A line on its way: where the scales of the rows of x begin, the scales of the rows of W if
  /// they are those of blocks, and the barrier on which a warp arrives that has read its stage.
  struct Started final {
    uint32_t scales;
    uint32_t empty;
    float2 weight;
  };

  __device__ __forceinline__ LineFeed(const ScaledLinearArgs& args, const RingSmem& smem,
                                      const ScaledWork& work)
      : args_(args), smem_(smem), work_(work), scales_(args), place_(work) {
    const uint32_t own = ptx::uniform(threadIdx.x / 128) * 64 * Traits::kLineBytes;  // of W
    weights_ = ptx::swizzle128_descriptor(smem.stages + own, 0, 1024);
    rows_ = ptx::swizzle128_descriptor(smem.stages + Traits::kLines * line_bytes(), 0, 1024);
  }

  __device__ __forceinline__ void begin_tile(int32_t tile) {
    scales_.begin_tile(tile);
    line_ = work_.begin;
  }
  [[nodiscard]] __device__ __forceinline__ const WeightScales& scales() const { return scales_; }

  /// Waits for the next line, the kLine-th of its stage, and lets the tensor cores begin with it.
  template <int kLine>
  __device__ __forceinline__ Started start(Product& product) {
    // Of a line past the depth any scale will do.
    const float2 weight =
        kHasBlocks ? scales_.of_line(min(line_++, args_.num_lines - 1)) : float2{};
    if constexpr (kLine == 0) {
      place_.wait(smem_);
    }
    constexpr uint32_t kUnit = 16;  // bytes that descriptors count
    constexpr uint32_t kRowBytes = Traits::kRows * Traits::kLineBytes;
    const uint32_t stage = ptx::uniform(place_.stage);
    const uint32_t offset = stage * args_.stage_bytes;
    ptx::wgmma_hold(product);
    ptx::wgmma_fence();
    issue_codes(product, ptx::move_descriptor(weights_, (offset + kLine * line_bytes()) / kUnit),
                ptx::move_descriptor(rows_, (offset + kLine * kRowBytes) / kUnit));
    const uint32_t scales = smem_.extra + (stage * Traits::kLines + kLine) * Traits::kLineScales;
    const Started line{scales, smem_.empty + 8 * stage, weight};
    if constexpr (kLine + 1 == Traits::kLines) {
      place_.advance(args_.stages);
    }
    return line;
  }
  /// Adds a line, of which kPending later ones are on their way, to the sums.
  template <int kLine, int kPending>
  __device__ __forceinline__ void finish(Product& sums, Product& product, const Started& line) {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_hold(product);
    promote(sums, product, line.scales, kHasBlocks, line.weight);
    if constexpr (kLine + 1 == Traits::kLines) {
      release_line(line.empty);
    }
  }

 private:
  /// Of W.
  __device__ __forceinline__ uint32_t line_bytes() const {
    return args_.tile_rows * Traits::kLineBytes;
  }

  const ScaledLinearArgs& args_;
  const RingSmem& smem_;
  const ScaledWork& work_;
  WeightScales scales_;
  uint64_t weights_;  // operands of the first stage: W of this warpgroup, x
  uint64_t rows_;
  RingReader place_;
  int32_t line_ = 0;  // of the depth
};

/// Adds the next kCount lines, the first of which begins a stage. None is on its way before or
/// after: where an accumulator is in use across the end of a loop, the compiler waits for every
/// product. At most two stages are held, of which a ring has more.
template <int kCount, typename Traits, bool kHasBlocks>
__device__ __forceinline__ void add_lines(LineFeed<Traits, kHasBlocks>& feed,
                                          float (&sums)[Traits::kGroups][4]) {
  constexpr int kSecond = Traits::kLines - 1;  // of a pair, in its stage
  float first[Traits::kGroups][4];
  auto even = feed.template start<0>(first);
  if constexpr (kCount == 1) {
    feed.template finish<0, 0>(sums, first, even);
  } else {
    float second[Traits::kGroups][4];
    auto odd = feed.template start<kSecond>(second);
    feed.template finish<0, 1>(sums, first, even);
    if constexpr (kCount > 2) {
      even = feed.template start<0>(first);
      feed.template finish<kSecond, 1>(sums, second, odd);
      odd = feed.template start<kSecond>(second);
      feed.template finish<0, 1>(sums, first, even);
    }
    feed.template finish<kSecond, 0>(sums, second, odd);
  }
}

/// The sums of a tile: `count` stages.
template <typename Traits, bool kHasBlocks>
__device__ __forceinline__ void multiply_lines(LineFeed<Traits, kHasBlocks>& feed, int32_t count,
                                               float (&sums)[Traits::kGroups][4]) {
  constexpr int kMost = Traits::kGroups <= 4 ? 4 : Traits::kLines;  // that registers are enough for
  int32_t lines = count * Traits::kLines;
  for (; lines >= kMost; lines -= kMost) {
    add_lines<kMost>(feed, sums);
  }
  for (; lines > 0; lines -= Traits::kLines) {
    add_lines<Traits::kLines>(feed, sums);
  }
}

template <typename Traits, bool kHasBlocks>
__device__ __forceinline__ void consume_codes(const ScaledLinearArgs& args, const RingSmem& smem) {
  const ScaledWork work(args);
  ScaledEpilogue<Traits> epilogue(args, smem, work.split);
  LineFeed<Traits, kHasBlocks> feed(args, smem, work);
  for (int32_t tile = work.tile; tile < args.num_tiles; tile += work.stride) {
    feed.begin_tile(tile);
    float sums[Traits::kGroups][4] = {};
    multiply_lines(feed, work.count, sums);
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
  run_ring<ScaledCopies<Traits>>(args, smem, &weight_map, &row_map, [&] {
    if (args.block_stride != 0) {
      consume_codes<Traits, true>(args, smem);
    } else {
      consume_codes<Traits, false>(args, smem);
    }
  });
}

}  // namespace diffulex::cuda::sm90
