// SPDX-License-Identifier: Apache-2.0
#pragma once

// The slice of a bfloat16 row that one CTA of a cluster holds in shared memory, and the walk over
// it.

#include <cfloat>
#include <climits>
#include <cstdint>

#include "ops/sampling/filter_record.cuh"
#include "ops/sampling/sm90/key_bins.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm90 {

inline constexpr int kCtas = 8;
inline constexpr int kThreads = kFilterThreads;  // what filter_sum and filter_scan expect
inline constexpr int kBinsPerThread = 11;
inline constexpr int kBins = kThreads * kBinsPerThread;  // kTopBin + 1 of them are used
static_assert(kBins > kTopBin && kBins % 4 == 0, "every value has a bin, copied by fours");
/// Columns of a CTA at most.
inline constexpr int64_t kMaxSlice = 64 << 10;

/// What the CTAs tell each other; read by all of them.
struct CtaReport final {
  uint32_t largest = 0;  // ordered_bits of values of the normaliser and of the candidates; 0 = none
  uint32_t best = 0;
  int32_t bad_count = 0;
  int32_t num_counted = 0;
  double middle_powers = 0.0;    // sum of exp(x) of this CTA's columns in the middle bin
  double middle_tempered = 0.0;  // and of exp(z)
  RowSums sums;
};

/// One warp's part of a sum over the CTA.
struct WarpCounts final {
  uint32_t largest;
  uint32_t best;
  int32_t bad_count;
  int32_t num_counted;
  float middle_powers;
  float middle_tempered;
};

/// Sums of the row, and the CTA that draws with the candidate mass before it.
struct RowTotals final {
  RowSums sums;
  double before = 0.0;
  int32_t drawer = -1;
};

struct ClusterShared final {
  alignas(16) uint32_t counts[kBins];  // of this CTA's columns
  alignas(16) uint32_t totals[kBins];  // of the row
  FilterShared filter;
  WarpCounts warp_counts[kFilterWarps];
  RowSums warp_sums[kFilterWarps];
  RowTotals row;
  CtaReport report;
  double above;                          // mass above the cut
  int32_t cut_bin;                       // of top-p
  int32_t least_bin;                     // of top-k
  alignas(16) __nv_bfloat16 columns[1];  // of this CTA, of the row's slice length
};

/// A cluster's view of its row and of what is kept.
struct RowView final {
  FilterState state;
  int64_t first;        // column of this CTA
  int32_t num_columns;  // of this CTA
  int32_t least_bin = 0;
  int32_t cut_bin = 0;
  float middle_mass = 0.0F;  // of a column of the middle bin, on average
  float raw_part = 0.0F;     // this thread's part of the row's sum at temperature 1
  bool is_whole = false;     // sums describe the unfiltered distribution

  // Of min-p and of the ties at the cut, in the types of the inner loops.
  float lowest_z = -INFINITY;
  int32_t last_tie = INT32_MAX;
  float least_value = -INFINITY;  // columns below it need no look

  __device__ bool is_kept(int32_t bin, float z, int32_t column) const {
    return bin >= least_bin && z >= lowest_z &&
           (bin > cut_bin || (bin == cut_bin && column <= last_tie));
  }
};

__device__ __forceinline__ void cluster_sync() {
  ptx::cluster_arrive();
  ptx::cluster_wait();
}

/// Calls visit(bits, x, column, is_candidate) for the counted columns of a piece: finite, or +inf
/// as the largest float, and in the normaliser. Others only count as bad where they are.
template <typename Visit>
__device__ __forceinline__ int32_t visit_piece(const FilterArgs& args, const ClusterShared& shared,
                                               const RowView& view, int32_t place,
                                               const Visit& visit) {
  const auto column = static_cast<int32_t>(view.first) + place;
  const uint4 raw = *reinterpret_cast<const uint4*>(shared.columns + place);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  const uint32_t candidates = candidate_bits(args.rows, shared.filter, column);
  const int32_t left = view.num_columns - place;
  uint32_t counted = left >= kPieceColumns ? (1U << kPieceColumns) - 1U : (1U << left) - 1U;
  const uint32_t present = counted;
  if (args.rows.exclusion == kModeRenormalize) {
    counted &= candidates;
  }
  int32_t bad = 0;
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) {
    const uint32_t bits = i % 2 == 0 ? words[i / 2] & 0xffffU : words[i / 2] >> 16;
    const bool is_finite = (bits & 0x7fffU) < 0x7f80U;
    bad += !is_finite && (present >> i & 1U) != 0 ? 1 : 0;
    if ((is_finite || bits == 0x7f80U) && (counted >> i & 1U) != 0) {
      visit(bits, fminf(__uint_as_float(bits << 16), FLT_MAX), column + i,
            (candidates >> i & 1U) != 0);
    }
  }
  return bad;
}

/// As visit_piece, for columns whose value is at least `least` and without a count of bad ones;
/// made for few of them.
template <typename Visit>
__device__ __forceinline__ void visit_large(const FilterArgs& args, const ClusterShared& shared,
                                            const RowView& view, int32_t place, float least,
                                            const Visit& visit) {
  const uint4 raw = *reinterpret_cast<const uint4*>(shared.columns + place);
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
  const __nv_bfloat162 best = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  if (!(fmaxf(__bfloat162float(best.x), __bfloat162float(best.y)) >= least)) {
    return;
  }
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) {
    const float x = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000U);
    mask |= x >= least && x > -INFINITY ? 1U << i : 0U;  // not NaN
  }
  const auto column = static_cast<int32_t>(view.first) + place;
  const uint32_t candidates = candidate_bits(args.rows, shared.filter, column);
  const int32_t left = view.num_columns - place;
  mask &= left >= kPieceColumns ? ~0U : (1U << left) - 1U;
  mask &= args.rows.exclusion == kModeRenormalize ? candidates : ~0U;
  for (; mask != 0; mask &= mask - 1) {
    const int32_t i = __ffs(static_cast<int>(mask)) - 1;
    const uint32_t bits = __bfloat16_as_ushort(shared.columns[place + i]);
    visit(bits, fminf(__uint_as_float(bits << 16), FLT_MAX), column + i,
          (candidates >> i & 1U) != 0);
  }
}

/// Copies the slice to shared memory and clears the counts.
__device__ inline void load_slice(const FilterArgs& args, ClusterShared& shared,
                                  const RowView& view, const __nv_bfloat16* source) {
  for (int32_t place = static_cast<int32_t>(threadIdx.x) * kPieceColumns; place < view.num_columns;
       place += kThreads * kPieceColumns) {
    const __nv_bfloat16* from = source + view.first + place;
    if (args.rows.is_vec && place + kPieceColumns <= view.num_columns) {
      ptx::cp_async16(ptx::smem_address(shared.columns + place), from, true);
    } else {
      for (int i = 0; i < kPieceColumns && place + i < view.num_columns; ++i) {
        shared.columns[place + i] = from[i];
      }
    }
  }
  ptx::cp_async_commit();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    shared.counts[bin] = 0;
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
}

}  // namespace diffulex::cuda::sm90
