// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T for few rows x: the weights are read once at the speed of the memory.
//
//   cluster        `splits` shares of the depth times `shares` neighbouring tiles of 128 rows of W;
//                  CTAs with one share of the depth bring each other the rows of x
//   producer warp  streams W and x; the first W while the kernel in front still runs
//   two consumer   W tile (64 rows each) times x tile: rows of W are the wide operand
//   warpgroups
//   epilogue       partial sums go to their owner's shared memory and are added in rank order
//
// Clusters are dealt (tiles of W) in turn and the pipeline runs on from tile to tile.

#include <cstdint>

#include <cuda.h>

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mbarrier.cuh"
#include "kernels/cuda/common/pdl.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/tma.cuh"
#include "kernels/cuda/common/wgmma.cuh"
#include "kernels/cuda/sm90/linear/epilogue.cuh"
#include "kernels/cuda/sm90/linear/traits.cuh"

namespace diffulex::cuda::sm90 {

/// Position in the ring of stages.
template <int kStages>
struct LinearCursor final {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Shared addresses of a CTA.
template <typename Traits>
struct LinearSmem final {
  uint32_t stages;
  uint32_t partials;
  uint32_t full;
  uint32_t empty;
  uint32_t partials_full;
  uint32_t partials_empty;

  __device__ __forceinline__ explicit LinearSmem(const uint8_t* raw) {
    stages = ptx::smem_address(raw);
    partials = stages + Traits::kStages * Traits::kStageBytes;
    full = partials + Traits::kPartialBytes;
    empty = full + 8 * Traits::kStages;
    partials_full = empty + 8 * Traits::kStages;
    partials_empty = partials_full + 8;
  }
  __device__ __forceinline__ uint32_t weights(int32_t stage) const {
    return stages + stage * Traits::kStageBytes;
  }
  __device__ __forceinline__ uint32_t rows(int32_t stage) const {
    return weights(stage) + Traits::kWeightBytes;
  }
};

/// What this CTA does.
template <typename Traits>
struct LinearWork final {
  int32_t item;    // of the cluster: `shares` tiles
  int32_t stride;  // to its next item
  int32_t split;
  int32_t share;
  int32_t begin;  // steps of depth
  int32_t count;

  __device__ __forceinline__ explicit LinearWork(const LinearArgs& args) {
    const int32_t bits = args.split_bits + args.share_bits;
    const auto block = static_cast<int32_t>(blockIdx.x);
    item = block >> bits;
    stride = static_cast<int32_t>(gridDim.x) >> bits;
    split = (block >> args.share_bits) & (args.splits - 1);
    share = block & (args.shares - 1);
    begin = (args.num_steps * split) >> args.split_bits;
    count = ((args.num_steps * (split + 1)) >> args.split_bits) - begin;
  }
  __device__ __forceinline__ int32_t tile(const LinearArgs& args, int32_t index) const {
    return index * args.shares + share;
  }
};

/// The thread that starts the copies of a CTA.
template <typename Traits>
class LinearProducer final {
 public:
  __device__ __forceinline__ LinearProducer(const LinearArgs& args, const LinearSmem<Traits>& smem,
                                            const CUtensorMap* weight_map,
                                            const CUtensorMap* row_map)
      : args_(args),
        smem_(smem),
        weight_map_(weight_map),
        row_map_(row_map),
        work_(args),
        policy_(ptx::policy_evict_first()),
        mask_(static_cast<uint16_t>(((1U << args.shares) - 1) << (work_.split * args.shares))),
        row_begin_((Traits::kRows >> args.share_bits) * work_.share) {}

  /// Weights, which nothing in front writes: they fill the stages at once.
  __device__ __forceinline__ void start() {
    early_ = work_.count < Traits::kStages ? work_.count : Traits::kStages;
    for (int32_t step = 0; step < early_; ++step) {
      load_weights(step, work_.item, step);
    }
  }

  __device__ __forceinline__ void run() {
    LinearCursor<Traits::kStages> cursor;
    for (int32_t step = 0; step < early_; ++step, cursor.advance()) {
      load_rows(cursor.stage, step);
    }
    int32_t first = early_;
    for (int32_t item = work_.item; item < args_.num_items; item += work_.stride) {
      for (int32_t step = first; step < work_.count; ++step, cursor.advance()) {
        ptx::mbarrier_wait(smem_.empty + 8 * cursor.stage, cursor.parity ^ 1);
        load_weights(cursor.stage, item, step);
        load_rows(cursor.stage, step);
      }
      first = 0;
    }
    // Nobody leaves before the others have said that they read what this CTA sent them: a word to
    // the memory of a CTA that is gone would be an error.
    for (int32_t stage = 0; stage < Traits::kStages; ++stage, cursor.advance()) {
      ptx::mbarrier_wait(smem_.empty + 8 * cursor.stage, cursor.parity ^ 1);
    }
  }

 private:
  __device__ __forceinline__ void load_weights(int32_t stage, int32_t item, int32_t step) {
    const uint32_t full = smem_.full + 8 * stage;
    ptx::mbarrier_arrive_expect(full, Traits::kStageBytes);
    // Depth, 8 rows, two runs of them, pairs of runs.
    ptx::tma_load_hinted(smem_.weights(stage), weight_map_, full, policy_,
                         (work_.begin + step) * Traits::kDepth, 0, 0,
                         work_.tile(args_, item) * (Traits::kWeightRows / 16));
  }
  /// This CTA's part of the rows, for every CTA with its share of the depth.
  __device__ __forceinline__ void load_rows(int32_t stage, int32_t step) {
    const uint32_t target = smem_.rows(stage) + row_begin_ * Traits::kRowBytes;
    const uint32_t full = smem_.full + 8 * stage;
    const int32_t depth = (work_.begin + step) * Traits::kDepth;
    if (args_.shares == 1) {
      ptx::tma_load(target, row_map_, full, depth, 0);
    } else {
      ptx::tma_load_multicast(target, row_map_, full, mask_, depth, row_begin_);
    }
  }

