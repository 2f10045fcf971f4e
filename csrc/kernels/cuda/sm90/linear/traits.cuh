// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the dense product for few rows. A CTA computes 128 rows of W (the M of the warpgroup
// product, columns of the result) times kRows rows of x (its N) over a share of the depth; a stage
// of the pipeline holds 64 elements of depth of both operands.

#include <cstdint>

namespace diffulex::cuda::sm90 {

template <typename Element, int kRowCount>
struct LinearTraits final {
  using T = Element;
  static constexpr int kRows = kRowCount;  // of x
  static constexpr int kWeightRows = 128;  // of W
  static constexpr int kDepth = 64;        // elements of a stage
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kGroups = kRows / 8;  // accumulators of a thread, four floats each

  static constexpr int kConsumerWarps = 8;  // two warpgroups of 64 rows of W
  static constexpr int kConsumers = 32 * kConsumerWarps;
  /// Many sums want registers that the copying warpgroup gives away; one warp copies otherwise.
  static constexpr bool kMovesRegisters = kRows > 128;
  static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : 32);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kRows * kRowBytes;

  /// Up to here a step of depth takes less time to multiply than to read.
  static constexpr bool kWaitsForMemory = kRows <= 64;

  /// Shares of the depth a cluster may have.
  static constexpr int kMaxSplits = 4;
  /// Partial sums meet in pieces of so many accumulator groups; a unit is one group of one warp. A
  /// CTA owns a piece's share and gets it from the others.
  static constexpr int kPieceLimit = kWaitsForMemory ? 4 : 8;
  static constexpr int kPieceGroups = kGroups < kPieceLimit ? kGroups : kPieceLimit;
  static constexpr int kPieces = kGroups / kPieceGroups;
  static constexpr int kUnitBytes = 32 * 16;
  static constexpr int kPartialBytes =
      kPieceGroups * kConsumerWarps * kUnitBytes / kMaxSplits * (kMaxSplits - 1);

  /// Two CTAs on a multiprocessor while the memory is the limit: the one behind loads its first
  /// weights while the one in front ends.
  static constexpr int kCtas = kWaitsForMemory ? 2 : 1;
  static constexpr int kSmemLimit = 228 * 1024 / kCtas - 1024;
  static constexpr int kBarrierBytes = 256;
  static constexpr int kFixedBytes = kPartialBytes + kBarrierBytes;
  static constexpr int kStages = (kSmemLimit - kFixedBytes) / kStageBytes;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(sizeof(T) == 2, "a line is 64 elements of 16 bits");
  static_assert(kPieceGroups * kConsumerWarps % kMaxSplits == 0, "every share owns as much");
  static_assert((2 * kStages + 2) * 8 <= kBarrierBytes, "two barriers a stage");
  static_assert(kStages >= 2, "a stage is filled while another is read");
};

}  // namespace diffulex::cuda::sm90
