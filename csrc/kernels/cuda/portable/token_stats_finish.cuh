// SPDX-License-Identifier: Apache-2.0
#pragma once

// From the chunk records of a row to its result, by one CTA of any number of warps. The first warp
// adds the records in fp64, in an order that depends on the number of chunks alone, and reads again
// the one chunk that holds a drawn id; all warps read the few chunks that can hold the top-k.

#include <climits>
#include <cstdint>

#include "diffulex/kernels/sampling.h"
#include "kernels/common/log_sum.h"
#include "kernels/cuda/common/ordered_key.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/portable/token_stats.cuh"
#include "kernels/cuda/portable/token_stats_chunks.cuh"
#include "kernels/cuda/portable/token_stats_top_k.cuh"

namespace diffulex::cuda {

/// e^x to the accuracy of fp32 over the range of fp64: the power of two is exact, the fraction goes
/// through the special function unit.
__device__ __forceinline__ double fast_exp(double x) {
  const double power = x * 1.4426950408889634;
  if (!(power > -1000.0)) {
    return power != power ? power : 0.0;
  }
  const double whole = rint(fmin(power, 1000.0));
  const double fraction = ptx::exp2_approx(static_cast<float>(power - whole));
  return fraction * __hiloint2double((static_cast<int>(whole) + 1023) << 20, 0);
}

/// Natural logarithm to the accuracy of fp32; the rest of a sum past fp32 counts.
__device__ __forceinline__ double fast_log(double x) {
  const auto nearest = static_cast<float>(x);
  return logf(nearest) + (x - nearest) / x;
}

/// exp(value - maximum) with an empty chunk (-inf) giving 0.
__device__ __forceinline__ double chunk_scale(float value, float maximum) {
  return value == -INFINITY ? 0.0
                            : fast_exp(static_cast<double>(value) - static_cast<double>(maximum));
}

/// Largest key of a warp and the lowest chunk that has it; chunk -1 when there is none.
struct BestChunk final {
  float key = -INFINITY;
  int32_t chunk = -1;

