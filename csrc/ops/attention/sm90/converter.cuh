// SPDX-License-Identifier: Apache-2.0
#pragma once

// The converter warpgroups: one that fills the stages of K and V that the consumers multiply, or
// one for K and one for V; cached tiles from pieces of codes and tiles in flight through the copy
// engine.

#include <cstdint>
#include <type_traits>

#include "ops/attention/sm90/maps.h"
#include "ops/attention/sm90/producer.cuh"
#include "ops/attention/sm90/traits.cuh"
#include "ops/kv/codes.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm90 {

/// One thread of a converter of K, of V or of both. Threads side by side take eight codes each of a
/// row, so that they read and write all banks at once; the row modulo 8, that is the swizzle, stays
/// the same.
template <typename Traits, bool kHasKeys, bool kHasValues>
class Converter final {
 public:
  using T = typename Traits::Element;

  __device__ Converter(const CodedAttentionArgs& args, const AttentionMaps& maps, uint8_t* smem,
                       const Barriers<Traits>& barriers)
      : args_(args), maps_(maps), smem_(smem), barriers_(barriers), lane_(threadIdx.x & 31) {
    const uint32_t thread = threadIdx.x % 128;
    const uint32_t eight = thread % kThreadsPerRow;
    row_ = thread / kThreadsPerRow;
    const uint32_t swizzle = row_ & 7;
    const uint32_t line_offset = Traits::kCodeLineBytes == 128
                                     ? (((eight >> 1) ^ swizzle) << 4) + (eight & 1) * 8
                                     : eight * 8;
    code_offset_ = row_ * Traits::kCodeLineBytes + line_offset;
    value_offset_ = eight / 8 * Traits::kKeyChunkBytes + row_ * 128 + ((eight % 8 ^ swizzle) << 4);
  }

  /// Fills the stages of the tiles of one unit.
  __device__ __forceinline__ void run(const TileSetup& setup) {
    const int32_t num_in_flight = setup.walk.num_in_flight;
    walk(0, num_in_flight, [&](auto is_values, int32_t index, const Place& place) {
      copy<decltype(is_values)::value>(setup, index, place);
    });
    // Not before V of the last copied tile is on its way: converting takes longer than starting a
    // copy.
    walk(num_in_flight, setup.walk.num_tiles, [&](auto is_values, int32_t, const Place& place) {
      convert<decltype(is_values)::value>(place);
    });
  }

 private:
  static constexpr int kThreadsPerRow = Traits::kCodeLineBytes / 8;
  static constexpr int kRowsPerPass = 128 / kThreadsPerRow;
  static constexpr int kPasses = Traits::kPieceKeys / kRowsPerPass;
  // With few registers a piece is read in two halves.
  static constexpr int kBatches = Traits::kRegisters.converter < 48 ? 2 : 1;
  static constexpr int kBatchPasses = kPasses / kBatches;
  static_assert(kRowsPerPass % 8 == 0, "the swizzle of a thread is that of all its rows");
  static_assert(kPasses * kRowsPerPass == Traits::kPieceKeys, "every thread takes as many rows");

  using Place = Ring<Traits::kStages>;

  /// Calls `fill` for what this converter fills, K and V (a std::bool_constant), of the tiles
  /// [first, end), K a tile ahead of V: consumers leave V of a tile only after they have met K of
  /// the tile after next.
  template <typename Fill>
  __device__ __forceinline__ void walk(int32_t first, int32_t end, const Fill& fill) {
#pragma unroll 1
    for (int32_t index = first; index <= end; ++index) {
      if constexpr (kHasKeys) {
        if (index < end) {
          fill(std::false_type(), index, tile_);
        }
      }
      if constexpr (kHasValues) {
        if (index > first) {
          fill(std::true_type(), index - 1, tile_.before());
        }
      }
      if (index < end) {
        tile_.advance();
      }
    }
  }
  template <bool kIsValues>
  __device__ __forceinline__ uint32_t full(const Place& place) const {
    return kIsValues ? barriers_.value_full(place.stage) : barriers_.key_full(place.stage);
  }
  template <bool kIsValues>
  __device__ __forceinline__ uint32_t stage_offset(const Place& place) const {
    return (kIsValues ? Traits::kValueOffset : Traits::kKeyOffset) +
           place.stage * Traits::kKeyBytes;
  }
  /// Waits until every consumer, and of values the cleaner, has left the stage of the tile.
  template <bool kIsValues>
  __device__ __forceinline__ void wait_empty(const Place& place) const {
    ptx::mbarrier_wait(
        kIsValues ? barriers_.value_empty(place.stage) : barriers_.key_empty(place.stage),
        place.phase ^ 1);
  }
  __device__ __forceinline__ void set_unmapped(const Place& place, uint32_t bits) {
    *reinterpret_cast<uint32_t*>(smem_ + Barriers<Traits>::unmapped_offset(place.stage)) = bits;
  }

  /// K or V of a tile in flight. All four warps arrive, the first with what the copies deliver.
  template <bool kIsValues>
  __device__ __forceinline__ void copy(const TileSetup& setup, int32_t index, const Place& place) {
    wait_empty<kIsValues>(place);
    if (warp() > 0) {
      arrive(full<kIsValues>(place));
      return;
    }
    const TileCopier<Traits> tiles(args_, setup);
    if (lane_ == 0) {
      if constexpr (!kIsValues) {
        set_unmapped(place, 0);
      }
      ptx::mbarrier_arrive_expect(full<kIsValues>(place), tiles.bytes(index));
    }
    __syncwarp();
    tiles.issue_in_flight(index, ptx::smem_address(smem_) + stage_offset<kIsValues>(place),
                          full<kIsValues>(place), kIsValues ? &maps_.v : &maps_.k,
                          kIsValues ? &maps_.v_tile : &maps_.k_tile);
  }

