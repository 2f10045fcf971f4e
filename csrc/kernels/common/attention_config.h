// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/kernels/attention.h"

namespace diffulex {

/// Split counts and scratch sizes assume a device of this many multiprocessors (H100 and H200), so
/// that they are functions of host shapes alone and equal on every machine.
inline constexpr int32_t kAttentionSmCount = 132;
/// Largest number of key splits of one request.
inline constexpr int32_t kAttentionMaxSplits = 32;
/// Keys a split should have at least.
inline constexpr int32_t kAttentionKeysPerSplit = 256;
/// As above when results must not depend on the batch, and the bound on the splits then.
inline constexpr int32_t kAttentionInvariantKeysPerSplit = 1024;
inline constexpr int32_t kAttentionInvariantMaxSplits = 8;

/// Largest portable cluster.
inline constexpr int32_t kHopperMaxCluster = 8;
/// Keys a CTA of a full cluster must have before more splits, through the workspace, pay.
inline constexpr int32_t kHopperKeysPerClusterCta = 1024;

/// Tile shape and split bound of one launch.
struct AttentionConfig {
  int32_t rows_per_tile = 0;    // M: packed rows (token * G + g) of a tile
  int32_t tokens_per_tile = 0;  // floor(M / G), at least 1
  int32_t keys_per_tile = 0;    // N
  int32_t tiles_per_request = 0;
  int32_t num_splits = 1;  // upper bound; the device clamps it per request (request_splits)
  int32_t keys_per_split = kAttentionKeysPerSplit;
  int32_t cluster_size = 1;  // CTAs that add up the splits of a unit; 1 = a second kernel does
};

/// Keys of a tensor-core key tile for head dim D: 64 (D <= 128), 32 (D <= 256), 16 (D <= 512).
[[nodiscard]] int32_t attention_keys_per_tile(int32_t head_dim);

/// Tile shape and splits of the tensor-core kernels. With `batch_invariant` the row tile is fixed
/// at 128 and an automatic split count means one split, so that nothing depends on the batch.
[[nodiscard]] AttentionConfig attention_config(const AttentionShape& shape, bool batch_invariant);

/// As above for a kernel with its own fixed tile (the generic one).
[[nodiscard]] AttentionConfig attention_config_for_tile(const AttentionShape& shape,
                                                        int32_t rows_per_tile,
                                                        int32_t keys_per_tile,
                                                        bool batch_invariant);

/// Keys of a key tile of the Hopper kernels: 128 (D <= 128), 64 (D <= 256), 32 (D <= 512).
[[nodiscard]] int32_t hopper_keys_per_tile(int32_t head_dim);

/// Tile shape and splits of the Hopper kernels. The splits are the CTAs of one or more clusters,
/// the last of which adds up the partials in the same launch; for many splits a second kernel does.
[[nodiscard]] AttentionConfig hopper_attention_config(const AttentionShape& shape,
                                                      bool batch_invariant);

/// Scratch of the Hopper kernels, in this order: per (request, row tile, KV head, split) M x D
/// floats and M statistics of 8 bytes, per (request, row tile, KV head) a counter of 8 bytes for
/// each CTA of a cluster. All 0 without splits.
struct HopperScratch {
  size_t value_bytes = 0;
  size_t stat_bytes = 0;
  size_t counter_bytes = 0;

  [[nodiscard]] size_t bytes() const { return value_bytes + stat_bytes + counter_bytes; }
};

[[nodiscard]] HopperScratch hopper_scratch(const AttentionShape& shape,
                                           const AttentionConfig& config);

/// Bytes of fp32 partials (unnormalised output, maximum, sum) of one configuration: R * Hkv *
/// tiles * splits * M * (D + 2) * 4, 0 without splits.
[[nodiscard]] size_t attention_partial_bytes(const AttentionShape& shape,
                                             const AttentionConfig& config);

}  // namespace diffulex
