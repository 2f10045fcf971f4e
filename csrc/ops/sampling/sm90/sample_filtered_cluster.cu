// SPDX-License-Identifier: Apache-2.0
//
// sample_filtered of bfloat16 rows: a cluster of CTAs holds a row in its shared memory, counts its
// columns per value, and finds every cut in those counts. Counts are integers and masses follow
// from counts, so nothing depends on the order of the threads. Rows whose cuts fall where values
// share a bin, or whose sums those columns could move, are left to the general kernel.
#include <cstdint>

#include "ops/sampling/filter_record.cuh"
#include "ops/sampling/sm90/filter_counts.cuh"
#include "ops/sampling/sm90/filter_slice.cuh"
#include "ops/sampling/sm90/key_bins.cuh"
#include "ops/sampling/sm90/sample_filtered_cluster.h"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/hopper.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/shared_memory.cuh"

namespace diffulex::cuda::sm90 {
namespace {

constexpr const char* kWhere = "diffulex::sample_filtered";
/// Sets the bin of the top-k cut: the one with the k-th largest value.
__device__ void find_top_k(ClusterShared& shared, RowView& view, int32_t top_k) {
  const int32_t highest = kBins - 1 - static_cast<int32_t>(threadIdx.x) * kBinsPerThread;
  int32_t mine = 0;
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    mine += static_cast<int32_t>(shared.totals[highest - i]);
  }
  int32_t total = 0;
  int32_t above = filter_scan(mine, shared.filter.ints, total);
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const auto count = static_cast<int32_t>(shared.totals[highest - i]);
    if (above < top_k && above + count >= top_k) {
      shared.least_bin = highest - i;
    }
    above += count;
  }
  __syncthreads();
  view.least_bin = shared.least_bin;
}

/// True when a filter before top-p drops the columns of a bin.
__device__ __forceinline__ bool is_filtered_out(const RowView& view, int32_t bin) {
  return bin < view.least_bin ||
         static_cast<double>(view.state.transform.tempered(bin_value(bin))) < view.state.lowest_z;
}

/// Mass of one column of a bin, 0 when a filter before top-p drops it.
__device__ __forceinline__ float bin_mass(const RowView& view, int32_t bin, bool is_filtered) {
  if (is_filtered && is_filtered_out(view, bin)) {
    return 0.0F;
  }
  return bin == kMiddleBin ? view.middle_mass
                           : view.state.mass(view.state.transform.tempered(bin_value(bin)));
}

/// Number of ties of this CTA that stay if `kept` of the row do, as find_last_tie takes it: -1 for
/// none, INT64_MAX for all. Slices are in id order, ties before this CTA's come first.
__device__ __forceinline__ int64_t ties_that_stay(ClusterShared& shared, const RowView& view,
                                                  double kept) {
  int64_t left = static_cast<int64_t>(kept < 1.0 ? 1.0 : kept);
  const uint32_t rank = ptx::cluster_rank();
  for (uint32_t other = 0; other < rank; ++other) {
    left -= *ptx::cluster_pointer(&shared.counts[view.cut_bin], other);
  }
  const auto own = static_cast<int64_t>(shared.counts[view.cut_bin]);
  return left <= 0 ? -1 : (left >= own ? INT64_MAX : -2 - left);
}

/// Sets the top-p cut; false when the counts do not determine it.
__device__ bool find_top_p(const FilterArgs& args, ClusterShared& shared, RowView& view,
                           float top_p) {
  const bool is_filtered = args.order == FilterOrder::kTopKFirst;
  const int32_t highest = kBins - 1 - static_cast<int32_t>(threadIdx.x) * kBinsPerThread;
  float masses[kBinsPerThread];  // of a column
  double mine = 0.0;
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const uint32_t count = shared.totals[highest - i];
    masses[i] = count == 0 ? 0.0F : bin_mass(view, highest - i, is_filtered);
    mine += static_cast<double>(count) * masses[i];
  }
  double total = 0.0;
  double above = filter_scan(mine, shared.filter.doubles, total);
  const double limit = fmax(0.0, static_cast<double>(top_p)) * total;
  const int32_t top = bin_of(__float_as_uint(view.state.largest_logit) >> 16);
  if (threadIdx.x == 0) {
    shared.cut_bin = top;
  }
  __syncthreads();
  int32_t lowest = INT32_MAX;
  double lowest_above = 0.0;
