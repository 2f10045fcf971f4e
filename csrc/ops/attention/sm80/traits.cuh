// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile shapes and the shared-memory plan of the sm_80 attention kernel.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/config.h"

namespace diffulex::cuda::sm80 {

/// T element type, kDim head dim D, kRows packed query rows M of a tile, kStageCount stages of K
/// and V: an entry of kAttentionTiles. Cached elements are of type Cached_, T or KvCode.
template <typename T, int kDim, int kRows, int kStageCount, typename Cached_ = T>
struct AttentionTraits final {
  using Element = T;
  using Cached = Cached_;
  using Args = AttentionArgsOf<Cached>;
  static constexpr bool kIsCoded = std::is_same_v<Cached, KvCode>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileRows = kRows;
  static constexpr AttentionTile kTile{kDim, kRows, kStageCount};
  static constexpr int kTileKeys = kTile.keys();
  // 16 x 512 fp32 accumulators would need 256 registers a thread: two warps share 16 rows, each
  // owning half of the value dims (the scores are computed by both).
  static constexpr int kValueParts = kDim > 256 ? 2 : 1;
  static constexpr int kRowWarps = kRows / 16;
  static constexpr int kWarps = kRowWarps * kValueParts;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kValueDims = kDim / kValueParts;
  static constexpr int kStages = kStageCount;
  // Q fragments stay in registers while accumulators leave room for them.
  static constexpr bool kQueryInRegisters = kDim <= 128;
  static constexpr int kChunks = kDim / 8;  // 16-byte pieces of a row
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kPasses = kTileKeys / kRowsPerPass;

  static constexpr int kQueryBytes = kRows * kDim * 2;
  static constexpr int kKeyBytes = kTileKeys * kDim * 2;  // one stage of K, or of V
  static constexpr int kFlagBytes = kStages * kTileKeys;
  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kFlagOffset = kValueOffset + kStages * kKeyBytes;
  static constexpr int kSmemBytes = kFlagOffset + kFlagBytes;

  static_assert(kThreads % kChunks == 0 && kTileKeys % kRowsPerPass == 0,
                "every thread copies the same number of 16-byte pieces");
  static_assert(kStages >= 2, "the next tile is on its way while one is multiplied");
  static_assert(kSmemBytes == kTile.shared_bytes(), "what the choice of a tile goes by");
  static_assert(kSmemBytes <= kMediumSharedMemory, "every instance fits compute capability 8.0");
  static_assert(attention_tile(kDim, kRows, kSmallSharedMemory).stages > 0 ||
                    attention_tile(kDim, 32, kSmallSharedMemory).stages > 0 ||
                    attention_tile(kDim, 64, kSmallSharedMemory).stages > 0,
                "its head dim has an instance that fits every device");
};

}  // namespace diffulex::cuda::sm80
