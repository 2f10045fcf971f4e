// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the Hopper expert products of e4m3 codes: as MoeTraits, with 128 columns in a stage,
// the line of one scale of a row. Sums exist twice, those of the line and those in float32, so
// there are fewer positions in the largest tile.

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/moe/config.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/sm90/traits.cuh"

namespace diffulex::cuda::sm90 {

template <int kColumnCount, bool kIsGateUp>
struct MoeScaledShape : MoeTileShape {
  static_assert(kColumnCount <= kMoeMaxScaledTile, "the registers hold no more sums");
  using Element = __nv_bfloat16;  // of the result of the down product; the other's is float
  static constexpr bool kGateUp = kIsGateUp;
  static constexpr MoeOperands kOperands = MoeOperands::kCodes;
  static constexpr int kColumns = kColumnCount;  // positions of a tile
  static constexpr int kBlocks = kColumns == 64 ? 2 : 1;
  static constexpr int kWeightRows = 128 * kBlocks;
  static constexpr int kCtasPerSm = kColumns <= 32 ? 2 : 1;
  static constexpr int narrower_groups(int groups) { return kColumns <= 64 ? 0 : groups - 4; }
  static constexpr int kDepth = 128;  // codes of a stage
  static constexpr bool kGathers = kGateUp;
  static constexpr int kBoxRows = kColumns <= 96 ? 16 : 32;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kScaleBytes = kColumns * 4;  // of a stage
  static constexpr int kMaxStagedRows = 64 / kBlocks;
  static constexpr int kStagedRows =
      kGateUp ? 0 : (kColumns < kMaxStagedRows ? kColumns : kMaxStagedRows);
};
template <int kColumnCount, bool kIsGateUp>
struct MoeScaledTraits : MoeLayout<MoeScaledShape<kColumnCount, kIsGateUp>> {};

}  // namespace diffulex::cuda::sm90
