// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T of e4m3 codes for more than kScaledFewRows rows of x, which are the wide operand
// here: a lane then has two scales of rows a line, and gate and up in neighbouring groups of its
// sums. The ring is that of csrc/ops/linear/sm90/ring.cuh, the terms and the order of the sums
// those of product.cuh, and so the bits.
//
//   tile        128 rows of x, 64 a warpgroup, times 128 or 192 rows of W
//   128         two lines on their way, the first one promoted while the second one is multiplied
//   192         one line; fewer bytes from shared memory a product, and no registers for a second.
//               The warpgroups take turns: one promotes while the other multiplies
//   shares      of the depth, where few rows have two: two CTAs, or one after the other
//   end of x    the last tile is shifted to end there: copies that reach past x are slower. A
//               single tile with fewer rows than its copies reaches past it
//
// Beside the tensor cores, which take 512 cycles for a line of 128 x 128, promotion costs about 150
// more and the copies 60, whatever overlaps.

#include <cstdint>

#include <cuda.h>

#include "ops/activation/gate.cuh"
#include "ops/linear/sm90/epilogue.cuh"
#include "ops/linear/sm90/ring.cuh"
#include "ops/quant/sm90/line.cuh"
#include "ops/quant/sm90/traits.cuh"
#include "ops/shared/cuda/turns.cuh"

namespace diffulex::cuda::sm90 {

template <int kColumnCount, bool kHasBlockScales>
struct ManyRowsTraits final {
  using T = __nv_bfloat16;                          // of the result
  static constexpr int kColumns = kColumnCount;     // rows of W
  static constexpr int kGroups = kColumns / 8;      // accumulators of a thread, four floats each
  static constexpr bool kBlocks = kHasBlockScales;  // of W, or one scale a row
  static constexpr bool kIsPaired = kColumns <= kManyRowsPairedTile;
  static constexpr int kRun = 4;  // accumulator groups that one share of the depth writes together
  static constexpr int kConsumers = 2 * 128;  // threads
  static constexpr int kThreads = kConsumers + 128;

  static_assert(kIsPaired || !kBlocks, "a tile of 192 rows has parts of blocks");
};

struct ManyRowsArgs final : ScaledLinearArgs {
  int32_t row_tiles;     // of x; those of one tile of W follow each other
  int32_t second_share;  // line; 0: the sums have one share
  int32_t held_bytes;    // for sums of the first share, where this CTA has both; else 0
  bool is_wide;          // the result takes stores of 8 bytes
};

/// Rows of x of a tile: whole halves, of which the last ones are shifted to end with x.
struct RowSpan final {
  int32_t first;
  int32_t count;
};

struct ManyRowsWork final : RingWork {
  int32_t tiles;  // of W and x

  __device__ __forceinline__ explicit ManyRowsWork(const ManyRowsArgs& args)
      : RingWork(args), tiles(args.num_tiles * args.row_tiles) {
    const int32_t first = split == 0 ? 0 : args.second_share;
    const int32_t end = bits > 0 && split == 0 ? args.second_share : args.num_lines;
    // Pairs of lines, also where a tile takes one at a time: one past the depth is all zeros.
    set_share(first, (end - first + 1) / 2 * 2, args.stages);
  }
  static __device__ __forceinline__ RowSpan rows_of(const ManyRowsArgs& args, int32_t row_tile) {
    const int32_t first = row_tile * kManyRowsTile;
    const int32_t rows = min(args.num_rows - first, kManyRowsTile);
    const int32_t count = (rows + kManyRowsBox - 1) / kManyRowsBox * kManyRowsBox;
    return {max(0, min(first, args.num_rows - count)), count};
  }
};

/// The copies of a stage: a line of W, of x and the scales of its rows, which lie beside the
/// stages.
template <typename Traits>
class ManyRowsCopies : public RingCopies<ManyRowsArgs, ManyRowsWork> {
 public:
  __device__ __forceinline__ ManyRowsCopies(const ManyRowsArgs& args, const RingSmem& smem,
                                            const CUtensorMap* weight_map,
                                            const CUtensorMap* row_map)
      : RingCopies(args, smem, weight_map, row_map), policy_(ptx::policy_evict_normal()) {}

