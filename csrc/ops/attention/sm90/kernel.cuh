// SPDX-License-Identifier: Apache-2.0
#pragma once

// Block-diffusion paged attention on wgmma: a producer warpgroup feeds K and V through the copy
// engine to one or two consumer warpgroups of 64 packed rows (token * G + g) each. CTAs stride over
// the units (request, row tile, KV head), or the CTAs of some clusters share one unit's keys.
//
// Who waits for which barrier (Barriers in traits.cuh), and on which it arrives afterwards. Units
// pass through two slots, key and value tiles through kStages stages each:
//
//   warp 3  schedule  unit_empty ........................ writes a unit ........... unit_full
//   warp 0  queries   unit_full, query_empty ............ copies Q ................ query_full
//           keys      per tile: key_empty ............... copies K ................ key_full
//   warp 2  values    unit_full, per tile: value_empty .. copies V ................ value_full
//   warp 1  clean     unit_full, per tile: value_full ... zeroes unseen rows ...... value_clean,
//                                                                                   value_empty
//   others  scores    unit_full, query_full, key_full ... Q K^T, softmax .......... key_empty
//           products  value_full, then value_clean if the tile has unseen rows .... value_empty
//           end       after the last scores ....................................... query_empty
//
// Beside caches of codes the consumers and the cleaner are the same. Copiers of codes and of scale
// bytes and a converter take the place of the copiers, with a ring of kPieces pieces of codes
// between them, in the order K 0, K 1, V 0, K 2, V 1 ... of the cached tiles. In the same order,
// but apart, the converter fetches the tiles in flight before. Beside one consumer warpgroup there
// are two converters, the first of K, the second of V, each with a ring of half the pieces:
//
//   warp 0  queries   as above
//           codes     per piece of a cached tile: piece_empty  copies codes ........ piece_full
//   warp 2  scales    the same: unit_full, piece_empty ....... copies scale bytes .. piece_full
//   last 4  cached    per piece: piece_full .................. reads it ............ piece_empty
//   or 8              before the first of K, of V: key_empty, value_empty
//                     after the last ......................... has written values .. key_full,
//                                                                                    value_full
//           in flight per tile: key_empty, value_empty ....... copies K, V ......... as above
//
// Nobody waits in a circle: before K of a tile the converter waits for the scores of the tile two
// before, for which consumers need K up to that tile and V up to the one before it; before V of a
// tile it waits for the products of the tile two before, for which they need V up to that tile and
// K up to the tile after it, and the next K at most before they say so: all of it filled earlier.
// It reads pieces in the order in which they are issued, and a copier waits for a piece that the
// converter reads next, or for the end of a unit all of whose pieces it has issued. Each of two
// converters waits for a part of that, in the same order. The first unread piece of the order above
// has been issued or can be, for what lay in its place came earlier; and so did all that its
// converter waits for: K of tile i + 2, say, needs the scores of tile i, and they K of i and V of
// i - 1. No copier is a pass of a ring ahead of the other, since a piece is read only after both.
// Copiers and converters count pieces, and converters, cleaner and consumers tiles, from the same
// record, so that everyone meets every phase of a barrier; tiles in flight have no pieces. Every
// piece that is issued is read, so that no copy outlives its CTA. The last four or eight warps also
// arrive at the barrier of a cluster.
//
// The products of a tile run under the softmax of the next. Two groups of rows take turns on the
// tensor cores through the named barriers 1 and 2. Every reader releases a unit by unit_empty.

#include <cstdint>

#include "ops/attention/sm90/code_copier.cuh"
#include "ops/attention/sm90/converter.cuh"
#include "ops/attention/sm90/epilogue.cuh"
#include "ops/attention/sm90/mainloop.cuh"
#include "ops/attention/sm90/producer.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"