  __device__ __forceinline__ void add(float other, int32_t other_chunk) {
    if (other > key) {  // chunks come in ascending order
      key = other;
      chunk = other_chunk;
    }
  }
  __device__ __forceinline__ void merge_warp() {
    const uint32_t mine = chunk < 0 ? 0 : ordered_bits(key);
    const uint32_t best = __reduce_max_sync(kFullWarp, mine);
    const auto place = static_cast<uint32_t>(mine == best && chunk >= 0 ? chunk : INT32_MAX);
    const uint32_t lowest = __reduce_min_sync(kFullWarp, place);
    chunk = best == 0 ? -1 : static_cast<int32_t>(lowest);
    key = best == 0 ? -INFINITY : ordered_value(best);
  }
};

/// Largest float of a warp.
__device__ __forceinline__ float quick_max(float value) {
  return ordered_value(__reduce_max_sync(kFullWarp, ordered_bits(value)));
}

/// What the records say about a row.
struct RowSummary final {
  float maximum = -INFINITY;  // of z over the normaliser
  double sum = 0.0;           // relative to exp(maximum)
  double weighted = 0.0;
  double candidates = 0.0;
  LogSum log_sum;
  LogSum raw_log_sum;
  double entropy = 0.0;
  float best_key = -INFINITY;
  float best_z = -INFINITY;
  float second_z = -INFINITY;  // -inf = none
  int32_t best_chunk = -1;
  int32_t best_column = -1;  // -1 = to be looked for in best_chunk
  int32_t bad_count = 0;
};

/// Adds the records of a row; every lane gets the result.
__device__ inline RowSummary summarize(const TokenStatsArgs& args, const ChunkRecord* records) {
  RowSummary summary;
  const int lane = threadIdx.x & 31;
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  BestChunk best;
  float raw_maximum = -INFINITY;
  int32_t bad_count = 0;
  for (int32_t chunk = lane; chunk < num_chunks; chunk += 32) {
    const ChunkRecord record = records[chunk];
    summary.maximum = fmaxf(summary.maximum, record.maximum);
    raw_maximum = fmaxf(raw_maximum, record.raw_maximum);
    bad_count += record.bad_count;
    best.add(record.best_key, chunk);
  }
  best.merge_warp();
  summary.maximum = quick_max(summary.maximum);
  raw_maximum = quick_max(raw_maximum);
  summary.bad_count = __reduce_add_sync(kFullWarp, bad_count);
  summary.best_key = best.key;
  summary.best_chunk = best.chunk;
  // The runner-up by key; its z follows from its chunk's record.
  BestChunk second;
  double terms[4] = {0.0, 0.0, 0.0, 0.0};
  for (int32_t chunk = lane; chunk < num_chunks; chunk += 32) {
    const ChunkRecord record = records[chunk];
    second.add(chunk == best.chunk ? record.second_key : record.best_key, chunk);
    const double scale = chunk_scale(record.maximum, summary.maximum);
    const double shift =
        scale == 0.0 ? 0.0
                     : static_cast<double>(record.maximum) - static_cast<double>(summary.maximum);
    terms[0] += scale * record.sum;
    terms[1] += scale * (record.weighted + shift * record.sum);
    terms[2] += scale * record.candidate_sum;
    terms[3] += record.raw_maximum == record.maximum && raw_maximum == summary.maximum
                    ? scale * record.raw_sum
                    : chunk_scale(record.raw_maximum, raw_maximum) * record.raw_sum;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (double& term : terms) {
      term += __shfl_xor_sync(kFullWarp, term, offset);
    }
  }
  summary.sum = terms[0];
  summary.weighted = terms[1];
  summary.candidates = terms[2];
  const double raw_sum = terms[3];
  second.merge_warp();
  if (best.chunk >= 0) {
    const ChunkRecord& record = records[best.chunk];
    summary.best_z = record.best_z;
    summary.best_column = record.best_column;
    if (second.chunk >= 0) {
      summary.second_z =
          second.chunk == best.chunk ? record.second_z : records[second.chunk].best_z;
    }
  }
  // Two logarithms at once, in different lanes.
  const double logarithm = fast_log(lane == 0 ? summary.sum : raw_sum);
  summary.log_sum = LogSum{summary.maximum, __shfl_sync(kFullWarp, logarithm, 0)};
  summary.raw_log_sum = LogSum{raw_maximum, __shfl_sync(kFullWarp, logarithm, 1)};
  summary.entropy = summary.sum > 0.0 ? summary.log_sum.log - summary.weighted / summary.sum : 0.0;
  return summary;
}

/// Lowest column of the winning chunk whose key is the row's largest.
template <typename T>
__device__ int32_t greedy_column(const TokenStatsArgs& args, const T* source,
                                 const RowTransform& transform, const RowSummary& summary) {
  if (summary.best_chunk < 0 || summary.best_column >= 0) {
    return summary.best_column;
  }
  const int64_t first = summary.best_chunk * kStatsChunkColumns;
  int32_t found = INT32_MAX;
  for (int64_t column = first + (threadIdx.x & 31); column < first + kStatsChunkColumns;
       column += 32) {
    const float x = value_at(args, source, column);
    if (x != -INFINITY && transform.key(x, column) == summary.best_key &&
        is_candidate(args, column)) {
      found = min(found, static_cast<int32_t>(column));
    }
  }
  return static_cast<int32_t>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(found)));
}

/// Chunk of a draw and the candidate mass before it.
struct DrawPlace final {
  int32_t chunk = -1;
  double before = 0.0;
};

/// The chunk in which the running candidate mass passes `target`; the last chunk with candidate
/// mass if rounding leaves none.
__device__ inline DrawPlace draw_chunk(const TokenStatsArgs& args, const ChunkRecord* records,
                                       float maximum, double target) {
  const int lane = threadIdx.x & 31;
  const int32_t num_chunks = static_cast<int32_t>(args.num_chunks);
  DrawPlace place;
  double total = 0.0;
  for (int32_t base = 0; base < num_chunks; base += 32) {
    double term = 0.0;
    if (base + lane < num_chunks) {
      const ChunkRecord& record = records[base + lane];
      term = chunk_scale(record.maximum, maximum) * record.candidate_sum;
    }
    double inclusive = term;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
      inclusive += lane >= offset ? other : 0.0;
    }
    const double before = total + (inclusive - term);
    const unsigned filled = __ballot_sync(kFullWarp, term > 0.0);
    const unsigned passed = __ballot_sync(kFullWarp, term > 0.0 && total + inclusive > target);
    if (filled != 0) {
      const int owner =
          passed != 0 ? __ffs(static_cast<int>(passed)) - 1 : 31 - __clz(static_cast<int>(filled));
      place.chunk = base + owner;
      place.before = __shfl_sync(kFullWarp, before, owner);
    }
    if (passed != 0) {
      break;
    }
    total += __shfl_sync(kFullWarp, inclusive, 31);
  }
  return place;
}

