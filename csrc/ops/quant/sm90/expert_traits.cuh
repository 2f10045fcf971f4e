// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the Hopper expert products of weights of 4 bits in tiles: as MoeTraits, with 128
// columns in a stage, nibbles and the scales of their groups beside two lines of the rows. Nibbles
// become values in the registers of four consumers. Tiles of the list have one height, whatever
// their positions: the products of one have the width that it needs.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/moe/config.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/sm90/traits.cuh"
#include "ops/quant/nibble_plan.h"

namespace diffulex::cuda::sm90 {

template <int kScaleCount, bool kIsGateUp>
struct MoeTiledShape : MoeTileShape {
  using Element = __nv_bfloat16;  // of the rows and of the result
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr MoeOperands kOperands = MoeOperands::kNibbles;
  static constexpr int kScaleRows = kScaleCount;  // of a stage: 128 / group
  static constexpr int kColumns = kMoeTiledTile;  // positions of a tile
  static constexpr int kConsumers = 4;
  static constexpr int kBlocks = 1;
  static constexpr int kWeightRows = 64 * kConsumers;
  static constexpr int narrower_groups(int groups) { return groups / 2; }
  static constexpr int kDepth = kNibbleStageDepth;
  static constexpr int kLines = 2;
  static constexpr bool kGathers = kGateUp;
  static constexpr int kBoxRows = 16;
  /// Threads that gather want more registers; with one scale a stage, which is read with all its
  /// nibbles, those that multiply do.
  static constexpr bool kReadsMost = !kGathers && kScaleRows == 1;
  static constexpr int kProducerRegisters = kReadsMost ? 32 : 56;
  static constexpr int kConsumerRegisters = kReadsMost ? 112 : 104;
  static constexpr int kWeightBytes = kWeightRows * kDepth / 2;
  static constexpr int kScaleBytes = kScaleRows * kWeightRows * kNibbleScaleBytes;  // of a stage
  static constexpr int kStagedRows = 32;
};
template <int kScaleCount, bool kIsGateUp>
struct MoeTiledTraits : MoeLayout<MoeTiledShape<kScaleCount, kIsGateUp>> {};

}  // namespace diffulex::cuda::sm90
