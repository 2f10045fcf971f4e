// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile shapes and the shared-memory plan of the sm_90a attention kernel.

#include <cstdint>

namespace diffulex::cuda::sm90 {

/// T element type, kDim head dim D, kRows packed query rows M of a tile. Q, K and V lie in shared
/// memory as chunks of 64 dims: [chunk][row][64], rows of 128 bytes with the 128-byte swizzle.
template <typename T, int kDim, int kRows>
struct AttentionTraits final {
  using Element = T;
  static constexpr int kHeadDim = kDim;
  static constexpr int kTileRows = kRows;
  // hopper_keys_per_tile() of ops/attention/config.h
  static constexpr int kTileKeys = kDim <= 128 ? 128 : (kDim <= 256 ? 64 : 32);
  // 64 x 512 fp32 accumulators would need 256 registers a thread: two warpgroups share 64 rows,
  // each owning half of the value dims (the scores are computed by both).
  static constexpr int kValueParts = kDim > 256 ? 2 : 1;
  static constexpr int kRowGroups = kRows / 64;
  static constexpr int kConsumers = kRowGroups * kValueParts;  // warpgroups
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;
  static constexpr int kValueDims = kDim / kValueParts;
  static constexpr int kChunks = kDim / 64;

  // With two consumer warpgroups; together 64,512 registers. D = 256 needs the accumulators most.
  static constexpr uint32_t kProducerRegisters = kDim == 256 ? 88 : 104;
  static constexpr uint32_t kConsumerRegisters = kDim == 256 ? 208 : 200;

  static constexpr int kQueryChunkBytes = kRows * 128;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes;
  static constexpr int kKeyChunkBytes = kTileKeys * 128;
  static constexpr int kKeyBytes = kChunks * kKeyChunkBytes;  // one stage of K, or of V
  static constexpr int kMaxSmem = 227 * 1024;
  static constexpr int kBarrierBytes = 256;
  // Two units in turn: what the scheduler says of one, then the key interval of each of its tokens.
  static constexpr int kUnitBytes = 256 + kRows * 8;
  static constexpr int kControlBytes = kBarrierBytes + 2 * kUnitBytes;
  static constexpr int kFitting = (kMaxSmem - kControlBytes - kQueryBytes) / (2 * kKeyBytes);
  static constexpr int kStages = kFitting < 4 ? kFitting : 4;

  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kBarrierOffset = kValueOffset + kStages * kKeyBytes;
  static constexpr int kUnitOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kSmemBytes = kUnitOffset + 2 * kUnitBytes;

  static_assert(kStages >= 2, "the pipeline needs two stages");
};

/// Addresses of the barriers. Every stage of K and of V has its own pair; `clean` completes after
/// invisible rows of a V stage were zeroed.
template <typename Traits>
struct Barriers final {
  static constexpr int kStages = Traits::kStages;
  uint32_t base;

  __device__ uint32_t query_full() const { return base; }
  __device__ uint32_t query_empty() const { return base + 8; }
  __device__ uint32_t unit_full(uint32_t slot) const { return base + 16 + slot * 8; }
  __device__ uint32_t unit_empty(uint32_t slot) const { return base + 32 + slot * 8; }
  __device__ uint32_t key_full(uint32_t stage) const { return base + 48 + stage * 8; }
  __device__ uint32_t key_empty(uint32_t stage) const { return key_full(stage + kStages); }
  __device__ uint32_t value_full(uint32_t stage) const { return key_full(stage + 2 * kStages); }
  __device__ uint32_t value_empty(uint32_t stage) const { return key_full(stage + 3 * kStages); }
  __device__ uint32_t value_clean(uint32_t stage) const { return key_full(stage + 4 * kStages); }
  /// Byte offset in shared memory of the unmapped-page bits of a stage.
  __device__ static constexpr int unmapped_offset(uint32_t stage) {
    return Traits::kBarrierOffset + 48 + 5 * kStages * 8 + static_cast<int>(stage) * 4;
  }
  /// Byte offset of the word that tells the consumers whether their cluster adds up the unit.
  __device__ static constexpr int verdict_offset() {
    static_assert(52 + 5 * kStages * 8 + kStages * 4 <= Traits::kBarrierBytes, "room for barriers");
    return unmapped_offset(kStages);
  }
};

/// Position in a ring of stages; `phase` is the parity of the pass.
template <int kStages>
struct Ring final {
  uint32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace diffulex::cuda::sm90
