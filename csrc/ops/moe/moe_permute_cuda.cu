// SPDX-License-Identifier: Apache-2.0
//
// moe_permute: a stable counting sort of the slots by local expert in one CTA, or in one cluster
// when they are many. Every warp owns a contiguous range of slots and a histogram row in shared
// memory; the column sums give the offsets, and on the second pass each warp places its slots in
// order, 32 at a time, ranked by ballot. No cursor is shared, so that the order is the slot order.
#include <algorithm>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/tiles.cuh"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda {
namespace {

/// Histograms fit the shared memory that needs no permission.
constexpr int kHistogramInts = 10 * 1024;
/// Groups of 32 slots a warp loads together.
constexpr int kAhead = 4;
/// More slots than this are shared by the CTAs of a cluster, on devices that have clusters.
constexpr int kMaxSingleSlots = 2048;
constexpr int kClusterCtas = 8;

struct PermuteArgs {
  SlotRoutes routes;
  int32_t* __restrict__ sorted_slots;  // [T K]
  int32_t* offsets;                    // [L + 1]
  TileList tiles;
  int32_t num_warps;    // of a CTA that take part in the sort
  int32_t expert_bits;  // 2^expert_bits >= num_local
};

/// Lanes whose expert (below 2^bits, or -1) equals this lane's.
__device__ __forceinline__ unsigned lanes_of_expert(int expert, int bits) {
  unsigned same = __ballot_sync(kFullWarp, expert >= 0);
  same = expert >= 0 ? same : 0;
  for (int bit = 0; bit < bits; ++bit) {
    const unsigned ones = __ballot_sync(kFullWarp, expert >> bit & 1);
    same &= (expert >> bit & 1) != 0 ? ones : ~ones;
  }
  return same;
}

/// Experts of kAhead groups of 32 slots from `base` on, loaded together.
__device__ __forceinline__ void load_experts(const PermuteArgs& args, int64_t base, int64_t last,
                                             int (&experts)[kAhead]) {
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int64_t slot = base + i * 32 + (threadIdx.x & 31);
    experts[i] = slot < last ? local_expert(args.routes, static_cast<int>(slot)) : -1;
  }
}

/// Counts of this CTA and of the CTAs before it, for one expert.
struct ExpertCount {
  int before;
  int total;
};

/// Barrier of the cluster; on architectures without clusters nothing launches what calls it.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  ptx::cluster_arrive();
  ptx::cluster_wait();
#endif
}

/// Counts of one expert in the CTAs of the cluster, whose `totals` lie at the same address.
__device__ __forceinline__ ExpertCount cluster_count(const int* totals, int expert, int rank) {
  ExpertCount count{0, 0};
#if __CUDA_ARCH__ >= 900
  const uint32_t own = ptx::smem_address(totals + expert);
#pragma unroll
  for (int other = 0; other < kClusterCtas; ++other) {
    const int value = ptx::cluster_load(ptx::cluster_address(own, other));
    count.before += other < rank ? value : 0;
    count.total += value;
  }
#endif
  return count;
}