  const LinearArgs& args_;
  const LinearSmem<Traits>& smem_;
  const CUtensorMap* weight_map_;
  const CUtensorMap* row_map_;
  const LinearWork<Traits> work_;
  const uint64_t policy_;
  const uint16_t mask_;
  const int32_t row_begin_;
  int32_t early_ = 0;
};

/// One step of depth: 64 rows of W at `weights` times the rows at `rows`, as one batch of products.
template <typename T, int kGroups>
__device__ __forceinline__ void issue_step(float (&sums)[kGroups][4], uint32_t weights,
                                           uint32_t rows, bool accumulate) {
  const uint64_t a = ptx::swizzle128_descriptor(weights, 0, 1024);
  const uint64_t b = ptx::swizzle128_descriptor(rows, 0, 1024);
  ptx::wgmma_hold(sums);
  ptx::wgmma_fence();
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    // A step of 16 elements is 32 bytes; descriptors count 16.
    ptx::wgmma_ss<T>(sums, a + 2 * k, b + 2 * k, accumulate || k > 0);
  }
  ptx::wgmma_commit();
}

template <typename Traits>
__device__ __forceinline__ void consume(const LinearArgs& args, const LinearSmem<Traits>& smem) {
  const LinearWork<Traits> work(args);
  const auto group = static_cast<int32_t>(threadIdx.x) / 128;
  const auto thread = static_cast<int32_t>(threadIdx.x) % 128;
  // One thread per CTA whose copies go to the stage.
  const bool is_signaller = thread < args.shares;
  const uint32_t target = static_cast<uint32_t>(work.split * args.shares + thread);
  const uint32_t empty = is_signaller ? ptx::cluster_address(smem.empty, target) : 0;
  LinearEpilogue<Traits> epilogue(args, smem.partials, smem.partials_full, smem.partials_empty,
                                  work.split, work.share);
  LinearCursor<Traits::kStages> cursor;
  float sums[Traits::kGroups][4];
  for (int32_t item = work.item; item < args.num_items; item += work.stride) {
    int32_t pending = 0;
    for (int32_t step = 0; step < work.count; ++step, cursor.advance()) {
      ptx::mbarrier_wait(smem.full + 8 * cursor.stage, cursor.parity);
      issue_step<typename Traits::T>(sums, smem.weights(cursor.stage) + group * 64 * 128,
                                     smem.rows(cursor.stage), step > 0);
      if constexpr (Traits::kWaitsForMemory) {
        // Short products: the stage is worth more than their overlap.
        ptx::wgmma_wait<0>();
        pending = cursor.stage;
      } else {
        ptx::wgmma_wait<1>();
      }
      if ((Traits::kWaitsForMemory || step > 0) && is_signaller) {
        ptx::mbarrier_arrive_remote(empty + 8 * pending);
      }
      pending = cursor.stage;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_hold(sums);
    if (!Traits::kWaitsForMemory && is_signaller) {
      ptx::mbarrier_arrive_remote(empty + 8 * pending);
    }
    epilogue.finish(sums, work.tile(args, item));
  }
  epilogue.leave();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap row_map,
                  const __grid_constant__ LinearArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const LinearSmem<Traits> smem(raw);
  const int32_t cluster_size = args.splits * args.shares;
  const bool is_producer = threadIdx.x >= Traits::kConsumers;
  if (threadIdx.x == Traits::kConsumers) {
    ptx::tma_prefetch_map(&weight_map);
    ptx::tma_prefetch_map(&row_map);
    for (int32_t stage = 0; stage < Traits::kStages; ++stage) {
      ptx::mbarrier_init(smem.full + 8 * stage, 1);
      ptx::mbarrier_init(smem.empty + 8 * stage, 2 * args.shares);
    }
    const int32_t others = args.splits > 1 ? args.splits - 1 : 1;
    ptx::mbarrier_init(smem.partials_full, Traits::kConsumerWarps * others);
    ptx::mbarrier_init(smem.partials_empty, Traits::kConsumerWarps * others);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  pdl_launch_dependents();
  if (cluster_size > 1) {
    ptx::cluster_arrive_relaxed();
  }
  if (is_producer) {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_decrease<Traits::kProducerRegisters>();
    }
    LinearProducer<Traits> producer(args, smem, &weight_map, &row_map);
    const bool is_chosen = threadIdx.x / 32 == Traits::kConsumerWarps && ptx::elect_one();
    if (is_chosen) {
      producer.start();
    }
    __syncwarp();
    if (cluster_size > 1) {
      ptx::cluster_wait();  // the barriers of the others are ready
    }
    pdl_wait();
    if (is_chosen) {
      producer.run();
    }
    __syncwarp();
  } else {
    if constexpr (Traits::kMovesRegisters) {
      ptx::registers_increase<Traits::kConsumerRegisters>();
    }
    if (cluster_size > 1) {
      ptx::cluster_wait();
    }
    // Results may overwrite what kernels in front still read.
    pdl_wait();
    consume(args, smem);
    __syncwarp();
  }
}

}  // namespace diffulex::cuda::sm90