  struct Place final {
    int32_t weights;  // pairs of runs of W
    RowSpan rows;
    int32_t first_scale;  // of x: a multiple of four
    int32_t scale_bytes;  // whole runs of 16
  };
  /// Warps.
  static __device__ __forceinline__ uint32_t num_readers(const ManyRowsArgs& /*args*/) {
    return Traits::kConsumers / 32;
  }
  __device__ __forceinline__ int32_t num_tiles() const { return work_.tiles; }
  __device__ __forceinline__ Place place_of(int32_t tile) const {
    const int32_t weight_tile = tile / args_.row_tiles;
    const RowSpan rows = ManyRowsWork::rows_of(args_, tile - weight_tile * args_.row_tiles);
    const int32_t first = rows.first / 4 * 4;
    const int32_t end = min(rows.first + rows.count, args_.num_rows);
    return {weight_tile * (Traits::kColumns / 16), rows, first, (end - first + 3) / 4 * 16};
  }
  __device__ __forceinline__ int32_t weight_bytes(const Place& /*place*/) const {
    return kWeightBytes;
  }
  __device__ __forceinline__ int32_t row_bytes(const Place& place) const {
    return place.rows.count * kCodeLine + place.scale_bytes;
  }
  __device__ __forceinline__ int32_t stage_bytes(const Place& place) const {
    return kWeightBytes + row_bytes(place);
  }
  __device__ __forceinline__ void load_weights(int32_t stage, const Place& place, int32_t step,
                                               uint32_t barrier) {
    // Depth, 8 rows, two runs of them, pairs of runs.
    ptx::tma_load_hinted(smem_.stages + stage * args_.stage_bytes, weight_map_, barrier, policy_,
                         (work_.begin + step) * kCodeLine, 0, 0, place.weights);
  }
  __device__ __forceinline__ void load_rows(int32_t stage, const Place& place, int32_t step,
                                            uint32_t barrier) {
    const int32_t line = work_.begin + step;
    const uint32_t target = smem_.stages + stage * args_.stage_bytes + kWeightBytes;
    ptx::tma_load(target, row_map_, barrier, line * kCodeLine, place.rows.first);
    if (place.rows.count > kManyRowsBox) {
      ptx::tma_load(target + kManyRowsBox * kCodeLine, row_map_, barrier, line * kCodeLine,
                    place.rows.first + kManyRowsBox);
    }
    // Of a line past the depth any scale will do.
    const int32_t block = min(line, args_.num_lines - 1);
    ptx::bulk_load(smem_.extra + stage * kManyRowsScaleBytes,
                   args_.x_scale + block * args_.x_scale_stride + place.first_scale,
                   static_cast<uint32_t>(place.scale_bytes), barrier);
  }

 private:
  static constexpr int32_t kWeightBytes = Traits::kColumns * kCodeLine;

  const uint64_t policy_;
};

/// Scales of the blocks of W that a tile has, of all of its rows or of gate and up: those of 32
/// lines lie in the lanes. Without blocks they are 1.
template <typename Traits>
class BlockScales final {
 public:
  __device__ __forceinline__ BlockScales(const ManyRowsArgs& args, int32_t weight_tile,
                                         int32_t begin)
      : num_lines_(args.num_lines), begin_(begin) {
    if constexpr (Traits::kBlocks) {
      const bool has_gate = args.act >= 0;
      const int32_t row = weight_tile * (has_gate ? Traits::kColumns / 2 : Traits::kColumns);
      even_ = args.weight_scale + row / kCodeLine * args.block_stride;
      odd_ = even_ + (has_gate ? args.num_columns / kCodeLine * args.block_stride : 0);
      later_ = read(0);
    }
  }
  /// Of the next line, `step` of this share.
  [[nodiscard]] __device__ __forceinline__ float2 of_line(int32_t step) {
    if constexpr (Traits::kBlocks) {
      if (step % 32 == 0) {
        lines_ = later_;
        later_ = read(step + 32);
      }
      return make_float2(__shfl_sync(0xFFFFFFFFU, lines_.x, step % 32),
                         __shfl_sync(0xFFFFFFFFU, lines_.y, step % 32));
    }
    return make_float2(1.0F, 1.0F);
  }

 private:
  __device__ __forceinline__ float2 read(int32_t step) const {
    const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
    const int32_t line = min(begin_ + step + lane, num_lines_ - 1);
    return make_float2(__ldg(even_ + line), __ldg(odd_ + line));
  }