template <bool kClustered>
__global__ void __launch_bounds__(kMoeSortThreads)
    permute_kernel(const __grid_constant__ PermuteArgs args) {
  __shared__ int histogram[kHistogramInts];  // [num_warps + 1, L]: of the warps, then of the CTA
  __shared__ uint64_t scratch[33];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int rank = kClustered ? static_cast<int>(blockIdx.x) : 0;
  for (int i = threadIdx.x; i < args.num_warps * args.routes.num_local; i += kMoeSortThreads) {
    histogram[i] = 0;
  }
  pdl_wait();
  pdl_launch_dependents();
  __syncthreads();
  // Whole groups of 32 slots per warp, in ascending order.
  const int64_t workers = int64_t{args.num_warps} * (kClustered ? kClusterCtas : 1);
  const int64_t groups = (int64_t{args.routes.num_slots} + 31) / 32;
  const int64_t groups_per_warp = (groups + workers - 1) / workers;
  const int64_t first = (int64_t{rank} * args.num_warps + warp) * groups_per_warp * 32;
  const int64_t end = first + groups_per_warp * 32;
  const int64_t last =
      warp >= args.num_warps ? first : (end < args.routes.num_slots ? end : args.routes.num_slots);
  int* counts = histogram + (warp < args.num_warps ? warp : 0) * args.routes.num_local;
  int* totals = histogram + args.num_warps * args.routes.num_local;
  int experts[kAhead];
  for (int64_t base = first; base < last; base += 32 * kAhead) {
    load_experts(args, base, last, experts);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (experts[i] >= 0) {
        atomicAdd(&counts[experts[i]], 1);
      }
    }
  }
  __syncthreads();
  if constexpr (kClustered) {
    for (int expert = threadIdx.x; expert < args.routes.num_local; expert += kMoeSortThreads) {
      int own = 0;
      for (int w = 0; w < args.num_warps; ++w) {
        own += histogram[w * args.routes.num_local + expert];
      }
      totals[expert] = own;
    }
    cluster_sync();
  }

  // Turn counts into begins: over the warps of one expert, then over the experts; one scan of
  // slots (low half) and tiles (high half).
  uint64_t done = 0;
  for (int base = 0; base < args.routes.num_local; base += kMoeSortThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    const bool is_real = expert < args.routes.num_local;
    ExpertCount count{0, 0};
    if (is_real) {
      if constexpr (kClustered) {
        count = cluster_count(totals, expert, rank);
      } else {
        for (int w = 0; w < args.num_warps; ++w) {
          count.total += histogram[w * args.routes.num_local + expert];
        }
      }
    }
    const uint64_t tiles = count.total == 0 ? 0 : (count.total - 1) / args.tiles.tile + 1;
    uint64_t sum = 0;
    const uint64_t before =
        done + block_exclusive_sum<kMoeSortThreads / 32>(
                   tiles << 32 | static_cast<uint32_t>(count.total), scratch, &sum);
    done += sum;
    if (is_real) {
      const int begin = static_cast<int>(static_cast<uint32_t>(before));
      int cursor = begin + count.before;
      // Eight at a time, so that the loads do not wait for the stores.
      for (int w = 0; w < args.num_warps; w += 8) {
        int own[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          own[i] = w + i < args.num_warps ? histogram[(w + i) * args.routes.num_local + expert] : 0;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (w + i < args.num_warps) {
            histogram[(w + i) * args.routes.num_local + expert] = cursor;
          }
          cursor += own[i];
        }
      }
      if (rank == 0) {
        args.offsets[expert] = begin;
        write_expert_tiles(args.tiles, expert, begin, static_cast<int>(tiles),
                           static_cast<int>(before >> 32));
      }
    }
  }
  const int num_active = static_cast<int>(static_cast<uint32_t>(done));
  if (rank == 0) {
    end_tiles(args.tiles, static_cast<int>(done >> 32));
    if (threadIdx.x == 0) {
      args.offsets[args.routes.num_local] = num_active;
      args.tiles.counters[1] = num_active;
    }
  }
  __syncthreads();

  for (int64_t base = first; base < last; base += 32 * kAhead) {
    if (last - first > 32 * kAhead) {  // otherwise they are the ones loaded last
      load_experts(args, base, last, experts);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (base + i * 32 >= last) {
        break;
      }
      const unsigned same = lanes_of_expert(experts[i], args.expert_bits);
      if (experts[i] >= 0) {
        const int place = counts[experts[i]] + __popc(same & ((1U << lane) - 1U));
        args.sorted_slots[place] = static_cast<int>(base) + i * 32 + lane;
      }
      __syncwarp();
      if (experts[i] >= 0 && lane == __ffs(same) - 1) {
        counts[experts[i]] += __popc(same);
      }
      __syncwarp();
    }
  }
  const int64_t threads = int64_t{kMoeSortThreads} * (kClustered ? kClusterCtas : 1);
  for (int64_t i = int64_t{num_active} + rank * kMoeSortThreads + threadIdx.x;
       i < args.routes.num_slots; i += threads) {
    args.sorted_slots[i] = -1;
  }
  if constexpr (kClustered) {
    // No CTA leaves while another may still read its counts.
    cluster_sync();
  }
}

