// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T with W of 4 bits. The pipeline is that of csrc/ops/linear/sm90/ring.cuh: a copying
// warp streams W ahead of the kernels in front, warpgroups multiply 64 rows of W each, two CTAs may
// share the depth. What differs:
//
//   weights  lie in global memory in the order of the fragments of the products: a lane reads the
//            nibbles of its rows, 64 columns at a time, with one load each, and makes the left
//            operand in registers while the products of the 64 columns in front run, of another
//            warpgroup if not of its own
//   scales   come with the nibbles of a stage
//   phases   beside a low tile the warpgroups that have no rows of their own take every second or
//            fourth stage: making fragments takes more than one warp on each scheduler. A stage
//            is one phase's in all rounds of a tile (NibblePlan)
//   tiles    of W times tiles of up to 64 rows of x, for any number of rows
//
//   copying warp --full--> warpgroups of a phase --empty--> copying warp      (a stage)
//   phase p --named barrier--> phase 0, p ascending --> the other share       (a tile)
//
// The order of the sums does not depend on the number of rows.

#include <cstdint>

#include <cuda.h>

#include "ops/linear/sm90/ring.cuh"
#include "ops/quant/sm90/nibble_epilogue.cuh"
#include "ops/quant/sm90/nibble_fragment.cuh"
#include "ops/quant/sm90/nibble_traits.cuh"
#include "ops/shared/cuda/wgmma.cuh"

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

/// `steps` stages on.
__device__ __forceinline__ void skip_stages(RingCursor& cursor, int32_t steps, int32_t stages) {
  cursor.stage += steps;
  while (cursor.stage >= stages) {
    cursor.stage -= stages;
    cursor.parity ^= 1;
  }
}

/// Adds the sums of all phases of a tile to those of phase 0, in ascending order. All consumers.
template <typename Traits>
__device__ __forceinline__ void add_phases(const NibbleLinearArgs& args, uint32_t shares,
                                           int32_t phase, int32_t stripe,
                                           float (&sums)[Traits::kGroups][4]) {
  constexpr uint32_t kBarrier = 1;
  const auto threads = static_cast<uint32_t>(args.blocks * args.phases * 128);
  const uint32_t mine =
      shares + stripe * Traits::kGroups * 512 + static_cast<uint32_t>(threadIdx.x) % 32 * 16;
  for (int32_t other = 1; other < args.phases; ++other) {
    if (phase == other) {
#pragma unroll
      for (int32_t group = 0; group < Traits::kGroups; ++group) {
        ptx::store_shared16(
            mine + group * 512,
            make_uint4(__float_as_uint(sums[group][0]), __float_as_uint(sums[group][1]),
                       __float_as_uint(sums[group][2]), __float_as_uint(sums[group][3])));
      }
    }
    ptx::named_barrier_sync(kBarrier, threads);
    if (phase == 0) {
#pragma unroll
      for (int32_t group = 0; group < Traits::kGroups; ++group) {
        add_shared(sums[group], mine + group * 512);
      }
    }
    ptx::named_barrier_sync(kBarrier, threads);  // read: the next phase may write
  }
}

template <typename Traits>
__device__ __forceinline__ void consume_nibbles(const NibbleLinearArgs& args,
                                                const RingSmem& smem) {
  const NibbleWork work(args);
  const int32_t warp = ptx::uniform(static_cast<int32_t>(threadIdx.x) / 32);
  const int32_t phase = warp / (4 * args.blocks);
  const int32_t stripe = warp - phase * 4 * args.blocks;  // of 16 rows of W
  const bool is_signaller = threadIdx.x % 32 == 0;
  const int32_t weight_bytes = args.tile_rows * (kNibbleStageDepth / 2);
  const int32_t stage_scales = Traits::kScaleRows * args.tile_rows * Traits::kScaleBytes;
  const uint32_t scales = smem.extra + args.share_bytes;
  NibbleLane<Traits> lane(args, stripe);
  NibbleEpilogue<Traits> epilogue(args, smem.partials, smem.partials_full, smem.partials_empty,
                                  work.split);
  RingCursor first;  // of a tile
  uint32_t fragments[Traits::kIsOverlapped ? Traits::kLines : 1][4][4] = {};
  for (int32_t tile = work.tile; tile < work.tiles; tile += work.stride) {
    RingCursor cursor = first;
    skip_stages(cursor, phase, args.stages);
    float sums[Traits::kGroups][4] = {};
    for (int32_t step = phase; step < work.count; step += args.phases) {
      if (tile == work.tile && step < work.early) {
        ptx::mbarrier_wait(smem.landed + 8 * cursor.stage, 0);
      }
      ptx::mbarrier_wait(smem.full + 8 * cursor.stage, cursor.parity);
      const uint32_t weights = smem.stages + cursor.stage * args.stage_bytes;
      lane.begin_stage(scales + cursor.stage * stage_scales);
      ptx::wgmma_hold(sums);
#pragma unroll
      for (int32_t line = 0; line < Traits::kLines; ++line) {
        const int32_t buffer = Traits::kIsOverlapped ? line : 0;
        if (!Traits::kIsOverlapped && line > 0) {
          ptx::wgmma_wait<0>();
          ptx::wgmma_hold(sums);
        }
        lane.fragments_of(weights, line, fragments[buffer]);
        const uint64_t rows = ptx::swizzle128_descriptor(
            weights + weight_bytes + line * Traits::kRows * Traits::kLineBytes, 0, 1024);
        ptx::wgmma_fence();
#pragma unroll
        for (int32_t k = 0; k < 4; ++k) {
          // A step of 16 elements is 32 bytes; descriptors count 16.
          ptx::wgmma_rs<typename Traits::T>(sums, fragments[buffer][k],
                                            ptx::move_descriptor(rows, 2 * k), true);
        }
        ptx::wgmma_commit();
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(sums);
      __syncwarp();  // every lane has read its nibbles and scales
      if (is_signaller) {
        ptx::mbarrier_arrive(smem.empty + 8 * cursor.stage);
      }
      skip_stages(cursor, args.phases, args.stages);
    }
    skip_stages(first, work.count, args.stages);
    add_phases<Traits>(args, smem.extra, phase, stripe, sums);
    if (phase == 0 && stripe < args.warps) {
      epilogue.finish(sums, tile, tile + work.stride >= work.tiles);
    }
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    nibble_linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                         const __grid_constant__ CUtensorMap row_map,
                         const __grid_constant__ NibbleLinearArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const RingSmem smem(raw, args, args.share_bytes + args.scale_bytes);
  run_ring<NibbleCopies<Traits>>(args, smem, &weight_map, &row_map,
                                 [&] { consume_nibbles<Traits>(args, smem); });
}

}  // namespace diffulex::cuda::sm90