  const int32_t num_lines_;
  const int32_t begin_;
  const float* even_ = nullptr;  // for groups of the sums
  const float* odd_ = nullptr;
  float2 lines_{};
  float2 later_{};
};

/// The stages of a warpgroup, in turn.
template <typename Traits>
class ManyRowsFeed final {
 public:
  using Sums = float[Traits::kGroups][4];
  /// A line that is multiplied: its stage, and the scales of this lane's rows of x.
  struct Started final {
    int32_t stage;
    float upper;
    float lower;
  };

  __device__ __forceinline__ ManyRowsFeed(const ManyRowsArgs& args, const RingSmem& smem,
                                          const ManyRowsWork& work)
      : args_(args), smem_(smem), place_(work) {
    constexpr uint32_t kHalfBytes = kManyRowsBox * kCodeLine;
    const uint32_t rows =
        smem.stages + Traits::kColumns * kCodeLine + threadIdx.x / 128 * kHalfBytes;
    rows_ = ptx::swizzle128_descriptor(rows, 0, 1024);
    weights_ = ptx::swizzle128_descriptor(smem.stages, 0, 1024);
    own_row_ = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    Turns::open(group());
  }
  __device__ __forceinline__ void begin_tile(const RowSpan& rows) {
    scales_ = smem_.extra + (own_row_ + rows.first % 4) * sizeof(float);
  }
  /// Waits for the next line and lets the tensor cores begin with it.
  __device__ __forceinline__ Started start(Sums& product) {
    place_.wait(smem_);
    Turns::wait(group());
    const uint32_t offset = place_.stage * (kStageBytes / 16);
    ptx::wgmma_hold(product);
    ptx::wgmma_fence();
    issue_codes(product, ptx::move_descriptor(rows_, offset),
                ptx::move_descriptor(weights_, offset));
    Turns::pass(group());
    const uint32_t scales = scales_ + place_.stage * kManyRowsScaleBytes;
    const Started line{place_.stage, ptx::shared_load1(scales),
                       ptx::shared_load1(scales + 8 * sizeof(float))};
    place_.advance(args_.stages);
    return line;
  }
  /// Adds a line, of which there are kPending later ones, to the sums.
  template <int kPending>
  __device__ __forceinline__ void add(Sums& sums, Sums& product, const Started& line,
                                      float2 weight) {
    ptx::wgmma_wait<kPending>();
    ptx::wgmma_hold(product);
    release_line(smem_.empty + 8 * line.stage);
    const float even[2] = {__fmul_rn(line.upper, weight.x), __fmul_rn(line.lower, weight.x)};
    const float odd[2] = {__fmul_rn(line.upper, weight.y), __fmul_rn(line.lower, weight.y)};
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float factor = group % 2 == 0 ? even[i / 2] : odd[i / 2];
        sums[group][i] = fmaf(factor, product[group][i], sums[group][i]);
      }
    }
  }
  /// Leaves out a line.
  __device__ __forceinline__ void skip() {
    place_.wait(smem_);
    Turns::wait(group());
    Turns::pass(group());
    release_line(smem_.empty + 8 * place_.stage);
    place_.advance(args_.stages);
  }

 private:
  using Turns = ptx::Turns<!Traits::kIsPaired>;
  static constexpr uint32_t kStageBytes = (Traits::kColumns + kManyRowsTile) * kCodeLine;

  static __device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / 128; }

  const ManyRowsArgs& args_;
  const RingSmem& smem_;
  uint64_t rows_;
  uint64_t weights_;
  uint32_t own_row_;
  uint32_t scales_ = 0;
  RingReader place_;
};

/// Sums of a tile on their way out: the other share, scales of rows of W and bias, or gate, one
/// rounding.
template <typename Traits>
class ManyRowsEpilogue final : public LinearExchange<Traits, Traits::kRun> {
 public:
  using Sums = float[Traits::kGroups][4];

  __device__ __forceinline__ ManyRowsEpilogue(const ManyRowsArgs& args, const RingSmem& smem,
                                              int32_t split)
      : LinearExchange<Traits, Traits::kRun>(args, smem.partials, smem.partials_full,
                                             smem.partials_empty, split),
        many_(args) {}

