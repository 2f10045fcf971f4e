// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T with W of 4 bits. The pipeline is that of csrc/ops/linear/sm90/ring.cuh: a copying
// warp streams W ahead of the kernels in front, warpgroups multiply 64 rows of W each, two CTAs may
// share the depth. What differs:
//
//   weights  lie in global memory in the order of the fragments of the products: a lane reads the
//            nibbles of its rows, a piece at a time (NibbleTraits), with one load each, and makes
//            the left operand in registers while the products of the piece before run
//   scales   come with the nibbles of a stage
//   phases   beside a low tile the warpgroups that have no rows of their own take every second or
//            fourth stage: making fragments takes more than one warp on each scheduler. A stage
//            is one phase's in all rounds of a tile (NibblePlan)
//   tiles    of W times tiles of up to 128 rows of x, for any number of rows
//
//   copying warp --full--> warpgroups of a phase --empty--> copying warp      (a stage)
//   phase p --named barrier--> phase 0, p ascending --> the other share       (a tile)
//
// The order of the sums does not depend on the number of rows of one tile of x; NibblePlan says
// where it may on that of tiles.

#include <cstdint>

#include <cuda.h>

#include "ops/linear/sm90/ring.cuh"
#include "ops/quant/sm90/line.cuh"
#include "ops/quant/sm90/nibble_epilogue.cuh"
#include "ops/quant/sm90/nibble_fragment.cuh"
#include "ops/quant/sm90/nibble_traits.cuh"
#include "ops/quant/sm90/nibble_turn.cuh"

namespace diffulex::cuda::sm90 {

/// What this CTA does.
struct NibbleWork final : SteppedWork {
  int32_t tiles;  // of W and x, of all CTAs

  __device__ __forceinline__ explicit NibbleWork(const NibbleLinearArgs& args)
      : SteppedWork(args), tiles(args.num_tiles * args.row_tiles) {}
};

/// The copies of a stage: nibbles and scales of W, lines of x.
template <typename Traits>
class NibbleCopies : public RingCopies<NibbleLinearArgs, NibbleWork> {
 public:
  __device__ __forceinline__ NibbleCopies(const NibbleLinearArgs& args, const RingSmem& smem,
                                          const CUtensorMap* weight_map, const CUtensorMap* row_map)
      : RingCopies(args, smem, weight_map, row_map),
        policy_(args.row_tiles > 1 ? ptx::policy_evict_normal() : ptx::policy_evict_first()) {}

  struct Place final {
    int32_t weight_tile;
    int32_t first_row;  // of x
    int32_t run;        // rows of W whose scales lie together: all of the tile, or its gate or up
  };
  /// The warps of one phase.
  static __device__ __forceinline__ uint32_t num_readers(const NibbleLinearArgs& args) {
    return static_cast<uint32_t>(4 * args.blocks);
  }
  __device__ __forceinline__ int32_t num_tiles() const { return work_.tiles; }
  __device__ __forceinline__ Place place_of(int32_t tile) const {
    const int32_t weight_tile = tile / args_.row_tiles;
    const int32_t left = args_.num_columns - weight_tile * run_height();
    return {weight_tile, (tile - weight_tile * args_.row_tiles) * Traits::kRows,
            min(run_height(), left)};
  }
  __device__ __forceinline__ int32_t weight_bytes(const Place& place) const {
    return nibble_bytes() +
           Traits::kScaleRows * Traits::kScaleBytes * place.run * (has_gate() ? 2 : 1);
  }
  __device__ __forceinline__ int32_t row_bytes(const Place& /*place*/) const {
    return args_.box_rows * Traits::kLines * Traits::kLineBytes;
  }
  __device__ __forceinline__ int32_t stage_bytes(const Place& place) const {
    return weight_bytes(place) + row_bytes(place);
  }
  __device__ __forceinline__ void load_weights(int32_t stage, const Place& place, int32_t step,
                                               uint32_t barrier) {
    const int32_t depth = work_.begin + step;
    // 128 bytes of a run of eight rows, four of those, two runs, pairs of runs.
    ptx::tma_load_hinted(smem_.stages + stage * args_.stage_bytes, weight_map_, barrier, policy_, 0,
                         depth * 4, 0, place.weight_tile * (args_.tile_rows / 16));
    const int32_t scales = Traits::kScaleRows * args_.tile_rows;
    const uint32_t target = smem_.extra + args_.share_bytes + stage * scales * Traits::kScaleBytes;
    if constexpr (Traits::kIsExact) {
      load_scales<4>(target, args_.scales, args_.scale_stride, place, depth, barrier);
      load_scales<2>(target + scales * 4, args_.zeros, args_.zero_stride, place, depth, barrier);
    } else {
      load_scales<2>(target, args_.scales, args_.scale_stride, place, depth, barrier);
    }
  }
  __device__ __forceinline__ void load_rows(int32_t stage, const Place& place, int32_t step,
                                            uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes + nibble_bytes();
    const int32_t column = (work_.begin + step) * kNibbleStageDepth;
#pragma unroll
    for (int32_t line = 0; line < Traits::kLines; ++line) {
      ptx::tma_load(target, row_map_, barrier, column + line * (Traits::kLineBytes / 2),
                    place.first_row);
      target += Traits::kRows * Traits::kLineBytes;
    }
  }

