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

/// What most shapes have in common: rows and weights of 16 bits, no clusters.
struct MoeTileShape {
  static constexpr MoeOperands kOperands = MoeOperands::kHalves;
  static constexpr int kCtas = 1;       // of a cluster
  static constexpr int kConsumers = 2;  // warpgroups of kBlocks blocks of 64 weight rows
  static constexpr int kCtasPerSm = 1;
  static constexpr int kDepth = 64;      // elements of a stage
  static constexpr int kRowBytes = 128;  // of a line of a row
  static constexpr int kLines = 1;       // of a row in a stage
  static constexpr int kScaleBytes = 0;  // of a stage
  /// Whether a warp owns weight rows that lie together (see MoePairShape) and writes its results
  /// through little shared memory.
  static constexpr bool kWarpsWrite = false;
  static constexpr int kWarpStagedBytes = 0;
};

/// What follows from a shape: how its CTAs use shared memory.
template <typename Shape>
struct MoeLayout : Shape {
  static constexpr int kThreads = 128 * (1 + Shape::kConsumers);
  /// Registers of a thread differ by role; together at most what the kernel started with.
  static constexpr bool kMovesRegisters = Shape::kCtasPerSm == 1;
  static constexpr int kStageBytes =
      Shape::kWeightBytes + Shape::kColumns * Shape::kLines * Shape::kRowBytes;
  /// Results of a tile per position.
  static constexpr int kOutColumns = Shape::kGateUp ? Shape::kWeightRows / 2 : Shape::kWeightRows;
  static constexpr int kGroupColumns = kOutColumns / Shape::kConsumers;
  /// Results of a warpgroup on their way out, kStagedRows positions at a time, or of its warps.
  static constexpr int kStagedBytes =
      Shape::kWarpsWrite ? 4 * Shape::kWarpStagedBytes : Shape::kStagedRows * kGroupColumns * 2;
  static constexpr int kAlignment = 1024;  // of the swizzle pattern
  static constexpr int kSmemLimit = Shape::kCtasPerSm == 1 ? 227 * 1024 : 113 * 1024;
  static constexpr int kTilesAhead = 32;
  /// Per consumer: where a position goes, its factor, and the next tiles; then sources of
  /// positions.
  static constexpr int kPositionBytes =
      Shape::kStagedRows > 0 && !Shape::kWarpsWrite ? Shape::kConsumers * Shape::kColumns * 12 : 0;
  static constexpr int kTableBytes = kPositionBytes + Shape::kConsumers * kTilesAhead * 12 +
                                     (Shape::kCtas == 1 ? Shape::kColumns * 4 : 0);
  static constexpr int kBarrierBytes = 256;
  /// Whether the CTAs may sort the slots themselves.
  static constexpr bool kSorts = Shape::kCtas == 1 && Shape::kColumns <= kMoeMaxSortingTile;
  static constexpr int kSortedBytes = kSorts ? static_cast<int>(sizeof(SortedSlots)) : 0;
  static constexpr int kFixedBytes =
      kAlignment + Shape::kConsumers * kStagedBytes + kTableBytes + kBarrierBytes + kSortedBytes;
  static constexpr int kStages = (kSmemLimit - kFixedBytes) / (kStageBytes + Shape::kScaleBytes);
  static constexpr int kSmemBytes = kFixedBytes + kStages * (kStageBytes + Shape::kScaleBytes);
  static_assert(Shape::kProducerRegisters + Shape::kConsumers * Shape::kConsumerRegisters <=
                    65536 / kThreads / 8 * 8 * (1 + Shape::kConsumers),
                "more would be waited for in vain");
  static_assert(!kSorts || sizeof(SortScratch) <= size_t{kStages} * kStageBytes,
                "the sort works where the stages will be");
  static_assert(kTableBytes % 16 == 0, "what lies behind is aligned");
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes, "stages to hide the memory");
};

template <typename T, int kColumnCount, bool kIsGateUp>
struct MoeHalfShape : MoeTileShape {
  static_assert(sizeof(T) == 2, "the line of a row is 64 elements of 16 bits");
  using Element = T;
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr int kColumns = kColumnCount;  // positions of a tile
  /// Blocks of 64 weight rows of a consumer. Two halve how often the positions' rows are read; the
  /// largest tile has no registers for them, and the smallest want many items.
  static constexpr int kBlocks = kColumns >= 64 && kColumns <= 128 ? 2 : 1;
  /// Where that buys a stage.
  static constexpr bool kWarpsWrite = kColumns == 96;
  static constexpr int kWeightRows = 128 * kBlocks;
  static constexpr int kCtasPerSm = kColumns <= 32 ? 2 : 1;
  /// Next narrower width of the products of a tile that is not full, in groups of 8 columns; 0 =
  /// there is none. Small tiles wait for the memory whatever they multiply.
  static constexpr int narrower_groups(int groups) { return kColumns <= 64 ? 0 : groups - 4; }
  /// Rows of larger tiles are brought together before the product.
  static constexpr bool kGathers = kGateUp && kColumns <= kMoeMaxGatherTile;
  /// Rows one copy brings when the rows lie together.
  static constexpr int kBoxRows = kColumns <= 96 ? 16 : 32;
  static constexpr int kProducerRegisters = kGathers ? 56 : 40;
  static constexpr int kConsumerRegisters = kGathers ? 224 : 232;
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kMaxStagedRows = 64 / kBlocks;
  static constexpr int kStagedRows = kColumns < kMaxStagedRows ? kColumns : kMaxStagedRows;
  static constexpr int kWarpStagedBytes = 512;
};
template <typename T, int kColumnCount, bool kIsGateUp>
struct MoeTraits : MoeLayout<MoeHalfShape<T, kColumnCount, kIsGateUp>> {};

/// The shapes for many positions of an expert. The two CTAs of a cluster share a tile of the list:
/// the same 256 weight rows, half of which each brings for both, times half of the positions each.
/// A warp owns 32 weight rows that lie together (gate-up: 16 of each kind), so that its results
/// need no exchange with other warps.
template <typename T, bool kIsGateUp>
struct MoePairShape : MoeTileShape {
  using Element = T;
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr int kCtas = 2;
  static constexpr int kColumns = kMoePairTile / kCtas;  // most positions of a CTA
  static constexpr int kBlocks = 2;
  static constexpr bool kWarpsWrite = true;
  static constexpr int kWeightRows = 256;
  static constexpr int narrower_groups(int groups) { return groups > 12 ? groups - 2 : groups - 4; }
  static constexpr bool kGathers = false;
  static constexpr int kBoxRows = 16;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kStagedRows = 0;
  /// Of a warp: buffers of 32 pieces of 16 bytes.
  static constexpr int kWarpStagedBytes = 2048;
};
template <typename T, bool kIsGateUp>
struct MoePairTraits : MoeLayout<MoePairShape<T, kIsGateUp>> {};

}  // namespace diffulex::cuda::sm90
