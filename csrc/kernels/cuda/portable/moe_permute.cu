// SPDX-License-Identifier: Apache-2.0
//
// moe_permute: a stable counting sort of the slots by local expert in one CTA. Every warp owns a
// contiguous range of slots and a histogram row in shared memory; the column sums give the offsets,
// and on the second pass each warp places its slots in order, 32 at a time, ranked by ballot. No
// cursor is shared, so that the order is the slot order.
#include <cstdint>

#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/portable/check_data.h"
#include "kernels/cuda/portable/moe_tiles.cuh"
#include "kernels/cuda/portable/prepare.h"

namespace diffulex::cuda {
namespace {

/// Histograms fit the shared memory that needs no permission.
constexpr int kHistogramInts = 10 * 1024;

struct PermuteArgs {
  const int32_t* __restrict__ topk_ids;    // [T, K]
  const int32_t* __restrict__ expert_map;  // [E] or null
  int32_t* __restrict__ sorted_slots;      // [T K]
  int32_t* offsets;                        // [L + 1], read again by other threads
  TileList tiles;
  int64_t ids_stride;
  int32_t num_slots;
  int32_t top_k;
  int32_t num_experts;  // ids from here on are none
  int32_t num_local;
  int32_t num_warps;  // that take part in the sort
};

/// Local expert of a slot, -1 = none.
__device__ __forceinline__ int expert_of(const PermuteArgs& args, int slot) {
  const int token = slot / args.top_k;
  const int id = args.topk_ids[token * args.ids_stride + (slot - token * args.top_k)];
  if (id < 0 || id >= args.num_experts) {
    return -1;
  }
  const int local = args.expert_map == nullptr ? id : args.expert_map[id];
  return local < 0 || local >= args.num_local ? -1 : local;
}

__global__ void __launch_bounds__(kMoeSortThreads)
    permute_kernel(const __grid_constant__ PermuteArgs args) {
  __shared__ int histogram[kHistogramInts];  // [num_warps, L]
  __shared__ int scratch[33];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < args.num_warps * args.num_local; i += kMoeSortThreads) {
    histogram[i] = 0;
  }
  __syncthreads();
  // Whole groups of 32 slots per warp, in ascending order.
  const int64_t groups = (int64_t{args.num_slots} + 31) / 32;
  const int64_t groups_per_warp = (groups + args.num_warps - 1) / args.num_warps;
  const int64_t first = warp * groups_per_warp * 32;
  const int64_t end = first + groups_per_warp * 32;
  const int64_t last = end < args.num_slots ? end : args.num_slots;
  const bool has_slots = warp < args.num_warps;
  int* counts = histogram + (has_slots ? warp : 0) * args.num_local;
  for (int64_t base = first; has_slots && base < last; base += 32) {
    const int slot = static_cast<int>(base) + lane;
    const int expert = base + lane < last ? expert_of(args, slot) : -1;
    const unsigned same = __match_any_sync(kFullWarp, expert);
    if (expert >= 0 && lane == __ffs(same) - 1) {
      counts[expert] += __popc(same);
    }
    __syncwarp();
  }
  __syncthreads();

  // Turn counts into begins: over the warps of one expert, then over the experts.
  int num_active = 0;
  for (int base = 0; base < args.num_local; base += kMoeSortThreads) {
    const int expert = base + static_cast<int>(threadIdx.x);
    int own = 0;
    for (int w = 0; expert < args.num_local && w < args.num_warps; ++w) {
      own += histogram[w * args.num_local + expert];
    }
    int total = 0;
    int begin = num_active + block_exclusive_sum(own, scratch, &total);
    if (expert < args.num_local) {
      args.offsets[expert] = begin;
      for (int w = 0; w < args.num_warps; ++w) {
        int& entry = histogram[w * args.num_local + expert];
        const int count = entry;
        entry = begin;
        begin += count;
      }
    }
    num_active += total;
  }
  if (threadIdx.x == 0) {
    args.offsets[args.num_local] = num_active;
    args.tiles.counters[1] = num_active;
  }
  __syncthreads();

  for (int64_t base = first; has_slots && base < last; base += 32) {
    const int slot = static_cast<int>(base) + lane;
    const int expert = base + lane < last ? expert_of(args, slot) : -1;
    const unsigned same = __match_any_sync(kFullWarp, expert);
    if (expert >= 0) {
      const int rank = __popc(same & ((1U << lane) - 1U));
      args.sorted_slots[counts[expert] + rank] = slot;
    }
    __syncwarp();
    if (expert >= 0 && lane == __ffs(same) - 1) {
      counts[expert] += __popc(same);
    }
    __syncwarp();
  }
  for (int64_t i = int64_t{num_active} + threadIdx.x; i < args.num_slots; i += kMoeSortThreads) {
    args.sorted_slots[i] = -1;
  }
  // The offsets were written by this CTA before a barrier.
  write_tiles(
      args.tiles, args.num_local, scratch, [&](int expert) { return args.offsets[expert]; },
      [&](int expert) { return args.offsets[expert + 1]; });
}

}  // namespace

Status moe_permute(const MoePermuteParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::moe_permute";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const int64_t num_experts =
      params.expert_map.present() ? params.expert_map.size[0] : params.num_local_experts;
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "topk_ids", params.topk_ids, INT64_MIN, num_experts, context));
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "expert_map", params.expert_map, INT64_MIN,
                                       params.num_local_experts, context));
  PermuteArgs args{};
  args.topk_ids = params.topk_ids.as<const int32_t>();
  args.expert_map = params.expert_map.as<const int32_t>();
  args.sorted_slots = params.sorted_slots.as<int32_t>();
  args.offsets = params.expert_offsets.as<int32_t>();
  args.tiles = {params.tile_expert.as<int32_t>(), params.tile_start.as<int32_t>(),
                params.counters.as<int32_t>(), static_cast<int32_t>(params.tile_expert.size[0]),
                params.tile};
  args.ids_stride = params.topk_ids.stride[0];
  args.num_slots = static_cast<int32_t>(params.topk_ids.numel());
  args.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  args.num_experts = static_cast<int32_t>(num_experts);
  args.num_local = params.num_local_experts;
  constexpr int32_t kMaxWarps = kMoeSortThreads / 32;
  const int32_t fitting = kHistogramInts / params.num_local_experts;
  args.num_warps = fitting < kMaxWarps ? fitting : kMaxWarps;
  permute_kernel<<<1, kMoeSortThreads, 0, stream_of(context)>>>(args);
  return check_launch(kWhere);
}

Status prepare_moe_permute() {
  return touch_kernel("diffulex::moe_permute", permute_kernel);
}

}  // namespace diffulex::cuda
