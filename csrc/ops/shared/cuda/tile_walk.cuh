// SPDX-License-Identifier: Apache-2.0
#pragma once

// Order in which an attention CTA visits the key tiles of its split.

#include <cstdint>

#include "diffulex/ops/row_interval.h"

namespace diffulex::cuda {

/// Keys a CTA walks: in-flight tiles first, then cached tiles from high to low.
struct TileWalk final {
  KeyRange piece;  // keys of this split
  int32_t context_len;
  int32_t num_in_flight;  // tiles
  int32_t num_tiles;
  int32_t last_cached;  // index of the highest cached tile

  template <int kTileKeys>
  __device__ static TileWalk make(const KeyRange& piece, int32_t context_len) {
    TileWalk walk;
    walk.piece = piece;
    walk.context_len = context_len;
    const int32_t in_flight = piece.end - max_i32(piece.begin, context_len);
    walk.num_in_flight = in_flight > 0 ? ceil_div_i32(in_flight, kTileKeys) : 0;
    const int32_t cached_end = min_i32(piece.end, context_len);
    int32_t num_cached = 0;
    walk.last_cached = 0;
    if (cached_end > piece.begin) {
      walk.last_cached = (cached_end - 1) / kTileKeys;
      num_cached = walk.last_cached - piece.begin / kTileKeys + 1;
    }
    walk.num_tiles = walk.num_in_flight + num_cached;
    return walk;
  }

  /// First key of tile `index`; keys below the piece are invisible.
  template <int kTileKeys>
  __device__ int32_t base(int32_t index) const {
    if (index < num_in_flight) {
      return max_i32(piece.begin, context_len) + index * kTileKeys;
    }
    return (last_cached - (index - num_in_flight)) * kTileKeys;
  }

  __device__ bool is_in_flight(int32_t index) const { return index < num_in_flight; }

  /// Keys of tile `index` that belong to the piece.
  template <int kTileKeys>
  __device__ KeyRange bounds(int32_t index) const {
    const int32_t first = base<kTileKeys>(index);
    const int32_t end = is_in_flight(index) ? piece.end : min_i32(piece.end, context_len);
    return KeyRange{max_i32(first, piece.begin), min_i32(first + kTileKeys, end)};
  }
};

}  // namespace diffulex::cuda
