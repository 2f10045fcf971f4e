// SPDX-License-Identifier: Apache-2.0
#pragma once

// The record of one chunk of one row, by one warp. The chunk is copied to shared memory in 16-byte
// pieces, each lane touches only the pieces it copied itself. Excluded columns and the penalised
// one are overwritten by a pad and added back singly, so that the sums run without tests; only
// chunks with values that are not finite, or too large, go element by element.

#include <cfloat>
#include <climits>
#include <cstdint>

#include "kernels/cuda/common/ordered_key.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/portable/token_stats.cuh"
#include "kernels/cuda/portable/token_stats_special.cuh"

namespace diffulex::cuda {

inline constexpr int kChunkLoads = static_cast<int>(kStatsChunkColumns) / (32 * 8);
inline constexpr float kLog2E = 1.44269504F;
inline constexpr float kLn2 = 0.693147181F;

/// What stands in for a column without weight, and the packed pairs of a 16-bit type.
template <typename T>
struct PairMath;
template <>
struct PairMath<__nv_bfloat16> final {
  using Pair = __nv_bfloat162;
  // Far below every logit that has weight, and finite differences with all of them.
  static constexpr float kPad = -1.0e30F;
  static __device__ __forceinline__ float low(uint32_t word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __uint_as_float(word & 0xffff0000U);
  }
};
template <>
struct PairMath<__half> final {
  using Pair = __half2;
  static constexpr float kPad = -65504.0F;
  static __device__ __forceinline__ float low(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
};
template <>
struct PairMath<float> final {
  static constexpr float kPad = -1.0e30F;
};

/// Columns the pad stands in for have no weight when the best one is above this.
template <typename T>
__device__ __forceinline__ constexpr float least_plain_best() {
  return PairMath<T>::kPad < -1.0e20F ? -1.0e20F : -60000.0F;
}

/// Offset of load `load` of this lane in a chunk.
__device__ __forceinline__ int32_t lane_column(int load) {
  return load * 256 + static_cast<int>(threadIdx.x & 31) * 8;
}

/// A chunk in shared memory as one lane sees it: [load * 256 + lane * 8, + 8) for each load.
template <typename T>
struct LaneChunk final {
  T* columns;  // kStatsChunkColumns of the warp, 16-byte aligned

  __device__ __forceinline__ void read(int load, float (&values)[8]) const {
    const T* piece = columns + lane_column(load);
    if constexpr (sizeof(T) == 4) {
      load_floats<4, true>(piece, *reinterpret_cast<float (*)[4]>(values));
      load_floats<4, true>(piece + 4, *reinterpret_cast<float (*)[4]>(values + 4));
    } else {
      const uint4 raw = *reinterpret_cast<const uint4*>(piece);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = PairMath<T>::low(words[i]);
        values[2 * i + 1] = PairMath<T>::high(words[i]);
      }
    }
  }
  /// Puts the pad where bit (8 * load + i) of `mask` is set.
  __device__ __forceinline__ void pad(uint64_t mask) const {
    for (; mask != 0; mask &= mask - 1) {
      const int bit = __ffsll(static_cast<long long>(mask)) - 1;
      columns[lane_column(bit / 8) + bit % 8] = from_float<T>(PairMath<T>::kPad);
    }
  }
};

/// Starts the copy of the chunk at column `first`, as one group of cp.async; what lies past the row
/// becomes the pad.
template <typename T>
__device__ __forceinline__ void start_chunk(const TokenStatsArgs& args, const T* source,
                                            int32_t first, const LaneChunk<T>& chunk) {
  constexpr int kStep = 16 / static_cast<int>(sizeof(T));
  const T* from = source + first + lane_column(0);
  if (args.is_vec && first + kStatsChunkColumns <= args.num_columns) {
    const uint32_t target = ptx::smem_address(chunk.columns + lane_column(0));
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
#pragma unroll
      for (int i = 0; i < 8; i += kStep) {
        constexpr auto kBytes = static_cast<uint32_t>(sizeof(T));
        ptx::cp_async16(target + (load * 256 + i) * kBytes, from + load * 256 + i, true);
      }
    }
  } else {
    const int64_t left = args.num_columns - first - lane_column(0);  // may be negative
#pragma unroll 1
    for (int load = 0; load < kChunkLoads; ++load) {
      T* piece = chunk.columns + lane_column(load);
      if (args.is_vec && load * 256 + 8 <= left) {
#pragma unroll
        for (int i = 0; i < 8; i += kStep) {
          ptx::cp_async16(ptx::smem_address(piece + i), from + load * 256 + i, true);
        }
        continue;
      }
      for (int i = 0; i < 8; ++i) {
        piece[i] = load * 256 + i < left ? from[load * 256 + i] : from_float<T>(PairMath<T>::kPad);
      }
    }
  }
  ptx::cp_async_commit();
}

