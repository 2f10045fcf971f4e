// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the products for few rows, and that of many rows of codes, share: a ring of stages that a
// copying warp fills, ahead of the kernels in front where it can.
//
// A wait sees only the parity of a round: a round and the second one before it look alike. So a
// reader must know that the previous round has landed before it waits for the next.

#include <cstdint>

#include <cuda.h>

#include "ops/linear/sm90/args.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"

namespace diffulex::cuda::sm90 {

/// Position in the ring of stages.
struct RingCursor {
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
struct RingSmem final {
  uint32_t stages;
  uint32_t partials;
  uint32_t extra;  // sums of phases, then scales: the kernel's own
  uint32_t full;
  uint32_t empty;
  uint32_t landed;  // a barrier for the first W of each stage
  uint32_t partials_full;
  uint32_t partials_empty;
  uint32_t released;  // a barrier: the kernels in front have ended

  __device__ __forceinline__ RingSmem(const uint8_t* raw, const LinearArgs& args,
                                      int32_t extra_bytes) {
    stages = ptx::smem_address(raw);
    partials = stages + args.stages * args.stage_bytes;
    extra = partials + args.partial_bytes;
    full = extra + extra_bytes;
    empty = full + 8 * args.stages;
    landed = empty + 8 * args.stages;
    partials_full = landed + 8 * args.stages;
    partials_empty = partials_full + 8;
    released = partials_empty + 8;
  }
};

/// What this CTA does; its share of the depth is set by what derives from this.
struct RingWork {
  int32_t bits;    // log2 of the shares of the depth
  int32_t tile;    // first one
  int32_t stride;  // to the next one
  int32_t split;
  int32_t begin;  // of its share of the depth
  int32_t count;  // steps
  int32_t early;  // of them, those whose W comes while the kernels in front run

  __device__ __forceinline__ explicit RingWork(const LinearArgs& args) {
    bits = args.splits - 1;
    const auto block = static_cast<int32_t>(blockIdx.x);
    tile = block >> bits;
    stride = static_cast<int32_t>(gridDim.x) >> bits;
    split = block & bits;
  }

  __device__ __forceinline__ void set_share(int32_t first, int32_t steps, int32_t stages) {
    begin = first;
    count = steps;
    early = steps < stages ? steps : stages;
  }
};

/// A consumer's place in the ring.
struct RingReader final : RingCursor {
  int32_t early;  // stages from here on whose W has a barrier of its own

  __device__ __forceinline__ explicit RingReader(const RingWork& work) : early(work.early) {}
  /// Waits for the stage.
  __device__ __forceinline__ void wait(const RingSmem& smem) {
    if (early > 0) {
      --early;
      ptx::mbarrier_wait(smem.landed + 8 * stage, 0);
    }
    ptx::mbarrier_wait(smem.full + 8 * stage, parity);
  }
};

/// Shares of the depth are whole steps.
struct SteppedWork : RingWork {
  __device__ __forceinline__ explicit SteppedWork(const LinearArgs& args) : RingWork(args) {
    const int32_t first = (args.num_steps * split) >> bits;
    set_share(first, ((args.num_steps * (split + 1)) >> bits) - first, args.stages);
  }
};

/// What the copies of all kernels know.
template <typename Args, typename Work>
class RingCopies {
 protected:
  __device__ __forceinline__ RingCopies(const Args& args, const RingSmem& smem,
                                        const CUtensorMap* weight_map, const CUtensorMap* row_map)
      : args_(args), smem_(smem), weight_map_(weight_map), row_map_(row_map), work_(args) {}

  const Args& args_;
  const RingSmem& smem_;
  const CUtensorMap* weight_map_;
  const CUtensorMap* row_map_;
  const Work work_;
};

/// Starts the copies of a CTA: W and later rows by one thread, the first rows by another. `Copies`
/// knows what they are:
///
///   num_readers(args)                           arrivals before a stage is filled again
///   num_tiles()                                 of all CTAs
///   place_of(tile)                              where a tile lies, found once for its stages
///   weight_bytes(place), row_bytes(place)       of a stage; stage_bytes(place): both
///   load_weights(stage, place, step, barrier)   and load_rows: start them
template <typename Copies>
class RingProducer final : public Copies {
 public:
  using Copies::Copies;