#pragma unroll
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const int32_t bin = highest - i;
    const uint32_t count = shared.totals[bin];
    // What the other filters left, at zero mass too.
    const bool is_member =
        count > 0 && (masses[i] > 0.0F || !is_filtered || !is_filtered_out(view, bin));
    if (is_member && (above <= limit || bin == top)) {
      lowest = bin;
      lowest_above = above;
    }
    above += static_cast<double>(count) * masses[i];
  }
  if (lowest != INT32_MAX) {
    atomicMin(&shared.cut_bin, lowest);
  }
  __syncthreads();
  view.cut_bin = shared.cut_bin;
  if (lowest == view.cut_bin) {
    shared.above = lowest_above;
  }
  __syncthreads();
  if (view.cut_bin == kMiddleBin || view.cut_bin == 0) {
    return false;  // these bins hold several values
  }
  const double mass = bin_mass(view, view.cut_bin, is_filtered);
  const double ties = shared.totals[view.cut_bin];
  const double kept = mass > 0.0 ? floor((limit - shared.above) / mass) + 1.0 : ties;
  view.state.last_tie = INT64_MAX;
  if (kept < ties) {
    view.state.last_tie = ties_that_stay(shared, view, kept);
  }
  return true;
}

/// The first column at `place` at which the running sum passes `target`; one has to.
template <typename Walk, typename Weight>
__device__ __forceinline__ int32_t column_in_piece(int32_t place, double sum, double target,
                                                   const Walk& walk, const Weight& weight) {
  int32_t found = -1;
  bool is_found = false;
  walk(place, [&](uint32_t bits, float x, int32_t column, bool is_choice) {
    const double own = weight(bits, x, column, is_choice);
    sum += own;
    if (own > 0.0 && !is_found) {
      found = column;
      is_found = sum > target;
    }
  });
  return found;
}

/// The column of this CTA at which the running sum of weight(bits, x, column, is_candidate), in id
/// order, first passes `target`; -1 if it does not. Each warp adds a range of columns. Weights of
/// columns below view.least_value are 0.
template <typename Weight>
__device__ int32_t find_passing(const FilterArgs& args, ClusterShared& shared, const RowView& view,
                                double running, double target, const Weight& weight) {
  constexpr int32_t kStep = 32 * kPieceColumns;
  const auto warp = static_cast<int32_t>(threadIdx.x >> 5);
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  const int32_t steps = (view.num_columns + kStep - 1) / kStep;
  const int32_t range = (steps + kFilterWarps - 1) / kFilterWarps * kStep;
  const int32_t end = min(view.num_columns, (warp + 1) * range);
  const auto walk = [&](int32_t place, const auto& take) {
    if (place < end) {
      visit_large(args, shared, view, place, view.least_value, take);
    }
  };
  double mine = 0.0;
  for (int32_t place = warp * range + lane * kPieceColumns; place < end; place += kStep) {
    walk(place, [&](uint32_t bits, float x, int32_t column, bool is_choice) {
      mine += weight(bits, x, column, is_choice);
    });
  }
  mine = warp_sum(mine);
  __syncthreads();  // the scratch may still be read
  if (lane == 0) {
    shared.filter.doubles[warp] = mine;
  }
  if (threadIdx.x == 0) {
    shared.filter.column = -1;
  }
  __syncthreads();
  for (int32_t i = 0; i < warp; ++i) {
    running += shared.filter.doubles[i];
  }
  if (running <= target && running + mine > target) {  // one warp
    for (int32_t first = warp * range; first < end; first += kStep) {
      const int32_t place = first + lane * kPieceColumns;
      double part = 0.0;
      walk(place, [&](uint32_t bits, float x, int32_t column, bool is_choice) {
        part += weight(bits, x, column, is_choice);
      });
      double inclusive = part;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
        inclusive += lane >= offset ? other : 0.0;
      }
      const unsigned passed = __ballot_sync(kFullWarp, part > 0.0 && running + inclusive > target);
      if (passed == 0) {
        running += __shfl_sync(kFullWarp, inclusive, 31);
        continue;
      }
      if (lane == __ffs(static_cast<int>(passed)) - 1) {
        shared.filter.column =
            column_in_piece(place, running + (inclusive - part), target, walk, weight);
      }
      break;
    }
  }
  __syncthreads();
  return shared.filter.column;
}

