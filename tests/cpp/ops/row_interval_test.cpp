// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/row_interval.h"

#include <vector>

#include <gtest/gtest.h>

#include "ops/shared/fast_div.h"

namespace diffulex::test {
namespace {

/// Calls `visit` with every mask of a small exhaustive family.
template <typename Visit>
void for_each_mask(const Visit& visit) {
  for (int32_t kind = 0; kind <= 4; ++kind) {
    for (const int32_t block_size : {1, 3, 4}) {
      for (const int32_t window : {0, 1, 5}) {
        for (int32_t context_len = 0; context_len <= 9; context_len += 3) {
          for (int32_t num_valid = 1; num_valid <= 7; num_valid += 2) {
            for (const int32_t start : {0, context_len, context_len + 2}) {
              for (int32_t prefix = 0; prefix <= 8; prefix += 4) {
                RequestMask mask;
                mask.kind = kind;
                mask.block_size = block_size;
                mask.sliding_window = window;
                mask.context_len = context_len;
                mask.num_valid = num_valid;
                mask.start_position = start;
                mask.prefix_len = prefix;
                mask.padded_prefix_len = prefix + 3;
                mask.block_origin = mask_block_origin(mask);
                for (const int32_t bits : {kind, kind | kMaskHoleBit}) {
                  mask.hole = mask_hole(bits, context_len, prefix, prefix + 3);
                  for (const bool is_anchored : {false, true}) {
                    mask.is_anchored = is_anchored;
                    visit(mask, (bits & kMaskHoleBit) != 0);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

/// The visibility table read literally.
bool table_visible(const RequestMask& mask, bool hole, int32_t row, int32_t key) {
  const int32_t c = mask.context_len;
  const int32_t total = c + mask.num_valid;
  const int32_t position = mask.start_position + row;
  const int32_t origin = mask.padded_prefix_len % mask.block_size;
  const int32_t blocks_before = (position - origin + mask.block_size) / mask.block_size;
  const int32_t block_end = blocks_before * mask.block_size + origin;
  int32_t hi = 0;
  if (mask.kind == 0) {
    hi = std::min(position + 1, total);
  } else if (mask.kind == 1) {
    hi = std::min(block_end, total);
  } else if (mask.kind == 2) {
    hi = total;
  } else if (mask.kind == 4) {
    hi = c;
  } else if (position < mask.prefix_len) {
    hi = std::min(mask.prefix_len, total);
  } else if (position < mask.padded_prefix_len) {
    hi = std::min(mask.padded_prefix_len, total);
  } else {
    hi = std::min(block_end, total);
  }
  const int32_t window_end = mask.is_anchored ? mask.start_position : position;
  const int32_t lo =
      mask.sliding_window > 0 ? std::max(0, window_end - mask.sliding_window + 1) : 0;
  const bool in_hole = hole && key < c && key >= mask.prefix_len && key < mask.padded_prefix_len;
  return key >= lo && key < hi && !in_hole;
}

TEST(RowInterval, EqualsTheTableEverywhere) {
  for_each_mask([](const RequestMask& mask, bool hole) {
    for (int32_t row = 0; row < mask.num_valid; ++row) {
      const KeyRange interval = row_interval(mask, row);
      for (int32_t key = 0; key <= mask.context_len + mask.num_valid; ++key) {
        ASSERT_EQ(contains(interval, key) && !contains(mask.hole, key),
                  table_visible(mask, hole, row, key))
            << "kind " << mask.kind << " row " << row << " key " << key;
      }
    }
  });
}

TEST(RowInterval, EndsNeverDecrease) {
  for_each_mask([](const RequestMask& mask, bool /*hole*/) {
    for (int32_t row = 1; row < mask.num_valid; ++row) {
      ASSERT_LE(row_interval(mask, row - 1).begin, row_interval(mask, row).begin);
      ASSERT_LE(row_interval(mask, row - 1).end, row_interval(mask, row).end);
    }
  });
}

TEST(RowInterval, TileClassIsExactForFullAndSafeForSkip) {
  for_each_mask([](const RequestMask& mask, bool hole) {
    const int32_t total = mask.context_len + mask.num_valid;
    const KeyRange first = row_interval(mask, 0);
    const KeyRange last = row_interval(mask, mask.num_valid - 1);
    for (int32_t begin = 0; begin < total; ++begin) {
      for (int32_t end = begin + 1; end <= total; ++end) {
        bool any = false;
        bool all = true;
        for (int32_t row = 0; row < mask.num_valid; ++row) {
          for (int32_t key = begin; key < end; ++key) {
            const bool visible = table_visible(mask, hole, row, key);
            any = any || visible;
            all = all && visible;
          }
        }
        const bool one_segment = end <= mask.context_len || begin >= mask.context_len;
        const TileClass tile =
            classify_tile(first, last, mask.hole, mask.context_len, KeyRange{begin, end});
        ASSERT_EQ(tile == TileClass::kFull, all && one_segment);
        if (tile == TileClass::kSkip) {
          ASSERT_FALSE(any);
        }
      }
    }
  });
}

TEST(RowInterval, PositionsNearTheIntegerLimitDoNotWrap) {
  RequestMask mask;
  mask.kind = static_cast<int32_t>(MaskKind::kBlockCausal);
  mask.block_size = 256;
  mask.context_len = 100;
  mask.num_valid = 4;
  mask.start_position = INT32_MAX - 1;
  mask.sliding_window = INT32_MAX;
  EXPECT_EQ(row_interval(mask, 3).end, 104);
  EXPECT_EQ(row_interval(mask, 3).begin, 3);
}

TEST(RowInterval, ValidRowsAreClamped) {
  EXPECT_EQ(num_valid_rows(4, 9, 7), 3);
  EXPECT_EQ(num_valid_rows(4, 9, 100), 5);
  EXPECT_EQ(num_valid_rows(4, 9, 0), 0);
  EXPECT_EQ(num_valid_rows(4, 9, INT32_MIN), 0);
}

TEST(RowInterval, SplitsCoverTheRangeInOrder) {
  for (const int32_t tile : {1, 4, 64}) {
    for (int32_t splits = 1; splits <= 9; ++splits) {
      for (int32_t begin = 0; begin <= 70; begin += 7) {
        for (int32_t end = begin; end <= 150; end += 13) {
          for (const int32_t context_len : {0, 5, 64, 100, 150}) {
            int32_t next = begin;
            for (int32_t split = 0; split < splits; ++split) {
              const KeyRange part =
                  split_key_range(KeyRange{begin, end}, context_len, splits, split, tile);
              if (part.end > part.begin) {
                ASSERT_EQ(part.begin, next);
                next = part.end;
              }
              if (split + 1 < splits) {
                ASSERT_LE(part.end, std::max(begin, std::min(context_len, end)));
                ASSERT_TRUE(part.end <= part.begin || part.end % tile == 0 ||
                            part.end == std::min(context_len, end));
              }
            }
            ASSERT_EQ(next, end);
          }
        }
      }
    }
  }
}

TEST(RowInterval, RequestSplitsAreClamped) {
  EXPECT_EQ(request_splits(0, 8, 256), 1);
  EXPECT_EQ(request_splits(256, 8, 256), 1);
  EXPECT_EQ(request_splits(257, 8, 256), 2);
  EXPECT_EQ(request_splits(1 << 20, 8, 256), 8);
}

TEST(RowIntervalTest, KeysOfATileCountWhatItsRowsMayRead) {
  const auto causal = static_cast<int32_t>(MaskKind::kBlockCausal);
  const auto cache_only = static_cast<int32_t>(MaskKind::kCacheOnly);
  EXPECT_EQ(max_tile_keys(2000, 40, causal, 0), 2040);
  EXPECT_EQ(max_tile_keys(300, 9, cache_only | kMaskHoleBit, 0), 300);
  EXPECT_EQ(max_tile_keys(500, 0, causal, 0), 0);
  EXPECT_EQ(max_tile_keys(2000, 40, causal, 100), 140);
  EXPECT_EQ(max_tile_keys(60, 40, causal, 100), 100);
}

TEST(RowIntervalTest, KnownPowerOfTwoBlocksGiveTheSameIntervals) {
  RequestMask mask;
  mask.kind = static_cast<int32_t>(MaskKind::kBlockCausal);
  mask.context_len = 1 << 29;
  mask.num_valid = 64;
  for (const int32_t shift : {0, 2, 5, 8}) {
    mask.block_size = 1 << shift;
    for (const int32_t start : {-40, -1, 0, 31, 1 << 20, 2147483640}) {
      mask.start_position = start;
      for (int32_t row = 0; row < 64; ++row) {
        mask.block_shift = -1;
        const KeyRange want = row_interval(mask, row);
        mask.block_shift = shift;
        const KeyRange got = row_interval(mask, row);
        ASSERT_EQ(got.begin, want.begin) << "start " << start << " row " << row;
        ASSERT_EQ(got.end, want.end) << "start " << start << " row " << row;
      }
    }
  }
}

TEST(FastDivTest, DividesExactly) {
  for (const uint32_t divisor : {1U, 2U, 3U, 4U, 7U, 18U, 31U, 128U, 1000U, 65537U, 1U << 30}) {
    const FastDiv by = FastDiv::of(divisor);
    for (const int64_t near : {int64_t{0}, int64_t{divisor}, int64_t{divisor} * 5, int64_t{1} << 20,
                               (int64_t{1} << 31) - 1}) {
      for (int64_t value = near - 3; value <= near + 3; ++value) {
        if (value >= 0 && value < (int64_t{1} << 31)) {
          ASSERT_EQ(by.divide(static_cast<int32_t>(value)), value / divisor)
              << value << " / " << divisor;
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
