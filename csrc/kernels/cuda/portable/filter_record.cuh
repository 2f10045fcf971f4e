// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the kernels of sample_filtered share besides the walk over a row: the filters of a row and
// the record that is written for it.

#include <cstdint>

#include "diffulex/kernels/sampling.h"
#include "kernels/common/log_sum.h"
#include "kernels/cuda/portable/filter_row.cuh"

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

__device__ inline float probability_of(const FilterState& state, const LogSum& log_sum,
                                       uint64_t entry) {
  if (entry == 0) {
    return 0.0F;
  }
  const float x = ordered_value(static_cast<uint32_t>(entry >> 32));
  const float z = state.transform.tempered(state.transform.logit(x, ranked_index(entry)));
  return static_cast<float>(exp(log_sum.log_probability(z)));
}

__device__ inline void write_filtered(const FilterArgs& args, const FilterState& state,
                                      const RowSums& sums, int64_t row, int32_t chosen, float x,
                                      int32_t bad_count) {
  float* stats = args.rows.stats + row * args.rows.stats_stride;
  const float logit = state.transform.logit(x, chosen);
  const LogSum log_sum{state.largest_z, log(sums.sum)};
  const LogSum raw_log_sum{state.largest_logit, log(sums.raw_sum)};
  const double entropy = log(sums.sum) - sums.weighted / sums.sum;
  args.rows.ids[row] = chosen;
  stats[kStatsConfidence] =
      static_cast<float>(exp(log_sum.log_probability(state.transform.tempered(logit))));
  stats[kStatsMaxProb] = probability_of(state, log_sum, sums.best);
  stats[kStatsSecondProb] = probability_of(state, log_sum, sums.second);
  stats[kStatsEntropy] = static_cast<float>(entropy > 0.0 ? entropy : 0.0);
  stats[kStatsLogSumExp] = static_cast<float>(log_sum.value());
  stats[kStatsMaxLogit] = state.transform.logit(
      ordered_value(static_cast<uint32_t>(sums.best >> 32)), ranked_index(sums.best));
  stats[kStatsRawConfidence] = static_cast<float>(exp(raw_log_sum.log_probability(logit)));
  stats[kStatsBadCount] = static_cast<float>(bad_count);
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
