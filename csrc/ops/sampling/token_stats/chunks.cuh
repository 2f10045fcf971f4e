// SPDX-License-Identifier: Apache-2.0
#pragma once

// The record of one chunk of one row, by one warp. The chunk is copied to shared memory in 16-byte
// pieces; a lane sums the pieces it copied itself and the warp looks through them together for the
// best column. Excluded columns and the penalised
// one are overwritten by a pad and added back singly, so that the sums run without tests; only
// chunks with values that are not finite, or too large, go element by element.

#include <cfloat>
#include <climits>
#include <cstdint>

#include "ops/sampling/token_stats/lane.cuh"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/sampling/token_stats/special.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

inline constexpr float kLn2 = 0.693147181F;

/// Largest value of this lane. NaN is dropped; the sums notice it.
template <typename T>
__device__ __forceinline__ float lane_maximum(const LaneChunk<T>& chunk) {
  if constexpr (sizeof(T) == 4) {
    float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
      float values[8];
      chunk.read(load, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        best[i % 4] = fmaxf(best[i % 4], values[i]);
      }
    }
    return fmaxf(fmaxf(best[0], best[1]), fmaxf(best[2], best[3]));
  } else {
    using Pair = typename PairMath<T>::Pair;
    const T lowest = from_float<T>(-INFINITY);
    Pair best[4] = {{lowest, lowest}, {lowest, lowest}, {lowest, lowest}, {lowest, lowest}};
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
      const uint4 raw = *reinterpret_cast<const uint4*>(chunk.columns + lane_column(load));
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        best[i] = __hmax2(best[i], *reinterpret_cast<const Pair*>(&words[i]));
      }
    }
    const Pair top = __hmax2(__hmax2(best[0], best[1]), __hmax2(best[2], best[3]));
    return to_float(__hmax(top.x, top.y));
  }
}

/// Sums relative to one maximum.
struct PowerSums final {
  float sum;
  float raw_sum;    // of the same powers at temperature 1; only where asked for
  float weighted;   // times the difference of z; NaN when a value is not finite
  int32_t num_low;  // of this lane: values a cap does not apply to, pads above all; 0 without cap
};

/// Independent sums of a lane.
inline constexpr int kSumChains = 4;

/// Sums of both values over the warp, in one set of shuffles: lanes below 16 add the first, the
/// others the second.
__device__ __forceinline__ void warp_sum_pair(float& first, float& second) {
  const bool is_low = (threadIdx.x & 16) == 0;
  float mine = is_low ? first : second;
  mine += __shfl_xor_sync(kFullWarp, is_low ? second : first, 16);
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) {
    mine += __shfl_xor_sync(kFullWarp, mine, offset);
  }
  first = __shfl_sync(kFullWarp, mine, 0);
  second = __shfl_sync(kFullWarp, mine, 16);
}

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
  PowerSums sums[kSumChains] = {};
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
      sums[i % kSumChains].sum += power;
      sums[i % kSumChains].weighted = fmaf(power, exponent, sums[i % kSumChains].weighted);
      if constexpr (kRaw) {
        sums[i % kSumChains].raw_sum += ptx::exp2_approx(fmaf(x, kLog2E, -raw_offset));
      }
    }
  }
#pragma unroll
  for (int i = 1; i < kSumChains; ++i) {
    sums[0].sum += sums[i].sum;
    sums[0].weighted += sums[i].weighted;
    sums[0].raw_sum += sums[i].raw_sum;
  }
  PowerSums total{};
  warp_sum_pair(sums[0].sum, sums[0].weighted);
  total.sum = sums[0].sum;
  total.weighted = sums[0].weighted;
  total.num_low = num_low;
  const float correction = ptx::exp2_approx(-slip);
  total.weighted = fmaf(-slip, total.sum, total.weighted) * correction * kLn2;
  total.sum *= correction;
  total.raw_sum = total.sum;
  if constexpr (kRaw) {
    total.raw_sum =
        warp_sum(sums[0].raw_sum) * ptx::exp2_approx(-fmaf(maximum, kLog2E, -raw_offset));
  }
  return total;
}

/// The best value's lowest column of the row, and the second largest value; ties keep both.
struct BestPlace final {
  int32_t column;
  float second;
};