/// Column drawn by the uniform of the row: the first whose running candidate mass passes `target`,
/// or the last candidate of the chunk if rounding leaves none. `chunk` and `powers` are
/// scratch.
template <typename T>
__device__ int32_t drawn_column(const TokenStatsArgs& args, const T* source,
                                const RowTransform& transform, const Exclusion& exclusion,
                                const ChunkRecord* records, const LaneChunk<T>& chunk,
                                float row_maximum, double target, float* powers) {
  const DrawPlace place = draw_chunk(args, records, row_maximum, target);
  if (place.chunk < 0) {
    return -1;
  }
  const int lane = threadIdx.x & 31;
  const float maximum = records[place.chunk].maximum;
  const double scale = chunk_scale(maximum, row_maximum);
  const int64_t first = place.chunk * kStatsChunkColumns;
  start_chunk(args, source, static_cast<int32_t>(first), chunk);
  ptx::cp_async_wait<0>();
  const uint64_t excluded = excluded_mask(exclusion, static_cast<int32_t>(first));
#pragma unroll 1
  for (int load = 0; load < kChunkLoads; ++load) {
    float values[8];
    chunk.read(load, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t column = first + lane_column(load) + i;
      const float x = RowTransform::sanitized(values[i]);
      const bool is_choice =
          (excluded >> (8 * load + i) & 1) == 0 && x != -INFINITY && column < args.num_columns;
      const float z = transform.tempered(transform.logit(x, column));
      powers[lane_column(load) + i] = is_choice ? ptx::exp2_approx((z - maximum) * kLog2E) : 0.0F;
    }
  }
  __syncwarp();
  // Lane i owns the columns [64 i, 64 i + 64).
  constexpr int32_t kOwned = static_cast<int32_t>(kStatsChunkColumns) / 32;
  const auto power_at = [&](int32_t i) {
    return powers[lane * kOwned + ((i + lane) & (kOwned - 1))];  // no two lanes in one bank
  };
  double parts[4] = {0.0, 0.0, 0.0, 0.0};
  bool has_any = false;
#pragma unroll 4
  for (int32_t i = 0; i < kOwned; i += 4) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float power = power_at(i + part);
      parts[part] += power;
      has_any = has_any || power > 0.0F;
    }
  }
  const double mine = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  double inclusive = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += lane >= offset ? other : 0.0;
  }
  const unsigned passed =
      __ballot_sync(kFullWarp, has_any && place.before + inclusive * scale > target);
  const unsigned filled = __ballot_sync(kFullWarp, has_any);
  if (filled == 0) {
    return -1;
  }
  const int owner =
      passed != 0 ? __ffs(static_cast<int>(passed)) - 1 : 31 - __clz(static_cast<int>(filled));
  // Within the owner's columns, two per lane.
  const double before = __shfl_sync(kFullWarp, inclusive - mine, owner);
  const float first_power = powers[owner * kOwned + 2 * lane];
  const float second_power = powers[owner * kOwned + 2 * lane + 1];
  double pair = static_cast<double>(first_power) + second_power;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, pair, offset);
    pair += lane >= offset ? other : 0.0;
  }
  const double after_second = before + pair;
  const double after_first = after_second - second_power;
  const int64_t column = first + owner * kOwned + 2 * lane;
  int32_t found = INT32_MAX;
  int32_t last = -1;
  if (second_power > 0.0F) {
    last = static_cast<int32_t>(column) + 1;
    found = place.before + after_second * scale > target ? last : found;
  }
  if (first_power > 0.0F) {
    last = last < 0 ? static_cast<int32_t>(column) : last;
    found = place.before + after_first * scale > target ? static_cast<int32_t>(column) : found;
  }
  found = static_cast<int32_t>(__reduce_min_sync(kFullWarp, static_cast<unsigned>(found)));
  last = __reduce_max_sync(kFullWarp, last);
  return found == INT32_MAX ? last : found;
}

/// Records of a row without source or candidate. By the first warp.
__device__ inline void write_empty(const TokenStatsArgs& args, int64_t row, int32_t bad_count) {
  float* stats = args.stats + row * args.stats_stride;
  if (threadIdx.x == 0) {
    args.ids[row] = -1;
  }
  if (threadIdx.x < kTokenStatsColumns) {
    float value = threadIdx.x == kStatsBadCount ? static_cast<float>(bad_count) : 0.0F;
    if (args.is_partial && (threadIdx.x == 0 || (threadIdx.x >= 3 && threadIdx.x <= 5))) {
      value = -INFINITY;
    }
    stats[threadIdx.x] = value;
  }
  for (int32_t i = threadIdx.x; i < args.top_k; i += 32) {
    args.topk_ids[row * args.topk_ids_stride + i] = -1;
    args.topk_probs[row * args.topk_probs_stride + i] = args.is_partial ? -INFINITY : 0.0F;
  }
}