/// Turns the number of ties that stay, as find_top_p leaves it, into the last such column.
__device__ void find_last_tie(const FilterArgs& args, ClusterShared& shared, RowView& view) {
  if (view.state.last_tie >= -1) {
    return;
  }
  const auto wanted = static_cast<double>(-2 - view.state.last_tie);
  view.state.last_tie =
      find_passing(args, shared, view, 0.0, wanted - 0.5, [&](uint32_t bits, float, int32_t, bool) {
        return bin_of(bits) == view.cut_bin ? 1.0 : 0.0;
      });
}

/// The sums and maxima of the parts that the lanes of a warp hold.
__device__ __forceinline__ RowSums add_warp(const RowSums& part) {
  RowSums sums;
  sums.sum = warp_sum(part.sum);
  sums.weighted = warp_sum(part.weighted);
  sums.raw_sum = warp_sum(part.raw_sum);
  sums.candidate_sum = warp_sum(part.candidate_sum);
  sums.last = __reduce_max_sync(kFullWarp, part.last);
  // Entries are values here, so that two may be equal.
  const auto best = static_cast<uint32_t>(part.best >> 32);
  const auto second = static_cast<uint32_t>(part.second >> 32);
  const uint32_t top = __reduce_max_sync(kFullWarp, best);
  const bool has_tie = __popc(__ballot_sync(kFullWarp, best == top)) > 1;
  const uint32_t next = __reduce_max_sync(kFullWarp, best == top && !has_tie ? second : best);
  sums.best = static_cast<uint64_t>(top) << 32;
  sums.second = static_cast<uint64_t>(next) << 32;
  return sums;
}

/// Sums of this CTA's columns, reported.
__device__ void sum_columns(const FilterArgs& args, ClusterShared& shared, const RowView& view) {
  // A thread adds a few dozen columns in fp32; threads and CTAs are added in fp64.
  float sum = 0.0F;
  float weighted = 0.0F;
  float candidate_sum = 0.0F;
  float best = -INFINITY;
  float second = -INFINITY;
  int32_t last = -1;
  for (int32_t place = static_cast<int32_t>(threadIdx.x) * kPieceColumns; place < view.num_columns;
       place += kThreads * kPieceColumns) {
    visit_large(args, shared, view, place, view.is_whole ? -INFINITY : view.least_value,
                [&](uint32_t bits, float x, int32_t column, bool is_choice) {
                  const float z = view.state.transform.tempered(x);
                  const bool is_kept = view.is_kept(bin_of(bits), z, column);
                  if (!is_kept && !view.is_whole) {
                    return;
                  }
                  const float mass = view.state.mass(z);
                  if (is_kept && is_choice) {
                    candidate_sum += mass;
                    last = column;
                  }
                  sum += mass;
                  weighted += mass > 0.0F ? mass * (z - view.state.largest_z) : 0.0F;
                  if (is_choice) {
                    second = fmaxf(second, fminf(best, x));
                    best = fmaxf(best, x);
                  }
                });
  }
  const auto entry = [](float value) {
    return value == -INFINITY ? 0 : static_cast<uint64_t>(ordered_bits(value)) << 32;
  };
  RowSums mine;
  mine.sum = static_cast<double>(sum);
  mine.weighted = static_cast<double>(weighted);
  mine.raw_sum = static_cast<double>(view.raw_part);
  mine.candidate_sum = static_cast<double>(candidate_sum);
  mine.best = entry(best);
  mine.second = entry(second);
  mine.last = last;
  mine = add_warp(mine);
  if ((threadIdx.x & 31) == 0) {
    shared.warp_sums[threadIdx.x >> 5] = mine;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const RowSums sums =
        add_warp(threadIdx.x < kFilterWarps ? shared.warp_sums[threadIdx.x] : RowSums{});
    if (threadIdx.x == 0) {
      shared.report.sums = sums;
    }
  }
}