/// The two largest values; ties keep both.
struct TopTwo final {
  float best = -INFINITY;
  float second = -INFINITY;

  __device__ __forceinline__ void merge(float other_best, float other_second) {
    second = fmaxf(fminf(best, other_best), fmaxf(second, other_second));
    best = fmaxf(best, other_best);
  }
  __device__ __forceinline__ void merge_warp() {
    const uint32_t mine = ordered_bits(best);
    const uint32_t top = __reduce_max_sync(kFullWarp, mine);
    const bool is_owner = mine == top;
    const bool has_tie = __popc(__ballot_sync(kFullWarp, is_owner)) > 1;
    const float rest = is_owner && !has_tie ? second : best;
    second = ordered_value(__reduce_max_sync(kFullWarp, ordered_bits(rest)));
    best = ordered_value(top);
  }
};

/// Of this lane. NaN is dropped; the sums notice it.
template <typename T>
__device__ __forceinline__ TopTwo lane_top_two(const LaneChunk<T>& chunk) {
  TopTwo top;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
      float values[8];
      chunk.read(load, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        top.second = fmaxf(top.second, fminf(top.best, values[i]));
        top.best = fmaxf(top.best, values[i]);
      }
    }
  } else {
    using Pair = typename PairMath<T>::Pair;
    const T lowest = from_float<T>(-INFINITY);
    Pair best[2] = {{lowest, lowest}, {lowest, lowest}};  // two chains, for their latency
    Pair second[2] = {best[0], best[0]};
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
      const uint4 raw = *reinterpret_cast<const uint4*>(chunk.columns + lane_column(load));
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pair x = *reinterpret_cast<const Pair*>(&words[i]);
        second[i % 2] = __hmax2(second[i % 2], __hmin2(best[i % 2], x));
        best[i % 2] = __hmax2(best[i % 2], x);
      }
    }
    second[0] = __hmax2(__hmax2(second[0], second[1]), __hmin2(best[0], best[1]));
    best[0] = __hmax2(best[0], best[1]);
    top.best = to_float(best[0].x);
    top.second = to_float(second[0].x);
    top.merge(to_float(best[0].y), to_float(second[0].y));
  }
  return top;
}

/// Sums relative to one maximum.
struct PowerSums final {
  float sum;
  float raw_sum;    // of the same powers at temperature 1; only where asked for
  float weighted;   // times the difference of z; NaN when a value is not finite
  int32_t num_low;  // of this lane: values a cap does not apply to, pads above all; 0 without cap
};