/// The unnormalised record of a vocabulary shard; the row may lack candidates. By the first warp.
__device__ inline void write_partial(const TokenStatsArgs& args, int64_t row, int32_t greedy,
                                     float logit, const RowSummary& summary) {
  if (threadIdx.x != 0) {
    return;
  }
  float* stats = args.stats + row * args.stats_stride;
  const bool has_mass = summary.sum > 0.0;
  stats[0] = has_mass ? summary.maximum : -INFINITY;
  stats[1] = has_mass ? static_cast<float>(summary.sum) : 0.0F;
  stats[2] = has_mass ? static_cast<float>(summary.weighted) : 0.0F;
  stats[3] = greedy < 0 ? -INFINITY : summary.best_z;
  stats[4] = summary.second_z;
  stats[5] = logit;
  stats[6] = 0.0F;
  stats[7] = static_cast<float>(summary.bad_count);
  args.ids[row] = greedy < 0 ? -1 : args.vocab_start + greedy;
}

/// The record of a row with a chosen column. By the first warp; the exponentials in lanes.
template <typename T>
__device__ void write_record(const TokenStatsArgs& args, const T* source,
                             const RowTransform& transform, int64_t row, int32_t greedy,
                             int32_t chosen, const RowSummary& summary) {
  const int lane = threadIdx.x & 31;
  const float best_logit = transform.logit(value_at(args, source, greedy), greedy);
  const float logit =
      chosen == greedy ? best_logit : transform.logit(value_at(args, source, chosen), chosen);
  const float z = lane == kStatsMaxProb      ? summary.best_z
                  : lane == kStatsSecondProb ? summary.second_z
                                             : transform.tempered(logit);
  const bool is_raw = lane == kStatsRawConfidence && transform.is_tempered;
  const double log_probability =
      is_raw ? summary.raw_log_sum.log_probability(logit) : summary.log_sum.log_probability(z);
  auto value = static_cast<float>(fast_exp(log_probability));
  if (lane == kStatsSecondProb && summary.second_z == -INFINITY) {
    value = 0.0F;
  } else if (lane == kStatsEntropy) {
    value = static_cast<float>(summary.entropy > 0.0 ? summary.entropy : 0.0);
  } else if (lane == kStatsLogSumExp) {
    value = static_cast<float>(summary.log_sum.value());
  } else if (lane == kStatsMaxLogit) {
    value = best_logit;
  } else if (lane == kStatsBadCount) {
    value = static_cast<float>(summary.bad_count);
  }
  if (lane < kTokenStatsColumns) {
    args.stats[row * args.stats_stride + lane] = value;
  }
  if (lane == 0) {
    args.ids[row] = args.vocab_start + chosen;
  }
}

/// Everything of a row but its top-k, by the first warp. False when the row has no candidate and is
/// done.
template <typename T>
__device__ bool finish_choice(const TokenStatsArgs& args, const T* source,
                              const RowTransform& transform, const Exclusion& exclusion,
                              int64_t row, const ChunkRecord* records, const LaneChunk<T>& chunk,
                              TopKShared& shared) {
  const RowSummary summary = summarize(args, records);
  if (summary.best_chunk < 0 && !args.is_partial) {
    write_empty(args, row, summary.bad_count);
    return false;
  }
  const int32_t greedy = greedy_column(args, source, transform, summary);
  if (threadIdx.x == 0) {
    shared.log_sum = summary.log_sum;
  }
  if (args.is_partial) {
    const float logit =
        greedy < 0 ? -INFINITY : transform.logit(value_at(args, source, greedy), greedy);
    write_partial(args, row, greedy, logit, summary);
    return true;
  }
  int32_t chosen = greedy;
  if (transform.is_tempered && args.uniforms != nullptr && summary.candidates > 0.0) {
    const int32_t drawn =
        drawn_column(args, source, transform, exclusion, records, chunk, summary.maximum,
                     args.uniforms[row] * summary.candidates, shared.powers);
    chosen = drawn >= 0 ? drawn : greedy;
  }
  write_record(args, source, transform, row, greedy, chosen, summary);
  return true;
}

/// Writes the result of a row. By every thread of a CTA, after its records are complete; `chunk` is
/// scratch of the thread's warp.
template <typename T>
__device__ void finish_row(const TokenStatsArgs& args, const T* source,
                           const RowTransform& transform, const Exclusion& exclusion, int64_t row,
                           const ChunkRecord* records, const LaneChunk<T>& chunk,
                           TopKShared& shared) {
  if (threadIdx.x < 32) {
    const bool has_choice =
        finish_choice(args, source, transform, exclusion, row, records, chunk, shared);
    if (threadIdx.x == 0) {
      shared.is_open = has_choice;
    }
  }
  if (args.top_k == 0) {
    return;
  }
  __syncthreads();
  if (shared.is_open) {
    collect_top_k(args, source, transform, exclusion, records, chunk, shared);
    write_top_k(args, source, transform, row, shared);
  }
}

}  // namespace diffulex::cuda
