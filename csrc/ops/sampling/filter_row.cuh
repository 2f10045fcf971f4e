// SPDX-License-Identifier: Apache-2.0
#pragma once

// One vocabulary row under top-k, top-p and min-p, by one CTA. All filters keep leading parts of
// one order (logit descending, id ascending), so each becomes a cut in that order. A cut is found
// digit by digit on order-preserving keys: every pass reads the row once and sums the columns per
// digit in registers, in an order that depends on the geometry alone. The number of passes is fixed
// by the dtype.

#include <climits>
#include <cstdint>

#include "diffulex/ops/sampling.h"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

inline constexpr int kFilterThreads = 384;
inline constexpr int kFilterWarps = kFilterThreads / 32;
inline constexpr int kPieceColumns = 8;
inline constexpr int64_t kTileColumns = kFilterThreads * kPieceColumns;
inline constexpr int kDigitBits = 4;
inline constexpr int kDigits = 1 << kDigitBits;

struct FilterArgs final {
  TokenStatsArgs rows;   // where the logits are and which ids are candidates
  const int32_t* top_k;  // [R] or null
  const float* top_p;    // [R] or null
  const float* min_p;    // [R] or null
  int32_t num_levels;    // digits of a key that can differ
  FilterOrder order;
  ConfidenceSpace space;
  bool only_pending;  // rows that another kernel has marked
};

struct FilterShared final {
  double doubles[kFilterWarps];
  double digit_mass[kDigits][kFilterWarps];
  int32_t digit_count[kDigits][kFilterWarps];
  double mass[kDigits];
  int32_t count[kDigits];
  uint64_t keys[kFilterWarps];
  int32_t ints[kFilterWarps];
  int64_t forbidden[kStatsMaxForbidden];  // columns
  int32_t column;
};

