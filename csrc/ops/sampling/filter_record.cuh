// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of sample_filtered share besides the walk over a row: the filters of a row and
// the record that is written for it.

#include <cstdint>

#include "diffulex/ops/sampling.h"
#include "ops/sampling/filter_row.cuh"
#include "ops/shared/log_sum.h"

namespace diffulex::cuda {

/// The filters of one row.
struct RowFilters final {
  int32_t top_k;  // 0 = off
  float top_p;    // >= 1 = off
  float min_p;    // 0 = off

  __device__ bool is_active() const { return top_k > 0 || top_p < 1.0F || min_p > 0.0F; }
};

__device__ inline RowFilters row_filters(const FilterArgs& args, int64_t row) {
  RowFilters filters;
  filters.top_k = args.top_k == nullptr || args.top_k[row] < 0 ? 0 : args.top_k[row];
  filters.top_p = args.top_p == nullptr ? 1.0F : args.top_p[row];
  filters.min_p = args.min_p == nullptr ? 0.0F : fminf(fmaxf(args.min_p[row], 0.0F), 1.0F);
  return filters;
}

/// Marks, in the bad-count column, a row that the cluster kernel leaves to the general one.
inline constexpr float kPendingRow = -1.0F;

/// Sums over the described distribution and over what may be drawn.
struct RowSums final {
  double sum = 0.0;
  double weighted = 0.0;
  double raw_sum = 0.0;
  double candidate_sum = 0.0;  // kept candidates
  uint64_t best = 0;           // ranked stored values of the described candidates
  uint64_t second = 0;
  int32_t last = -1;  // last kept candidate
};

/// By the first warp, a statistic per lane.
__device__ inline void write_filtered(const FilterArgs& args, const FilterState& state,
                                      const RowSums& sums, int64_t row, int32_t chosen, float x,
                                      int32_t bad_count) {
  const auto lane = static_cast<int32_t>(threadIdx.x);
  const auto logit_of = [&](uint64_t entry) {
    const float value = ordered_value(static_cast<uint32_t>(entry >> 32));
    return state.transform.logit(value, ranked_index(entry));
  };
  const bool is_raw = lane == kStatsRawConfidence;
  const uint64_t entry = lane == kStatsSecondProb ? sums.second : sums.best;
  const bool is_ranked =
      lane == kStatsMaxProb || lane == kStatsSecondProb || lane == kStatsMaxLogit;
  const float logit = is_ranked ? logit_of(entry) : state.transform.logit(x, chosen);
  const LogSum log_sum{is_raw ? state.largest_logit : state.largest_z,
                       log(is_raw ? sums.raw_sum : sums.sum)};
  auto value = static_cast<float>(
      exp(log_sum.log_probability(is_raw ? logit : state.transform.tempered(logit))));
  if (is_ranked && entry == 0) {
    value = 0.0F;
  } else if (lane == kStatsEntropy) {
    value = static_cast<float>(fmax(log_sum.log - sums.weighted / sums.sum, 0.0));
  } else if (lane == kStatsLogSumExp) {
    value = static_cast<float>(log_sum.value());
  } else if (lane == kStatsMaxLogit) {
    value = logit;
  } else if (lane == kStatsBadCount) {
    value = static_cast<float>(bad_count);
  }
  if (lane < kTokenStatsColumns) {
    args.rows.stats[row * args.rows.stats_stride + lane] = value;
  }
  if (lane == 0) {
    args.rows.ids[row] = chosen;
  }
}

/// By every thread of a CTA.
__device__ inline void write_no_choice(const FilterArgs& args, int64_t row, int32_t bad_count) {
  if (threadIdx.x == 0) {
    args.rows.ids[row] = -1;
  }
  if (threadIdx.x < kTokenStatsColumns) {
    args.rows.stats[row * args.rows.stats_stride + threadIdx.x] =
        threadIdx.x == kStatsBadCount ? static_cast<float>(bad_count) : 0.0F;
  }
}

}  // namespace diffulex::cuda