/// Powers 2^((x - maximum) * scale) of the chunk's logits x; with kRaw also those at temperature 1.
///
/// A cap would give weight to pads and hide infinities, so values at or below the least plain one
/// stay as they are and are counted; the caller knows how many pads there must be.
template <typename T, bool kCapped, bool kRaw>
__device__ __forceinline__ PowerSums chunk_sums(const LaneChunk<T>& chunk,
                                                const RowTransform& transform, float maximum,
                                                float scale) {
  // One fused operation per exponent: x * scale - offset. The offset's rounding shifts all
  // exponents alike, by `slip`, and is taken out of the sums.
  const float offset = maximum * scale;
  const float slip = fmaf(maximum, scale, -offset);
  const float raw_offset = maximum * kLog2E;
  PowerSums sums[2] = {};
  int32_t num_low = 0;
#pragma unroll 4
  for (int load = 0; load < kChunkLoads; ++load) {
    float values[8];
    chunk.read(load, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float x = values[i];
      if constexpr (kCapped) {
        const bool is_low = !(x > least_plain_best<T>());  // NaN too
        num_low += is_low ? 1 : 0;
        x = is_low ? x : transform.capped(x);
      }
      const float exponent = fmaf(x, scale, -offset);
      const float power = ptx::exp2_approx(exponent);
      sums[i % 2].sum += power;
      sums[i % 2].weighted = fmaf(power, exponent, sums[i % 2].weighted);
      if constexpr (kRaw) {
        sums[i % 2].raw_sum += ptx::exp2_approx(fmaf(x, kLog2E, -raw_offset));
      }
    }
  }
  PowerSums total{};
  total.sum = warp_sum(sums[0].sum + sums[1].sum);
  total.weighted = warp_sum(sums[0].weighted + sums[1].weighted);
  total.num_low = num_low;
  const float correction = ptx::exp2_approx(-slip);
  total.weighted = fmaf(-slip, total.sum, total.weighted) * correction * kLn2;
  total.sum *= correction;
  total.raw_sum = total.sum;
  if constexpr (kRaw) {
    total.raw_sum = warp_sum(sums[0].raw_sum + sums[1].raw_sum) *
                    ptx::exp2_approx(-fmaf(maximum, kLog2E, -raw_offset));
  }
  return total;
}

/// Lowest column (of the row) of the warp's chunk that holds `best`. The warp looks through the
/// columns of the lanes whose own best it is, one lane after the other.
template <typename T>
__device__ __forceinline__ int32_t column_of(const LaneChunk<T>& chunk, float lane_best, float best,
                                             int32_t first) {
  __syncwarp();  // the pieces of other lanes
  int32_t column = INT32_MAX;
  unsigned owners = __ballot_sync(kFullWarp, lane_best == best);
  for (; owners != 0; owners &= owners - 1) {
    const int32_t owner = __ffs(static_cast<int>(owners)) - 1;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t index = 32 * half + static_cast<int32_t>(threadIdx.x & 31);
      const int32_t place = (index >> 3) * 256 + owner * 8 + (index & 7);
      if (to_float(chunk.columns[place]) == best) {
        column = min(column, first + place);
      }
    }
  }
  return static_cast<int32_t>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(column)));
}

/// Which columns of a row are no candidates, spread over the lanes of a warp.
struct Exclusion final {
  int32_t forbidden = -1;        // column that lane i < kStatsMaxForbidden knows of, -1 = none
  int32_t limit = INT32_MAX;     // columns from here on are excluded
  int32_t penalty_column = -1;   // of the row, -1 = none
  bool is_renormalised = false;  // excluded columns do not count either
};

__device__ __forceinline__ Exclusion row_exclusion(const TokenStatsArgs& args,
                                                   const RowTransform& transform) {
  Exclusion exclusion;
  if (transform.penalty != 0.0F && transform.penalty_column >= 0 &&
      transform.penalty_column < args.num_columns) {
    exclusion.penalty_column = static_cast<int32_t>(transform.penalty_column);
  }
  if (args.exclusion == kModeOff) {
    return exclusion;
  }
  exclusion.is_renormalised = args.exclusion == kModeRenormalize;
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  if (lane < args.num_forbidden) {
    const int64_t column = args.forbidden_ids[lane] - args.vocab_start;
    exclusion.forbidden =
        column >= 0 && column < args.num_columns ? static_cast<int32_t>(column) : -1;
  }
  const int64_t limit = args.vocab_limit - args.vocab_start;
  if (limit < args.num_columns) {
    exclusion.limit = limit < 0 ? 0 : static_cast<int32_t>(limit);
  }
  return exclusion;
}

