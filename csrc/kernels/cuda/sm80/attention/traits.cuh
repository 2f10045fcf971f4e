// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile shapes and the shared-memory plan of the sm_80 attention kernel.

#include <cstdint>

namespace diffulex::cuda::sm80 {

/// T element type, kDim head dim D, kRows packed query rows M of a tile.
template <typename T, int kDim, int kRows>
struct AttentionTraits final {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileRows = kRows;
  // attention_keys_per_tile() of kernels/common/attention_config.h
  static constexpr int kTileKeys = kDim <= 128 ? 64 : (kDim <= 256 ? 32 : 16);
  // 16 x 512 fp32 accumulators would need 256 registers a thread: two warps share 16 rows, each
  // owning half of the value dims (the scores are computed by both).
  static constexpr int kValueParts = kDim > 256 ? 2 : 1;
  static constexpr int kRowWarps = kRows / 16;
  static constexpr int kWarps = kRowWarps * kValueParts;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kValueDims = kDim / kValueParts;
  static constexpr int kStages = kDim <= 128 ? 3 : 2;
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
  static_assert(kSmemBytes <= 163 * 1024, "sm_80 offers 163 KiB of shared memory to a CTA");
};

}  // namespace diffulex::cuda::sm80