/// Of the warp's chunk, whose largest value is `best`. The warp looks through the columns of the
/// lanes whose own best it is, one lane after the other.
template <typename T>
__device__ __forceinline__ BestPlace find_best(const LaneChunk<T>& chunk, float lane_best,
                                               float best, int32_t first) {
  __syncwarp();  // the pieces of other lanes
  unsigned owners = __ballot_sync(kFullWarp, lane_best == best);
  int32_t column = INT32_MAX;
  int32_t count = 0;
  float rest = lane_best == best ? -INFINITY : lane_best;
  for (; owners != 0; owners &= owners - 1) {
    const int32_t owner = __ffs(static_cast<int>(owners)) - 1;
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const int32_t index = 32 * half + static_cast<int32_t>(threadIdx.x & 31);
      const int32_t place = (index >> 3) * 256 + owner * 8 + (index & 7);
      const float value = to_float(chunk.columns[place]);
      if (value == best) {
        column = min(column, first + place);
        ++count;
      } else {
        rest = fmaxf(rest, value);
      }
    }
  }
  __syncwarp();  // other lanes may fill their pieces again
  const bool has_tie = __reduce_add_sync(kFullWarp, count) > 1;
  const float other = ordered_value(__reduce_max_sync(kFullWarp, ordered_bits(rest)));
  return {static_cast<int32_t>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(column))),
          has_tie ? best : other};
}

/// Which columns of a row are no candidates, spread over the lanes of a warp.
struct Exclusion final {
  int32_t forbidden = -1;        // column that lane i < kStatsMaxForbidden knows of, -1 = none
  int32_t limit = INT32_MAX;     // columns from here on are excluded
  int32_t penalty_column = -1;   // of the row, -1 = none
  bool is_renormalised = false;  // excluded columns do not count either
};

__device__ __forceinline__ Exclusion row_exclusion(const TokenStatsArgs& args,
                                                   const RowInputs& inputs,
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
    const int64_t column = inputs.forbidden_id - args.vocab_start;
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
  const float lane_best = lane_maximum(chunk);
  const uint32_t key = __reduce_max_sync(kFullWarp, ordered_bits(lane_best));
  const float best = ordered_value(key);
  const bool has_candidates = first < exclusion.limit;
  // Only the row's best chunk has to know where its best value is and what comes second.
  const bool is_always_searched = args.top_k > 0 || best_so_far == nullptr || has_penalty;
  uint32_t least = 0;  // of the first lane
  if (!is_always_searched && (threadIdx.x & 31) == 0) {
    least = atomicMax(best_so_far, has_candidates ? key : 0);
  }
  PartSums part;
  part.maximum = kCapped ? transform.capped(best) : best;
  const PowerSums sums = transform.is_tempered
                             ? chunk_sums<T, kCapped, true>(chunk, transform, part.maximum, scale)
                             : chunk_sums<T, kCapped, false>(chunk, transform, part.maximum, scale);
  part.sum = sums.sum;
  part.weighted = sums.weighted;
  part.raw_sum = sums.raw_sum;
  is_plain = is_plain && (best > kLeast || !has_candidates);
  if constexpr (kCapped) {
    is_plain =
        is_plain && best < INFINITY && __all_sync(kFullWarp, sums.num_low == __popcll(pads)) != 0;
  }
  if (!has_candidates) {
    part = PartSums{};  // nothing but pads
  }
  float maximum = part.maximum;
  if (has_exclusion) {
    maximum = fmaxf(part.maximum, rest.maximum);
    part = moved_to(transform, part, maximum);
    rest = moved_to(transform, rest, maximum);
  }
  // A pad has no weight beside the maximum, however high the temperature.
  is_plain = is_plain && (maximum - kLeast) * scale > 150.0F && fabsf(maximum * scale) < 1.0e30F;
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
    record.best_key = best;
    record.best_z = transform.tempered(transform.capped(best));
    if (is_always_searched || key >= __shfl_sync(kFullWarp, least, 0)) {
      const BestPlace place = find_best(chunk, lane_best, best, first);
      record.best_column = place.column;
      record.second_key = place.second;
      record.second_z = transform.tempered(transform.capped(place.second));
      if (is_plain && !(place.second > kLeast)) {
        // A pad or nearly one. The sums stay what they are in chunks that are not searched.
        is_plain = !has_penalty;
        const ChunkRecord exact = chunk_by_element(args, transform, source, first);
        record.second_key = exact.second_key;
        record.second_z = exact.second_z;
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
    record = chunk_by_element(args, transform, source, first);
  }
  return record;
}

}  // namespace diffulex::cuda
