// SPDX-License-Identifier: Apache-2.0
#include "ops/sampling/token_stats_config.h"

#include <algorithm>

#include "diffulex/ops/sampling.h"

namespace diffulex {
namespace {

/// Multiprocessors of the device that the shares were measured on.
constexpr int64_t kMeasuredProcessors = 132;
/// Shared memory for chunks, of a multiprocessor.
constexpr int64_t kStageBytes = 160 << 10;

int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

/// Warps for the `chunks` of a CTA, at most `max_warps`, in rounds as even as can be; some more
/// where the row has few chunks, since they finish it together.
int32_t even_warps(int64_t chunks, int64_t max_warps) {
  constexpr int64_t kLeast = 4;
  const int64_t rounds = std::max<int64_t>(ceil_div(chunks, max_warps), 1);  // of no chunks too
  return static_cast<int32_t>(std::max(ceil_div(chunks, rounds), kLeast));
}

/// CTAs that share a row while there are few rows, as measured. A cluster must fit the SMs of a
/// GPC, whose number is not a multiple of its size: of 32 clusters of eight some find a third CTA
/// on their SMs, which costs the heavier CTAs of a top-k more than a larger share of the row each.
int64_t cluster_ctas(int64_t num_rows, bool has_top_k, int64_t num_processors) {
  constexpr int64_t kMeasuredRows = 48;
  if (num_rows <= num_processors / 4) {
    return has_top_k ? 7 : 8;
  }
  return num_rows <= kMeasuredRows * num_processors / kMeasuredProcessors ? 5 : 2;
}

}  // namespace

/// While there are few rows, CTAs share a row; a warp sums a chunk while its other one is on its
/// way. Where rows outnumber SMs, an SM takes the more of them the more there are, so that they end
/// at different times.
StatsCluster stats_cluster(int64_t num_rows, int64_t num_chunks, bool has_top_k, int64_t max_warps,
                           int64_t chunk_bytes, int64_t num_processors) {
  num_processors = std::max<int64_t>(num_processors, 1);
  max_warps = std::min(max_warps, kStageBytes / (kStatsStages * chunk_bytes));
  if (num_rows > num_processors / 2) {
    const int64_t rows_per_sm =
        num_rows > 2048 ? 6 : std::min<int64_t>(ceil_div(num_rows, num_processors), 4);
    return {1, even_warps(num_chunks, max_warps / rows_per_sm)};
  }
  const int64_t most = std::max<int64_t>(num_chunks / 4, 1);  // of no chunks too
  const int64_t ctas = std::min(cluster_ctas(num_rows, has_top_k, num_processors), most);
  const int64_t share = std::max<int64_t>(ceil_div(num_chunks, ctas), 1);
  return {static_cast<int32_t>(ctas),
          even_warps(share, std::min(ceil_div(share, kStatsStages), max_warps))};
}

size_t token_stats_workspace_bytes(int64_t num_rows, int64_t vocab_size, int32_t /*top_k*/,
                                   Device device) {
  if (device == Device::kCpu || num_rows <= 0 || vocab_size <= 0) {
    return 0;
  }
  return static_cast<size_t>(num_rows * stats_chunks(vocab_size) * kStatsRecordBytes);
}

}  // namespace diffulex
