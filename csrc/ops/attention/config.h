// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/ops/attention.h"

namespace diffulex {

/// Multiprocessors of an H100 or H200 (SXM). Scratch sizes assume them, so that they are functions
/// of host shapes alone; on a smaller device keys are split for its own number, within that
/// scratch.
inline constexpr int32_t kAttentionSmCount = 132;

/// Shared memory a CTA may opt in to, in bytes: compute capability 8.6, 8.9 and 12.0; 8.0 and 8.7;
/// 9.0 and 10.0.
inline constexpr int32_t kSmallSharedMemory = 99 * 1024;
inline constexpr int32_t kMediumSharedMemory = 163 * 1024;
inline constexpr int32_t kLargeSharedMemory = 227 * 1024;

/// What the choices depend on beside the shapes.
struct AttentionDevice {
  int32_t num_processors = kAttentionSmCount;
  int32_t shared_memory = kLargeSharedMemory;  // bytes a CTA may opt in to
};

/// Largest number of key splits of one request.
inline constexpr int32_t kAttentionMaxSplits = 32;
/// Keys a split should have at least.
inline constexpr int32_t kAttentionKeysPerSplit = 256;
/// As above when results must not depend on the batch, and the bound on the splits then.
inline constexpr int32_t kAttentionInvariantKeysPerSplit = 1024;
inline constexpr int32_t kAttentionInvariantMaxSplits = 8;

/// Largest portable cluster.
inline constexpr int32_t kHopperMaxCluster = 8;

/// Tile shape and split bound of one launch.
struct AttentionConfig {
  int32_t rows_per_tile = 0;    // M: packed rows (token * G + g) of a tile
  int32_t tokens_per_tile = 0;  // floor(M / G), at least 1
  int32_t keys_per_tile = 0;    // N
  int32_t stages = 0;           // AttentionTile::stages of the sm_80 kernel
  int32_t tiles_per_request = 0;
  int32_t num_splits = 1;  // upper bound; the device clamps it per request (request_splits)
  int32_t keys_per_split = kAttentionKeysPerSplit;
  int32_t cluster_size = 1;  // CTAs that add up the splits of a unit; 1 = a second kernel does
};

/// Keys of a tensor-core key tile for head dim D: 64 (D <= 128), 32 (D <= 256), 16 (D <= 512).
[[nodiscard]] constexpr int32_t attention_keys_per_tile(int32_t head_dim) {
  if (head_dim <= 128) {
    return 64;
  }
  return head_dim <= 256 ? 32 : 16;
}

/// One instantiation of the sm_80 kernel, apart from its element type.
struct AttentionTile {
  int32_t head_dim = 0;
  int32_t rows = 0;    // M
  int32_t stages = 0;  // of K and V in shared memory; 0 = no such kernel

  [[nodiscard]] constexpr int32_t keys() const { return attention_keys_per_tile(head_dim); }
  /// Dynamic shared memory of a CTA: Q, the stages of K and V, and a byte a staged key, of 16-bit
  /// elements.
  [[nodiscard]] constexpr int32_t shared_bytes() const {
    return 2 * rows * head_dim + stages * keys() * (4 * head_dim + 1);
  }
};

/// Every instantiation: of a head dim the tallest tile first, of a tile the deepest pipeline.
inline constexpr AttentionTile kAttentionTiles[] = {
    {64, 128, 3}, {64, 64, 3},   {128, 128, 3}, {128, 128, 2}, {128, 64, 3},
    {128, 64, 2}, {256, 128, 2}, {256, 64, 2},  {512, 64, 2},  {512, 32, 2},
};

/// The first instantiation of at most `rows` rows that fits `shared_memory`.
[[nodiscard]] constexpr AttentionTile attention_tile(int32_t head_dim, int32_t rows,
                                                     int32_t shared_memory) {
  for (const AttentionTile& tile : kAttentionTiles) {
    if (tile.head_dim == head_dim && tile.rows <= rows && tile.shared_bytes() <= shared_memory) {
      return tile;
    }
  }
  return {};
}

/// Shared memory of the generic kernel (fp32, odd head dims) with tiles of `tile` rows and as many
/// keys: fp32 rows of Q and of K or V, padded by four floats, the probabilities, 24 bytes a key.
[[nodiscard]] constexpr int32_t generic_attention_bytes(int32_t head_dim, int32_t tile) {
  const int32_t stride = (head_dim + 3) / 4 * 4 + 4;
  return 4 * (2 * tile * stride + tile * (tile + 1)) + 24 * tile;
}

inline constexpr int32_t kGenericTile = 32;
inline constexpr int32_t kSmallGenericTile = 16;

/// Rows and keys of a tile of the generic kernel.
[[nodiscard]] constexpr int32_t generic_attention_tile(int32_t head_dim, int32_t shared_memory) {
  return generic_attention_bytes(head_dim, kGenericTile) <= shared_memory ? kGenericTile
                                                                          : kSmallGenericTile;
}

/// Tile shape and splits of the tensor-core kernels; `stages` is 0 where none has the head dim.
/// With `batch_invariant` the row tile is the tallest and an automatic split count means one split,
/// so that nothing depends on the batch.
[[nodiscard]] AttentionConfig attention_config(const AttentionShape& shape, bool batch_invariant,
                                               const AttentionDevice& device = {});

/// As above for a kernel with its own fixed tile (the generic one).
[[nodiscard]] AttentionConfig attention_config_for_tile(const AttentionShape& shape,
                                                        int32_t rows_per_tile,
                                                        int32_t keys_per_tile, bool batch_invariant,
                                                        const AttentionDevice& device = {});

/// Keys of a key tile of the Hopper kernels: 128 (D <= 128), 64 (D <= 256), 32 (D <= 512).
[[nodiscard]] int32_t hopper_keys_per_tile(int32_t head_dim);

/// Tile shape and splits of the Hopper kernels, those that should take the least time. The splits
/// are the CTAs of one or more clusters, the last of which adds up the partials in the same launch;
/// for many splits a second kernel does. With `batch_invariant` as attention_config(); with a given
/// number of splits tiles have 64 rows where those of a request fit into one, else 128.
[[nodiscard]] AttentionConfig hopper_attention_config(const AttentionShape& shape,
                                                      bool batch_invariant,
                                                      const AttentionDevice& device = {});

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
