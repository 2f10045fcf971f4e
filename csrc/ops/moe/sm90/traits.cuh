// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the Hopper expert products. A CTA computes 128 or 256 weight rows (the M of the
// warpgroup product) times kColumns positions of one expert (its N): a stage of the pipeline holds
// 64 columns of both operands. The weight rows of a gate-up tile alternate in groups of eight, gate
// and up, so that a thread holds both sums of a result. Small tiles wait for the memory: two CTAs
// share a multiprocessor, so that one streams while the other starts or ends.

#include <cstdint>

#include "ops/moe/config.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/sm90/sort_slots.cuh"

namespace diffulex::cuda::sm90 {

template <typename T, int kColumnCount, bool kIsGateUp>
struct MoeTraits {
  using Element = T;
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr bool kIsScaled = false;       // see scaled_traits.cuh
  static constexpr int kCtas = 1;                // of a cluster
  static constexpr int kColumns = kColumnCount;  // positions of a tile
  /// Blocks of 64 weight rows of a consumer. Two halve how often the positions' rows are read; the
  /// largest tile has no registers for them, and the smallest want many items.
  static constexpr int kBlocks = kColumns >= 64 && kColumns <= 128 ? 2 : 1;
  /// Whether a warp owns weight rows that lie together (see MoePairTraits) and writes its results
  /// through little shared memory, where that buys a stage.
  static constexpr bool kWarpsWrite = kColumns == 96;
  static constexpr int kWeightRows = 128 * kBlocks;
  static constexpr int kCtasPerSm = kColumns <= 32 ? 2 : 1;
  /// Next narrower width of the products of a tile that is not full, in groups of 8 columns; 0 =
  /// there is none. Small tiles wait for the memory whatever they multiply.
  static constexpr int narrower_groups(int groups) { return kColumns <= 64 ? 0 : groups - 4; }
  /// Results of a tile per position.
  static constexpr int kOutColumns = kGateUp ? kWeightRows / 2 : kWeightRows;
  static constexpr int kDepth = 64;  // elements of a stage
  static constexpr int kRowBytes = kDepth * 2;

  static constexpr int kConsumers = 2;  // warpgroups of kBlocks blocks
  static constexpr int kThreads = 128 * (1 + kConsumers);
  /// Rows of larger tiles are brought together before the product.
  static constexpr bool kGathers = kGateUp && kColumns <= kMoeMaxGatherTile;
  /// Rows one copy brings when the rows lie together.
  static constexpr int kBoxRows = kColumns <= 96 ? 16 : 32;

  /// Registers of a thread once the roles differ; together at most what the kernel started with.
  static constexpr bool kMovesRegisters = kCtasPerSm == 1;
  static constexpr int kProducerRegisters = kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = kGathers ? 224 : 232;

  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kColumns * kRowBytes;
  static constexpr int kScaleBytes = 0;  // of a stage
  /// Results of a warpgroup on their way out, some positions at a time.
  static constexpr int kGroupColumns = kOutColumns / kConsumers;
  static constexpr int kMaxStagedRows = 64 / kBlocks;
  static constexpr int kStagedRows = kColumns < kMaxStagedRows ? kColumns : kMaxStagedRows;
  static constexpr int kWarpStagedBytes = 512;
  static constexpr int kStagedBytes =
      kWarpsWrite ? 4 * kWarpStagedBytes : kStagedRows * kGroupColumns * 2;

  static constexpr int kAlignment = 1024;  // of the swizzle pattern
  static constexpr int kSmemLimit = kCtasPerSm == 1 ? 227 * 1024 : 113 * 1024;
  /// Per consumer: where a position goes, its factor, and the next tiles.
  static constexpr int kTilesAhead = 32;
  static constexpr int kPositionBytes = kWarpsWrite ? 0 : kConsumers * kColumns * 12;
  static constexpr int kTableBytes = kPositionBytes + kConsumers * kTilesAhead * 12 + kColumns * 4;
  static constexpr int kBarrierBytes = 256;
  /// Whether the CTAs may sort the slots themselves.
  static constexpr bool kSorts = kColumns <= kMoeMaxSortingTile;
  static constexpr int kSortedBytes = kSorts ? static_cast<int>(sizeof(SortedSlots)) : 0;
  static constexpr int kFixedBytes =
      kAlignment + kConsumers * kStagedBytes + kTableBytes + kBarrierBytes + kSortedBytes;
  static constexpr int kStages = (kSmemLimit - kFixedBytes) / kStageBytes;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    65536 / kThreads / 8 * 8 * 3,
                "more would be waited for in vain");
  static_assert(!kSorts || sizeof(SortScratch) <= size_t{kStages} * kStageBytes,
                "the sort works where the stages will be");
  static_assert(kTableBytes % 16 == 0, "what lies behind is aligned");
  static_assert(sizeof(T) == 2, "the line of a row is 64 elements of 16 bits");
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes, "stages to hide the memory");
};

/// The shapes for many positions of an expert. The two CTAs of a cluster share a tile of the list:
/// the same 256 weight rows, half of which each brings for both, times half of the positions each.
/// A warp owns 32 weight rows that lie together (gate-up: 16 of each kind), so that its results
/// need no exchange with other warps.
template <typename T, bool kIsGateUp>
struct MoePairTraits {
  using Element = T;
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr bool kIsScaled = false;
  static constexpr int kCtas = 2;
  static constexpr int kColumns = kMoePairTile / kCtas;  // most positions of a CTA
  static constexpr int kBlocks = 2;
  static constexpr bool kWarpsWrite = true;
  static constexpr int kWeightRows = 256;
  static constexpr int kCtasPerSm = 1;
  static constexpr int narrower_groups(int groups) { return groups > 12 ? groups - 2 : groups - 4; }
  static constexpr int kOutColumns = kGateUp ? kWeightRows / 2 : kWeightRows;
  static constexpr int kDepth = 64;
  static constexpr int kRowBytes = kDepth * 2;

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr bool kGathers = false;
  static constexpr int kBoxRows = 16;

  static constexpr bool kMovesRegisters = true;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kColumns * kRowBytes;
  static constexpr int kScaleBytes = 0;  // of a stage
  static constexpr int kGroupColumns = kOutColumns / kConsumers;
  /// Of a warp: buffers of 32 pieces of 16 bytes.
  static constexpr int kWarpStagedBytes = 2048;
  static constexpr int kStagedBytes = 4 * kWarpStagedBytes;

  static constexpr int kAlignment = 1024;
  static constexpr int kSmemLimit = 227 * 1024;
  static constexpr int kTilesAhead = 32;
  static constexpr int kPositionBytes = 0;
  static constexpr int kTableBytes = kConsumers * kTilesAhead * 12;
  static constexpr int kBarrierBytes = 256;
  static constexpr bool kSorts = false;
  static constexpr int kFixedBytes =
      kAlignment + kConsumers * kStagedBytes + kTableBytes + kBarrierBytes;
  static constexpr int kStages = (kSmemLimit - kFixedBytes) / kStageBytes;
  static constexpr int kSmemBytes = kFixedBytes + kStages * kStageBytes;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    65536 / kThreads / 8 * 8 * 3,
                "more would be waited for in vain");
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes, "stages to hide the memory");
};

}  // namespace diffulex::cuda::sm90
