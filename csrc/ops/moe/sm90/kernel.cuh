// SPDX-License-Identifier: Apache-2.0
#pragma once

// The persistent kernel of one expert product: warp 0 streams weights, warps 1 to 3 bring the
// positions' rows (by box, or 16 bytes a thread where they are gathered), two warpgroups multiply.
// Work items are (tile of the list, weight rows), weight rows fastest, dealt in turn to CTAs or to
// clusters of two; the pipeline runs on from item to item. Each sum runs over ascending columns in
// one order, whatever the tile holds.
//
// Who waits for which barrier, and on which it arrives afterwards, per stage of the ring (64
// columns of both operands):
//
//   warp 0        weights   empty .... expects the bytes of the stage, copies W ......... full
//   warp 1        rows      empty .... copies boxes of rows, which count as bytes ....... full
//   or warps 1-3  gathered  empty .... 16 bytes a thread; each of 96 threads arrives .... full
//   warps 4-11    products  full ..... multiplies; once the next stage's are issued ..... empty
//
// Products of codes (scaled_item.cuh) have 128 columns in a stage and wait for their own: warps 1-3
// bring the scales of the rows beside them, and a stage ends when each of the warps 4-11 has added
// its product, times the scales, to float32 sums. Products with nibbles (csrc/ops/quant/sm90/
// expert_item.cuh) have 128 columns too, warps 4-19 multiply, each of which ends a stage.
//
// With clusters of two, a consumer arrives on `empty` of both CTAs, since each brings half of the
// weights for both. Gathering threads agree on the sources of a tile through the named barrier
// 1 + kConsumers. The gate-up product waits for the kernel before it at once, the down product only
// before it reads rows: its weights already stream.

#include <cstdint>
#include <type_traits>

#include <cuda.h>

#include "ops/moe/gemm.h"
#include "ops/moe/sm90/epilogue.cuh"
#include "ops/moe/sm90/pipeline.cuh"
#include "ops/moe/sm90/scaled_item.cuh"
#include "ops/moe/sm90/sort_slots.cuh"
#include "ops/moe/sm90/traits.cuh"
#include "ops/moe/sm90/warp_epilogue.cuh"
#include "ops/moe/tiles.cuh"
#include "ops/quant/sm90/expert_item.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/tma.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// The weight rows of a stage, the 128 of one consumer at a time, where warps own rows that lie
/// together; a CTA of a pair brings one half for both.
template <typename Traits>
__device__ __forceinline__ void load_warp_rows(const CUtensorMap& map, uint32_t target,
                                               uint32_t full, uint64_t policy, int depth,
                                               int column, int expert) {
  const auto load = [&](int half) {
    const uint32_t rows = target + half * (Traits::kWeightBytes / 2);
#pragma unroll
    for (int block = 0; block < (Traits::kGateUp ? Traits::kBlocks : 1); ++block) {
      const uint32_t begin = rows + block * 64 * Traits::kRowBytes;
      // Gate-up: columns, rows of 16 (a block has 8), gate or up, groups of 16 rows, expert;
      // otherwise: columns, 16 rows, groups of 32 rows, block, expert.
      const int x1 = Traits::kGateUp ? block * 8 : 0;
      const int x2 = Traits::kGateUp ? 0 : column / 32 + half * 4;
      const int x3 = Traits::kGateUp ? column / 16 + half * 4 : 0;
      if constexpr (Traits::kCtas > 1) {
        ptx::tma_load_multicast(begin, &map, full, 3, policy, depth, x1, x2, x3, expert);
      } else {
        ptx::tma_load_hinted(begin, &map, full, policy, depth, x1, x2, x3, expert);
      }
    }
  };
  if constexpr (Traits::kCtas > 1) {
    load(static_cast<int>(ptx::cluster_rank()));
  } else {
    load(0);
    load(1);
  }
}

