// SPDX-License-Identifier: Apache-2.0
#pragma once

// out = x W^T for few rows x: the weights are read once at the speed of the memory.
//
//   grid        one CTA to a processor with nearly all its shared memory, each with the same share
//               of W: the memory feeds pairs of processors evenly, so uneven shares would wait
//   cluster     two shares of the depth where the tiles of W alone do not come out even
//   copy warp   streams W and x; it starts on W while the kernels before it still run, as soon as
//               their CTA has left the processor, and then no faster than the memory delivers, so
//               that the reads of those kernels do not queue up
//   warpgroups  W tile (64 rows each) times x tile: rows of W are the wide operand
//   epilogue    each share sends the other one half of its sums and writes the other half
//
// Clusters are dealt tiles of W in turn and the ring runs on from tile to tile.

#include <cstdint>

#include <cuda.h>

#include "ops/linear/sm90/epilogue.cuh"
#include "ops/linear/sm90/traits.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// Position in the ring of stages.
struct LinearCursor final {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int32_t stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Shared addresses of a CTA.
struct LinearSmem final {
  uint32_t stages;
  uint32_t partials;
  uint32_t full;
  uint32_t empty;
  uint32_t landed;  // a barrier for the first W of each stage
  uint32_t partials_full;
  uint32_t partials_empty;
  uint32_t released;  // a barrier: the kernels in front have ended

  __device__ __forceinline__ LinearSmem(const uint8_t* raw, const LinearArgs& args) {
    stages = ptx::smem_address(raw);
    partials = stages + args.stages * args.stage_bytes;
    full = partials + args.partial_bytes;
    empty = full + 8 * args.stages;
    landed = empty + 8 * args.stages;
    partials_full = landed + 8 * args.stages;
    partials_empty = partials_full + 8;
    released = partials_empty + 8;
  }
};

/// What this CTA does.
struct LinearWork final {
  int32_t tile;    // first of W
  int32_t stride;  // to the next one
  int32_t split;
  int32_t begin;  // steps of depth
  int32_t count;
  int32_t early;  // of them, those whose W comes while the kernels in front run

  __device__ __forceinline__ explicit LinearWork(const LinearArgs& args) {
    const int32_t bits = args.splits - 1;  // log2
    const auto block = static_cast<int32_t>(blockIdx.x);
    tile = block >> bits;
    stride = static_cast<int32_t>(gridDim.x) >> bits;
    split = block & bits;
    begin = (args.num_steps * split) >> bits;
    count = ((args.num_steps * (split + 1)) >> bits) - begin;
    early = count < args.stages ? count : args.stages;
  }
};

/// Starts the copies of a CTA: W and later rows by one thread, the first rows by another.
template <typename Traits>
class LinearProducer final {
 public:
  __device__ __forceinline__ LinearProducer(const LinearArgs& args, const LinearSmem& smem,
                                            const CUtensorMap* weight_map,
                                            const CUtensorMap* row_map)
      : args_(args),
        smem_(smem),
        weight_map_(weight_map),
        row_map_(row_map),
        work_(args),
        policy_(ptx::policy_evict_first()) {}

  /// Weights, which nothing in front writes (ExecContext::weights_settled), fill the stages. Until
  /// the kernels in front have ended few are on their way at a time.
  __device__ __forceinline__ void start() {
    for (int32_t step = 0; step < work_.early; ++step) {
      if (step >= args_.paced_stages) {
        const uint32_t landed = smem_.landed + 8 * (step - args_.paced_stages);
        while (!ptx::mbarrier_test(smem_.released, 0) && !ptx::mbarrier_test(landed, 0)) {
        }
      }
      const uint32_t landed = smem_.landed + 8 * step;
      ptx::mbarrier_arrive_expect(landed, static_cast<uint32_t>(weight_bytes()));
      load_weights(step, work_.tile, step, landed);
    }
  }

  /// The rows that belong to these weights, once the kernels in front have ended.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive(smem_.released);
    for (int32_t step = 0; step < work_.early; ++step) {
      const uint32_t full = smem_.full + 8 * step;
      ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(args_.row_bytes));
      load_rows(step, step, full);
    }
  }

  /// All that follows.
  __device__ __forceinline__ void run() {
    LinearCursor cursor;
    for (int32_t step = 0; step < work_.early; ++step) {
      cursor.advance(args_.stages);
    }
    int32_t first = work_.early;
    for (int32_t tile = work_.tile; tile < args_.num_tiles; tile += work_.stride) {
      for (int32_t step = first; step < work_.count; ++step, cursor.advance(args_.stages)) {
        const uint32_t full = smem_.full + 8 * cursor.stage;
        ptx::mbarrier_wait(smem_.empty + 8 * cursor.stage, cursor.parity ^ 1);
        ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(weight_bytes() + args_.row_bytes));
        load_weights(cursor.stage, tile, step, full);
        load_rows(cursor.stage, step, full);
      }
      first = 0;
    }
  }

 private:
  __device__ __forceinline__ int32_t weight_bytes() const {
    return args_.lines * args_.tile_rows * Traits::kLineBytes;
  }
  __device__ __forceinline__ void load_weights(int32_t stage, int32_t tile, int32_t step,
                                               uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes;
    for (int32_t line = 0; line < args_.lines; ++line) {
      // Depth, 8 rows, two runs of them, pairs of runs.
      ptx::tma_load_hinted(target, weight_map_, barrier, policy_, depth_of(step, line), 0, 0,
                           tile * (args_.tile_rows / 16));
      target += args_.tile_rows * Traits::kLineBytes;
    }
  }
  __device__ __forceinline__ void load_rows(int32_t stage, int32_t step, uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes + weight_bytes();
    for (int32_t line = 0; line < args_.lines; ++line) {
      ptx::tma_load(target, row_map_, barrier, depth_of(step, line), 0);
      target += Traits::kRows * Traits::kLineBytes;
    }
  }
  __device__ __forceinline__ int32_t depth_of(int32_t step, int32_t line) const {
    return ((work_.begin + step) * args_.lines + line) * static_cast<int32_t>(kFewRowsDepth);
  }

  const LinearArgs& args_;
  const LinearSmem& smem_;
  const CUtensorMap* weight_map_;
  const CUtensorMap* row_map_;
  const LinearWork work_;
  const uint64_t policy_;
};