 private:
  /// What a stage has of scales, or zero points, of kBytes each.
  template <int32_t kBytes>
  __device__ __forceinline__ void load_scales(uint32_t target, const uint8_t* source,
                                              int64_t stride, const Place& place, int32_t depth,
                                              uint32_t barrier) {
    const auto bytes = static_cast<uint32_t>(place.run * kBytes);
    source += depth * Traits::kScaleRows * stride + place.weight_tile * run_height() * kBytes;
    for (int32_t row = 0; row < Traits::kScaleRows; ++row) {
      ptx::bulk_load(target, source, bytes, barrier);
      if (has_gate()) {
        ptx::bulk_load(target + args_.tile_rows / 2 * kBytes, source + args_.num_columns * kBytes,
                       bytes, barrier);
      }
      target += args_.tile_rows * kBytes;
      source += stride;
    }
  }
  __device__ __forceinline__ int32_t run_height() const {
    return has_gate() ? args_.tile_rows / 2 : args_.tile_rows;
  }
  /// Of a stage.
  __device__ __forceinline__ int32_t nibble_bytes() const {
    return args_.tile_rows * (kNibbleStageDepth / 2);
  }
  __device__ __forceinline__ bool has_gate() const { return args_.act >= 0; }

  const uint64_t policy_;
};

/// The stages of a consumer's phase, in turn.
template <typename Traits>
class NibbleFeed final {
 public:
  __device__ __forceinline__ NibbleFeed(const NibbleLinearArgs& args, const RingSmem& smem,
                                        const NibbleWork& work, int32_t phase, int32_t stripe)
      : args_(args), smem_(smem), work_(work), lane_(args, stripe), early_(work.early - phase) {
    rows_ =
        ptx::swizzle128_descriptor(smem.stages + args.tile_rows * (kNibbleStageDepth / 2), 0, 1024);
    place_.stage = phase;
  }

  /// Waits for the next stage, and reads its scales.
  __device__ __forceinline__ int32_t begin() {
    const int32_t stage = place_.stage;
    const int32_t known = ptx::uniform(stage);  // for descriptors, long after this
    if (early_ > 0) {
      ptx::mbarrier_wait(smem_.landed + 8 * stage, 0);
      early_ -= args_.phases;
    }
    ptx::mbarrier_wait(smem_.full + 8 * stage, place_.parity);
    lane_.begin_stage(smem_.stages + stage * args_.stage_bytes,
                      smem_.extra + args_.share_bytes +
                          stage * Traits::kScaleRows * args_.tile_rows * Traits::kScaleBytes);
    move(args_.phases);
    return known;
  }
  /// Ends a tile of which this phase has taken `steps` stages.
  __device__ __forceinline__ void end_tile(int32_t steps) {
    move(work_.count - steps * args_.phases);
  }
  /// Starts the products of a piece of a stage.
  __device__ __forceinline__ void start(int32_t stage, int32_t piece,
                                        uint32_t (&fragments)[Traits::kPieceSteps][4],
                                        float (&sums)[Traits::kGroups][4]) {
    lane_.fragments_of(piece, fragments);
    const uint32_t offset = static_cast<uint32_t>(stage) * args_.stage_bytes;
    multiply_piece<Traits, Traits::kRows>(rows_, offset, piece, fragments, sums);
  }
  /// This warp has read a stage.
  __device__ __forceinline__ void release(int32_t stage) const {
    release_line(smem_.empty + 8 * stage);
  }

 private:
  /// At most as many stages on as the ring has, or back.
  __device__ __forceinline__ void move(int32_t steps) {
    place_.stage += steps;
    if (place_.stage >= args_.stages || place_.stage < 0) {
      place_.stage += place_.stage < 0 ? args_.stages : -args_.stages;
      place_.parity ^= 1;
    }
  }

