// SPDX-License-Identifier: Apache-2.0

// Tiles, splits and scratch of attention: host shapes and facts of the device in, a launch out.

#include <algorithm>
#include <cstdint>
#include <string>

#include <gtest/gtest.h>

#include "ops/attention/config.h"

namespace diffulex::test {
namespace {

AttentionShape shape_of(int32_t num_reqs, int32_t max_seqlen_q, int32_t max_context_len) {
  AttentionShape shape;
  shape.num_reqs = num_reqs;
  shape.num_q_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_dim = 128;
  shape.max_seqlen_q = max_seqlen_q;
  shape.max_context_len = max_context_len;
  return shape;
}

TEST(AttentionConfig, RowTileFollowsTheRowsOfARequest) {
  EXPECT_EQ(attention_config(shape_of(4, 16, 512), false).rows_per_tile, 64);
  EXPECT_EQ(attention_config(shape_of(4, 17, 512), false).rows_per_tile, 128);
  EXPECT_EQ(attention_config(shape_of(4, 16, 512), true).rows_per_tile, 128);
  AttentionShape sevens = shape_of(1, 64, 0);
  sevens.num_q_heads = 28;
  sevens.num_kv_heads = 4;
  EXPECT_EQ(attention_config(sevens, false).tokens_per_tile, 18);
  EXPECT_EQ(attention_config(sevens, false).tiles_per_request, 4);
}

TEST(AttentionConfig, KeyTileByHeadDim) {
  EXPECT_EQ(attention_keys_per_tile(64), 64);
  EXPECT_EQ(attention_keys_per_tile(128), 64);
  EXPECT_EQ(attention_keys_per_tile(256), 32);
  EXPECT_EQ(attention_keys_per_tile(512), 16);
}

TEST(AttentionConfig, SplitsOnlyWhenTheDeviceIsIdle) {
  EXPECT_EQ(attention_config(shape_of(64, 32, 32768), false).num_splits, 1);
  const AttentionConfig single = attention_config(shape_of(1, 4, 32768), false);
  EXPECT_GT(single.num_splits, 1);
  EXPECT_LE(single.num_splits, kAttentionMaxSplits);
  EXPECT_EQ(attention_config(shape_of(1, 4, 200), false).num_splits, 1);
  EXPECT_EQ(attention_config(shape_of(1, 4, 32768), true).num_splits, 1);
  AttentionShape forced = shape_of(1, 4, 32768);
  forced.num_splits = 5;
  EXPECT_EQ(attention_config(forced, false).num_splits, 5);
  forced.num_splits = 100;
  EXPECT_EQ(attention_config(forced, false).num_splits, kAttentionMaxSplits);
  EXPECT_EQ(attention_config(forced, true).num_splits, kAttentionInvariantMaxSplits);
}

TEST(AttentionConfig, WorkspaceHoldsTheLargestConfiguration) {
  EXPECT_EQ(attention_workspace_bytes(shape_of(1, 4, 32768), Device::kCpu), 0U);
  const AttentionShape shape = shape_of(1, 4, 32768);
  const AttentionConfig config = attention_config(shape, false);
  const size_t expected =
      static_cast<size_t>(8 * config.tiles_per_request * config.num_splits) * 64 * 130 * 4;
  EXPECT_EQ(attention_partial_bytes(shape, config), expected);
  EXPECT_GE(attention_workspace_bytes(shape, Device::kCuda), expected);
  EXPECT_EQ(attention_workspace_bytes(shape_of(1, 4, 100), Device::kCuda), 0U);
}

/// Calls `visit` with shapes of small and large batches, every group and head dim the kernels know.
template <typename Visit>
void for_each_shape(const Visit& visit) {
  for (const int32_t num_reqs : {1, 2, 3, 5, 8, 16, 40, 64, 200}) {
    for (const int32_t num_kv_heads : {1, 2, 4, 8, 32}) {
      for (const int32_t group : {1, 2, 4, 7, 8, 16, 32, 64, 65, 128}) {
        for (const int32_t head_dim : {64, 128, 256, 512}) {
          for (const int32_t rows : {1, 4, 16, 17, 32, 64, 100, 128, 1000, 8192}) {
            for (const int32_t context_len : {0, 200, 1000, 4096, 32768, 131072}) {
              AttentionShape shape = shape_of(num_reqs, rows, context_len);
              shape.num_q_heads = num_kv_heads * group;
              shape.num_kv_heads = num_kv_heads;
              shape.head_dim = head_dim;
              visit(shape);
            }
          }
        }
      }
    }
  }
}

AttentionDevice device_of(int32_t num_processors, int32_t shared_memory) {
  AttentionDevice device;
  device.num_processors = num_processors;
  device.shared_memory = shared_memory;
  return device;
}

TEST(AttentionTiles, EveryHeadDimHasATileOnEveryDevice) {
  for (const int32_t limit : {kSmallSharedMemory, kMediumSharedMemory, kLargeSharedMemory}) {
    for (const int32_t head_dim : {64, 128, 256, 512}) {
      for (const int32_t rows : {64, 128}) {
        const AttentionTile tile = attention_tile(head_dim, rows, limit);
        const std::string what = "D " + std::to_string(head_dim) + " rows " + std::to_string(rows) +
                                 " limit " + std::to_string(limit);
        EXPECT_GE(tile.stages, 2) << what;
        EXPECT_EQ(tile.head_dim, head_dim) << what;
        EXPECT_GE(tile.rows, 32) << what;
        EXPECT_LE(tile.rows, rows) << what;
        EXPECT_LE(tile.shared_bytes(), limit) << what;
      }
    }
    for (int32_t head_dim = 1; head_dim <= 512; ++head_dim) {
      EXPECT_LE(generic_attention_bytes(head_dim, generic_attention_tile(head_dim, limit)), limit)
          << head_dim;
    }
  }
  EXPECT_EQ(attention_tile(96, 128, kLargeSharedMemory).stages, 0);
  EXPECT_EQ(attention_tile(128, 128, 48 * 1024).stages, 0);
}

/// The bytes of a CTA and what a device with 99 KiB takes in place of the larger tiles.
TEST(AttentionTiles, KnownBytesAndSmallTiles) {
  EXPECT_EQ((AttentionTile{64, 64, 3}.shared_bytes()), 57536);
  EXPECT_EQ((AttentionTile{128, 64, 3}.shared_bytes()), 114880);
  EXPECT_EQ((AttentionTile{128, 128, 3}.shared_bytes()), 131264);
  EXPECT_EQ((AttentionTile{512, 64, 2}.shared_bytes()), 131104);
  const struct {
    int32_t head_dim, rows, small_rows, small_stages, large_rows, large_stages;
  } cases[] = {{64, 64, 64, 3, 64, 3},     {64, 128, 128, 3, 128, 3}, {128, 64, 64, 2, 64, 3},
               {128, 128, 128, 2, 128, 3}, {256, 64, 64, 2, 64, 2},   {256, 128, 64, 2, 128, 2},
               {512, 64, 32, 2, 64, 2},    {512, 128, 32, 2, 64, 2}};
  for (const auto& row : cases) {
    const AttentionTile small = attention_tile(row.head_dim, row.rows, kSmallSharedMemory);
    EXPECT_EQ(small.rows, row.small_rows) << row.head_dim << " rows " << row.rows;
    EXPECT_EQ(small.stages, row.small_stages) << row.head_dim << " rows " << row.rows;
    for (const int32_t limit : {kMediumSharedMemory, kLargeSharedMemory}) {
      const AttentionTile large = attention_tile(row.head_dim, row.rows, limit);
      EXPECT_EQ(large.rows, row.large_rows) << row.head_dim << " rows " << row.rows;
      EXPECT_EQ(large.stages, row.large_stages) << row.head_dim << " rows " << row.rows;
    }
  }
  EXPECT_EQ(generic_attention_tile(512, kSmallSharedMemory), kSmallGenericTile);
  EXPECT_EQ(generic_attention_tile(256, kSmallSharedMemory), kGenericTile);
  EXPECT_EQ(generic_attention_tile(512, kMediumSharedMemory), kGenericTile);
}

/// A tile never has fewer rows than a token unless the kernel is not taken: nothing divides by 0.
TEST(AttentionConfig, GroupsAboveATileLeaveTheTensorCores) {
  AttentionShape shape = shape_of(1, 16, 512);
  shape.head_dim = 512;
  shape.num_kv_heads = 1;
  for (const int32_t limit : {kSmallSharedMemory, kMediumSharedMemory, kLargeSharedMemory}) {
    for (const int32_t group : {1, 16, 32, 64, 65, 127, 128, 200}) {
      shape.num_q_heads = group;
      const AttentionConfig config =
          attention_config(shape, false, device_of(kAttentionSmCount, limit));
      EXPECT_EQ(config.rows_per_tile, limit == kSmallSharedMemory ? 32 : 64) << group;
      EXPECT_EQ(config.tokens_per_tile, std::max(1, config.rows_per_tile / group)) << group;
      EXPECT_EQ(config.tiles_per_request, (16 - 1) / config.tokens_per_tile + 1) << group;
    }
  }
}

/// FNV-1a over every choice for devices of 132 multiprocessors with 163 and 227 KiB. The figure is
/// that of the choices the recorded times were measured with: a change of it is a change of speed.
TEST(AttentionConfig, ChoicesOfTheMeasuredDevice) {
  for (const int32_t limit : {kMediumSharedMemory, kLargeSharedMemory}) {
    const AttentionDevice device = device_of(132, limit);
    uint64_t hash = 14695981039346656037U;
    const auto mix = [&](int32_t value) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211U;
    };
    for_each_shape([&](const AttentionShape& shape) {
      for (const bool is_invariant : {false, true}) {
        const AttentionConfig hopper = hopper_attention_config(shape, is_invariant, device);
        const AttentionConfig portable = attention_config(shape, is_invariant, device);
        for (const AttentionConfig& config : {hopper, portable}) {
          mix(config.rows_per_tile);
          mix(config.tokens_per_tile);
          mix(config.tiles_per_request);
          mix(config.num_splits);
          mix(config.cluster_size);
          mix(config.keys_per_split);
        }
      }
    });
    EXPECT_EQ(hash, 0x46a9e9e6abf2d92aU) << std::hex << hash;
  }
}

/// Choices that were the fastest, or within a few percent of it, when all were timed on an H200.
TEST(AttentionConfig, HopperTilesAndSplitsThatWereFastest) {
  struct Row {
    int32_t num_reqs, query_rows, context, q_heads, kv_heads, head_dim, window;  // a shape
    int32_t rows, splits, cluster;                                               // its choice
  };
  constexpr Row kRows[] = {
      {1, 32, 224, 32, 8, 128, 0, 64, 1, 1},      {1, 32, 1024, 32, 8, 128, 0, 64, 4, 4},
      {1, 32, 4096, 32, 8, 128, 0, 128, 8, 8},    {1, 32, 32768, 32, 8, 128, 0, 128, 16, 1},
      {1, 32, 8192, 32, 8, 128, 0, 128, 16, 1},   {1, 32, 8192, 32, 2, 128, 0, 128, 16, 1},
      {1, 32, 8192, 16, 4, 128, 0, 64, 8, 8},     {2, 32, 1024, 32, 8, 128, 0, 64, 2, 2},
      {8, 32, 1024, 32, 8, 128, 0, 64, 1, 1},     {8, 32, 8192, 32, 8, 128, 0, 128, 2, 2},
      {16, 32, 1024, 32, 8, 128, 0, 128, 1, 1},   {8, 32, 32768, 32, 8, 128, 1024, 64, 1, 1},
      {1, 32, 32768, 32, 8, 128, 1024, 64, 4, 4}, {1, 256, 256, 16, 8, 256, 0, 64, 1, 1},
      {1, 256, 4096, 16, 8, 256, 0, 128, 4, 2},   {4, 8, 256, 32, 8, 128, 0, 64, 1, 1},
      {2, 8, 1024, 32, 8, 128, 0, 64, 4, 4},      {1, 8192, 0, 32, 8, 128, 0, 128, 1, 1},
      {1, 32, 4096, 16, 2, 512, 0, 64, 16, 1}};
  for (const Row& row : kRows) {
    AttentionShape shape = shape_of(row.num_reqs, row.query_rows, row.context);
    shape.num_q_heads = row.q_heads;
    shape.num_kv_heads = row.kv_heads;
    shape.head_dim = row.head_dim;
    shape.sliding_window = row.window;
    const AttentionConfig config = hopper_attention_config(shape, false);
    const std::string what = std::to_string(row.num_reqs) + " x " + std::to_string(row.context) +
                             " window " + std::to_string(row.window) + " D " +
                             std::to_string(row.head_dim);
    EXPECT_EQ(config.rows_per_tile, row.rows) << what;
    EXPECT_EQ(config.num_splits, row.splits) << what;
    EXPECT_EQ(config.cluster_size, row.cluster) << what;
    const AttentionSplits splits = attention_splits(shape, true);
    EXPECT_EQ(splits.rows_per_tile, row.rows) << what;
    EXPECT_EQ(splits.num_splits, row.splits) << what;
    EXPECT_EQ(splits.cluster_size, row.cluster) << what;
  }
}

/// Nothing depends on the batch: one split, the tallest tile.
TEST(AttentionConfig, HopperBatchInvariantLaunchesAreOfOneKind) {
  for (const int32_t num_reqs : {1, 8, 64}) {
    for (const int32_t rows : {1, 32, 128}) {
      for (const int32_t context : {0, 1024, 32768}) {
        const AttentionConfig invariant =
            hopper_attention_config(shape_of(num_reqs, rows, context), true);
        EXPECT_EQ(invariant.num_splits, 1);
        EXPECT_EQ(invariant.rows_per_tile, 128);
      }
    }
  }
}

/// Rows per tile that there is a kernel for, a whole number of tokens in each, and scratch that is
/// enough for every window.
TEST(AttentionConfig, HopperChoicesCanBeLaunched) {
  for_each_shape([&](AttentionShape shape) {
    const size_t scratch = attention_workspace_bytes(shape, Device::kCuda);
    const int32_t group = shape.num_q_heads / shape.num_kv_heads;
    for (const int32_t window : {0, 1, 128, 1000, 40000}) {
      shape.sliding_window = window;
      const AttentionConfig config = hopper_attention_config(shape, false);
      ASSERT_TRUE(config.rows_per_tile == 64 || config.rows_per_tile == 128);
      ASSERT_TRUE(shape.head_dim <= 256 || config.rows_per_tile == 64);
      ASSERT_TRUE(group > 64 || shape.max_seqlen_q * group > 64 || config.rows_per_tile == 64);
      ASSERT_TRUE(group <= config.rows_per_tile || shape.head_dim > 256 || group > 128);
      ASSERT_GE(config.tiles_per_request * config.tokens_per_tile, shape.max_seqlen_q);
      ASSERT_GE(scratch, hopper_scratch(shape, config).bytes());
    }
  });
}

/// On fewer multiprocessors (an H100 PCIe has 114, an H20 78) splits fill at most one wave of them,
/// and scratch sized from the shapes alone is enough.
TEST(AttentionConfig, FewerMultiprocessors) {
  for (const int32_t num_processors : {78, 114, 132, 148}) {
    const AttentionDevice device = device_of(num_processors, kLargeSharedMemory);
    const int32_t usable = std::min(num_processors, kAttentionSmCount);
    for_each_shape([&](const AttentionShape& shape) {
      const AttentionConfig hopper = hopper_attention_config(shape, false, device);
      const int64_t units = int64_t{shape.num_reqs} * shape.num_kv_heads * hopper.tiles_per_request;
      if (hopper.num_splits > 1) {
        ASSERT_LE(units * hopper.num_splits, usable);
      }
      const size_t scratch = attention_workspace_bytes(shape, Device::kCuda);
      ASSERT_GE(scratch, hopper_scratch(shape, hopper).bytes());
      for (const int32_t limit : {kSmallSharedMemory, kMediumSharedMemory, kLargeSharedMemory}) {
        const AttentionDevice other = device_of(num_processors, limit);
        const int32_t tile = generic_attention_tile(shape.head_dim, limit);
        ASSERT_GE(scratch, attention_partial_bytes(shape, attention_config(shape, false, other)));
        ASSERT_GE(scratch, attention_partial_bytes(
                               shape, attention_config_for_tile(shape, tile, tile, false, other)));
      }
    });
    if (HasFatalFailure()) {
      return;
    }
  }
  AttentionShape shape = shape_of(1, 32, 32768);
  EXPECT_EQ(hopper_attention_config(shape, false, device_of(132, kLargeSharedMemory)).num_splits,
            16);
  EXPECT_EQ(hopper_attention_config(shape, false, device_of(114, kLargeSharedMemory)).num_splits,
            14);
  EXPECT_EQ(hopper_attention_config(shape, false, device_of(78, kLargeSharedMemory)).num_splits, 9);
}

}  // namespace
}  // namespace diffulex::test
