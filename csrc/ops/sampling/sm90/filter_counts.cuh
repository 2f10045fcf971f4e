// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many columns of a row each bin holds: counted by each CTA of a cluster and added.

#include <cstdint>

#include "ops/sampling/sm90/filter_slice.cuh"
#include "ops/sampling/sm90/key_bins.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda::sm90 {

/// Sums of exp(x) and exp(z) over columns of the middle bin.
struct MiddleSums final {
  float powers = 0.0F;
  float tempered = 0.0F;

  __device__ __forceinline__ void add(const RowView& view, float x) {
    powers += ptx::exp2_approx(x * kLog2E);
    tempered += ptx::exp2_approx(view.state.transform.tempered(x) * kLog2E);
  }
};

/// Reports what the threads of this CTA have found.
__device__ __forceinline__ void report_counts(ClusterShared& shared, float largest, float best,
                                              int32_t bad, int32_t counted,
                                              const MiddleSums& middle) {
  const auto key = [](float value) { return value == -INFINITY ? 0U : ordered_bits(value); };
  const WarpCounts mine{__reduce_max_sync(kFullWarp, key(largest)),
                        __reduce_max_sync(kFullWarp, key(best)),
                        __reduce_add_sync(kFullWarp, bad),
                        __reduce_add_sync(kFullWarp, counted),
                        warp_sum(middle.powers),
                        warp_sum(middle.tempered)};
  if ((threadIdx.x & 31) == 0) {
    shared.warp_counts[threadIdx.x >> 5] = mine;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    CtaReport& report = shared.report;
    report = {};
    for (const WarpCounts& part : shared.warp_counts) {
      report.largest = max(report.largest, part.largest);
      report.best = max(report.best, part.best);
      report.bad_count += part.bad_count;
      report.num_counted += part.num_counted;
      report.middle_powers += part.middle_powers;
      report.middle_tempered += part.middle_tempered;
    }
  }
}

/// Counts this CTA's columns and reports its maxima.
__device__ inline void count_columns(const FilterArgs& args, ClusterShared& shared,
                                     const RowView& view) {
  float largest = -INFINITY;
  float best = -INFINITY;
  MiddleSums middle;
  int32_t counted = 0;
  int32_t bad = 0;
  for (int32_t place = static_cast<int32_t>(threadIdx.x) * kPieceColumns; place < view.num_columns;
       place += kThreads * kPieceColumns) {
    const uint4 raw = *reinterpret_cast<const uint4*>(shared.columns + place);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    constexpr uint32_t kMagnitude = 0x7fff7fffU;
    const uint32_t sizes[4] = {raw.x & kMagnitude, raw.y & kMagnitude, raw.z & kMagnitude,
                               raw.w & kMagnitude};
    const uint32_t most = __vimax3_u16x2(__vimax3_u16x2(sizes[0], sizes[1], sizes[2]), sizes[3], 0);
    const bool is_finite = (most & 0xffffU) < 0x7f80U && most >> 16 < 0x7f80U;
    const uint32_t candidates =
        candidate_bits(args.rows, shared.filter, static_cast<int32_t>(view.first) + place);
    if (is_finite && candidates == (1U << kPieceColumns) - 1U &&
        place + kPieceColumns <= view.num_columns) {  // nearly all, without a branch per column
#pragma unroll
      for (int i = 0; i < kPieceColumns; ++i) {
        const uint32_t bits = i % 2 == 0 ? words[i / 2] & 0xffffU : words[i / 2] >> 16;
        atomicAdd(&shared.counts[bin_of(bits)], 1U);
      }
      const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
      const __nv_bfloat162 top = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
      const float x = fmaxf(__bfloat162float(top.x), __bfloat162float(top.y));
      largest = fmaxf(largest, x);
      best = fmaxf(best, x);
      counted += kPieceColumns;
      const uint32_t least =
          __vimin3_u16x2(__vimin3_u16x2(sizes[0], sizes[1], sizes[2]), sizes[3], kMagnitude);
      if ((least & 0xffffU) < kLeastMagnitude || least >> 16 < kLeastMagnitude) {
#pragma unroll 1
        for (int i = 0; i < kPieceColumns; ++i) {
          const float value = __bfloat162float(shared.columns[place + i]);
          if (fabsf(value) < kMiddleWidth) {
            middle.add(view, value);
          }
        }
      }
      continue;
    }
    bad += visit_piece(args, shared, view, place,
                       [&](uint32_t bits, float x, int32_t, bool is_choice) {
                         const int32_t bin = bin_of(bits);
                         atomicAdd(&shared.counts[bin], 1U);
                         if (bin == kMiddleBin) {
                           middle.add(view, x);
                         }
                         ++counted;
                         largest = fmaxf(largest, x);
                         best = is_choice ? fmaxf(best, x) : best;
                       });
  }
  report_counts(shared, largest, best, bad, counted, middle);
}

/// Adds the counts and reports of all CTAs; the same in each of them. Each adds a share of the bins
/// and tells the others.
__device__ inline CtaReport merge_reports(ClusterShared& shared, RowView& view) {
  FilterState& state = view.state;
  constexpr int32_t kShare = kBins / kCtas;
  static_assert(kBins % (kCtas * 4) == 0 && kShare / 4 <= kThreads, "four bins per thread at most");
  const auto place =
      static_cast<int32_t>(ptx::cluster_rank()) * kShare + static_cast<int32_t>(threadIdx.x) * 4;
  uint4 sum{0, 0, 0, 0};
  if (threadIdx.x < kShare / 4) {
    uint4 parts[kCtas];
#pragma unroll
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      parts[rank] =
          *reinterpret_cast<const uint4*>(ptx::cluster_pointer(&shared.counts[place], rank));
    }
#pragma unroll
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      sum.x += parts[rank].x;
      sum.y += parts[rank].y;
      sum.z += parts[rank].z;
      sum.w += parts[rank].w;
    }
#pragma unroll
    for (uint32_t rank = 0; rank < kCtas; ++rank) {
      *reinterpret_cast<uint4*>(ptx::cluster_pointer(&shared.totals[place], rank)) = sum;
    }
  }
  CtaReport merged;
#pragma unroll
  for (uint32_t rank = 0; rank < kCtas; ++rank) {
    const CtaReport& other = *ptx::cluster_pointer(&shared.report, rank);
    merged.largest = max(merged.largest, other.largest);
    merged.best = max(merged.best, other.best);
    merged.bad_count += other.bad_count;
    merged.num_counted += other.num_counted;
    merged.middle_powers += other.middle_powers;
    merged.middle_tempered += other.middle_tempered;
  }
  if (merged.largest != 0) {
    state.largest_logit = ordered_value(merged.largest);
    state.largest_z = state.transform.tempered(state.largest_logit);
  }
  state.num_counted = merged.num_counted;
  const uint32_t counts[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (counts[i] > 0 && place + i != kMiddleBin) {
      const float difference = bin_value(place + i) - state.largest_logit;
      view.raw_part += static_cast<float>(counts[i]) * ptx::exp2_approx(difference * kLog2E);
    }
  }
  // Without middle values the largest may lie so low that its power overflows.
  if (ptx::cluster_rank() == 0 && threadIdx.x == 0 && merged.middle_powers > 0) {
    view.raw_part += static_cast<float>(merged.middle_powers) * expf(-state.largest_logit);
  }
  cluster_sync();
  return merged;
}

}  // namespace diffulex::cuda::sm90