/// Bit (8 * load + i) of this lane for a column of the row, 0 when another lane or chunk has it.
__device__ __forceinline__ uint64_t lane_bit(int32_t column, int32_t first) {
  const int32_t place = column - first;
  const bool is_mine = column >= first && place < static_cast<int32_t>(kStatsChunkColumns) &&
                       (place >> 3 & 31) == static_cast<int32_t>(threadIdx.x & 31);
  return is_mine ? uint64_t{1} << ((place >> 8) * 8 + (place & 7)) : 0;
}

/// True, in every lane, when the chunk holds an excluded column.
__device__ __forceinline__ bool has_excluded(const Exclusion& exclusion, int32_t first) {
  const bool is_here = exclusion.forbidden >= first &&
                       exclusion.forbidden - first < static_cast<int32_t>(kStatsChunkColumns);
  return __any_sync(kFullWarp, is_here) != 0 ||
         exclusion.limit < first + static_cast<int32_t>(kStatsChunkColumns);
}

/// Columns of this lane that are not below `end`, a column of the row.
__device__ __forceinline__ uint64_t columns_from(int64_t end, int32_t first) {
  uint64_t mask = 0;
  if (end - first < static_cast<int64_t>(kStatsChunkColumns)) {
#pragma unroll 1
    for (int load = 0; load < kChunkLoads; ++load) {
      const int64_t left = end - first - lane_column(load);
      const uint64_t bits = left >= 8 ? 0U : (left <= 0 ? 0xffU : 0xffU & (0xffU << left));
      mask |= bits << (8 * load);
    }
  }
  return mask;
}

/// Excluded columns of this lane.
__device__ __forceinline__ uint64_t excluded_mask(const Exclusion& exclusion, int32_t first) {
  uint64_t mask = columns_from(exclusion.limit, first);
  unsigned owners = __ballot_sync(
      kFullWarp, exclusion.forbidden >= first &&
                     exclusion.forbidden - first < static_cast<int32_t>(kStatsChunkColumns));
  for (; owners != 0; owners &= owners - 1) {
    const int owner = __ffs(static_cast<int>(owners)) - 1;
    mask |= lane_bit(__shfl_sync(kFullWarp, exclusion.forbidden, owner), first);
  }
  return mask;
}

/// True, in every lane, when no lane's columns in `mask` hold NaN or an infinity.
template <typename T>
__device__ __forceinline__ bool all_finite(const LaneChunk<T>& chunk, uint64_t mask) {
  bool is_finite = true;
  for (; mask != 0; mask &= mask - 1) {
    const int bit = __ffsll(static_cast<long long>(mask)) - 1;
    is_finite = is_finite && isfinite(to_float(chunk.columns[lane_column(bit / 8) + bit % 8]));
  }
  return __all_sync(kFullWarp, is_finite) != 0;
}

/// A warp's partial sums over some columns, relative to the logit `maximum`.
struct PartSums final {
  float maximum = -INFINITY;
  float sum = 0.0F;
  float weighted = 0.0F;
  float raw_sum = 0.0F;
};

/// Of the columns in `mask`, one after the other.
template <typename T, bool kCapped>
__device__ __forceinline__ PartSums masked_sums(const LaneChunk<T>& chunk,
                                                const RowTransform& transform, uint64_t mask) {
  const float scale = transform.inv_temperature * kLog2E;
  const auto logit_at = [&](uint64_t bits) {
    const int bit = __ffsll(static_cast<long long>(bits)) - 1;
    const float x = to_float(chunk.columns[lane_column(bit / 8) + bit % 8]);
    return kCapped ? transform.capped(x) : x;
  };
  PartSums part;
  for (uint64_t bits = mask; bits != 0; bits &= bits - 1) {
    part.maximum = fmaxf(part.maximum, logit_at(bits));
  }
  part.maximum = warp_max(part.maximum);
  for (uint64_t bits = mask; bits != 0; bits &= bits - 1) {
    const float difference = logit_at(bits) - part.maximum;
    const float power = ptx::exp2_approx(difference * scale);
    part.sum += power;
    part.weighted = fmaf(power, difference * transform.inv_temperature, part.weighted);
    part.raw_sum += ptx::exp2_approx(difference * kLog2E);
  }
  part.sum = warp_sum(part.sum);
  part.weighted = warp_sum(part.weighted);
  part.raw_sum = warp_sum(part.raw_sum);
  return part;
}

