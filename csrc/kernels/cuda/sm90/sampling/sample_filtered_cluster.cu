// SPDX-License-Identifier: Apache-2.0
//
// sample_filtered of bfloat16 rows: a cluster of CTAs holds a row in its shared memory, counts its
// columns per value, and finds every cut in those counts. Counts are integers and masses follow
// from counts, so nothing depends on the order of the threads. Rows whose cuts fall where values
// share a bin, or whose sums those columns could move, are left to the general kernel.
#include <cstdint>

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/hopper.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/pdl.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/shared_memory.cuh"
#include "kernels/cuda/portable/filter_record.cuh"
#include "kernels/cuda/sm90/sampling/filter_slice.cuh"
#include "kernels/cuda/sm90/sampling/key_bins.cuh"
#include "kernels/cuda/sm90/sampling/sample_filtered_cluster.h"

namespace diffulex::cuda::sm90 {
namespace {

constexpr const char* kWhere = "diffulex::sample_filtered";
/// Counts this CTA's columns and reports its maxima.
__device__ void count_columns(const FilterArgs& args, ClusterShared& shared, const RowView& view) {
  float largest_x = -INFINITY;
  float best_x = -INFINITY;
  int32_t largest_column = -1;  // the first one, as columns ascend
  int32_t best_column = -1;
  int32_t counted = 0;
  const int32_t bad =
      visit_slice(args, shared, view, [&](uint32_t bits, float x, int32_t column, bool is_choice) {
        atomicAdd(&shared.counts[bin_of(bits)], 1U);
        ++counted;
        if (x > largest_x) {
          largest_x = x;
          largest_column = column;
        }
        if (is_choice && x > best_x) {
          best_x = x;
          best_column = column;
        }
      });
  uint64_t largest = largest_column < 0 ? 0 : ranked(largest_x, largest_column);
  uint64_t best = best_column < 0 ? 0 : ranked(best_x, best_column);
  const int32_t bad_count = filter_sum(bad, shared.filter.ints);
  counted = filter_sum(counted, shared.filter.ints);
  largest = filter_max(largest, shared.filter);
  best = filter_max(best, shared.filter);
  if (threadIdx.x == 0) {
    shared.report.largest = largest;
    shared.report.best = best;
    shared.report.bad_count = bad_count;
    shared.report.num_counted = counted;
  }
}

/// Adds the counts and reports of all CTAs; the same in each of them.
__device__ CtaReport merge_reports(ClusterShared& shared, FilterState& state) {
  CtaReport merged;
  for (uint32_t rank = 0; rank < kCtas; ++rank) {
    const CtaReport& other = *ptx::cluster_pointer(&shared.report, rank);
    merged.largest = other.largest > merged.largest ? other.largest : merged.largest;
    merged.best = other.best > merged.best ? other.best : merged.best;
    merged.bad_count += other.bad_count;
    merged.num_counted += other.num_counted;
  }
  for (int place = static_cast<int>(threadIdx.x) * 4; place < kBins; place += kThreads * 4) {
    uint4 sum{0, 0, 0, 0};
#pragma unroll
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      const uint4 part =
          *reinterpret_cast<const uint4*>(ptx::cluster_pointer(&shared.counts[place], rank));
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
    *reinterpret_cast<uint4*>(&shared.totals[place]) = sum;
  }
  if (merged.largest != 0) {
    state.largest_logit = ordered_value(static_cast<uint32_t>(merged.largest >> 32));
    state.largest_z = state.transform.tempered(state.largest_logit);
  }
  state.num_counted = merged.num_counted;
  __syncthreads();
  return merged;
}

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

/// Mass of one column of a bin, 0 when a filter before top-p drops it.
__device__ __forceinline__ double bin_mass(const RowView& view, int32_t bin, bool is_filtered) {
  const float z = view.state.transform.tempered(bin_value(bin));
  const bool is_out =
      is_filtered && (bin < view.least_bin || static_cast<double>(z) < view.state.lowest_z);
  if (bin == kMiddleBin) {
    return is_out ? 0.0 : view.middle_mass;
  }
  return is_out ? 0.0 : static_cast<double>(view.state.mass(z));
}

/// Finds the mean mass of the middle bin's columns, which differ. The same in every CTA.
__device__ void weigh_middle_bin(const FilterArgs& args, ClusterShared& shared, RowView& view) {
  const uint32_t count = shared.totals[kMiddleBin];
  if (count == 0) {
    return;
  }
  const RowTransform& transform = view.state.transform;
  view.middle_mass = static_cast<double>(view.state.mass(0.0F));
  const double width = expm1(static_cast<double>(kMiddleWidth) *
                             fabs(static_cast<double>(transform.inv_temperature)));
  if (count * view.middle_mass * width < 1.0e-9) {
    return;  // against a sum of at least one
  }
  double mine = 0.0;
  visit_slice(args, shared, view, [&](uint32_t bits, float x, int32_t, bool) {
    if (bin_of(bits) == kMiddleBin) {
      mine += static_cast<double>(view.state.mass(transform.tempered(x)));
    }
  });
  mine = filter_sum(mine, shared.filter.doubles);
  if (threadIdx.x == 0) {
    shared.report.middle_mass = mine;
  }
  cluster_sync();
  double total = 0.0;
  for (uint32_t rank = 0; rank < kCtas; ++rank) {
    total += ptx::cluster_pointer(&shared.report, rank)->middle_mass;
  }
  view.middle_mass = total / count;
}

/// Sets the top-p cut; false when the counts cannot tell it.
__device__ bool find_top_p(const FilterArgs& args, ClusterShared& shared, RowView& view,
                           float top_p) {
  const bool is_filtered = args.order == FilterOrder::kTopKFirst;
  const int32_t highest = kBins - 1 - static_cast<int32_t>(threadIdx.x) * kBinsPerThread;
  double mine = 0.0;
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const uint32_t count = shared.totals[highest - i];
    mine += count == 0 ? 0.0 : count * bin_mass(view, highest - i, is_filtered);
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
  for (int32_t i = 0; i < kBinsPerThread; ++i) {
    const int32_t bin = highest - i;
    const uint32_t count = shared.totals[bin];
    const bool is_member =
        count > 0 && (!is_filtered || bin_mass(view, bin, true) > 0.0 ||
                      (bin >= view.least_bin && static_cast<double>(view.state.transform.tempered(
                                                    bin_value(bin))) >= view.state.lowest_z));
    if (is_member && (above <= limit || bin == top)) {
      lowest = bin;
      lowest_above = above;
    }
    above += count == 0 ? 0.0 : count * bin_mass(view, bin, is_filtered);
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
    // Ties before this CTA's in id order; the slices are in id order too.
    int64_t left = static_cast<int64_t>(kept < 1.0 ? 1.0 : kept);
    const uint32_t rank = ptx::cluster_rank();
    for (uint32_t other = 0; other < rank; ++other) {
      left -= *ptx::cluster_pointer(&shared.counts[view.cut_bin], other);
    }
    const auto own = static_cast<int64_t>(shared.counts[view.cut_bin]);
    view.state.last_tie = left <= 0 ? -1 : (left >= own ? INT64_MAX : -2 - left);
  }
  return true;
}

/// Turns the number of ties that stay, as find_top_p leaves it, into the last such column.
__device__ void find_last_tie(const FilterArgs& args, ClusterShared& shared, RowView& view) {
  if (view.state.last_tie >= -1) {
    return;
  }
  const auto wanted = static_cast<int32_t>(-2 - view.state.last_tie);
  int32_t seen = 0;
  for (int32_t tile = 0; tile < view.num_columns; tile += kThreads * kPieceColumns) {
    const int32_t place = tile + static_cast<int32_t>(threadIdx.x) * kPieceColumns;
    int32_t mine = 0;
    const auto walk = [&](const auto& visit) {
      if (place < view.num_columns) {
        visit_piece(args, shared, view, place, visit);
      }
    };
    walk([&](uint32_t bits, float, int32_t, bool) { mine += bin_of(bits) == view.cut_bin; });
    int32_t total = 0;
    int32_t number = seen + filter_scan(mine, shared.filter.ints, total);
    walk([&](uint32_t bits, float, int32_t column, bool) {
      if (bin_of(bits) == view.cut_bin && ++number == wanted) {
        shared.filter.column = column;
      }
    });
    seen += total;
    if (seen >= wanted) {
      break;
    }
  }
  __syncthreads();
  view.state.last_tie = shared.filter.column;
}

/// Sums of this CTA's columns, reported.
__device__ void sum_columns(const FilterArgs& args, ClusterShared& shared, const RowView& view) {
  RowSums sums;
  // A thread adds a few dozen columns in fp32; threads and CTAs are added in fp64.
  float raw_sum = 0.0F;
  float sum = 0.0F;
  float weighted = 0.0F;
  float candidate_sum = 0.0F;
  visit_slice(args, shared, view, [&](uint32_t bits, float x, int32_t column, bool is_choice) {
    const float z = view.state.transform.tempered(x);
    raw_sum += ptx::exp2_approx((x - view.state.largest_logit) * 1.44269504F);
    const bool is_kept = view.is_kept(bin_of(bits), z, column);
    if (!is_kept && !view.is_whole) {
      return;
    }
    const float mass = view.state.mass(z);
    if (is_kept && is_choice) {
      candidate_sum += mass;
      sums.last = column;
    }
    sum += mass;
    weighted += mass > 0.0F ? mass * (z - view.state.largest_z) : 0.0F;
    if (is_choice) {
      const uint64_t entry = ranked(x, column);
      if (entry > sums.best) {
        sums.second = sums.best;
        sums.best = entry;
      } else if (entry > sums.second) {
        sums.second = entry;
      }
    }
  });
  sums.sum = filter_sum(static_cast<double>(sum), shared.filter.doubles);
  sums.weighted = filter_sum(static_cast<double>(weighted), shared.filter.doubles);
  sums.raw_sum = filter_sum(static_cast<double>(raw_sum), shared.filter.doubles);
  sums.candidate_sum = filter_sum(static_cast<double>(candidate_sum), shared.filter.doubles);
  const uint64_t best = filter_max(sums.best, shared.filter);
  sums.second = filter_max(sums.best == best ? sums.second : sums.best, shared.filter);
  sums.best = best;
  sums.last =
      static_cast<int32_t>(filter_max(static_cast<uint64_t>(sums.last + 1), shared.filter)) - 1;
  if (threadIdx.x == 0) {
    shared.report.sums = sums;
  }
}

/// Sums of the row, and the CTA that draws with the candidate mass before it.
struct RowTotals final {
  RowSums sums;
  double before = 0.0;
  int32_t drawer = -1;
};

__device__ RowTotals add_sums(ClusterShared& shared, double uniform) {
  RowTotals totals;
  for (uint32_t rank = 0; rank < kCtas; ++rank) {
    const RowSums part = ptx::cluster_pointer(&shared.report, rank)->sums;
    totals.sums.sum += part.sum;
    totals.sums.weighted += part.weighted;
    totals.sums.raw_sum += part.raw_sum;
    totals.sums.candidate_sum += part.candidate_sum;
    totals.sums.last = part.last > totals.sums.last ? part.last : totals.sums.last;
    const uint64_t lesser = part.best > totals.sums.best ? totals.sums.best : part.best;
    totals.sums.best = part.best > totals.sums.best ? part.best : totals.sums.best;
    totals.sums.second = totals.sums.second > lesser ? totals.sums.second : lesser;
    totals.sums.second = totals.sums.second > part.second ? totals.sums.second : part.second;
  }
  const double target = uniform * totals.sums.candidate_sum;
  double running = 0.0;
  for (int32_t rank = 0; rank < kCtas; ++rank) {
    const RowSums part = ptx::cluster_pointer(&shared.report, static_cast<uint32_t>(rank))->sums;
    if (part.last >= 0) {  // the last one if rounding leaves none
      totals.drawer = rank;
      totals.before = running;
    }
    if (part.last >= 0 && running + part.candidate_sum > target) {
      break;
    }
    running += part.candidate_sum;
  }
  return totals;
}

/// The first kept candidate of this CTA whose running mass passes `target`; its last one if none
/// does.
__device__ int32_t draw_column(const FilterArgs& args, ClusterShared& shared, const RowView& view,
                               double before, double target) {
  if (threadIdx.x == 0) {
    shared.filter.column = INT32_MAX;
  }
  for (int32_t tile = 0; tile < view.num_columns; tile += kThreads * kPieceColumns) {
    const int32_t place = tile + static_cast<int32_t>(threadIdx.x) * kPieceColumns;
    const auto walk = [&](const auto& take) {
      if (place < view.num_columns) {
        visit_piece(args, shared, view, place,
                    [&](uint32_t bits, float x, int32_t column, bool is_choice) {
                      const float z = view.state.transform.tempered(x);
                      if (is_choice && view.is_kept(bin_of(bits), z, column)) {
                        take(static_cast<double>(view.state.mass(z)), column);
                      }
                    });
      }
    };
    double mine = 0.0;
    walk([&](double mass, int32_t) { mine += mass; });
    double total = 0.0;
    double running = before + filter_scan(mine, shared.filter.doubles, total);
    before += total;
    if (before > target) {
      walk([&](double mass, int32_t column) {
        running += mass;
        if (running > target) {
          atomicMin(&shared.filter.column, column);
        }
      });
      break;
    }
  }
  __syncthreads();
  return shared.filter.column == INT32_MAX ? shared.report.sums.last : shared.filter.column;
}

/// Finds the cuts; false when the row is one for the general kernel. The same in every CTA.
__device__ bool find_cuts(const FilterArgs& args, ClusterShared& shared, RowView& view,
                          const RowFilters& filters) {
  const float inverse = view.state.transform.inv_temperature;
  const bool is_low_blurred =
      shared.totals[0] > 0 && (view.state.largest_logit - kLowValue) * inverse < 100.0F;
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
  if (filters.top_p >= 1.0F) {
    return true;
  }
  // Where min-p ends inside the middle bin, its columns are not alike.
  const double middle_width =
      static_cast<double>(kMiddleWidth) * fabs(static_cast<double>(inverse));
  if (args.order == FilterOrder::kTopKFirst && fabs(view.state.lowest_z) <= middle_width) {
    return false;
  }
  weigh_middle_bin(args, shared, view);
  return find_top_p(args, shared, view, filters.top_p);
}

__device__ void run_row(const FilterArgs& args, ClusterShared& shared, RowView& view, int64_t row,
                        const RowFilters& filters, const __nv_bfloat16* source) {
  const uint32_t rank = ptx::cluster_rank();
  load_slice(args, shared, view, source);
  count_columns(args, shared, view);
  cluster_sync();
  const CtaReport merged = merge_reports(shared, view.state);
  if (merged.best == 0) {
    if (rank == 0) {
      write_no_choice(args, row, merged.bad_count);
    }
    return;
  }
  float* mark = args.rows.stats + row * args.rows.stats_stride + kStatsBadCount;
  if (!find_cuts(args, shared, view, filters)) {
    if (rank == 0 && threadIdx.x == 0) {
      *mark = kPendingRow;
    }
    return;
  }
  find_last_tie(args, shared, view);
  // The least float at or above the bound keeps what the bound keeps.
  view.lowest_z = __double2float_ru(view.state.lowest_z);
  view.last_tie =
      static_cast<int32_t>(view.state.last_tie > INT32_MAX ? INT32_MAX : view.state.last_tie);
  sum_columns(args, shared, view);
  cluster_sync();
  const double uniform = args.rows.uniforms[row];
  const RowTotals totals = add_sums(shared, uniform);
  if (totals.drawer < 0) {
    // Nothing that may be drawn was kept.
    if (rank == 0 && threadIdx.x == 0) {
      *mark = kPendingRow;
    }
    return;
  }
  if (rank == static_cast<uint32_t>(totals.drawer)) {
    const int32_t chosen =
        draw_column(args, shared, view, totals.before, uniform * totals.sums.candidate_sum);
    if (threadIdx.x == 0) {
      const float x = RowTransform::sanitized(to_float(shared.columns[chosen - view.first]));
      write_filtered(args, view.state, totals.sums, row, chosen, x, merged.bad_count);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
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