namespace diffulex::cuda::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(const Barriers<Traits>& barriers) {
  constexpr uint32_t kConsumerWarps = Traits::kConsumers * 4;
  // Beside the consumers a cleaner and two copiers read units, and converters if there are any.
  constexpr uint32_t kUnitReaders = kConsumerWarps + 3 + Traits::kConverters * 4;
  constexpr uint32_t kFillers = Traits::kIsCoded ? 4 : 1;  // warps that fill a stage together
  ptx::mbarrier_init(barriers.query_full(), 1);
  ptx::mbarrier_init(barriers.query_empty(), kConsumerWarps);
  for (uint32_t slot = 0; slot < 2; ++slot) {
    ptx::mbarrier_init(barriers.unit_full(slot), 32);
    ptx::mbarrier_init(barriers.unit_empty(slot), kUnitReaders * 32);
  }
  for (uint32_t stage = 0; stage < Traits::kStages; ++stage) {
    ptx::mbarrier_init(barriers.key_full(stage), kFillers);
    ptx::mbarrier_init(barriers.key_empty(stage), kConsumerWarps);
    ptx::mbarrier_init(barriers.value_full(stage), kFillers);
    ptx::mbarrier_init(barriers.value_empty(stage), kConsumerWarps + 1);  // and the cleaner
    ptx::mbarrier_init(barriers.value_clean(stage), 1);
  }
  if constexpr (Traits::kIsCoded) {
    for (uint32_t piece = 0; piece < Traits::kPieces; ++piece) {
      ptx::mbarrier_init(barriers.piece_full(piece), 1 + 32);  // codes, and scales of every lane
      ptx::mbarrier_init(barriers.piece_empty(piece), kFillers);
    }
  }
  ptx::mbarrier_init_fence();
}

/// True where this cluster adds up the unit: the only one with keys, or the last to arrive. Called
/// by the consumers after the partials of the cluster are written.
template <typename Traits>
__device__ __forceinline__ bool is_last_cluster(const AttentionArgs& args, const TileSetup& setup,
                                                uint8_t* smem) {
  constexpr uint32_t kBarrier = 3;  // Turns has 1 and 2
  const int32_t clusters = ceil_div_i32(setup.view.splits, args.cluster_size);
  if (clusters == 1) {
    return true;
  }
  auto* verdict = reinterpret_cast<volatile uint32_t*>(smem + Barriers<Traits>::verdict_offset());
  if (threadIdx.x == 128) {
    const int64_t unit = PartialSlot<Traits>::unit_index(args, setup.work);
    *verdict = arrive_last(args.arrivals + unit * args.cluster_size + ptx::cluster_rank(),
                           args.launch_tag, clusters)
                   ? 1
                   : 0;
  }
  __syncwarp();  // the barrier wants whole warps
  ptx::named_barrier_sync(kBarrier, Traits::kConsumerThreads);
  return *verdict != 0;
}

/// A consumer warpgroup. The CTAs of the clusters of a unit compute its splits; every CTA of the
/// last cluster to finish then adds up a share of the rows.
template <typename Traits>
__device__ __forceinline__ void consume_units(const AttentionArgs& args, uint8_t* smem,
                                              const Barriers<Traits>& barriers, int group,
                                              const typename Traits::Rows& rows) {
  Consumer<Traits> consumer(args, smem, barriers, group);
  UnitReader<Traits> units(smem, barriers);
  const UnitRecord* shared = nullptr;  // the unit of a cluster
  while (const UnitRecord* record = units.next()) {
    if (record->is_live != 0) {
      Accumulators<Traits> result;
      consumer.run(record->setup, units, result);
      if (record->setup.view.splits == 1) {
        store_final<Traits>(args, record->setup, group, result, rows);
      } else {
        store_partial<Traits>(args, record->setup, group, result);
      }
    }
    shared = record->is_shared != 0 ? record : nullptr;
    units.release();
  }
  if (args.cluster_size > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (shared != nullptr && is_last_cluster<Traits>(args, shared->setup, smem)) {
      reduce_unit<Traits>(args, shared->setup, static_cast<int>(threadIdx.x) - 128, rows);
    }
  }
}

/// Fetches into L2 what the first unit will read: the metadata and, if requests are of one size,
/// the page ids. Nothing is read, so this may come before the kernels ahead have ended.
__device__ __forceinline__ void prefetch_metadata(const AttentionArgs& args) {
  constexpr int kLineElems = 32;
  const int lane = threadIdx.x & 31;
  const int32_t* const arrays[] = {args.cu_seqlens_q, args.valid_slices, args.context_lens,
                                   args.mask_kinds,   args.prefix_lens,  args.padded_prefix_lens,
                                   args.q_starts};
#pragma unroll
  for (int i = 0; i < 7; ++i) {
    if (lane == i && arrays[i] != nullptr) {
      ptx::prefetch_l2(arrays[i]);
    }
  }
  // Along x lie the units, cluster_size CTAs each.
  const uint32_t per_request =
      static_cast<uint32_t>(args.num_kv_heads * args.tiles_per_request * args.cluster_size);
  const uint32_t request = blockIdx.x / per_request;
  if (request < static_cast<uint32_t>(args.num_reqs) && lane * kLineElems < args.max_pages) {
    ptx::prefetch_l2(args.page_table + request * args.page_table_stride + lane * kLineElems);
  }
}

