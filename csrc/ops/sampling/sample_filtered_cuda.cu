// SPDX-License-Identifier: Apache-2.0
//
// sample_filtered, any type and any row: one CTA per row. Rows without temperature or filter leave
// at once. On sm_90 clusters do most rows of bfloat16 logits (ops/sampling/sm90).
#include <climits>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/prepare.h"
#include "ops/sampling/filter_record.cuh"
#include "ops/sampling/filter_row.cuh"
#include "ops/sampling/sm90/sample_filtered_cluster.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/log_sum.h"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::sample_filtered";

/// The columns before any filter.
struct RowStart {
  uint64_t best = 0;  // ranked stored value of the candidates; 0 = none
  int32_t bad_count = 0;
};

/// Sets the maxima of `state`.
template <typename T>
__device__ RowStart start_row(const FilterArgs& args, FilterShared& shared, FilterState& state,
                              const T* source) {
  uint64_t largest = 0;
  RowStart start;
  int32_t counted = 0;
  visit_row(args.rows, shared, state, source, [&](const FilterColumn& column, int64_t index) {
    start.bad_count += column.is_bad ? 1 : 0;
    if (column.key == 0) {
      return;
    }
    ++counted;
    const uint64_t entry = ranked(column.x, index);
    largest = entry > largest ? entry : largest;
    if (column.is_candidate) {
      start.best = entry > start.best ? entry : start.best;
    }
  });
  start.bad_count = filter_sum(start.bad_count, shared.ints);
  state.num_counted = filter_sum(counted, shared.ints);
  start.best = filter_max(start.best, shared);
  largest = filter_max(largest, shared);
  if (largest != 0) {
    const float x = ordered_value(static_cast<uint32_t>(largest >> 32));
    state.largest_logit = state.transform.logit(x, ranked_index(largest));
    state.largest_z = state.transform.tempered(state.largest_logit);
  }
  return start;
}

template <typename T>
__device__ RowSums sum_row(const FilterArgs& args, FilterShared& shared, const FilterState& state,
                           const T* source, bool is_whole) {
  RowSums sums;
  visit_row(args.rows, shared, state, source, [&](const FilterColumn& column, int64_t index) {
    if (column.key == 0) {
      return;
    }
    sums.raw_sum += static_cast<double>(expf(column.logit - state.largest_logit));
    const bool is_kept = state.is_kept(column, index);
    const float mass = is_whole || is_kept ? state.mass(column.z) : 0.0F;
    if (is_kept && column.is_candidate) {
      sums.candidate_sum += static_cast<double>(mass);
      sums.last = static_cast<int32_t>(index);
    }
    if (mass > 0.0F) {
      sums.sum += static_cast<double>(mass);
      sums.weighted += static_cast<double>(mass) *
                       (static_cast<double>(column.z) - static_cast<double>(state.largest_z));
    }
    if ((is_whole || is_kept) && column.is_candidate) {
      const uint64_t entry = ranked(column.x, index);
      if (entry > sums.best) {
        sums.second = sums.best;
        sums.best = entry;
      } else if (entry > sums.second) {
        sums.second = entry;
      }
    }
  });
  sums.sum = filter_sum(sums.sum, shared.doubles);
  sums.weighted = filter_sum(sums.weighted, shared.doubles);
  sums.raw_sum = filter_sum(sums.raw_sum, shared.doubles);
  sums.candidate_sum = filter_sum(sums.candidate_sum, shared.doubles);
  const uint64_t best = filter_max(sums.best, shared);
  sums.second = filter_max(sums.best == best ? sums.second : sums.best, shared);
  sums.best = best;
  sums.last = static_cast<int32_t>(filter_max(static_cast<uint64_t>(sums.last + 1), shared)) - 1;
  return sums;
}

/// The first kept candidate whose running mass in id order passes `target`; `last` if none does.
template <typename T>
__device__ int32_t drawn_column(const FilterArgs& args, FilterShared& shared,
                                const FilterState& state, const T* source, double target,
                                int32_t last) {
  if (threadIdx.x == 0) {
    shared.column = INT32_MAX;
  }
  double before_tile = 0.0;
  for (int64_t tile = 0; tile * kTileColumns < args.rows.num_columns; ++tile) {
    double mine = 0.0;
    visit_tile(args.rows, shared, state, source, tile,
               [&](const FilterColumn& column, int64_t index) {
                 if (column.is_candidate && state.is_kept(column, index)) {
                   mine += static_cast<double>(state.mass(column.z));
                 }
               });
    double total = 0.0;
    double running = before_tile + filter_scan(mine, shared.doubles, total);
    before_tile += total;
    if (before_tile > target) {
      visit_tile(args.rows, shared, state, source, tile,
                 [&](const FilterColumn& column, int64_t index) {
                   if (column.is_candidate && state.is_kept(column, index)) {
                     running += static_cast<double>(state.mass(column.z));
                     if (running > target) {
                       atomicMin(&shared.column, static_cast<int32_t>(index));
                     }
                   }
                 });
      break;
    }
  }
  __syncthreads();
  return shared.column == INT32_MAX ? last : shared.column;
}