/// Adds the reports of all CTAs. By one warp, with a report in each of the first lanes.
__device__ RowTotals add_sums(ClusterShared& shared, double uniform) {
  const uint32_t lane = threadIdx.x & 31;
  RowSums part;
  if (lane < kCtas) {
    part = ptx::cluster_pointer(&shared.report, lane)->sums;
  }
  RowTotals totals;
  totals.sums = add_warp(part);
  const double target = uniform * totals.sums.candidate_sum;
  double inclusive = part.candidate_sum;
#pragma unroll
  for (uint32_t offset = 1; offset < kCtas; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += lane >= offset ? other : 0.0;
  }
  const unsigned filled = __ballot_sync(kFullWarp, part.last >= 0);
  const unsigned passed = __ballot_sync(kFullWarp, part.last >= 0 && inclusive > target);
  if (filled != 0) {  // the last one if rounding leaves none
    totals.drawer =
        passed != 0 ? __ffs(static_cast<int>(passed)) - 1 : 31 - __clz(static_cast<int>(filled));
    const double before = __shfl_up_sync(kFullWarp, inclusive, 1);
    totals.before = __shfl_sync(kFullWarp, lane == 0 ? 0.0 : before, totals.drawer);
  }
  return totals;
}

/// The first kept candidate of this CTA whose running mass passes `target`; its last one if none
/// does.
__device__ int32_t draw_column(const FilterArgs& args, ClusterShared& shared, const RowView& view,
                               double before, double target) {
  const int32_t found = find_passing(args, shared, view, before, target,
                                     [&](uint32_t bits, float x, int32_t column, bool is_choice) {
                                       const float z = view.state.transform.tempered(x);
                                       return is_choice && view.is_kept(bin_of(bits), z, column)
                                                  ? static_cast<double>(view.state.mass(z))
                                                  : 0.0;
                                     });
  return found < 0 ? shared.report.sums.last : found;
}

/// Finds the cuts; false when the row is one for the general kernel. The same in every CTA.
__device__ bool find_cuts(const FilterArgs& args, ClusterShared& shared, RowView& view,
                          const RowFilters& filters, double middle_tempered) {
  const float inverse = view.state.transform.inv_temperature;
  const bool is_low_blurred =
      shared.totals[0] > 0 &&
      (view.state.largest_logit - kLowValue) * fminf(inverse, 1.0F) < 100.0F;
  if (shared.totals[kTopBin] > 0 || is_low_blurred) {
    return false;
  }
  if (filters.min_p > 0.0F) {
    view.state.lowest_z =
        static_cast<double>(view.state.largest_z) + log(static_cast<double>(filters.min_p));
  }
  if (filters.top_k > 0 && filters.top_k < view.state.num_counted) {
    find_top_k(shared, view, filters.top_k);
    if (view.least_bin == kMiddleBin || view.least_bin == 0) {
      return false;
    }
  }
  if (!(filters.top_p < 1.0F)) {
    return true;
  }
  // Where min-p ends inside the middle bin, its columns are not alike.
  const float middle_width = kMiddleWidth * fabsf(inverse);
  if (args.order == FilterOrder::kTopKFirst &&
      fabs(view.state.lowest_z) <= static_cast<double>(middle_width)) {
    return false;
  }
  if (shared.totals[kMiddleBin] > 0) {
    // On average; their powers relative to 1 are in the range of fp32.
    if (middle_width > 50.0F) {
      return false;
    }
    view.middle_mass =
        view.state.mass(0.0F) * static_cast<float>(middle_tempered / shared.totals[kMiddleBin]);
  }
  return find_top_p(args, shared, view, filters.top_p);
}