  /// Weights, which nothing in front writes (ExecContext::weights_settled), fill the stages. Until
  /// the kernels in front have ended few are on their way at a time.
  __device__ __forceinline__ void start() {
    const auto place = this->place_of(work_.tile);
    for (int32_t step = 0; step < work_.early; ++step) {
      if (step >= args_.paced_stages) {
        const uint32_t landed = smem_.landed + 8 * (step - args_.paced_stages);
        while (!ptx::mbarrier_test(smem_.released, 0) && !ptx::mbarrier_test(landed, 0)) {
        }
      }
      const uint32_t landed = smem_.landed + 8 * step;
      ptx::mbarrier_arrive_expect(landed, static_cast<uint32_t>(this->weight_bytes(place)));
      this->load_weights(step, place, step, landed);
    }
  }

  /// The rows that belong to these weights, once the kernels in front have ended.
  __device__ __forceinline__ void release() {
    ptx::mbarrier_arrive(smem_.released);
    const auto place = this->place_of(work_.tile);
    const auto bytes = static_cast<uint32_t>(this->row_bytes(place));
    for (int32_t step = 0; step < work_.early; ++step) {
      const uint32_t full = smem_.full + 8 * step;
      ptx::mbarrier_arrive_expect(full, bytes);
      this->load_rows(step, place, step, full);
    }
  }

  /// All that follows.
  __device__ __forceinline__ void run() {
    RingCursor cursor;
    for (int32_t step = 0; step < work_.early; ++step) {
      cursor.advance(args_.stages);
    }
    int32_t first = work_.early;
    for (int32_t tile = work_.tile; tile < this->num_tiles(); tile += work_.stride) {
      const auto place = this->place_of(tile);
      for (int32_t step = first; step < work_.count; ++step, cursor.advance(args_.stages)) {
        const uint32_t full = smem_.full + 8 * cursor.stage;
        ptx::mbarrier_wait(smem_.empty + 8 * cursor.stage, cursor.parity ^ 1);
        ptx::mbarrier_arrive_expect(full, static_cast<uint32_t>(this->stage_bytes(place)));
        this->load_weights(cursor.stage, place, step, full);
        this->load_rows(cursor.stage, place, step, full);
      }
      first = 0;
    }
  }

 private:
  using Copies::args_;
  using Copies::smem_;
  using Copies::work_;
};

/// The barriers, made by the warp that `is_producer`. All threads.
template <typename Copies, typename Args>
__device__ __forceinline__ void begin_ring(const Args& args, const RingSmem& smem,
                                           const CUtensorMap* weight_map,
                                           const CUtensorMap* row_map, bool is_producer) {
  if (is_producer && ptx::elect_one()) {
    ptx::tma_prefetch_map(weight_map);
    ptx::tma_prefetch_map(row_map);
    for (int32_t stage = 0; stage < args.stages; ++stage) {
      ptx::mbarrier_init(smem.full + 8 * stage, 1);
      ptx::mbarrier_init(smem.empty + 8 * stage, Copies::num_readers(args));
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
}

/// All copies, by the copying warp.
template <typename Copies>
__device__ __forceinline__ void produce(RingProducer<Copies>& producer) {
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
}

/// What the other warps do first: results may overwrite what kernels in front still read.
template <typename Copies>
__device__ __forceinline__ void await_kernels(RingProducer<Copies>& producer) {
  pdl_wait();
  if (threadIdx.x < 32) {
    if (ptx::elect_one()) {
      producer.release();
    }
    __syncwarp();
  }
}

/// A kernel: the ring, its copying warp, which is the last one, and `consume()`, of the others.
template <typename Copies, typename Args, typename Consume>
__device__ __forceinline__ void run_ring(const Args& args, const RingSmem& smem,
                                         const CUtensorMap* weight_map, const CUtensorMap* row_map,
                                         Consume&& consume) {
  const bool is_producer = threadIdx.x + 32 >= blockDim.x;
  begin_ring<Copies>(args, smem, weight_map, row_map, is_producer);
  RingProducer<Copies> producer(args, smem, weight_map, row_map);
  if (is_producer) {
    produce(producer);
  } else {
    await_kernels(producer);
  }
  if (args.splits > 1) {
    ptx::cluster_wait();  // the barriers of the other one are ready
  }
  if (!is_producer) {
    consume();
  }
}

}  // namespace diffulex::cuda::sm90