template <typename T>
__global__ void __launch_bounds__(kFilterThreads, 1)
    filter_kernel(const __grid_constant__ FilterArgs args) {
  __shared__ FilterShared shared;
  const int64_t row = blockIdx.x;
  const RowFilters filters = row_filters(args, row);
  if (args.rows.inv_temperature[row] == 0.0F || !filters.is_active()) {
    return;
  }
  if (args.only_pending &&
      args.rows.stats[row * args.rows.stats_stride + kStatsBadCount] != kPendingRow) {
    return;
  }
  const T* source = source_row<T>(args.rows, row);
  if (source == nullptr) {
    write_no_choice(args, row, 0);
    return;
  }
  if (threadIdx.x < args.rows.num_forbidden) {
    shared.forbidden[threadIdx.x] = args.rows.forbidden_ids[threadIdx.x];
  }
  __syncthreads();
  FilterState state;
  state.transform = row_transform(args.rows, row_inputs(args.rows, row));
  state.keys.unused_bits = 32 - args.num_levels * kDigitBits;
  const RowStart start = start_row(args, shared, state, source);
  if (start.best == 0) {
    write_no_choice(args, row, start.bad_count);
    return;
  }
  if (filters.min_p > 0.0F) {
    state.lowest_z = static_cast<double>(state.largest_z) + log(static_cast<double>(filters.min_p));
  }
  if (filters.top_k > 0 && filters.top_k < state.num_counted) {
    state.lowest_key = top_k_key(args, shared, state, source, filters.top_k);
  }
  if (filters.top_p < 1.0F) {
    set_top_p_cut(args, shared, state, source, filters.top_p);
  }
  RowSums sums = sum_row(args, shared, state, source, args.space == ConfidenceSpace::kTempered);
  int32_t chosen = -1;
  if (sums.last < 0) {
    // Nothing that may be drawn was kept: the best candidate, by the unfiltered distribution.
    chosen = ranked_index(start.best);
    sums = sum_row(args, shared, state, source, true);
  } else {
    chosen = drawn_column(args, shared, state, source, args.rows.uniforms[row] * sums.candidate_sum,
                          sums.last);
  }
  if (threadIdx.x < 32) {
    const float x = RowTransform::sanitized(to_float(source[chosen]));
    write_filtered(args, state, sums, row, chosen, x, start.bad_count);
  }
}

/// Digits of a key that can differ: the significant bits of the stored type, all with a soft cap.
int32_t key_levels(const SampleFilteredParams& params) {
  if (params.softcap > 0.0F || params.logits.dtype == DType::kF32) {
    return 8;
  }
  return params.logits.dtype == DType::kBF16 ? 4 : 5;
}

FilterArgs make_args(const SampleFilteredParams& params) {
  FilterArgs args{};
  args.rows = TokenStatsArgs::of(params);
  args.top_k = params.top_k.present() ? params.top_k.as<const int32_t>() : nullptr;
  args.top_p = params.top_p.present() ? params.top_p.as<const float>() : nullptr;
  args.min_p = params.min_p.present() ? params.min_p.as<const float>() : nullptr;
  args.num_levels = key_levels(params);
  args.order = params.filter_order;
  args.space = params.confidence_space;
  return args;
}

}  // namespace

Status sample_filtered(const SampleFilteredParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  FilterArgs args = make_args(params);
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "row_index", params.row_index, -1,
                                       args.rows.num_stored + args.rows.num_extra, context));
  if (sm90::has_sample_filtered(args, params.logits.dtype, context)) {
    // Nearly all rows; the general kernel does what it leaves pending.
    DIFFULEX_RETURN_IF_ERROR(sm90::sample_filtered(args, context));
    args.only_pending = true;
  }
  return dispatch_dtype(kWhere, params.logits.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    filter_kernel<T>
        <<<static_cast<unsigned>(args.rows.num_rows), kFilterThreads, 0, stream_of(context)>>>(
            args);
    return check_launch(kWhere);
  });
}

Status prepare_sample_filtered(const ExecContext& /*context*/) {
  DIFFULEX_RETURN_IF_ERROR(for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    return touch_kernel(kWhere, filter_kernel<T>);
  }));
  return sm90::prepare_sample_filtered();
}

}  // namespace diffulex::cuda