/// The whole warp, one lane of which issues: the compiler then needs no loop over lanes.
template <typename Traits>
__device__ __forceinline__ void produce_weights(const MoeList<Traits::kSorts>& list,
                                                const MoeMaps& maps, const MoeSmem<Traits>& smem) {
  const ExpertGemm& gemm = list.gemm;
  const uint64_t policy = gemm.is_streamed ? ptx::policy_evict_first() : ptx::policy_evict_normal();
  const int steps = depth_steps<Traits>(gemm);
  StageCursor<Traits> cursor;
  for (MoeWalk<Traits> walk(list); walk.has_item(); walk.advance()) {
    const MoeTile tile = walk.tile();
    const int column = walk.column();
    uint32_t bytes = row_bytes<Traits>(gemm, tile.count);
    if constexpr (kHasNibbles<Traits>) {
      bytes += nibble_bytes<Traits>(gemm, column);
    } else {
      bytes += Traits::kWeightBytes;
    }
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      const uint32_t full = smem.full + cursor.stage * 8;
      ptx::mbarrier_wait(smem.empty + cursor.stage * 8, cursor.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(full, bytes);
        const uint32_t target = smem.weights(cursor.stage);
        if constexpr (kHasNibbles<Traits>) {
          load_nibbles<Traits>(gemm, maps.weight, smem, cursor.stage, policy, step, column,
                               tile.expert);
        } else if constexpr (Traits::kWarpsWrite) {
          load_warp_rows<Traits>(maps.weight, target, full, policy, step * Traits::kDepth, column,
                                 tile.expert);
        } else if constexpr (Traits::kGateUp) {
          // Columns, 8 rows, gate or up, groups of 8 rows, expert.
          ptx::tma_load_hinted(target, &maps.weight, full, policy, step * Traits::kDepth, 0, 0,
                               column / 8, tile.expert);
        } else {
          ptx::tma_load_hinted(target, &maps.weight, full, policy, step * Traits::kDepth, column,
                               tile.expert);
        }
      }
      __syncwarp();
    }
  }
}

/// Rows that lie together: boxes of kBoxRows. The whole warp, one lane of which issues.
template <typename Traits>
__device__ __forceinline__ void produce_dense_rows(const MoeList<Traits::kSorts>& list,
                                                   const MoeMaps& maps,
                                                   const MoeSmem<Traits>& smem) {
  const ExpertGemm& gemm = list.gemm;
  const int steps = depth_steps<Traits>(gemm);
  StageCursor<Traits> cursor;
  for (MoeWalk<Traits> walk(list); walk.has_item(); walk.advance()) {
    const MoeTile tile = walk.tile();
    const auto inner = static_cast<int32_t>(tile.start % gemm.row_map.inner);
    const auto outer = static_cast<int32_t>(tile.start / gemm.row_map.inner);
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(smem.empty + cursor.stage * 8, cursor.parity ^ 1);
      if (ptx::elect_one()) {
        for (int row = 0; row < tile.count; row += Traits::kBoxRows) {
#pragma unroll
          for (int line = 0; line < Traits::kLines; ++line) {
            ptx::tma_load(
                smem.rows(cursor.stage) + (line * Traits::kColumns + row) * Traits::kRowBytes,
                &maps.rows, smem.full + cursor.stage * 8,
                step * Traits::kDepth + line * kLineElements, inner + row, outer);
          }
        }
      }
      __syncwarp();
    }
  }
}

/// Rows that are gathered, 16 bytes a thread into the swizzled layout; a thread arrives once for
/// each stage when its pieces have landed.
template <typename Traits>
__device__ __forceinline__ void produce_gathered_rows(const MoeList<Traits::kSorts>& list,
                                                      const MoeSmem<Traits>& smem, int thread) {
  constexpr int kRowsPerPass = kRowThreads / kChunks;
  constexpr int kBarrier = 1 + Traits::kConsumers;
  constexpr int kUnrolled = 4 / Traits::kLines;
  const ExpertGemm& gemm = list.gemm;
  const int chunk = thread % kChunks;
  const uint8_t* base = static_cast<const uint8_t*>(gemm.rows) + chunk * 16;
  const auto row_bytes = static_cast<uint64_t>(gemm.row_map.inner_stride * 2);
  uint32_t* sources = smem.sources();
  const MoeWork<Traits> work(gemm, list.num_tiles());
  const int steps = depth_steps<Traits>(gemm);
  StageCursor<Traits> cursor;
  for (int item = work.first; item < work.items; item += work.stride) {
    const MoeTile tile = own_tile<Traits>(list, work.tile(item));
    ptx::named_barrier_sync(kBarrier, kRowThreads);  // the last sources were used
    for (int row = thread; row < tile.count; row += kRowThreads) {
      sources[row] = static_cast<uint32_t>(list.target(gemm.gather, tile.start + row)) / gemm.top_k;
    }
    ptx::named_barrier_sync(kBarrier, kRowThreads);
    for (int step = 0; step < steps; ++step, cursor.advance()) {
      ptx::mbarrier_wait(smem.empty + cursor.stage * 8, cursor.parity ^ 1);
      const uint8_t* column = base + step * Traits::kLines * Traits::kRowBytes;
      const uint32_t target = smem.rows(cursor.stage);
#pragma unroll kUnrolled
      for (int row = thread / kChunks; row < tile.count; row += kRowsPerPass) {
#pragma unroll
        for (int line = 0; line < Traits::kLines; ++line) {
          const int place = line * Traits::kColumns + row;
          ptx::cp_async16(target + place * Traits::kRowBytes + ((chunk ^ (row & 7)) * 16),
                          column + line * Traits::kRowBytes + sources[row] * row_bytes, true);
        }
      }
      ptx::cp_async_arrive(smem.full + cursor.stage * 8);
    }
  }
}