/// 64 elements of depth: 64 rows of W at `weights` times the rows at `rows`.
template <typename T, int kGroups>
__device__ __forceinline__ void issue_line(float (&sums)[kGroups][4], uint32_t weights,
                                           uint32_t rows, bool accumulate) {
  const uint64_t a = ptx::swizzle128_descriptor(weights, 0, 1024);
  const uint64_t b = ptx::swizzle128_descriptor(rows, 0, 1024);
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    // A step of 16 elements is 32 bytes; descriptors count 16.
    ptx::wgmma_ss<T>(sums, a + 2 * k, b + 2 * k, accumulate || k > 0);
  }
}

template <typename Traits>
__device__ __forceinline__ void consume(const LinearArgs& args, const LinearSmem& smem) {
  const LinearWork work(args);
  const auto group = static_cast<int32_t>(threadIdx.x) / 128;
  const bool is_signaller = threadIdx.x % 128 == 0;
  const int32_t weight_bytes = args.tile_rows * Traits::kLineBytes;
  LinearEpilogue<Traits> epilogue(args, smem.partials, smem.partials_full, smem.partials_empty,
                                  work.split);
  LinearCursor cursor;
  float sums[Traits::kGroups][4];
  for (int32_t tile = work.tile; tile < args.num_tiles; tile += work.stride) {
    for (int32_t step = 0; step < work.count; ++step, cursor.advance(args.stages)) {
      if (tile == work.tile && step < work.early) {
        ptx::mbarrier_wait(smem.landed + 8 * cursor.stage, 0);
      }
      ptx::mbarrier_wait(smem.full + 8 * cursor.stage, cursor.parity);
      uint32_t weights = smem.stages + cursor.stage * args.stage_bytes;
      uint32_t rows = weights + args.lines * weight_bytes;
      weights += group * 64 * Traits::kLineBytes;
      ptx::wgmma_hold(sums);
      ptx::wgmma_fence();
      issue_line<typename Traits::T>(sums, weights, rows, step > 0);
      if (args.lines > 1) {
        issue_line<typename Traits::T>(sums, weights + weight_bytes,
                                       rows + Traits::kRows * Traits::kLineBytes, true);
      }
      ptx::wgmma_commit();
      // The products are short: the stage is worth more than their overlap.
      ptx::wgmma_wait<0>();
      if (is_signaller) {
        ptx::mbarrier_arrive(smem.empty + 8 * cursor.stage);
      }
    }
    ptx::wgmma_hold(sums);
    epilogue.finish(sums, tile, tile + work.stride >= args.num_tiles);
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                  const __grid_constant__ CUtensorMap row_map,
                  const __grid_constant__ LinearArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const LinearSmem smem(raw, args);
  // The copying warp is the last one.
  const bool is_producer = threadIdx.x + 32 >= blockDim.x;
  if (is_producer && ptx::elect_one()) {
    ptx::tma_prefetch_map(&weight_map);
    ptx::tma_prefetch_map(&row_map);
    for (int32_t stage = 0; stage < args.stages; ++stage) {
      ptx::mbarrier_init(smem.full + 8 * stage, 1);
      ptx::mbarrier_init(smem.empty + 8 * stage, blockDim.x / 128);
      ptx::mbarrier_init(smem.landed + 8 * stage, 1);
    }
    if (args.splits > 1) {
      ptx::mbarrier_init(smem.partials_full, 1);
      ptx::mbarrier_init(smem.partials_empty, static_cast<uint32_t>(args.warps));
    }
    ptx::mbarrier_init(smem.released, 1);
    ptx::mbarrier_init_fence();
    if (args.splits > 1) {
      ptx::mbarrier_arrive_expect(smem.partials_full, static_cast<uint32_t>(args.partial_bytes));
    }
  }
  __syncthreads();
  pdl_launch_dependents();
  if (args.splits > 1) {
    ptx::cluster_arrive_relaxed();
  }
  LinearProducer<Traits> producer(args, smem, &weight_map, &row_map);
  if (is_producer) {
    const bool is_chosen = ptx::elect_one();
    if (is_chosen) {
      producer.start();
    }
    __syncwarp();
    pdl_wait();
    if (is_chosen) {
      producer.run();
    }
    __syncwarp();
  } else {
    // Results may overwrite what kernels in front still read.
    pdl_wait();
    if (threadIdx.x < 32) {
      if (ptx::elect_one()) {
        producer.release();
      }
      __syncwarp();
    }
  }
  if (args.splits > 1) {
    ptx::cluster_wait();  // the barriers of the other one are ready
  }
  if (!is_producer) {
    consume<Traits>(args, smem);
  }
}

}  // namespace diffulex::cuda::sm90
