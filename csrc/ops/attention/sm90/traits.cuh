// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile shapes and the shared-memory plan of the sm_90a attention kernel.

#include <cstdint>
#include <type_traits>

#include "ops/attention/args.cuh"

namespace diffulex::cuda::sm90 {

/// Registers of a thread of each warpgroup, multiples of 8.
struct AttentionRegisters final {
  uint32_t producer;
  uint32_t consumer;
  uint32_t converter;
};

/// Three warpgroups share 504 of them, four 512. D = 256 needs the accumulators most, and codes the
/// results; of the splits with converters these spill least.
constexpr AttentionRegisters attention_registers(bool is_coded, int consumers, int head_dim,
                                                 bool writes_codes) {
  if (!is_coded) {
    return head_dim == 256 || writes_codes ? AttentionRegisters{88, 208, 0}
                                           : AttentionRegisters{104, 200, 0};
  }
  if (consumers == 1) {
    return {112, 240, 80};
  }
  if (head_dim > 256) {
    return {72, 192, 56};
  }
  return head_dim == 256 ? AttentionRegisters{56, 208, 40} : AttentionRegisters{56, 200, 56};
}

/// T element type, kDim head dim D, kRows packed query rows M of a tile; cached elements are of
/// type Cached, T or KvCode; kernels with CodeRows as RowsOf write the codes of their results. Q, K
/// and V lie in shared memory as chunks of 64 dims: [chunk][row][64], rows of 128 bytes with the
/// 128-byte swizzle.
template <typename T, int kDim, int kRows, typename Cached = T, typename RowsOf = NoCodeRows>
struct AttentionTraits final {
  using Element = T;
  using Rows = RowsOf;
  static constexpr bool kWritesCodes = std::is_same_v<Rows, CodeRows>;
  static_assert(!kWritesCodes || kDim == kQuantGroup, "a head has one scale");
  using Args = AttentionArgsOf<Cached>;
  static constexpr bool kIsCoded = std::is_same_v<Cached, KvCode>;
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
  // One consumer multiplies faster than one warpgroup converts; beside two there is no room.
  static constexpr int kConverters = !kIsCoded ? 0 : (kConsumers == 1 ? 2 : 1);
  // Warpgroups: the producer, the consumers, and last the converters.
  static constexpr int kThreads = 128 * (1 + kConsumers + kConverters);
  static constexpr int kValueDims = kDim / kValueParts;
  static constexpr int kChunks = kDim / 64;
  // Products of 256 value dims need more registers than a thread of 512 starts with; two of 128 add
  // up the same.
  static constexpr int kValueSlices = kThreads == 512 && kValueDims > 128 ? 2 : 1;

  // One consumer without a converter has enough.
  static constexpr bool kMovesRegisters = kThreads > 256;
  static constexpr AttentionRegisters kRegisters =
      attention_registers(kIsCoded, kConsumers, kDim, kWritesCodes);
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer +
                        kConverters * kRegisters.converter <=
                    65536 / kThreads / 8 * 8 * (kThreads / 128),
                "what the threads start with");

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
  // Beside codes two stages of their values: what else is on its way waits as codes.
  static constexpr int kMostStages = kIsCoded ? 2 : 4;
  static constexpr int kStages = kFitting < kMostStages ? kFitting : kMostStages;
  static constexpr int kStageBytes = kStages * 2 * kKeyBytes;

  // Codes come in pieces of 8 KB, K or V of kPieceKeys keys: [row][D] with D = 64, else
  // [D / 128][row][128] with the 128-byte swizzle. Beside a piece lie its scale bytes, two barriers
  // and a word.
  static constexpr int kPieceBytes = 8192;
  static constexpr int kPieceKeys = kPieceBytes / kDim;
  static constexpr int kTilePieces = kTileKeys / kPieceKeys;  // of K, and of V
  static constexpr int kCodeLineBytes = kDim < 128 ? kDim : 128;
  static constexpr int kCodeLines = kDim / kCodeLineBytes;  // of a key
  static constexpr int kPieceMarkBytes = kPieceKeys + 16 + 4;
  static constexpr int kFittingPieces =
      (kMaxSmem - kControlBytes - kQueryBytes - kStageBytes) / (kPieceBytes + kPieceMarkBytes);
  static constexpr int kPieces = !kIsCoded ? 0 : (kFittingPieces < 12 ? kFittingPieces : 12);
  // Each converter has a ring of pieces of its own. One that passed over those of the other would
  // mistake phases of their barriers.
  static constexpr int kRingPieces = kPieces / (kConverters == 2 ? 2 : 1);

  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kPieceOffset = kValueOffset + kStages * kKeyBytes;
  static constexpr int kBarrierOffset = kPieceOffset + kPieces * kPieceBytes;
  static constexpr int kUnitOffset = kBarrierOffset + kBarrierBytes;
  static constexpr int kPieceBarrierOffset = kUnitOffset + 2 * kUnitBytes;
  static constexpr int kPieceScaleOffset = kPieceBarrierOffset + kPieces * 16;
  static constexpr int kPieceWordOffset = kPieceScaleOffset + kPieces * kPieceKeys;
  static constexpr int kSmemBytes = kPieceWordOffset + kPieces * 4;

  static_assert(kStages >= 2, "the pipeline needs two stages");
  static_assert(!kIsCoded || kRingPieces >= 3, "one piece is read while others are on their way");
  static_assert(kPieces % 2 == 0 || kConverters != 2, "rings of one size");
  static_assert(kSmemBytes <= kMaxSmem, "what a CTA may have");
};

/// Addresses of the barriers. Every stage of K and of V has its own pair, and so has every piece of
/// codes; `clean` completes after invisible rows of a V stage were zeroed.
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
  __device__ uint32_t piece_full(uint32_t piece) const {
    return base + (Traits::kPieceBarrierOffset - Traits::kBarrierOffset) + piece * 8;
  }
  __device__ uint32_t piece_empty(uint32_t piece) const {
    return piece_full(piece + Traits::kPieces);
  }
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
  /// The place in front of this one.
  [[nodiscard]] __device__ __forceinline__ Ring before() const {
    return stage == 0 ? Ring{kStages - 1, phase ^ 1} : Ring{stage - 1, phase};
  }
};

/// Positions among the pieces of codes: of the next of K, and of V. One converter reads both from
/// one ring.
template <typename Traits>
class PieceRings final {
 public:
  template <bool kIsValues>
  [[nodiscard]] __device__ __forceinline__ uint32_t piece() const {
    return kRing<kIsValues> * Traits::kRingPieces + rings_[kRing<kIsValues>].stage;
  }
  template <bool kIsValues>
  [[nodiscard]] __device__ __forceinline__ uint32_t phase() const {
    return rings_[kRing<kIsValues>].phase;
  }
  template <bool kIsValues>
  __device__ __forceinline__ void advance() {
    rings_[kRing<kIsValues>].advance();
  }

 private:
  template <bool kIsValues>
  static constexpr uint32_t kRing = kIsValues ? Traits::kConverters - 1 : 0;

  Ring<Traits::kRingPieces> rings_[Traits::kConverters];
};

}  // namespace diffulex::cuda::sm90