template <typename Traits, int kGroups>
__device__ __forceinline__ void hold(float (&sums)[Traits::kBlocks][kGroups][4]) {
#pragma unroll
  for (int block = 0; block < Traits::kBlocks; ++block) {
    ptx::wgmma_hold(sums[block]);
  }
}

/// Tells CTA `rank` of the cluster that this consumer has read a stage.
template <typename Traits>
__device__ __forceinline__ void release_stage(const MoeSmem<Traits>& smem, int stage, int rank) {
  const uint32_t empty = smem.empty + stage * 8;
  if constexpr (Traits::kCtas > 1) {
    ptx::mbarrier_arrive_remote(ptx::cluster_address(empty, rank));
  } else {
    ptx::mbarrier_arrive(empty);
  }
}

/// Sums of one item: the blocks of weight rows of this warpgroup times 8 * kGroups positions.
template <typename Traits, int kGroups>
__device__ __forceinline__ void multiply_item(const MoeSmem<Traits>& smem, int steps, int group,
                                              StageCursor<Traits>& cursor,
                                              float (&sums)[Traits::kBlocks][kGroups][4]) {
  constexpr int kBlockBytes = 64 * Traits::kRowBytes;
  using T = typename Traits::Element;
  // One lane for each CTA that waits for the stages.
  const int warp = static_cast<int>(threadIdx.x % 128) / 32;
  const bool is_signaller = threadIdx.x % 32 == 0 && warp < Traits::kCtas;
  int pending = 0;  // stage whose products may still run
  for (int step = 0; step < steps; ++step, cursor.advance()) {
    ptx::mbarrier_wait(smem.full + cursor.stage * 8, cursor.parity);
    if constexpr (Traits::kGathers) {
      ptx::fence_proxy_async();  // gathered rows were written by ordinary copies
    }
    const uint64_t weights = ptx::swizzle128_descriptor(
        smem.weights(cursor.stage) + group * Traits::kBlocks * kBlockBytes, 0,
        8 * Traits::kRowBytes);
    const uint64_t rows =
        ptx::swizzle128_descriptor(smem.rows(cursor.stage), 0, 8 * Traits::kRowBytes);
    hold<Traits>(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Traits::kDepth / 16; ++k) {
#pragma unroll
      for (int block = 0; block < Traits::kBlocks; ++block) {
        // A step of 16 elements is 32 bytes; descriptors count 16.
        ptx::wgmma_ss<T>(sums[block],
                         ptx::move_descriptor(weights, block * (kBlockBytes / 16) + k * 2),
                         ptx::move_descriptor(rows, k * 2), true);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (is_signaller && step > 0) {
      release_stage<Traits>(smem, pending, warp);
    }
    pending = cursor.stage;
  }
  ptx::wgmma_wait<0>();
  hold<Traits>(sums);
  if (is_signaller) {
    release_stage<Traits>(smem, pending, warp);
  }
}

/// What a consumer does with its sums.
template <typename Traits>
using ConsumerEpilogue =
    std::conditional_t<Traits::kWarpsWrite, WarpEpilogue<Traits>,
                       std::conditional_t<kHasCodes<Traits> && Traits::kGateUp,
                                          FloatEpilogue<Traits>, MoeEpilogue<Traits>>>;

/// A consumer warpgroup: looks up its tiles kTilesAhead at a time, so that none waits for its own.
template <typename Traits>
class MoeConsumer final {
 public:
  __device__ __forceinline__ MoeConsumer(const MoeList<Traits::kSorts>& list,
                                         const MoeSmem<Traits>& smem, int group)
      : list_(list),
        smem_(smem),
        work_(list.gemm, list.num_tiles()),
        epilogue_(list, smem.staged, smem.tables, group),
        tiles_(smem.tiles(group)),
        group_(group) {}

  __device__ __forceinline__ void run() {
    int index = 0;
    for (int item = work_.first; item < work_.items; item += work_.stride, ++index) {
      const int place = index % Traits::kTilesAhead;
      if (place == 0) {
        look_up(item);
        if constexpr (!Traits::kWarpsWrite) {
          epilogue_.fetch(tiles_[0]);
        }
      }
      const MoeTile tile = tiles_[place];
      if constexpr (!Traits::kWarpsWrite) {
        epilogue_.start(tile);
        const bool has_next = place + 1 < Traits::kTilesAhead && item + work_.stride < work_.items;
        if (has_next) {
          epilogue_.fetch(tiles_[place + 1]);
        }
      } else {
        epilogue_.fetch(tile);
      }
      multiply(tile, work_.column(item));
    }
  }

 private:
  /// Groups that are written; of nibbles four where products are narrower.
  template <int kGroups>
  static constexpr int kWritten = kHasNibbles<Traits> && kGroups < 4 ? 4 : kGroups;

  /// One tile a thread, from `item` on.
  __device__ __forceinline__ void look_up(int item) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int64_t own = item + int64_t{thread} * work_.stride;
    epilogue_.sync();
    if (thread < Traits::kTilesAhead && own < work_.items) {
      tiles_[thread] = own_tile<Traits>(list_, work_.tile(static_cast<int>(own)));
    }
    epilogue_.sync();
  }

  /// Computes `tile` times the weight rows of the result columns from `first` on, in the narrowest
  /// of the widths that holds the tile.
  template <int kGroups = Traits::kColumns / 8>
  __device__ __forceinline__ void multiply(const MoeTile& tile, int first) {
    constexpr int kNarrower = Traits::narrower_groups(kGroups);
    if constexpr (kNarrower > 0) {
      if (tile.count <= kNarrower * 8) {
        multiply<kNarrower>(tile, first);
        return;
      }
    }
    multiply_groups<kGroups>(tile, first);
  }

  template <int kGroups>
  __device__ __forceinline__ void multiply_groups(const MoeTile& tile, int first) {
    // Zeros, since an undefined value would keep its registers allocated throughout the loop.
    float sums[Traits::kBlocks][kWritten<kGroups>][4] = {};
    if constexpr (kHasNibbles<Traits>) {
      multiply_nibble_item<Traits>(smem_, depth_steps<Traits>(list_.gemm), group_, cursor_,
                                   reinterpret_cast<float (&)[kGroups][4]>(sums[0]));
    } else if constexpr (kHasCodes<Traits>) {
      multiply_scaled_item<Traits>(smem_, {list_.gemm, tile.expert, first, group_}, cursor_, sums);
    } else {
      multiply_item<Traits>(smem_, list_.gemm.depth / Traits::kDepth, group_, cursor_, sums);
    }
    epilogue_.finish(tile, first, sums);
  }

  const MoeList<Traits::kSorts>& list_;
  const MoeSmem<Traits>& smem_;
  MoeWork<Traits> work_;
  ConsumerEpilogue<Traits> epilogue_;
  StageCursor<Traits> cursor_;
  MoeTile* tiles_;
  int group_;
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    moe_kernel(const __grid_constant__ MoeMaps maps, const __grid_constant__ ExpertGemm gemm) {
  extern __shared__ uint8_t raw[];
  const MoeSmem<Traits> smem(raw);
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&maps.weight);
    ptx::tma_prefetch_map(&maps.rows);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(smem.full + stage * 8, full_arrivals<Traits>(gemm));
      ptx::mbarrier_init(smem.empty + stage * 8, kEmptyArrivals<Traits>);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Traits::kCtas > 1) {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  } else {
    __syncthreads();
  }
  const MoeList<Traits::kSorts> list{gemm, smem.sorted()};
  // The scratch of the sort lies where the stages will be.
  auto& scratch = *reinterpret_cast<SortScratch*>(raw + (smem.stages - ptx::smem_address(raw)));
  if (list.is_sorted_here()) {
    clear_masks<Traits::kThreads>(gemm.routes, scratch);
  }
  // The gate-up product starts from the ids, or the tile list, of the kernel before it. Those are
  // older than the kernel before the down product, whose weights therefore stream ahead of the
  // wait.
  if constexpr (Traits::kGateUp) {
    pdl_wait();
  }
  pdl_launch_dependents();
  if (list.is_sorted_here()) {
    sort_slots<Traits::kThreads>(gemm.routes, Traits::kColumns, scratch, *smem.sorted());
  }
  const int warp = static_cast<int>(threadIdx.x >> 5);
  if (warp < 4) {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_decrease<Traits::kProducerRegisters>();
    }
    if (warp == 0) {
      produce_weights<Traits>(list, maps, smem);
      pdl_wait();
    } else {
      pdl_wait();
      if constexpr (kHasCodes<Traits>) {
        produce_scaled_rows<Traits>(list, maps, smem, static_cast<int>(threadIdx.x) - 32);
      } else if (is_gathered<Traits>(gemm)) {
        if constexpr (Traits::kGathers) {
          produce_gathered_rows<Traits>(list, smem, static_cast<int>(threadIdx.x) - 32);
        }
      } else if (warp == 1) {
        produce_dense_rows<Traits>(list, maps, smem);
      }
    }
  } else {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_increase<Traits::kConsumerRegisters>();
    }
    MoeConsumer<Traits>(list, smem, warp / 4 - 1).run();
  }
  if constexpr (Traits::kCtas > 1) {
    // Neither CTA leaves while the other may still write or signal here.
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

}  // namespace diffulex::cuda::sm90