/// The same sums relative to another, no smaller maximum.
__device__ __forceinline__ PartSums moved_to(const RowTransform& transform, const PartSums& part,
                                             float maximum) {
  if (part.sum == 0.0F || part.maximum == maximum) {
    return part;
  }
  const float shift = part.maximum - maximum;
  const float factor = ptx::exp2_approx(shift * transform.inv_temperature * kLog2E);
  PartSums moved{maximum, part.sum * factor, 0.0F, part.raw_sum * ptx::exp2_approx(shift * kLog2E)};
  moved.weighted = factor * fmaf(shift * transform.inv_temperature, part.sum, part.weighted);
  return moved;
}

/// One column by itself: the penalised one.
struct SingleColumn final {
  float key = -INFINITY;
  float logit = -INFINITY;
  int32_t column = INT32_MAX;
  bool is_candidate = false;
  bool is_counted = false;
};

template <typename T>
__device__ __forceinline__ SingleColumn penalised_column(const TokenStatsArgs& args,
                                                         const RowTransform& transform,
                                                         const T* source, int32_t column) {
  SingleColumn single;
  const float x = to_float(source[column]);
  single.is_candidate = is_candidate(args, column);
  single.is_counted = single.is_candidate || args.exclusion != kModeRenormalize;
  single.key = transform.key(x, column);
  single.logit = transform.logit(x, column);
  single.column = column;
  return single;
}

/// Adds the single column to a record whose sums are relative to the logit `maximum`.
__device__ __forceinline__ void add_single(const RowTransform& transform,
                                           const SingleColumn& single, float maximum,
                                           ChunkRecord& record) {
  if (single.is_counted) {
    // The chunk's maximum stays: a penalty may be negative, but exp2 has the room for it or the
    // chunk goes element by element.
    const float difference = single.logit - maximum;
    const float power = ptx::exp2_approx(difference * transform.inv_temperature * kLog2E);
    record.sum += power;
    record.weighted = fmaf(power, difference * transform.inv_temperature, record.weighted);
    record.raw_sum += ptx::exp2_approx(difference * kLog2E);
    record.candidate_sum += single.is_candidate ? power : 0.0F;
  }
  if (!single.is_candidate) {
    return;
  }
  const float z = transform.tempered(single.logit);
  if (single.key > record.best_key ||
      (single.key == record.best_key && single.column < record.best_column)) {
    record.second_key = record.best_key;
    record.second_z = record.best_z;
    record.best_key = single.key;
    record.best_z = z;
    record.best_column = single.column;
  } else if (single.key > record.second_key) {
    record.second_key = single.key;
    record.second_z = z;
  }
}