Status launch_permute(const char* where, PermuteArgs args, const ExecContext& context) {
  const bool is_dependent = can_launch_dependent(context.device_index);
  const bool is_clustered = is_dependent && args.routes.num_slots > kMaxSingleSlots;
  // A row of the histogram for each warp that has slots, one more for the CTA in a cluster.
  const int32_t fitting = kHistogramInts / args.routes.num_local - (is_clustered ? 1 : 0);
  const int64_t useful = ceil_div(args.routes.num_slots, 32);
  args.num_warps = static_cast<int32_t>(
      std::max<int64_t>(1, std::min<int64_t>({fitting, kMoeSortThreads / 32, useful})));
  if (is_clustered && fitting >= 1) {
    const LaunchShape shape{dim3(kClusterCtas), dim3(kMoeSortThreads), 0, stream_of(context),
                            kClusterCtas};
    return cuda_status(where, launch_dependent(permute_kernel<true>, shape, true, args));
  }
  const LaunchShape shape{dim3(1), dim3(kMoeSortThreads), 0, stream_of(context)};
  return cuda_status(where, launch_dependent(permute_kernel<false>, shape, is_dependent, args));
}

}  // namespace

SlotRoutes slot_routes(const TensorRef& topk_ids, const TensorRef& expert_map,
                       int32_t num_local_experts) {
  SlotRoutes routes{};
  routes.ids = topk_ids.as<const int32_t>();
  routes.expert_map = expert_map.as<const int32_t>();
  routes.ids_stride = topk_ids.stride[0];
  routes.num_slots = static_cast<int32_t>(topk_ids.numel());
  routes.top_k = static_cast<int32_t>(topk_ids.size[1]);
  routes.num_experts =
      expert_map.present() ? static_cast<int32_t>(expert_map.size[0]) : num_local_experts;
  routes.num_local = num_local_experts;
  return routes;
}

Status check_routes(const char* where, const TensorRef& topk_ids, const TensorRef& expert_map,
                    int32_t num_local_experts, const ExecContext& context) {
  const int64_t num_experts = expert_map.present() ? expert_map.size[0] : num_local_experts;
  DIFFULEX_RETURN_IF_ERROR(
      check_range(where, "topk_ids", topk_ids, INT64_MIN, num_experts, context));
  return check_range(where, "expert_map", expert_map, INT64_MIN, num_local_experts, context);
}

Status moe_permute(const MoePermuteParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::moe_permute";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(
      check_routes(kWhere, params.topk_ids, params.expert_map, params.num_local_experts, context));
  PermuteArgs args{};
  args.routes = slot_routes(params.topk_ids, params.expert_map, params.num_local_experts);
  args.sorted_slots = params.sorted_slots.as<int32_t>();
  args.offsets = params.expert_offsets.as<int32_t>();
  args.tiles = {params.tile_expert.as<int32_t>(), params.tile_start.as<int32_t>(),
                params.counters.as<int32_t>(), static_cast<int32_t>(params.tile_expert.size[0]),
                params.tile};
  while ((1 << args.expert_bits) < params.num_local_experts) {
    ++args.expert_bits;
  }
  return launch_permute(kWhere, args, context);
}

Status prepare_moe_permute(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::moe_permute";
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, permute_kernel<false>));
  return touch_kernel(kWhere, permute_kernel<true>);
}

}  // namespace diffulex::cuda
