// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/attention_config.h"

#include <algorithm>

#include "kernels/common/row_interval.h"

namespace diffulex {
namespace {

constexpr int32_t kSmallRowTile = 64;
constexpr int32_t kLargeRowTile = 128;
// The generic kernel (fp32, odd head dims) uses this tile on both axes.
constexpr int32_t kGenericTile = 32;
// Splitting pays while fewer than this share of the multiprocessors has work.
constexpr double kBusyShare = 0.8;
constexpr double kWaveSlack = 0.85;
constexpr int32_t kMaxWaves = 4;

int32_t group_size(const AttentionShape& shape) {
  return shape.num_kv_heads > 0 ? std::max(1, shape.num_q_heads / shape.num_kv_heads) : 1;
}

double wave_efficiency(int64_t units) {
  const int64_t waves = (units + kAttentionSmCount - 1) / kAttentionSmCount;
  return static_cast<double>(units) / static_cast<double>(waves * kAttentionSmCount);
}

int32_t automatic_splits(int64_t base_units, int32_t max_context_len) {
  if (base_units <= 0 || static_cast<double>(base_units) >= kBusyShare * kAttentionSmCount) {
    return 1;
  }
  int32_t limit = std::min(kAttentionMaxSplits,
                           std::max(1, ceil_div_i32(max_context_len, kAttentionKeysPerSplit)));
  while (limit > 1 && base_units * limit > int64_t{kMaxWaves} * kAttentionSmCount) {
    --limit;
  }
  double best = 0.0;
  for (int32_t splits = 1; splits <= limit; ++splits) {
    best = std::max(best, wave_efficiency(base_units * splits));
  }
  for (int32_t splits = 1; splits < limit; ++splits) {
    if (wave_efficiency(base_units * splits) >= kWaveSlack * best) {
      return splits;
    }
  }
  return limit;
}

int32_t split_bound(const AttentionShape& shape, int64_t base_units, bool batch_invariant) {
  const int64_t max_keys =
      int64_t{std::max(shape.max_context_len, 0)} + std::max(shape.max_seqlen_q, 0);
  const int64_t per_split =
      batch_invariant ? kAttentionInvariantKeysPerSplit : kAttentionKeysPerSplit;
  const int64_t useful = std::max<int64_t>(1, (max_keys + per_split - 1) / per_split);
  if (shape.num_splits == 0) {
    // The number of units depends on the batch, so a batch-invariant launch may not look at it.
    return batch_invariant ? 1 : automatic_splits(base_units, std::max(shape.max_context_len, 0));
  }
  const int32_t limit = batch_invariant ? kAttentionInvariantMaxSplits : kAttentionMaxSplits;
  return static_cast<int32_t>(std::min<int64_t>({std::max(shape.num_splits, 1), limit, useful}));
}

/// Splits for one wave of CTAs. Batch-invariant launches split by the request alone.
int32_t hopper_splits(const AttentionShape& shape, int32_t keys_per_split, int64_t base_units,
                      bool batch_invariant) {
  const int64_t max_keys =
      int64_t{std::max(shape.max_context_len, 0)} + std::max(shape.max_seqlen_q, 0);
  const int64_t useful = std::max<int64_t>(1, (max_keys + keys_per_split - 1) / keys_per_split);
  if (shape.num_splits != 0) {
    const int32_t limit = batch_invariant ? kAttentionInvariantMaxSplits : kAttentionMaxSplits;
    return static_cast<int32_t>(std::min<int64_t>({std::max(shape.num_splits, 1), limit, useful}));
  }
  if (batch_invariant || base_units <= 0) {
    return 1;
  }
  const int64_t fitting = kAttentionSmCount / base_units;
  if (fitting > kHopperMaxCluster &&
      max_keys > int64_t{kHopperMaxCluster} * kHopperKeysPerClusterCta) {
    return static_cast<int32_t>(std::min<int64_t>({fitting, kAttentionMaxSplits, useful}));
  }
  int32_t splits = 1;
  while (splits < kHopperMaxCluster && 2 * splits <= fitting && splits < useful) {
    splits *= 2;
  }
  return splits;
}

/// CTAs of the clusters that hold `splits` splits of each unit: the largest clusters that run all
/// at once, or 1 where there is none and a second kernel adds up. Clusters do not cross groups of
/// multiprocessors, so the device holds fewer large ones than its size suggests, and a second wave
/// costs more than exchanges between clusters or the second kernel.
int32_t hopper_cluster(int32_t splits, int64_t base_units) {
  constexpr struct {
    int32_t size;
    int32_t resident;    // clusters of this size on the device
    int32_t max_splits;  // that a CTA can add up in the time of a second kernel
  } kClusters[] = {{8, 15, 32}, {4, 30, 16}, {2, 66, 8}};
  for (const auto& cluster : kClusters) {
    if (splits > cluster.size / 2 && splits <= cluster.max_splits &&
        base_units * ceil_div_i32(splits, cluster.size) <= cluster.resident) {
      return cluster.size;
    }
  }
  return 1;
}

}  // namespace

int32_t attention_keys_per_tile(int32_t head_dim) {
  if (head_dim <= 128) {
    return 64;
  }
  return head_dim <= 256 ? 32 : 16;
}

AttentionConfig attention_config_for_tile(const AttentionShape& shape, int32_t rows_per_tile,
                                          int32_t keys_per_tile, bool batch_invariant) {
  AttentionConfig config;
  const int32_t group = group_size(shape);
  config.rows_per_tile = rows_per_tile;
  config.tokens_per_tile = std::max(1, rows_per_tile / group);
  config.keys_per_tile = keys_per_tile;
  config.tiles_per_request = ceil_div_i32(std::max(shape.max_seqlen_q, 0), config.tokens_per_tile);
  const int64_t base_units =
      int64_t{shape.num_reqs} * shape.num_kv_heads * config.tiles_per_request;
  config.num_splits = split_bound(shape, base_units, batch_invariant);
  config.keys_per_split =
      batch_invariant ? kAttentionInvariantKeysPerSplit : kAttentionKeysPerSplit;
  return config;
}

AttentionConfig attention_config(const AttentionShape& shape, bool batch_invariant) {
  const bool small =
      !batch_invariant && int64_t{shape.max_seqlen_q} * group_size(shape) <= kSmallRowTile;
  return attention_config_for_tile(shape, small ? kSmallRowTile : kLargeRowTile,
                                   attention_keys_per_tile(shape.head_dim), batch_invariant);
}

int32_t hopper_keys_per_tile(int32_t head_dim) {
  if (head_dim <= 128) {
    return 128;
  }
  return head_dim <= 256 ? 64 : 32;
}

AttentionConfig hopper_attention_config(const AttentionShape& shape, bool batch_invariant) {
  const int32_t group = group_size(shape);
  const bool is_small = shape.head_dim > 256 ||
                        (!batch_invariant && int64_t{shape.max_seqlen_q} * group <= kSmallRowTile);
  AttentionConfig config;
  config.rows_per_tile = is_small ? kSmallRowTile : kLargeRowTile;
  config.tokens_per_tile = std::max(1, config.rows_per_tile / group);
  config.keys_per_tile = hopper_keys_per_tile(shape.head_dim);
  config.tiles_per_request = ceil_div_i32(std::max(shape.max_seqlen_q, 0), config.tokens_per_tile);
  config.keys_per_split = batch_invariant ? kAttentionInvariantKeysPerSplit : config.keys_per_tile;
  const int64_t base_units =
      int64_t{shape.num_reqs} * shape.num_kv_heads * config.tiles_per_request;
  config.num_splits = hopper_splits(shape, config.keys_per_split, base_units, batch_invariant);
  config.cluster_size = hopper_cluster(config.num_splits, base_units);
  return config;
}

size_t attention_partial_bytes(const AttentionShape& shape, const AttentionConfig& config) {
  if (config.num_splits <= 1) {
    return 0;
  }
  const int32_t rows = std::max(config.rows_per_tile, group_size(shape));
  const int64_t units =
      int64_t{shape.num_reqs} * shape.num_kv_heads * config.tiles_per_request * config.num_splits;
  return static_cast<size_t>(units * rows * (int64_t{shape.head_dim} + 2) *
                             static_cast<int64_t>(sizeof(float)));
}

AttentionSplits attention_splits(const AttentionShape& shape, bool is_hopper) {
  const AttentionConfig config =
      is_hopper ? hopper_attention_config(shape, false) : attention_config(shape, false);
  return {config.num_splits, config.cluster_size};
}

HopperScratch hopper_scratch(const AttentionShape& shape, const AttentionConfig& config) {
  HopperScratch scratch;
  if (config.num_splits <= 1) {
    return scratch;
  }
  const int64_t units = int64_t{shape.num_reqs} * shape.num_kv_heads * config.tiles_per_request;
  const int64_t rows = units * config.num_splits * config.rows_per_tile;
  scratch.value_bytes = static_cast<size_t>(rows * shape.head_dim * 4);
  scratch.stat_bytes = static_cast<size_t>(rows * 8);
  scratch.counter_bytes = static_cast<size_t>(units * config.cluster_size * 8);
  return scratch;
}

size_t attention_workspace_bytes(const AttentionShape& shape, Device device) {
  if (device == Device::kCpu) {
    return 0;
  }
  // The kernel that will run depends on dtype and strides, which are not part of the shape: the
  // buffer is large enough for any of them.
  size_t bytes = 0;
  for (const bool batch_invariant : {false, true}) {
    bytes =
        std::max(bytes, attention_partial_bytes(shape, attention_config(shape, batch_invariant)));
    bytes = std::max(
        bytes, hopper_scratch(shape, hopper_attention_config(shape, batch_invariant)).bytes());
    bytes = std::max(bytes, attention_partial_bytes(
                                shape, attention_config_for_tile(shape, kGenericTile, kGenericTile,
                                                                 batch_invariant)));
  }
  return bytes;
}

}  // namespace diffulex