/// The warps of the producer.
template <typename Traits>
__device__ __forceinline__ void produce(const typename Traits::Args& args,
                                        const AttentionMaps& maps, uint8_t* smem,
                                        const Barriers<Traits>& barriers, int warp,
                                        const typename Traits::Rows& rows) {
  if (warp == 0) {
    if constexpr (Traits::kIsCoded) {
      copy_coded_units<Traits>(args, maps, smem, barriers);
    } else {
      copy_units<Traits, false>(args, maps, smem, barriers);
    }
  } else if (warp == 1) {
    clean_units<Traits>(smem, barriers);
  } else if (warp == 2) {
    if constexpr (Traits::kIsCoded) {
      copy_unit_scales<Traits>(args, smem, barriers);
    } else {
      copy_units<Traits, true>(args, maps, smem, barriers);
    }
  } else {
    schedule_units<Traits>(args, smem, barriers);
    zero_units<Traits>(args, rows);
  }
}

/// What warps that add up nothing do at the end: the cluster's barrier counts every warp.
__device__ __forceinline__ void leave_cluster(const AttentionArgs& args) {
  if (args.cluster_size > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ typename Traits::Args args,
                     const __grid_constant__ AttentionMaps maps,
                     const __grid_constant__ typename Traits::Rows rows) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const Barriers<Traits> barriers{ptx::smem_address(smem + Traits::kBarrierOffset)};
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) >> 5, 0);
  if (threadIdx.x == 0) {
    init_barriers<Traits>(barriers);
    ptx::tma_prefetch_map(&maps.q);
    ptx::tma_prefetch_map(&maps.k);
    ptx::tma_prefetch_map(&maps.v);
    ptx::tma_prefetch_map(&maps.k_cache);
    ptx::tma_prefetch_map(&maps.v_cache);
  }
  if (warp == 1) {
    prefetch_metadata(args);
  }
  warm_arguments<Traits::kThreads / 32>(args, warp);
  __syncthreads();
  if (warp != 3) {
    pdl_wait();  // the scheduler waits later
  }
  if (warp < 4) {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_decrease<Traits::kRegisters.producer>();
    }
    produce<Traits>(args, maps, smem, barriers, warp, rows);
    leave_cluster(args);
  } else if (warp < 4 + 4 * Traits::kConsumers) {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_increase<Traits::kRegisters.consumer>();
    }
    consume_units<Traits>(args, smem, barriers, warp / 4 - 1, rows);
  } else if constexpr (Traits::kIsCoded) {
    ptx::registers_decrease<Traits::kRegisters.converter>();
    run_converter<Traits>(args, maps, smem, barriers, warp / 4 - 1 - Traits::kConsumers);
    leave_cluster(args);
  }
}

/// Adds up splits that are too many for clusters: grid of units (request, row tile, KV head) by
/// items, a block of consumer threads each.
template <typename Traits>
__global__ void __launch_bounds__(Traits::kConsumerThreads)
    reduce_kernel(const __grid_constant__ AttentionArgs args,
                  const __grid_constant__ typename Traits::Rows rows) {
  const int32_t unit_index = static_cast<int32_t>(blockIdx.x);
  const int32_t tile_index = args.by_kv_heads.divide(unit_index);
  SplitUnit unit;
  unit.work.kv_head = unit_index - tile_index * args.num_kv_heads;
  unit.work.request = tile_index / args.tiles_per_request;
  unit.work.tile = tile_index - unit.work.request * args.tiles_per_request;
  unit.work.split = 0;
  // The attention kernel lets this one start only after the kernels before it have ended, so the
  // metadata may be read before the wait; the partials may not.
  const RequestView view = load_request(args, unit.work.request);
  const int32_t first_row = unit.work.tile * args.tokens_per_tile;
  unit.splits = view.splits;
  unit.first_token = view.first_token + first_row;
  unit.num_tokens = min_i32(args.tokens_per_tile, view.mask.num_valid - first_row);
  pdl_launch_dependents();
  pdl_wait();
  if (unit.splits > 1 && unit.num_tokens > 0) {
    reduce_items<Traits, 1>(args, unit, static_cast<int>(blockIdx.y), 0,
                            static_cast<int>(threadIdx.x), rows);
  }
}

}  // namespace diffulex::cuda::sm90
