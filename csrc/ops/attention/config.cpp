// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/config.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "diffulex/ops/row_interval.h"

namespace diffulex {
namespace {

constexpr int32_t kSmallRowTile = 64;
constexpr int32_t kLargeRowTile = 128;
// Splitting pays while fewer than this share of the multiprocessors has work.
constexpr double kBusyShare = 0.8;
constexpr double kWaveSlack = 0.85;
constexpr int32_t kMaxWaves = 4;

int32_t group_size(const AttentionShape& shape) {
  return shape.num_kv_heads > 0 ? std::max(1, shape.num_q_heads / shape.num_kv_heads) : 1;
}

/// Scratch is sized for kAttentionSmCount, whatever the device has.
int32_t usable_processors(const AttentionDevice& device) {
  return std::clamp(device.num_processors, 1, kAttentionSmCount);
}

double wave_efficiency(int64_t units, int32_t num_processors) {
  const int64_t waves = (units + num_processors - 1) / num_processors;
  return static_cast<double>(units) / static_cast<double>(waves * num_processors);
}

int32_t automatic_splits(int64_t base_units, int32_t max_context_len, int32_t num_processors) {
  if (base_units <= 0 || static_cast<double>(base_units) >= kBusyShare * num_processors) {
    return 1;
  }
  int32_t limit = std::min(kAttentionMaxSplits,
                           std::max(1, ceil_div_i32(max_context_len, kAttentionKeysPerSplit)));
  while (limit > 1 && base_units * limit > int64_t{kMaxWaves} * num_processors) {
    --limit;
  }
  double best = 0.0;
  for (int32_t splits = 1; splits <= limit; ++splits) {
    best = std::max(best, wave_efficiency(base_units * splits, num_processors));
  }
  for (int32_t splits = 1; splits < limit; ++splits) {
    if (wave_efficiency(base_units * splits, num_processors) >= kWaveSlack * best) {
      return splits;
    }
  }
  return limit;
}

int32_t split_bound(const AttentionShape& shape, int64_t base_units, bool batch_invariant,
                    const AttentionDevice& device) {
  const int64_t max_keys =
      int64_t{std::max(shape.max_context_len, 0)} + std::max(shape.max_seqlen_q, 0);
  const int64_t per_split =
      batch_invariant ? kAttentionInvariantKeysPerSplit : kAttentionKeysPerSplit;
  const int64_t useful = std::max<int64_t>(1, (max_keys + per_split - 1) / per_split);
  if (shape.num_splits == 0) {
    // The number of units depends on the batch, so a batch-invariant launch may not look at it.
    if (batch_invariant) {
      return 1;
    }
    const int32_t context_len = std::max(shape.max_context_len, 0);
    return std::min(automatic_splits(base_units, context_len, usable_processors(device)),
                    automatic_splits(base_units, context_len, kAttentionSmCount));
  }
  const int32_t limit = batch_invariant ? kAttentionInvariantMaxSplits : kAttentionMaxSplits;
  return static_cast<int32_t>(std::min<int64_t>({std::max(shape.num_splits, 1), limit, useful}));
}

/// CTAs of the clusters that hold `splits` splits of each unit: the largest clusters that run all
/// at once, or 1 where there is none and a second kernel adds up. Clusters do not cross groups of
/// multiprocessors, so the device holds fewer large ones than its size suggests, and a second wave
/// costs more than exchanges between clusters or the second kernel. Of a device with fewer
/// multiprocessors as large a share is taken to be of use.
int32_t hopper_cluster(int32_t splits, int64_t base_units, int32_t num_processors) {
  constexpr struct {
    int32_t size;
    int32_t resident;    // clusters of this size on a device of kAttentionSmCount
    int32_t max_splits;  // that a CTA can add up in the time of a second kernel
  } kClusters[] = {{8, 15, 32}, {4, 30, 16}, {2, 66, 8}};
  for (const auto& cluster : kClusters) {
    const int32_t resident = cluster.resident * num_processors / kAttentionSmCount;
    if (splits > cluster.size / 2 && splits <= cluster.max_splits &&
        base_units * ceil_div_i32(splits, cluster.size) <= resident) {
      return cluster.size;
    }
  }
  return 1;
}

void set_rows(AttentionConfig& config, int32_t rows, const AttentionShape& shape) {
  config.rows_per_tile = rows;
  config.tokens_per_tile = std::max(1, rows / group_size(shape));
  config.tiles_per_request = ceil_div_i32(std::max(shape.max_seqlen_q, 0), config.tokens_per_tile);
}

/// True where the packed rows of a request fit into a tile of 64.
bool fits_small_tile(const AttentionShape& shape) {
  return int64_t{shape.max_seqlen_q} * group_size(shape) <= kSmallRowTile;
}

/// (request, row tile, KV head) of a launch.
int64_t num_units(const AttentionShape& shape, const AttentionConfig& config) {
  return int64_t{shape.num_reqs} * shape.num_kv_heads * config.tiles_per_request;
}

/// Most keys that a row tile sees.
int32_t hopper_keys(const AttentionShape& shape) {
  constexpr int32_t kLimit = 1 << 30;  // that of a request (args.cuh)
  return max_tile_keys(std::clamp(shape.max_context_len, 0, kLimit),
                       std::min(shape.max_seqlen_q, kLimit - 1),
                       static_cast<int32_t>(MaskKind::kBlockCausal), shape.sliding_window);
}

/// True when there is a kernel with tiles of `rows` that the shape gives enough of.
bool has_hopper_rows(const AttentionShape& shape, int32_t rows) {
  if (shape.head_dim > 256) {
    return rows == kSmallRowTile;
  }
  const bool is_group_small = group_size(shape) <= kSmallRowTile;
  return rows == kSmallRowTile ? is_group_small : !is_group_small || !fits_small_tile(shape);
}

AttentionConfig hopper_config(const AttentionShape& shape, int32_t rows, int32_t splits,
                              bool batch_invariant, int32_t num_processors) {
  AttentionConfig config;
  set_rows(config, rows, shape);
  config.keys_per_tile = hopper_keys_per_tile(shape.head_dim);
  config.keys_per_split = batch_invariant ? kAttentionInvariantKeysPerSplit : config.keys_per_tile;
  config.num_splits =
      std::clamp(splits, 1, std::max(1, ceil_div_i32(hopper_keys(shape), config.keys_per_split)));
  config.cluster_size = hopper_cluster(config.num_splits, num_units(shape, config), num_processors);
  return config;
}

/// Calls `visit` with every choice that a launch has: tiles of 64 and of 128 rows, keys whole or in
/// splits of one wave of CTAs, as many as a cluster has or, where that leaves most multiprocessors
/// idle, as many as there are CTAs.
template <typename Visit>
void for_each_hopper_config(const AttentionShape& shape, int32_t num_processors,
                            const Visit& visit) {
  for (const int32_t rows : {kSmallRowTile, kLargeRowTile}) {
    if (!has_hopper_rows(shape, rows)) {
      continue;
    }
    const AttentionConfig whole = hopper_config(shape, rows, 1, false, num_processors);
    visit(whole);
    const int64_t units = num_units(shape, whole);
    const int64_t fitting = units > 0 ? num_processors / units : 1;
    const int64_t useful = ceil_div_i32(hopper_keys(shape), whole.keys_per_split);
    const auto most =
        static_cast<int32_t>(std::min<int64_t>({fitting, useful, kAttentionMaxSplits}));
    for (int32_t splits = 2; splits <= std::min(most, kHopperMaxCluster); splits *= 2) {
      visit(hopper_config(shape, rows, splits, false, num_processors));
    }
    if (most > kHopperMaxCluster) {
      visit(hopper_config(shape, rows, most, false, num_processors));
    }
  }
}

/// Nanoseconds that a launch takes on an H200 while memory keeps up: what CTAs need to start, their
/// key tiles, and the exchange of the partials of splits. Only comparisons matter; they are
/// made on other devices too, where nothing was timed.
int64_t hopper_cost(const AttentionShape& shape, const AttentionConfig& config,
                    int32_t num_processors) {
  constexpr struct {
    int32_t head_dim, small_tile, large_tile;  // of 64 and of 128 rows
  } kTiles[] = {{64, 930, 1410}, {128, 1210, 1480}, {256, 1085, 1550}, {512, 1570, 1570}};
  constexpr int64_t kSmallStart = 3900;
  constexpr int64_t kLargeStart = 4100;
  constexpr int64_t kExchange = 1000;
  constexpr int64_t kExchangePerKilobyte = 15;  // that a CTA writes
  constexpr int64_t kCtasPerNanosecond = 2;     // that write a kilobyte at the same time
  constexpr int64_t kClusters = 4000;           // several for a unit
  constexpr int64_t kSecondKernel = 3850;
  const auto* tile = std::find_if(std::begin(kTiles), std::end(kTiles) - 1,
                                  [&](const auto& row) { return shape.head_dim <= row.head_dim; });
  const bool is_small = config.rows_per_tile == kSmallRowTile;
  const int64_t ctas = num_units(shape, config) * config.num_splits;
  const int64_t waves = std::max<int64_t>(1, (ctas + num_processors - 1) / num_processors);
  const int32_t tiles = ceil_div_i32(hopper_keys(shape), config.keys_per_tile);
  const int32_t walked = ceil_div_i32(tiles, config.num_splits);
  const int64_t whole = (is_small ? kSmallStart : kLargeStart) +
                        waves * walked * (is_small ? tile->small_tile : tile->large_tile);
  if (config.num_splits == 1) {
    return whole;
  }
  const int64_t kilobytes = int64_t{config.rows_per_tile} * shape.head_dim * 4 / 1024;
  const int64_t exchange =
      kExchange + kilobytes * (kExchangePerKilobyte + ctas / kCtasPerNanosecond);
  if (config.cluster_size == 1) {
    return whole + exchange + kSecondKernel;
  }
  return whole + exchange + (config.cluster_size < config.num_splits ? kClusters : 0);
}

}  // namespace

AttentionConfig attention_config_for_tile(const AttentionShape& shape, int32_t rows_per_tile,
                                          int32_t keys_per_tile, bool batch_invariant,
                                          const AttentionDevice& device) {
  AttentionConfig config;
  set_rows(config, rows_per_tile, shape);
  config.keys_per_tile = keys_per_tile;
  config.num_splits = split_bound(shape, num_units(shape, config), batch_invariant, device);
  config.keys_per_split =
      batch_invariant ? kAttentionInvariantKeysPerSplit : kAttentionKeysPerSplit;
  return config;
}

AttentionConfig attention_config(const AttentionShape& shape, bool batch_invariant,
                                 const AttentionDevice& device) {
  const bool small = !batch_invariant && fits_small_tile(shape);
  AttentionConfig config =
      attention_config_for_tile(shape, small ? kSmallRowTile : kLargeRowTile,
                                attention_keys_per_tile(shape.head_dim), batch_invariant, device);
  const AttentionTile tile =
      attention_tile(shape.head_dim, config.rows_per_tile, device.shared_memory);
  config.stages = tile.stages;
  if (tile.stages > 0 && tile.rows != config.rows_per_tile) {
    set_rows(config, tile.rows, shape);
  }
  return config;
}

int32_t hopper_keys_per_tile(int32_t head_dim) {
  if (head_dim <= 128) {
    return 128;
  }
  return head_dim <= 256 ? 64 : 32;
}

AttentionConfig hopper_attention_config(const AttentionShape& shape, bool batch_invariant,
                                        const AttentionDevice& device) {
  const int32_t num_processors = usable_processors(device);
  if (batch_invariant || shape.num_splits != 0) {
    const bool is_small = shape.head_dim > 256 || (!batch_invariant && fits_small_tile(shape));
    const int32_t limit = batch_invariant ? kAttentionInvariantMaxSplits : kAttentionMaxSplits;
    return hopper_config(shape, is_small ? kSmallRowTile : kLargeRowTile,
                         std::min(shape.num_splits, limit), batch_invariant, num_processors);
  }
  AttentionConfig best;
  int64_t least = INT64_MAX;
  for_each_hopper_config(shape, num_processors, [&](const AttentionConfig& config) {
    const int64_t cost = hopper_cost(shape, config, num_processors);
    if (cost < least) {
      least = cost;
      best = config;
    }
  });
  return best;
}

size_t attention_partial_bytes(const AttentionShape& shape, const AttentionConfig& config) {
  if (config.num_splits <= 1) {
    return 0;
  }
  const int32_t rows = std::max(config.rows_per_tile, group_size(shape));
  const int64_t units = num_units(shape, config) * config.num_splits;
  return static_cast<size_t>(units * rows * (int64_t{shape.head_dim} + 2) *
                             static_cast<int64_t>(sizeof(float)));
}

AttentionSplits attention_splits(const AttentionShape& shape, bool is_hopper) {
  const AttentionConfig config =
      is_hopper ? hopper_attention_config(shape, false) : attention_config(shape, false);
  return {config.num_splits, config.cluster_size, config.rows_per_tile};
}

HopperScratch hopper_scratch(const AttentionShape& shape, const AttentionConfig& config) {
  HopperScratch scratch;
  if (config.num_splits <= 1) {
    return scratch;
  }
  const int64_t units = num_units(shape, config);
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
  // The kernel that will run depends on dtype, strides and device, which are not part of the shape:
  // the buffer is large enough for any of them.
  size_t bytes = 0;
  for_each_hopper_config(shape, kAttentionSmCount, [&](const AttentionConfig& config) {
    bytes = std::max(bytes, hopper_scratch(shape, config).bytes());
  });
  for (const bool batch_invariant : {false, true}) {
    bytes = std::max(
        bytes, hopper_scratch(shape, hopper_attention_config(shape, batch_invariant)).bytes());
    for (const int32_t shared_memory : {kSmallSharedMemory, kLargeSharedMemory}) {
      AttentionDevice facts;
      facts.shared_memory = shared_memory;
      const int32_t tile = generic_attention_tile(shape.head_dim, shared_memory);
      for (const AttentionConfig& config :
           {attention_config(shape, batch_invariant, facts),
            attention_config_for_tile(shape, tile, tile, batch_invariant, facts)}) {
        bytes = std::max(bytes, attention_partial_bytes(shape, config));
      }
    }
  }
  return bytes;
}

}  // namespace diffulex
