// SPDX-License-Identifier: Apache-2.0
#pragma once

// How token_stats cuts a vocabulary row, shared by CPU and CUDA so that both sum in one order.
//
// Element transform, in this order: NaN and -inf -> -inf, +inf -> the largest finite float;
// key = logit - penalty (what the greedy choice compares, lowest id on ties);
// z = softcap(logit) - penalty, times the inverse temperature when that is not 0, clamped to the
// finite range. Chunk partials are fp32 per kStatsChunkColumns, combined in fp64 in an order that
// depends on the number of chunks alone.
//
// Partial records (`partial`): a missing best or second candidate has z = -inf (and best logit
// -inf), id -1; an empty normaliser is m = -inf, s = w = 0.

#include <cstdint>

namespace diffulex {

/// Columns of one chunk, independent of device and thread count.
inline constexpr int64_t kStatsChunkColumns = 2048;
/// Bytes of one chunk record in the CUDA workspace.
inline constexpr int64_t kStatsRecordBytes = 80;
/// Largest number of forbidden ids and of top-k columns.
inline constexpr int64_t kStatsMaxForbidden = 8;
inline constexpr int32_t kStatsMaxTopK = 64;

/// How the CTAs of the Hopper kernel share a row. Results do not depend on it.
struct StatsCluster {
  int32_t ctas = 1;   // per row
  int32_t warps = 1;  // per CTA
};

/// Chunks of a warp on their way or being summed, in the Hopper kernel.
inline constexpr int kStatsStages = 2;

/// Shares for `num_rows` rows of `num_chunks` chunks on `num_processors` multiprocessors; a CTA has
/// at most `max_warps`, a chunk `chunk_bytes` in shared memory.
[[nodiscard]] StatsCluster stats_cluster(int64_t num_rows, int64_t num_chunks, bool has_top_k,
                                         int64_t max_warps, int64_t chunk_bytes,
                                         int64_t num_processors);

/// Chunks of a row of `vocab_size` columns.
[[nodiscard]] constexpr int64_t stats_chunks(int64_t vocab_size) {
  return (vocab_size + kStatsChunkColumns - 1) / kStatsChunkColumns;
}

}  // namespace diffulex
