// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the Hopper expert products of e4m3 codes: as MoeTraits, with 128 columns in a stage,
// the line of one scale of a row. Sums exist twice, those of the line and those in float32, so
// there are fewer positions in the largest tile.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/moe/config.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/sm90/sort_slots.cuh"

namespace diffulex::cuda::sm90 {

template <int kColumnCount, bool kIsGateUp>
struct MoeScaledTraits {
  using Element = __nv_bfloat16;  // of the result of the down product; the other's is float
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr bool kIsScaled = true;
  static constexpr int kCtas = 1;
  static constexpr int kColumns = kColumnCount;  // positions of a tile
  static constexpr int kBlocks = kColumns == 64 ? 2 : 1;
  static constexpr bool kWarpsWrite = false;
  static constexpr int kWeightRows = 128 * kBlocks;
  static constexpr int kCtasPerSm = kColumns <= 32 ? 2 : 1;
  static constexpr int narrower_groups(int groups) { return kColumns <= 64 ? 0 : groups - 4; }
  static constexpr int kOutColumns = kGateUp ? kWeightRows / 2 : kWeightRows;
  static constexpr int kDepth = 128;  // codes of a stage
  static constexpr int kRowBytes = kDepth;

  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr bool kGathers = kGateUp;
  static constexpr int kBoxRows = kColumns <= 96 ? 16 : 32;

  static constexpr bool kMovesRegisters = kCtasPerSm == 1;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;

  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kColumns * kRowBytes;
  static constexpr int kScaleBytes = kColumns * 4;  // of a stage
  static constexpr int kGroupColumns = kOutColumns / kConsumers;
  static constexpr int kMaxStagedRows = 64 / kBlocks;
  static constexpr int kStagedRows = kColumns < kMaxStagedRows ? kColumns : kMaxStagedRows;
  static constexpr int kStagedBytes = kGateUp ? 0 : kStagedRows * kGroupColumns * 2;

  static constexpr int kAlignment = 1024;  // of the swizzle pattern
  static constexpr int kSmemLimit = kCtasPerSm == 1 ? 227 * 1024 : 113 * 1024;
  static constexpr int kTilesAhead = 32;
  static constexpr int kPositionBytes = kGateUp ? 0 : kConsumers * kColumns * 12;
  static constexpr int kTableBytes = kPositionBytes + kConsumers * kTilesAhead * 12 + kColumns * 4;
  static constexpr int kBarrierBytes = 256;
  static constexpr bool kSorts = kColumns <= kMoeMaxSortingTile;
  static constexpr int kSortedBytes = kSorts ? static_cast<int>(sizeof(SortedSlots)) : 0;
  static constexpr int kFixedBytes =
      kAlignment + kConsumers * kStagedBytes + kTableBytes + kBarrierBytes + kSortedBytes;
  static constexpr int kStages = (kSmemLimit - kFixedBytes) / (kStageBytes + kScaleBytes);
  static constexpr int kSmemBytes = kFixedBytes + kStages * (kStageBytes + kScaleBytes);
  static_assert(kColumns <= kMoeMaxScaledTile, "the registers hold no more sums");
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                    65536 / kThreads / 8 * 8 * 3,
                "more would be waited for in vain");
  static_assert(!kSorts || sizeof(SortScratch) <= size_t{kStages} * kStageBytes,
                "the sort works where the stages will be");
  static_assert(kTableBytes % 16 == 0, "what lies behind is aligned");
  static_assert(kStages >= 4 && kStages * 16 <= kBarrierBytes, "stages to hide the memory");
};

}  // namespace diffulex::cuda::sm90