__device__ void run_row(const FilterArgs& args, ClusterShared& shared, RowView& view, int64_t row,
                        const RowFilters& filters, const __nv_bfloat16* source) {
  const uint32_t rank = ptx::cluster_rank();
  load_slice(args, shared, view, source);
  count_columns(args, shared, view);
  cluster_sync();
  const CtaReport merged = merge_reports(shared, view);
  if (merged.best == 0) {
    if (rank == 0) {
      write_no_choice(args, row, merged.bad_count);
    }
    return;
  }
  const auto leave_to_general_kernel = [&] {
    if (rank == 0 && threadIdx.x == 0) {
      args.rows.stats[row * args.rows.stats_stride + kStatsBadCount] = kPendingRow;
    }
  };
  if (!find_cuts(args, shared, view, filters, merged.middle_tempered)) {
    leave_to_general_kernel();
    return;
  }
  const int32_t least_bin = max(view.least_bin, view.cut_bin);
  view.least_value = least_bin == 0 ? -INFINITY : bin_value(least_bin);
  find_last_tie(args, shared, view);
  // The least float at or above the bound keeps what the bound keeps.
  view.lowest_z = __double2float_ru(view.state.lowest_z);
  view.last_tie =
      static_cast<int32_t>(view.state.last_tie > INT32_MAX ? INT32_MAX : view.state.last_tie);
  sum_columns(args, shared, view);
  cluster_sync();
  const double uniform = args.rows.uniforms[row];
  if (threadIdx.x < 32) {
    const RowTotals all = add_sums(shared, uniform);
    if (threadIdx.x == 0) {
      shared.row = all;
    }
  }
  __syncthreads();
  const RowTotals totals = shared.row;
  if (totals.drawer < 0) {
    leave_to_general_kernel();  // nothing that may be drawn was kept
    return;
  }
  if (rank == static_cast<uint32_t>(totals.drawer)) {
    const int32_t chosen =
        draw_column(args, shared, view, totals.before, uniform * totals.sums.candidate_sum);
    if (threadIdx.x < 32) {
      const float x = RowTransform::sanitized(to_float(shared.columns[chosen - view.first]));
      write_filtered(args, view.state, totals.sums, row, chosen, x, merged.bad_count);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 3)
    cluster_filter_kernel(const __grid_constant__ FilterArgs args, int32_t slice) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *reinterpret_cast<ClusterShared*>(memory);
  pdl_wait();
  const int64_t row = blockIdx.x / kCtas;
  const RowFilters filters = row_filters(args, row);
  if (args.rows.inv_temperature[row] == 0.0F || !filters.is_active()) {
    return;  // the whole cluster
  }
  const auto* source = source_row<__nv_bfloat16>(args.rows, row);
  if (source == nullptr) {
    if (blockIdx.x % kCtas == 0) {
      write_no_choice(args, row, 0);
    }
    return;
  }
  if (threadIdx.x < args.rows.num_forbidden) {
    shared.filter.forbidden[threadIdx.x] = args.rows.forbidden_ids[threadIdx.x];
  }
  RowView view;
  view.state.transform = row_transform(args.rows, row_inputs(args.rows, row));
  view.first = static_cast<int64_t>(blockIdx.x % kCtas) * slice;
  const int64_t left = args.rows.num_columns - view.first;
  view.num_columns = static_cast<int32_t>(left < 0 ? 0 : (left < slice ? left : slice));
  view.is_whole = args.space == ConfidenceSpace::kTempered;
  run_row(args, shared, view, row, filters, source);
  cluster_sync();  // others may still read this CTA's counts and sums
}

int64_t slice_columns(int64_t num_columns) {
  return ceil_div(num_columns, int64_t{kCtas} * kPieceColumns) * kPieceColumns;
}

size_t shared_bytes(int64_t slice) {
  return sizeof(ClusterShared) + static_cast<size_t>(slice) * sizeof(__nv_bfloat16);
}

}  // namespace

bool has_sample_filtered(const FilterArgs& args, DType dtype, const ExecContext& context) {
  return dtype == DType::kBF16 && args.rows.softcap == 0.0F &&
         slice_columns(args.rows.num_columns) <= kMaxSlice &&
         is_hopper_device(context.device_index);
}

Status sample_filtered(const FilterArgs& args, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR((allow_shared_memory<cluster_filter_kernel>(kWhere, context.device_index,
                                                                       shared_bytes(kMaxSlice))));
  const int64_t slice = slice_columns(args.rows.num_columns);
  const LaunchShape shape{static_cast<unsigned>(args.rows.num_rows * kCtas), kThreads,
                          shared_bytes(slice), stream_of(context), kCtas};
  return cuda_status(kWhere, launch_dependent(cluster_filter_kernel, shape, true, args,
                                              static_cast<int32_t>(slice)));
}

Status prepare_sample_filtered() {
  int32_t device_index = 0;
  DIFFULEX_RETURN_IF_ERROR(cuda_status(kWhere, cudaGetDevice(&device_index)));
  if (!is_hopper_device(device_index)) {
    return Status::ok_status();
  }
  return allow_shared_memory<cluster_filter_kernel>(kWhere, device_index, shared_bytes(kMaxSlice));
}

}  // namespace diffulex::cuda::sm90