  /// `first_row` of the tile, or num_rows where this warp has nothing to write.
  __device__ __forceinline__ void finish(Sums& sums, int32_t weight_tile, int32_t first_row,
                                         bool is_last) {
    const bool has_gate = many_.act >= 0;
    const int32_t column = weight_tile * (has_gate ? Traits::kColumns / 2 : Traits::kColumns);
    float factor[Traits::kGroups][2];
    if constexpr (!Traits::kBlocks) {
      read_columns(factor, many_.weight_scale, column);
    }
    this->exchange(sums, is_last);
    float bias[Traits::kGroups][2] = {};
    if (many_.bias != nullptr) {
      read_columns(bias, static_cast<const float*>(many_.bias), column);
    }
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const float scale = Traits::kBlocks ? 1.0F : factor[group][i % 2];
        sums[group][i] = fmaf(sums[group][i], scale, bias[group][i % 2]);
      }
    }
    const int32_t row = first_row + warp_ * 16 + lane_ / 4;
    switch (many_.act) {
      case static_cast<int32_t>(Activation::kSilu):
        return write_gated<Activation::kSilu>(sums, row, column);
      case static_cast<int32_t>(Activation::kGeluTanh):
        return write_gated<Activation::kGeluTanh>(sums, row, column);
      case static_cast<int32_t>(Activation::kGeluErf):
        return write_gated<Activation::kGeluErf>(sums, row, column);
      default:
        return write_plain(sums, row, column);
    }
  }

 private:
  using LinearExchange<Traits, Traits::kRun>::warp_;
  using LinearExchange<Traits, Traits::kRun>::lane_;

  /// What W has for this lane's two columns of each group; past its rows anything.
  __device__ __forceinline__ void read_columns(float (&to)[Traits::kGroups][2], const float* values,
                                               int32_t column) const {
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      int32_t row = column + group * 8;
      if (many_.act >= 0) {
        row = column + group / 2 * 8 + group % 2 * many_.num_columns;
      }
      row = min(row + lane_ % 4 * 2, many_.weight_rows - 2);
      to[group][0] = __ldg(values + row);
      to[group][1] = __ldg(values + row + 1);
    }
  }
  __device__ __forceinline__ void write_plain(const Sums& sums, int32_t row, int32_t column) const {
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; group += 2) {
      if (this->is_mine(group)) {
#pragma unroll
        for (int32_t i = 0; i < 4; i += 2) {
          write(pack(sums[group][i], sums[group][i + 1]),
                pack(sums[group + 1][i], sums[group + 1][i + 1]), row + i * 4, column + group * 8);
        }
      }
    }
  }
  template <Activation kAct>
  __device__ __forceinline__ void write_gated(const Sums& sums, int32_t row, int32_t column) const {
    const auto gated = [&](int32_t group, int32_t i) {
      return pack(activate<kAct>(sums[group][i]) * sums[group + 1][i],
                  activate<kAct>(sums[group][i + 1]) * sums[group + 1][i + 1]);
    };
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; group += 4) {
      if (this->is_mine(group)) {
#pragma unroll
        for (int32_t i = 0; i < 4; i += 2) {
          write(gated(group, i), gated(group + 2, i), row + i * 4, column + group * 4);
        }
      }
    }
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    typename Traits::T* type = nullptr;
    return pack_pair(low, high, type);
  }
  /// 16 columns of a row from `column` on, of which a lane has two and two: four of one half go
  /// out.
  __device__ __forceinline__ void write(uint32_t left, uint32_t right, int32_t row,
                                        int32_t column) const {
    const bool is_odd = lane_ % 2 != 0;
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, is_odd ? left : right, 1);
    column += (is_odd ? 8 : 0) + lane_ % 4 / 2 * 4;
    if (row >= many_.num_rows || column >= many_.num_columns) {
      return;
    }
    auto* target = static_cast<typename Traits::T*>(many_.out) + row * many_.out_stride + column;
    const uint2 values = is_odd ? make_uint2(other, right) : make_uint2(left, other);
    if (many_.is_wide) {
      *reinterpret_cast<uint2*>(target) = values;
    } else {
      reinterpret_cast<uint32_t*>(target)[0] = values.x;
      reinterpret_cast<uint32_t*>(target)[1] = values.y;
    }
  }

  const ManyRowsArgs& many_;
};

