// SPDX-License-Identifier: Apache-2.0
#pragma once

// Visibility of keys in block-diffusion attention as integer intervals; compiled for host and
// device and shared by every attention kernel. Symbols: c cached keys of a request, nv real query
// rows, P absolute position of a row, p / pp prefix and padded prefix length.
//
//   key index   0 ........ p ...... pp ........ c ............ c + nv
//               |  cached  |  hole  |  cached   |  in flight   |

#include <cstdint>

#include "diffulex/export.h"
#include "diffulex/ops/attention.h"

namespace diffulex {

/// Half-open key range [begin, end); empty when end <= begin.
struct KeyRange {
  int32_t begin = 0;
  int32_t end = 0;
};

/// Everything the mask of one request needs, read once per tile.
struct RequestMask {
  int32_t context_len = 0;        // c, cached keys
  int32_t num_valid = 0;          // nv, real query rows
  int32_t start_position = 0;     // absolute position of row 0
  int32_t prefix_len = 0;         // p
  int32_t padded_prefix_len = 0;  // pp
  int32_t kind = 0;               // MaskKind
  int32_t block_size = 1;         // B of the mask
  int32_t sliding_window = 0;     // left window, 0 = off
  bool is_anchored = false;       // the window is that of row 0
  KeyRange hole;                  // invisible cached keys, empty when off
  int32_t block_shift = -1;       // log2(B) where B is known to be a power of two
  int32_t block_origin = 0;       // in [0, B): blocks start at this position modulo B
};

/// What a key tile is to a row tile.
enum class TileClass : int32_t {
  kSkip = 0,    // no row sees any key
  kMasked = 1,  // rows differ: test every element
  kFull = 2,    // every row sees every key (page-table entries may still be unmapped)
};

DIFFULEX_HOST_DEVICE constexpr int32_t min_i32(int32_t a, int32_t b) {
  return a < b ? a : b;
}
DIFFULEX_HOST_DEVICE constexpr int32_t max_i32(int32_t a, int32_t b) {
  return a > b ? a : b;
}
DIFFULEX_HOST_DEVICE constexpr int32_t clamp_i32(int32_t x, int32_t low, int32_t high) {
  return x < low ? low : (x > high ? high : x);
}
/// ceil(a / b) for a >= 0, b > 0, without overflow.
DIFFULEX_HOST_DEVICE constexpr int32_t ceil_div_i32(int32_t a, int32_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Rows of a request that are real: clamp(valid_slice - q_start, 0, q_end - q_start).
DIFFULEX_HOST_DEVICE constexpr int32_t num_valid_rows(int32_t q_start, int32_t q_end,
                                                      int32_t valid_slice) {
  return clamp_i32(valid_slice <= q_start ? 0 : valid_slice - q_start, 0,
                   max_i32(q_end - q_start, 0));
}

/// The invisible cached keys of a request; empty without kMaskHoleBit.
DIFFULEX_HOST_DEVICE constexpr KeyRange mask_hole(int32_t mask_kind_bits, int32_t context_len,
                                                  int32_t prefix_len, int32_t padded_prefix_len) {
  if ((mask_kind_bits & kMaskHoleBit) == 0) {
    return KeyRange{0, 0};
  }
  return KeyRange{clamp_i32(prefix_len, 0, context_len),
                  clamp_i32(padded_prefix_len, 0, context_len)};
}

/// Number of keys of the request's key index space; cache-only requests have no in-flight keys.
DIFFULEX_HOST_DEVICE constexpr int32_t num_keys(const RequestMask& mask) {
  return mask.kind == static_cast<int32_t>(MaskKind::kCacheOnly)
             ? mask.context_len
             : mask.context_len + mask.num_valid;
}

/// RequestMask::block_origin: the mask counts blocks from the end of the padded prefix.
DIFFULEX_HOST_DEVICE constexpr int32_t mask_block_origin(const RequestMask& mask) {
  const int32_t first = max_i32(mask.padded_prefix_len, 0);
  return mask.block_shift >= 0 ? first & ((1 << mask.block_shift) - 1) : first % mask.block_size;
}

/// First key past the block of `position`, which is not before the first block, counted from there.
DIFFULEX_HOST_DEVICE constexpr int64_t block_end_from_zero(const RequestMask& mask,
                                                           int64_t position) {
  if (position >= 0 && mask.block_shift >= 0) {
    return ((position >> mask.block_shift) + 1) << mask.block_shift;
  }
  if (position >= 0 && position <= 0x7FFFFFFF) {
    const uint32_t size = static_cast<uint32_t>(mask.block_size);
    return (int64_t{static_cast<uint32_t>(position) / size} + 1) * mask.block_size;
  }
  return (position / mask.block_size + 1) * mask.block_size;
}

/// First key past the block of a position, by the shortest division that will do. What lies before
/// the first whole block is a separate block.
DIFFULEX_HOST_DEVICE constexpr int64_t block_end(const RequestMask& mask, int64_t position) {
  return position >= 0 && position < mask.block_origin
             ? mask.block_origin
             : block_end_from_zero(mask, position - mask.block_origin) + mask.block_origin;
}

/// Keys that row `row` of the request may see, before the hole. Both ends are non-decreasing in
/// `row`.
DIFFULEX_HOST_DEVICE constexpr KeyRange row_interval(const RequestMask& mask, int32_t row) {
  // 64-bit: positions near 2^31 must not wrap when rounded up to a block.
  const int64_t position = static_cast<int64_t>(mask.start_position) + row;
  const int32_t keys = num_keys(mask);
  int64_t end = keys;
  const int64_t end_of_block = block_end(mask, position);
  switch (static_cast<MaskKind>(mask.kind)) {
    case MaskKind::kCausal:
      end = position + 1;
      break;
    case MaskKind::kBlockCausal:
      end = end_of_block;
      break;
    case MaskKind::kPrefixFull:
      end = position < mask.prefix_len          ? mask.prefix_len
            : position < mask.padded_prefix_len ? mask.padded_prefix_len
                                                : end_of_block;
      break;
    case MaskKind::kFull:
    case MaskKind::kCacheOnly:
      break;
  }
  end = end < 0 ? 0 : (end > keys ? keys : end);
  const int64_t window_end = mask.is_anchored ? mask.start_position : position;
  int64_t begin = mask.sliding_window > 0 ? window_end - mask.sliding_window + 1 : 0;
  begin = begin < 0 ? 0 : (begin > keys ? keys : begin);
  return KeyRange{static_cast<int32_t>(begin), static_cast<int32_t>(end)};
}

/// True if `key` lies in the range.
DIFFULEX_HOST_DEVICE constexpr bool contains(const KeyRange& range, int32_t key) {
  return key >= range.begin && key < range.end;
}

/// Keys that some row of [first, last] may see, hole included: [lo of first, hi of last).
DIFFULEX_HOST_DEVICE constexpr KeyRange tile_key_range(const KeyRange& first,
                                                       const KeyRange& last) {
  return KeyRange{first.begin, last.end};
}

/// Classifies keys [tile.begin, tile.end) against the rows between the rows whose intervals are
/// `first` and `last`. A full tile lies wholly in the cached or wholly in the in-flight segment.
DIFFULEX_HOST_DEVICE constexpr TileClass classify_tile(const KeyRange& first, const KeyRange& last,
                                                       const KeyRange& hole, int32_t context_len,
                                                       const KeyRange& tile) {
  if (tile.begin >= tile.end || tile.begin >= last.end || tile.end <= first.begin) {
    return TileClass::kSkip;
  }
  if (tile.begin >= hole.begin && tile.end <= hole.end) {
    return TileClass::kSkip;
  }
  const bool all_visible = tile.end <= first.end && tile.begin >= last.begin;
  const bool meets_hole = hole.begin < hole.end && tile.begin < hole.end && hole.begin < tile.end;
  const bool one_segment = tile.end <= context_len || tile.begin >= context_len;
  return all_visible && !meets_hole && one_segment ? TileClass::kFull : TileClass::kMasked;
}

/// Keys one row tile of a request reads at most; 0 for a request without real rows. Positions
/// are not looked at, so a window is taken to end at the last row.
DIFFULEX_HOST_DEVICE constexpr int32_t max_tile_keys(int32_t context_len, int32_t num_valid,
                                                     int32_t mask_kind_bits,
                                                     int32_t sliding_window) {
  if (num_valid <= 0) {
    return 0;
  }
  const bool cache_only = (mask_kind_bits & 0xFF) == static_cast<int32_t>(MaskKind::kCacheOnly);
  const int32_t keys = context_len + (cache_only ? 0 : num_valid);
  return sliding_window > 0 && sliding_window < keys - num_valid ? sliding_window + num_valid
                                                                 : keys;
}

/// Splits of one request: a function of its keys and of the launch-wide bound only.
/// `keys_per_split` is 256, or 1024 when results must not depend on the batch.
DIFFULEX_HOST_DEVICE constexpr int32_t request_splits(int32_t num_request_keys, int32_t max_splits,
                                                      int32_t keys_per_split) {
  return clamp_i32(ceil_div_i32(max_i32(num_request_keys, 0), keys_per_split), 1, max_splits);
}

/// Keys of split `split` of `splits` when a row tile needs `range`: the cached part is cut into
/// equal pieces of whole key tiles, in-flight keys belong to the last split. Pieces may be empty;
/// together they cover `range` exactly, in order.
DIFFULEX_HOST_DEVICE constexpr KeyRange split_key_range(const KeyRange& range, int32_t context_len,
                                                        int32_t splits, int32_t split,
                                                        int32_t key_tile) {
  if (range.end <= range.begin) {
    return KeyRange{range.begin, range.begin};
  }
  const int32_t cached_end = clamp_i32(context_len, range.begin, range.end);
  const int32_t first_tile = range.begin / key_tile;
  const int32_t tiles = ceil_div_i32(cached_end, key_tile) - first_tile;
  const int32_t tiles_per_split =
      splits == 1 ? max_i32(tiles, 0) : ceil_div_i32(max_i32(tiles, 0), splits);
  // 64-bit: tile index times tile size may pass 2^31 for the (clamped) last piece.
  const int64_t begin =
      (static_cast<int64_t>(first_tile) + static_cast<int64_t>(split) * tiles_per_split) * key_tile;
  const int64_t end = begin + static_cast<int64_t>(tiles_per_split) * key_tile;
  const int32_t low = begin < range.begin  ? range.begin
                      : begin > cached_end ? cached_end
                                           : static_cast<int32_t>(begin);
  const int32_t high = end > cached_end ? cached_end : static_cast<int32_t>(end);
  return KeyRange{low, split == splits - 1 ? range.end : max_i32(high, low)};
}

}  // namespace diffulex