/// Fixed-order sum over the CTA.
template <typename T>
__device__ __forceinline__ T filter_sum(T value, T* scratch) {
  value = warp_sum(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    scratch[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  T total = 0;
#pragma unroll
  for (int warp = 0; warp < kFilterWarps; ++warp) {
    total += scratch[warp];
  }
  return total;
}

__device__ __forceinline__ uint64_t filter_max(uint64_t value, FilterShared& shared) {
  value = warp_max(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    shared.keys[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  uint64_t result = 0;
#pragma unroll
  for (int warp = 0; warp < kFilterWarps; ++warp) {
    result = shared.keys[warp] > result ? shared.keys[warp] : result;
  }
  return result;
}

/// Sum over the lower threads; `total` is that of the CTA.
template <typename T>
__device__ __forceinline__ T filter_scan(T value, T* scratch, T& total) {
  T inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += (threadIdx.x & 31) >= offset ? other : T{0};
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 31) {
    scratch[threadIdx.x >> 5] = inclusive;
  }
  __syncthreads();
  T before = inclusive - value;
  total = 0;
#pragma unroll
  for (int warp = 0; warp < kFilterWarps; ++warp) {
    before += warp < static_cast<int>(threadIdx.x >> 5) ? scratch[warp] : T{0};
    total += scratch[warp];
  }
  return before;
}

/// Order of a logit among the digits that can differ; 0 = not in the normaliser.
struct FilterKey final {
  int32_t unused_bits = 0;

  __device__ uint32_t of(float logit) const {
    return logit == -INFINITY ? 0U : ordered_bits(logit) >> unused_bits;
  }
  __device__ float logit_of(uint32_t key) const {
    const uint32_t low = (1U << unused_bits) - 1U;
    const uint32_t bits = key << unused_bits;
    // The low bits are zero, and complemented in negative values.
    return ordered_value((bits & 0x80000000U) != 0 ? bits : bits | low);
  }
};

/// A column as the filters see it.
struct FilterColumn final {
  float x;      // sanitised stored value
  float logit;  // at temperature 1; -inf = not in the normaliser
  float z;      // at the temperature of the row
  uint32_t key;
  bool is_candidate;
  bool is_bad;
};

/// What is known about a row before and after the filters.
struct FilterState final {
  RowTransform transform;
  FilterKey keys;
  float largest_logit = -INFINITY;
  float largest_z = -INFINITY;
  double lowest_z = -INFINITY;   // of min-p
  uint32_t lowest_key = 1;       // of top-k
  uint32_t cut_key = 0;          // of top-p
  int64_t last_tie = INT64_MAX;  // last column kept at cut_key
  int32_t num_counted = 0;

  __device__ float mass(float z) const { return expf(z - largest_z); }
  __device__ bool within_others(const FilterColumn& column) const {
    return column.key >= lowest_key && static_cast<double>(column.z) >= lowest_z;
  }
  __device__ bool is_kept(const FilterColumn& column, int64_t index) const {
    return within_others(column) &&
           (column.key > cut_key || (column.key == cut_key && index <= last_tie));
  }
};

/// Bit i = column first + i is a candidate as far as ids decide.
__device__ __forceinline__ uint32_t candidate_bits(const TokenStatsArgs& args,
                                                   const FilterShared& shared, int64_t first) {
  uint32_t bits = (1U << kPieceColumns) - 1U;
  if (args.exclusion == kModeOff) {
    return bits;
  }
  for (int32_t i = 0; i < args.num_forbidden; ++i) {
    const int64_t place = shared.forbidden[i] - first;
    bits &= place >= 0 && place < kPieceColumns ? ~(1U << place) : ~0U;
  }
  if (first + kPieceColumns > args.vocab_limit) {
    const int64_t allowed = args.vocab_limit > first ? args.vocab_limit - first : 0;
    bits &= (1U << allowed) - 1U;
  }
  return bits;
}

/// Calls visit(column, index) for the columns of this thread in one tile.
template <typename T, typename Visit>
__device__ __forceinline__ void visit_tile(const TokenStatsArgs& args, const FilterShared& shared,
                                           const FilterState& state, const T* source, int64_t tile,
                                           const Visit& visit) {
  const int64_t first = tile * kTileColumns + static_cast<int64_t>(threadIdx.x) * kPieceColumns;
  if (first >= args.num_columns) {
    return;
  }
  float values[kPieceColumns];
  if (args.is_vec && first + kPieceColumns <= args.num_columns) {
    load_floats<kPieceColumns, true>(source + first, values);
  } else {
#pragma unroll
    for (int i = 0; i < kPieceColumns; ++i) {
      values[i] = first + i < args.num_columns ? to_float(source[first + i]) : 0.0F;
    }
  }
  const uint32_t candidates = candidate_bits(args, shared, first);
#pragma unroll
  for (int i = 0; i < kPieceColumns; ++i) {
    if (first + i < args.num_columns) {
      FilterColumn column;
      column.x = RowTransform::sanitized(values[i]);
      column.is_bad = !isfinite(values[i]);
      column.is_candidate = (candidates >> i & 1U) != 0 && column.x != -INFINITY;
      const bool is_counted =
          column.x != -INFINITY && (column.is_candidate || args.exclusion != kModeRenormalize);
      column.logit = is_counted ? state.transform.logit(column.x, first + i) : -INFINITY;
      column.z = state.transform.tempered(column.logit);
      column.key = state.keys.of(column.logit);
      visit(column, first + i);
    }
  }
}

template <typename T, typename Visit>
__device__ __forceinline__ void visit_row(const TokenStatsArgs& args, const FilterShared& shared,
                                          const FilterState& state, const T* source,
                                          const Visit& visit) {
  for (int64_t tile = 0; tile * kTileColumns < args.num_columns; ++tile) {
    visit_tile(args, shared, state, source, tile, visit);
  }
}

/// Sums the columns `select` takes whose key begins with `prefix`, by their next digit.
template <typename T, bool kWithMass, typename Select>
__device__ void sum_digits(const TokenStatsArgs& args, FilterShared& shared,
                           const FilterState& state, const T* source, int32_t shift,
                           uint32_t prefix, const Select& select) {
  int32_t counts[kDigits] = {};
  float masses[kDigits] = {};
  visit_row(args, shared, state, source, [&](const FilterColumn& column, int64_t) {
    // 64-bit shift: at the first level the prefix is empty.
    const bool is_member = column.key != 0 && select(column) &&
                           static_cast<uint64_t>(column.key) >> (shift + kDigitBits) == prefix;
    if (is_member) {
      const uint32_t digit = column.key >> shift & (kDigits - 1);
      const float mass = kWithMass ? state.mass(column.z) : 0.0F;
#pragma unroll
      for (uint32_t i = 0; i < kDigits; ++i) {
        counts[i] += digit == i ? 1 : 0;
        masses[i] += digit == i ? mass : 0.0F;
      }
    }
  });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kDigits; ++i) {
    const int32_t count = warp_sum(counts[i]);
    const double mass = kWithMass ? warp_sum(static_cast<double>(masses[i])) : 0.0;
    if ((threadIdx.x & 31) == 0) {
      shared.digit_count[i][threadIdx.x >> 5] = count;
      shared.digit_mass[i][threadIdx.x >> 5] = mass;
    }
  }
  __syncthreads();
  if (threadIdx.x < kDigits) {
    int32_t count = 0;
    double mass = 0.0;
#pragma unroll
    for (int warp = 0; warp < kFilterWarps; ++warp) {
      count += shared.digit_count[threadIdx.x][warp];
      mass += shared.digit_mass[threadIdx.x][warp];
    }
    shared.count[threadIdx.x] = count;
    shared.mass[threadIdx.x] = mass;
  }
  __syncthreads();
}

/// Key of the k-th largest logit of more than k.
template <typename T>
__device__ uint32_t top_k_key(const FilterArgs& args, FilterShared& shared,
                              const FilterState& state, const T* source, int32_t top_k) {
  uint32_t prefix = 0;
  int32_t remaining = top_k;
  for (int32_t level = args.num_levels - 1; level >= 0; --level) {
    sum_digits<T, false>(args.rows, shared, state, source, level * kDigitBits, prefix,
                         [](const FilterColumn&) { return true; });
    int32_t digit = kDigits - 1;
    while (digit > 0 && shared.count[digit] < remaining) {
      remaining -= shared.count[digit];
      --digit;
    }
    prefix = prefix << kDigitBits | static_cast<uint32_t>(digit);
  }
  return prefix;
}

/// Sets the top-p cut of `state`: a column of the order stays while the mass before it is at most
/// top_p times the whole, over all columns or over those the other filters left.
template <typename T>
__device__ void set_top_p_cut(const FilterArgs& args, FilterShared& shared, FilterState& state,
                              const T* source, float top_p) {
  const bool is_last = args.order == FilterOrder::kTopKFirst;
  const auto select = [&](const FilterColumn& column) {
    return !is_last || state.within_others(column);
  };
  uint32_t prefix = 0;
  double above = 0.0;
  double limit = 0.0;
  int32_t num_ties = 0;
  for (int32_t level = args.num_levels - 1; level >= 0; --level) {
    sum_digits<T, true>(args.rows, shared, state, source, level * kDigitBits, prefix, select);
    if (level == args.num_levels - 1) {
      double total = 0.0;
      for (int32_t digit = 0; digit < kDigits; ++digit) {
        total += shared.mass[digit];
      }
      limit = fmax(0.0, static_cast<double>(top_p)) * total;
    }
    int32_t chosen = kDigits - 1;
    double sum = above;
    bool is_open = true;
    bool has_chosen = false;
    for (int32_t digit = kDigits - 1; digit >= 0; --digit) {
      if (shared.count[digit] > 0) {
        // The first filled digit holds the first column of what is left and stays in any case.
        is_open = is_open && (!has_chosen || sum <= limit);
        if (is_open) {
          chosen = digit;
          above = sum;
          has_chosen = true;
        }
        sum += shared.mass[digit];
      }
    }
    num_ties = shared.count[chosen];
    prefix = prefix << kDigitBits | static_cast<uint32_t>(chosen);
  }
  state.cut_key = prefix;
  const double mass =
      static_cast<double>(state.mass(state.transform.tempered(state.keys.logit_of(prefix))));
  const double kept = mass > 0.0 ? floor((limit - above) / mass) + 1.0 : num_ties;
  if (kept >= num_ties) {
    return;
  }
  // The last tie that stays, in id order.
  const auto wanted = static_cast<int32_t>(kept < 1.0 ? 1.0 : kept);
  int32_t seen = 0;
  for (int64_t tile = 0; tile * kTileColumns < args.rows.num_columns; ++tile) {
    int32_t mine = 0;
    visit_tile(args.rows, shared, state, source, tile, [&](const FilterColumn& column, int64_t) {
      mine += column.key == prefix && select(column) ? 1 : 0;
    });
    int32_t total = 0;
    int32_t place = seen + filter_scan(mine, shared.ints, total);
    if (seen + total >= wanted) {
      visit_tile(args.rows, shared, state, source, tile,
                 [&](const FilterColumn& column, int64_t index) {
                   if (column.key == prefix && select(column) && ++place == wanted) {
                     shared.column = static_cast<int32_t>(index);
                   }
                 });
      break;
    }
    seen += total;
  }
  __syncthreads();
  state.last_tie = shared.column;
}

}  // namespace diffulex::cuda
