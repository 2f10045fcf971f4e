// SPDX-License-Identifier: Apache-2.0
#pragma once

// How a warpgroup adds up the products of some stages of a weight of 4 bits.

#include <cstdint>

#include "ops/quant/sm90/nibble_traits.cuh"
#include "ops/shared/cuda/wgmma.cuh"

namespace diffulex::cuda::sm90 {

/// Starts the products of a piece; `rows`: x of the first stage, in lines of kLineRows rows.
template <typename Traits, int kLineRows>
__device__ __forceinline__ void multiply_piece(uint64_t rows, uint32_t offset, int32_t piece,
                                               uint32_t (&fragments)[Traits::kPieceSteps][4],
                                               float (&sums)[Traits::kGroups][4]) {
  constexpr uint32_t kUnit = 16;       // bytes that descriptors count
  constexpr uint32_t kStepBytes = 32;  // of a line of x
  const uint32_t first = piece * Traits::kPieceSteps * kStepBytes;
  const uint32_t line = first / Traits::kLineBytes * kLineRows * Traits::kLineBytes;
  const uint64_t of_line = ptx::move_descriptor(rows, (offset + line) / kUnit);
  ptx::wgmma_fence();
#pragma unroll
  for (int32_t step = 0; step < Traits::kPieceSteps; ++step) {
    const uint32_t units = (first % Traits::kLineBytes + step * kStepBytes) / kUnit;
    ptx::wgmma_rs<typename Traits::T>(sums, fragments[step], ptx::move_descriptor(of_line, units),
                                      true);
  }
  ptx::wgmma_commit();
}

/// Adds the products of the next kCount stages. The left operand of a piece is made while the
/// products of the piece before run. None is on its way before or after: where an accumulator is in
/// use across the end of a loop, the compiler waits for every product. A phase holds kCount stages
/// at a time; a ring has at least as many for each (NibblePlan).
template <int kCount, typename Traits, typename Feed>
__device__ __forceinline__ void add_stages(Feed& feed,
                                           uint32_t (&fragments)[2][Traits::kPieceSteps][4],
                                           float (&sums)[Traits::kGroups][4]) {
  constexpr int32_t kPieces = Traits::kPieces;
  int32_t stages[kCount];
  ptx::wgmma_hold(sums);
#pragma unroll
  for (int32_t piece = 0; piece < kCount * kPieces; ++piece) {
    if (piece % kPieces == 0) {
      stages[piece / kPieces] = feed.begin();
    }
    if (piece > 1) {
      ptx::wgmma_wait<1>();
    }
    if (piece == kPieces + 1) {
      feed.release(stages[0]);
    }
    feed.start(stages[piece / kPieces], piece % kPieces, fragments[piece % 2], sums);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_hold(sums);
  feed.release(stages[kCount - 1]);
}

}  // namespace diffulex::cuda::sm90