/// The record of a chunk of finite values of which at least two are candidates; false when it is
/// not one, and the record is rubbish.
template <typename T, bool kCapped>
__device__ __forceinline__ bool plain_chunk(const TokenStatsArgs& args,
                                            const RowTransform& transform,
                                            const Exclusion& exclusion, const T* source,
                                            int32_t first, const LaneChunk<T>& chunk,
                                            uint32_t* best_so_far, ChunkRecord& record) {
  constexpr float kLeast = least_plain_best<T>();
  const float scale = transform.inv_temperature * kLog2E;
  const bool has_exclusion = has_excluded(exclusion, first);
  const bool has_penalty =
      exclusion.penalty_column >= first &&
      exclusion.penalty_column - first < static_cast<int32_t>(kStatsChunkColumns);
  bool is_plain = true;
  uint64_t pads = kCapped ? columns_from(args.num_columns, first) : 0;
  SingleColumn single;
  if (has_penalty) {
    single = penalised_column(args, transform, source, exclusion.penalty_column);
    is_plain = isfinite(single.key);
    const uint64_t bit = lane_bit(exclusion.penalty_column, first);
    chunk.pad(bit);
    pads |= bit;
  }
  PartSums rest;  // of the excluded columns, where they count
  if (has_exclusion) {
    const uint64_t excluded = excluded_mask(exclusion, first) & ~pads;
    if (!exclusion.is_renormalised) {
      rest = masked_sums<T, kCapped>(chunk, transform, excluded);
    }
    if (kCapped || exclusion.is_renormalised) {
      is_plain = is_plain && all_finite(chunk, excluded);  // the sums do not tell
    }
    chunk.pad(excluded);
    pads |= excluded;
  }
  const TopTwo mine = lane_top_two(chunk);
  TopTwo top = mine;
  top.merge_warp();
  PartSums part;
  part.maximum = kCapped ? transform.capped(top.best) : top.best;
  const PowerSums sums = transform.is_tempered
                             ? chunk_sums<T, kCapped, true>(chunk, transform, part.maximum, scale)
                             : chunk_sums<T, kCapped, false>(chunk, transform, part.maximum, scale);
  part.sum = sums.sum;
  part.weighted = sums.weighted;
  part.raw_sum = sums.raw_sum;
  const bool has_candidates = first < exclusion.limit;
  is_plain = is_plain && (top.best > kLeast || !has_candidates);
  if constexpr (kCapped) {
    is_plain = is_plain && top.best < INFINITY &&
               __all_sync(kFullWarp, sums.num_low == __popcll(pads)) != 0;
  }
  if (!has_candidates) {
    part = PartSums{};  // nothing but pads
  }
  const float maximum = fmaxf(part.maximum, rest.maximum);
  part = moved_to(transform, part, maximum);
  rest = moved_to(transform, rest, maximum);
  is_plain = is_plain && maximum > kLeast && fabsf(maximum * scale) < 1.0e30F;
  record.bad_count = 0;
  record.maximum = transform.tempered(maximum);
  record.raw_maximum = maximum;
  record.sum = part.sum + rest.sum;
  record.weighted = part.weighted + rest.weighted;
  record.raw_sum = part.raw_sum + rest.raw_sum;
  record.candidate_sum = part.sum;
  record.best_key = -INFINITY;
  record.second_key = -INFINITY;
  record.best_z = -INFINITY;
  record.second_z = -INFINITY;
  record.best_column = -1;
  if (has_candidates) {
    is_plain = is_plain && top.second > kLeast;
    record.best_key = top.best;
    record.second_key = top.second;
    record.best_z = transform.tempered(transform.capped(top.best));
    record.second_z = transform.tempered(transform.capped(top.second));
    if (best_so_far != nullptr) {
      const uint32_t key = ordered_bits(top.best);
      uint32_t least = 0;
      if ((threadIdx.x & 31) == 0) {
        least = atomicMax(best_so_far, key);
      }
      if (key >= __shfl_sync(kFullWarp, least, 0)) {
        record.best_column = column_of(chunk, mine.best, top.best, first);
      }
    }
  }
  if (has_penalty) {
    add_single(transform, single, maximum, record);
  }
  return is_plain && isfinite(record.weighted) && isfinite(record.sum) && isfinite(record.raw_sum);
}

/// Record of the chunk that begins at column `first`, whose copy has arrived. `best_so_far` (shared
/// by the warps of a CTA, ordered_bits of a key, 0 at first) lets a warp skip the search for the
/// column of a best key that cannot be the row's; null = never search.
template <typename T, bool kCapped>
__device__ __forceinline__ ChunkRecord chunk_record(const TokenStatsArgs& args,
                                                    const RowTransform& transform,
                                                    const Exclusion& exclusion, const T* source,
                                                    int32_t first, const LaneChunk<T>& chunk,
                                                    uint32_t* best_so_far) {
  ChunkRecord record{};
  if (!plain_chunk<T, kCapped>(args, transform, exclusion, source, first, chunk, best_so_far,
                               record)) {
    record = special_chunk(args, transform, source, first);
  }
  return record;
}

}  // namespace diffulex::cuda
