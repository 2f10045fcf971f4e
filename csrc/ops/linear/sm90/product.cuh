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

#include "diffulex/ops/linear.h"
#include "ops/linear/sm90/epilogue.cuh"
#include "ops/linear/sm90/ring.cuh"
#include "ops/linear/sm90/traits.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/tma.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// The copies of a stage: lines of W and of x.
template <typename Traits>
class LinearCopies : public RingCopies<LinearArgs, SteppedWork> {
 public:
  __device__ __forceinline__ LinearCopies(const LinearArgs& args, const RingSmem& smem,
                                          const CUtensorMap* weight_map, const CUtensorMap* row_map)
      : RingCopies(args, smem, weight_map, row_map), policy_(ptx::policy_evict_first()) {}

  /// Warpgroups.
  static __device__ __forceinline__ uint32_t num_readers(const LinearArgs& /*args*/) {
    return blockDim.x / 128;
  }
  __device__ __forceinline__ int32_t num_tiles() const { return args_.num_tiles; }
  static __device__ __forceinline__ int32_t place_of(int32_t tile) { return tile; }
  __device__ __forceinline__ int32_t weight_bytes(int32_t /*tile*/) const {
    return args_.lines * args_.tile_rows * Traits::kLineBytes;
  }
  __device__ __forceinline__ int32_t row_bytes(int32_t /*tile*/) const { return args_.row_bytes; }
  __device__ __forceinline__ int32_t stage_bytes(int32_t tile) const {
    return weight_bytes(tile) + row_bytes(tile);
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
  __device__ __forceinline__ void load_rows(int32_t stage, int32_t tile, int32_t step,
                                            uint32_t barrier) {
    uint32_t target = smem_.stages + stage * args_.stage_bytes + weight_bytes(tile);
    for (int32_t line = 0; line < args_.lines; ++line) {
      ptx::tma_load(target, row_map_, barrier, depth_of(step, line), 0);
      target += Traits::kRows * Traits::kLineBytes;
    }
  }

 private:
  __device__ __forceinline__ int32_t depth_of(int32_t step, int32_t line) const {
    return ((work_.begin + step) * args_.lines + line) * static_cast<int32_t>(kFewRowsDepth);
  }

  const uint64_t policy_;
};

/// 64 elements of depth: 64 rows of W times the rows of x, of which these are the descriptors.
template <typename T, int kGroups>
__device__ __forceinline__ void issue_line(float (&sums)[kGroups][4], uint64_t weights,
                                           uint64_t rows, bool accumulate) {
#pragma unroll
  for (int32_t k = 0; k < 4; ++k) {
    // A step of 16 elements is 32 bytes; descriptors count 16.
    ptx::wgmma_ss<T>(sums, ptx::move_descriptor(weights, 2 * k), ptx::move_descriptor(rows, 2 * k),
                     accumulate || k > 0);
  }
}

template <typename Traits>
__device__ __forceinline__ void consume(const LinearArgs& args, const RingSmem& smem) {
  const SteppedWork work(args);
  const int32_t group = ptx::uniform(threadIdx.x / 128);
  const bool is_signaller = threadIdx.x % 128 == 0;
  const uint32_t weight_bytes = args.tile_rows * Traits::kLineBytes;
  const uint64_t first_weights =
      ptx::swizzle128_descriptor(smem.stages + group * 64 * Traits::kLineBytes, 0, 1024);
  const uint64_t first_rows =
      ptx::swizzle128_descriptor(smem.stages + args.lines * weight_bytes, 0, 1024);
  LinearEpilogue<Traits> epilogue(args, smem.partials, smem.partials_full, smem.partials_empty,
                                  work.split);
  RingReader place(work);
  float sums[Traits::kGroups][4];
  for (int32_t tile = work.tile; tile < args.num_tiles; tile += work.stride) {
    for (int32_t step = 0; step < work.count; ++step, place.advance(args.stages)) {
      place.wait(smem);
      const uint32_t offset = ptx::uniform(place.stage) * args.stage_bytes / 16;
      const uint64_t weights = ptx::move_descriptor(first_weights, offset);
      const uint64_t rows = ptx::move_descriptor(first_rows, offset);
      ptx::wgmma_hold(sums);
      ptx::wgmma_fence();
      issue_line<typename Traits::T>(sums, weights, rows, step > 0);
      if (args.lines > 1) {
        issue_line<typename Traits::T>(
            sums, ptx::move_descriptor(weights, weight_bytes / 16),
            ptx::move_descriptor(rows, Traits::kRows * Traits::kLineBytes / 16), true);
      }
      ptx::wgmma_commit();
      // The products are short: the stage is worth more than their overlap.
      ptx::wgmma_wait<0>();
      if (is_signaller) {
        ptx::mbarrier_arrive(smem.empty + 8 * place.stage);
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
  const RingSmem smem(raw, args, 0);
  run_ring<LinearCopies<Traits>>(args, smem, &weight_map, &row_map,
                                 [&] { consume<Traits>(args, smem); });
}

}  // namespace diffulex::cuda::sm90