/// Adds the lines `begin` to `end` of a share to the sums, in their order; their number is even.
template <typename Traits>
__device__ __forceinline__ void add_lines(ManyRowsFeed<Traits>& feed, BlockScales<Traits>& scales,
                                          int32_t begin, int32_t end,
                                          float (&sums)[Traits::kGroups][4]) {
  for (int32_t step = begin; step < end; step += Traits::kIsPaired ? 2 : 1) {
    float first[Traits::kGroups][4];
    const auto line = feed.start(first);
    if constexpr (Traits::kIsPaired) {
      float second[Traits::kGroups][4];
      const auto next = feed.start(second);
      const float2 weight = scales.of_line(step);
      const float2 next_weight = scales.of_line(step + 1);
      feed.template add<1>(sums, first, line, weight);
      feed.template add<0>(sums, second, next, next_weight);
    } else {
      feed.template add<0>(sums, first, line, scales.of_line(step));
    }
  }
}

/// The sums of both shares, one after the other. Those of the first one wait at `held`.
template <typename Traits>
__device__ __forceinline__ void add_shares(ManyRowsFeed<Traits>& feed, BlockScales<Traits>& scales,
                                           int32_t second, int32_t end, uint32_t held,
                                           float (&sums)[Traits::kGroups][4]) {
  constexpr uint32_t kGroupBytes = 2 * 128 * 16;
  add_lines(feed, scales, 0, second, sums);
#pragma unroll
  for (int32_t group = 0; group < Traits::kGroups; ++group) {
    ptx::shared_store4(held + group * kGroupBytes, sums[group]);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      sums[group][i] = 0.0F;
    }
  }
  add_lines(feed, scales, second, end, sums);
#pragma unroll
  for (int32_t group = 0; group < Traits::kGroups; ++group) {
    add_shared(sums[group], held + group * kGroupBytes);
  }
}

template <typename Traits>
__device__ __forceinline__ void consume_many(const ManyRowsArgs& args, const RingSmem& smem) {
  const ManyRowsWork work(args);
  const auto half = static_cast<int32_t>(threadIdx.x) / 128 * kManyRowsBox;
  const uint32_t held = smem.extra + args.scale_bytes + threadIdx.x * 16;
  ManyRowsEpilogue<Traits> epilogue(args, smem, work.split);
  ManyRowsFeed<Traits> feed(args, smem, work);
  for (int32_t tile = work.tile; tile < work.tiles; tile += work.stride) {
    const int32_t weight_tile = tile / args.row_tiles;
    const RowSpan rows = ManyRowsWork::rows_of(args, tile - weight_tile * args.row_tiles);
    const bool has_rows = half < rows.count;
    float sums[Traits::kGroups][4] = {};
    feed.begin_tile(rows);
    if (has_rows) {
      BlockScales<Traits> scales(args, weight_tile, work.begin);
      if (Traits::kIsPaired && args.held_bytes > 0) {
        add_shares(feed, scales, args.second_share, work.count, held, sums);
      } else {
        add_lines(feed, scales, 0, work.count, sums);
      }
    } else {
      for (int32_t step = 0; step < work.count; ++step) {
        feed.skip();
      }
    }
    epilogue.finish(sums, weight_tile, has_rows ? rows.first : args.num_rows,
                    tile + work.stride >= work.tiles);
  }
}

/// The copying warp has a warpgroup of its own, which leaves its registers to the others.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    many_rows_kernel(const __grid_constant__ CUtensorMap weight_map,
                     const __grid_constant__ CUtensorMap row_map,
                     const __grid_constant__ ManyRowsArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const RingSmem smem(raw, args, args.scale_bytes + args.held_bytes);
  using Copies = ManyRowsCopies<Traits>;
  const bool is_producer = threadIdx.x / 32 == Traits::kConsumers / 32;
  begin_ring<Copies>(args, smem, &weight_map, &row_map, is_producer);
  RingProducer<Copies> producer(args, smem, &weight_map, &row_map);
  if (threadIdx.x >= Traits::kConsumers) {
    ptx::registers_decrease<40>();
    if (is_producer) {
      produce(producer);
    }
    if (args.splits > 1) {
      ptx::cluster_wait();
    }
  } else {
    ptx::registers_increase<232>();
    await_kernels(producer);
    if (args.splits > 1) {
      ptx::cluster_wait();  // the barriers of the other one are ready
    }
    consume_many<Traits>(args, smem);
  }
}

}  // namespace diffulex::cuda::sm90
