// SPDX-License-Identifier: Apache-2.0
#pragma once

// Block-diffusion paged attention on wgmma: a producer warpgroup feeds K and V through the copy
// engine to one or two consumer warpgroups of 64 packed rows (token * G + g) each. CTAs stride over
// the units (request, row tile, split, KV head), or the CTAs of a cluster share one unit's keys.

#include <cstdint>

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mbarrier.cuh"
#include "kernels/cuda/common/pdl.cuh"
#include "kernels/cuda/sm90/attention/epilogue.cuh"
#include "kernels/cuda/sm90/attention/mainloop.cuh"
#include "kernels/cuda/sm90/attention/producer.cuh"

namespace diffulex::cuda::sm90 {

template <typename Traits>
__device__ __forceinline__ void init_barriers(const Barriers<Traits>& barriers) {
  constexpr uint32_t kConsumerWarps = Traits::kConsumers * 4;
  ptx::mbarrier_init(barriers.query_full(), 1);
  ptx::mbarrier_init(barriers.query_empty(), kConsumerWarps);
  for (uint32_t slot = 0; slot < 2; ++slot) {
    ptx::mbarrier_init(barriers.unit_full(slot), 32);
    ptx::mbarrier_init(barriers.unit_empty(slot),
                       (kConsumerWarps + 2) * 32);  // and copier, cleaner
  }
  for (uint32_t stage = 0; stage < Traits::kStages; ++stage) {
    ptx::mbarrier_init(barriers.key_full(stage), 1);
    ptx::mbarrier_init(barriers.key_empty(stage), kConsumerWarps);
    ptx::mbarrier_init(barriers.value_full(stage), 1);
    ptx::mbarrier_init(barriers.value_empty(stage), kConsumerWarps + 1);  // and the cleaner
    ptx::mbarrier_init(barriers.value_clean(stage), 1);
  }
  ptx::mbarrier_init_fence();
}

/// A consumer warpgroup. The CTAs of a cluster compute the splits of one unit, and then each
/// finishes a share of the rows.
template <typename Traits>
__device__ __forceinline__ void consume_units(const AttentionArgs& args, uint8_t* smem,
                                              const Barriers<Traits>& barriers, int group) {
  Consumer<Traits> consumer(args, smem, barriers, group);
  UnitReader<Traits> units(smem, barriers);
  const UnitRecord* shared = nullptr;  // the unit of a cluster
  while (const UnitRecord* record = units.next()) {
    if (record->is_live != 0) {
      Accumulators<Traits> result;
      consumer.run(record->setup, units, result);
      if (record->setup.view.splits == 1) {
        store_final<Traits>(args, record->setup, group, result);
      } else {
        store_partial<Traits>(args, record->setup, group, result);
      }
    }
    shared = record->setup.view.splits > 1 ? record : nullptr;
    units.release();
  }
  if (args.cluster_size > 1) {
    __syncwarp();
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (shared != nullptr) {
      reduce_cluster<Traits>(args, shared->setup, static_cast<int>(threadIdx.x) - 128);
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
  const uint32_t per_request =
      static_cast<uint32_t>(args.num_kv_heads * args.tiles_per_request *
                            (args.cluster_size > 1 ? args.cluster_size : args.num_splits));
  const uint32_t request = blockIdx.x / per_request;
  if (request < static_cast<uint32_t>(args.num_reqs) && lane * kLineElems < args.max_pages) {
    ptx::prefetch_l2(args.page_table + request * args.page_table_stride + lane * kLineElems);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    attention_kernel(const __grid_constant__ AttentionArgs args,
                     const __grid_constant__ AttentionMaps maps) {
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
  __syncthreads();
  pdl_wait();
  // The next kernel may start now: it waits for this one before it touches what this one writes.
  pdl_launch_dependents();
  if (warp < 4) {
    if constexpr (Traits::kConsumers == 2) {
      ptx::registers_decrease<88>();
    }
    if (warp == 0) {
      copy_units<Traits>(args, maps, smem, barriers);
    } else if (warp == 1) {
      clean_units<Traits>(smem, barriers);
    } else if (warp == 2) {
      zero_units<Traits>(args);
    } else {
      schedule_units<Traits>(args, smem, barriers);
    }
    if (args.cluster_size > 1) {
      __syncwarp();
      ptx::cluster_arrive();  // the barrier counts every warp of the cluster
      ptx::cluster_wait();
    }
  } else {
    if constexpr (Traits::kConsumers == 2) {
      ptx::registers_increase<208>();
    }
    consume_units<Traits>(args, smem, barriers, warp / 4 - 1);
  }
}

}  // namespace diffulex::cuda::sm90