  const NibbleLinearArgs& args_;
  const RingSmem& smem_;
  const NibbleWork& work_;
  NibbleLane<Traits> lane_;
  uint64_t rows_;  // of x, of the first stage
  RingCursor place_;
  int32_t early_;  // stages from here on whose W has a barrier of its own
};

/// Adds the sums of all phases of a tile to those of phase 0, in ascending order. All consumers.
template <typename Traits>
__device__ __forceinline__ void add_phases(const NibbleLinearArgs& args, uint32_t shares,
                                           int32_t phase, int32_t stripe,
                                           float (&sums)[Traits::kGroups][4]) {
  constexpr uint32_t kBarrier = 1;
  constexpr int32_t kRun = nibble_share_rows(Traits::kRows) / 8;
  const auto threads = static_cast<uint32_t>(args.blocks * args.phases * 128);
  const uint32_t mine = shares + stripe * kRun * 512 + static_cast<uint32_t>(threadIdx.x) % 32 * 16;
  for (int32_t other = 1; other < args.phases; ++other) {
#pragma unroll
    for (int32_t first = 0; first < Traits::kGroups; first += kRun) {
      if (phase == other) {
#pragma unroll
        for (int32_t group = 0; group < kRun; ++group) {
          const float (&sum)[4] = sums[first + group];
          ptx::store_shared16(mine + group * 512,
                              make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                         __float_as_uint(sum[2]), __float_as_uint(sum[3])));
        }
      }
      ptx::named_barrier_sync(kBarrier, threads);
      if (phase == 0) {
#pragma unroll
        for (int32_t group = 0; group < kRun; ++group) {
          add_shared(sums[first + group], mine + group * 512);
        }
      }
      ptx::named_barrier_sync(kBarrier, threads);  // read: the next one may write
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void consume_nibbles(const NibbleLinearArgs& args,
                                                const RingSmem& smem) {
  const NibbleWork work(args);
  const int32_t warp = ptx::uniform(static_cast<int32_t>(threadIdx.x) / 32);
  const int32_t phase = warp / (4 * args.blocks);
  // Of 16 rows of W. In each phase the warps that have none are those of other schedulers.
  const int32_t stripe =
      (warp - phase * 4 * args.blocks) / 4 * 4 + (warp + phase * (4 / args.phases)) % 4;
  NibbleFeed<Traits> feed(args, smem, work, phase, stripe);
  NibbleEpilogue<Traits> epilogue(args, smem.partials, smem.partials_full, smem.partials_empty,
                                  work.split);
  uint32_t fragments[2][Traits::kPieceSteps][4] = {};
  for (int32_t tile = work.tile; tile < work.tiles; tile += work.stride) {
    float sums[Traits::kGroups][4] = {};
    const int32_t steps = (work.count - phase + args.phases - 1) / args.phases;
    int32_t step = steps;
#pragma unroll 1
    for (; step >= Traits::kTurn; step -= Traits::kTurn) {
      add_stages<Traits::kTurn, Traits>(feed, fragments, sums);
    }
    if (step > 0) {
      add_stages<1, Traits>(feed, fragments, sums);
    }
    feed.end_tile(steps);
    add_phases<Traits>(args, smem.extra, phase, stripe, sums);
    if (phase == 0 && stripe < args.warps) {
      epilogue.finish(sums, tile, tile + work.stride >= work.tiles);
    }
  }
}

/// As run_ring, where the copying warp has the last warpgroup to itself, which leaves its registers
/// to the others.
template <typename Copies, typename Traits, typename Consume>
__device__ __forceinline__ void run_ring_in_groups(const NibbleLinearArgs& args,
                                                   const RingSmem& smem,
                                                   const CUtensorMap* weight_map,
                                                   const CUtensorMap* row_map, Consume&& consume) {
  const bool is_copying = threadIdx.x + 128 >= blockDim.x;
  const bool is_producer = is_copying && threadIdx.x % 128 < 32;
  begin_ring<Copies>(args, smem, weight_map, row_map, is_producer);
  RingProducer<Copies> producer(args, smem, weight_map, row_map);
  // The two do not meet again: the compiler must know which registers a warp has.
  if (is_copying) {
    ptx::registers_decrease<Traits::kCopyingRegisters>();
    if (is_producer) {
      produce(producer);
    }
    if (args.splits > 1) {
      ptx::cluster_wait();
    }
  } else {
    ptx::registers_increase<Traits::kConsumerRegisters>();
    await_kernels(producer);
    if (args.splits > 1) {
      ptx::cluster_wait();  // the barriers of the other one are ready
    }
    consume();
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    nibble_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap row_map,
                         const __grid_constant__ NibbleLinearArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const RingSmem smem(raw, args, args.share_bytes + args.scale_bytes);
  using Copies = NibbleCopies<Traits>;
  if constexpr (Traits::kHasCopyingGroup) {
    run_ring_in_groups<Copies, Traits>(args, smem, &weight_map, &row_map,
                                       [&] { consume_nibbles<Traits>(args, smem); });
  } else {
    run_ring<Copies>(args, smem, &weight_map, &row_map,
                     [&] { consume_nibbles<Traits>(args, smem); });
  }
}

}  // namespace diffulex::cuda::sm90