  /// K or V of a cached tile.
  template <bool kIsValues>
  __device__ __forceinline__ void convert(const Place& place) {
#pragma unroll 1
    for (int part = 0; part < Traits::kTilePieces; ++part, pieces_.template advance<kIsValues>()) {
      const uint32_t piece = pieces_.template piece<kIsValues>();
      ptx::mbarrier_wait(barriers_.piece_full(piece), pieces_.template phase<kIsValues>());
      const uint8_t* codes = smem_ + Traits::kPieceOffset + piece * Traits::kPieceBytes;
      const uint8_t* scales = smem_ + Traits::kPieceScaleOffset + piece * Traits::kPieceKeys;
      uint8_t* rows = smem_ + stage_offset<kIsValues>(place) + value_offset_ +
                      part * (Traits::kPieceKeys * 128);
#pragma unroll
      for (int batch = 0; batch < kBatches; ++batch) {
        uint2 raw[kBatchPasses][Traits::kCodeLines];
        uint8_t scale[kBatchPasses];
#pragma unroll
        for (int pass = 0; pass < kBatchPasses; ++pass) {
          const int row = (batch * kBatchPasses + pass) * kRowsPerPass;
          scale[pass] = scales[row_ + row];
#pragma unroll
          for (int line = 0; line < Traits::kCodeLines; ++line) {
            raw[pass][line] = *reinterpret_cast<const uint2*>(
                codes + code_offset_ + (line * Traits::kPieceKeys + row) * Traits::kCodeLineBytes);
          }
        }
        if (batch == 0 && part == 0) {
          uint32_t unmapped = 0;
          if (!kIsValues && is_first()) {
            unmapped =
                *reinterpret_cast<const uint32_t*>(smem_ + Traits::kPieceWordOffset + piece * 4);
          }
          wait_empty<kIsValues>(place);
          if (!kIsValues && is_first()) {
            set_unmapped(place, unmapped);
          }
        }
        if (batch == kBatches - 1) {
          arrive(barriers_.piece_empty(piece));
        }
#pragma unroll
        for (int pass = 0; pass < kBatchPasses; ++pass) {
          const int row = (batch * kBatchPasses + pass) * kRowsPerPass;
#pragma unroll
          for (int line = 0; line < Traits::kCodeLines; ++line) {
            *reinterpret_cast<uint4*>(rows + line * 2 * Traits::kKeyChunkBytes + row * 128) =
                decode_eight<T>(raw[pass][line], scale[pass]);
          }
        }
      }
    }
    // The consumers' products read what these stores wrote. The cleaner's stores to the same rows
    // follow them by value_full, and the next tile's follow the cleaner's by value_empty; pieces
    // and their scale bytes are written and read in turns by piece_full and piece_empty. All are
    // mbarriers, which release and acquire, and which compute-sanitizer's racecheck does not
    // follow.
    ptx::fence_proxy_async();
    arrive(full<kIsValues>(place));
  }

  __device__ __forceinline__ bool is_first() const { return threadIdx.x % 128 == 0; }
  /// Arrives for this warp, after all of its lanes.
  __device__ __forceinline__ void arrive(uint32_t barrier) const {
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive(barrier);
    }
  }
  __device__ __forceinline__ int warp() const {
    return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x % 128) >> 5, 0);
  }

  const CodedAttentionArgs& args_;
  const AttentionMaps& maps_;
  uint8_t* smem_;
  const Barriers<Traits>& barriers_;
  const int lane_;
  uint32_t row_;
  uint32_t code_offset_;   // of this thread's first eight codes in a piece
  uint32_t value_offset_;  // and of their values in a stage
  Place tile_;             // of the next K
  PieceRings<Traits> pieces_;
};

/// Converts K, V or both of the units of this CTA.
template <typename Traits, bool kHasKeys, bool kHasValues>
__device__ __forceinline__ void convert_units(const CodedAttentionArgs& args,
                                              const AttentionMaps& maps, uint8_t* smem,
                                              const Barriers<Traits>& barriers) {
  Converter<Traits, kHasKeys, kHasValues> converter(args, maps, smem, barriers);
  UnitReader<Traits> units(smem, barriers);
  while (const UnitRecord* record = units.next()) {
    if (record->is_live != 0) {
      converter.run(record->setup);
    }
    units.release();
  }
}

/// The converter `index` of this CTA.
template <typename Traits>
__device__ __forceinline__ void run_converter(const CodedAttentionArgs& args,
                                              const AttentionMaps& maps, uint8_t* smem,
                                              const Barriers<Traits>& barriers, int index) {
  if constexpr (Traits::kConverters == 1) {
    convert_units<Traits, true, true>(args, maps, smem, barriers);
  } else if (index == 0) {
    convert_units<Traits, true, false>(args, maps, smem, barriers);
  } else {
    convert_units<Traits, false, true>(args, maps, smem, barriers);
  }
}

}  // namespace diffulex::cuda::sm90
