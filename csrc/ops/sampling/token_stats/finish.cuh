// SPDX-License-Identifier: Apache-2.0
#pragma once

// From the chunk records of a row to its result, by one CTA of any number of warps. The first warp
// adds the records in fp64, in an order that depends on the number of chunks alone; all warps read
// again the one chunk that holds a drawn id, and the few chunks that can hold the top-k.

#include <climits>
#include <cstdint>

#include "diffulex/ops/sampling.h"
#include "ops/sampling/token_stats/chunks.cuh"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/sampling/token_stats/top_k.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

/// exp(value - maximum) with an empty chunk (-inf) giving 0. To the accuracy of fp32 where it has
/// weight, over the range of fp64: candidates may be far below an excluded column.
__device__ __forceinline__ double chunk_scale(float value, float maximum) {
  const float power = (value - maximum) * kLog2E;
  if (!(power > -1000.0F)) {
    return 0.0;
  }
  const float whole = rintf(power);
  const double fraction = ptx::exp2_approx(power - whole);
  return fraction * __hiloint2double((static_cast<int>(whole) + 1023) << 20, 0);
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
  Normaliser normaliser;      // of z
  Normaliser raw_normaliser;  // of the logits at temperature 1; tempered rows only
  double sum = 0.0;           // relative to exp(normaliser.maximum)
  double weighted = 0.0;
  double candidates = 0.0;  // tempered rows only
  float best_key = -INFINITY;
  float best_z = -INFINITY;
  float second_z = -INFINITY;  // -inf = none
  int32_t best_chunk = -1;
  int32_t best_column = -1;
  int32_t bad_count = 0;
};

/// Records a lane reads at once.
inline constexpr int32_t kRecordGroup = 4;

/// Calls visit(chunk, record, is_first_time) for the records of this lane, in groups whose reads
/// overlap; the last group is filled with the last record.
template <typename Visit>
__device__ __forceinline__ void visit_records(const ChunkRecord* records, int32_t num_chunks,
                                              const Visit& visit) {
#pragma unroll 1
  for (int32_t base = static_cast<int32_t>(threadIdx.x & 31); base < num_chunks;
       base += 32 * kRecordGroup) {
    ChunkRecord group[kRecordGroup];
#pragma unroll
    for (int32_t i = 0; i < kRecordGroup; ++i) {
      group[i] = records[min(base + 32 * i, num_chunks - 1)];
    }
#pragma unroll
    for (int32_t i = 0; i < kRecordGroup; ++i) {
      visit(base + 32 * i, group[i], base + 32 * i < num_chunks);
    }
  }
}

/// Adds the records of a row; every lane gets the result. What only tempered rows need is left out
/// of the others.
__device__ inline RowSummary summarize(const TokenStatsArgs& args, const ChunkRecord* records,
                                       bool is_tempered) {
  RowSummary summary;
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  BestChunk best;
  float maximum = -INFINITY;
  float raw_maximum = -INFINITY;
  int32_t bad_count = 0;
  visit_records(records, num_chunks, [&](int32_t chunk, const ChunkRecord& record, bool is_new) {
    maximum = fmaxf(maximum, record.maximum);
    raw_maximum = fmaxf(raw_maximum, record.raw_maximum);
    bad_count += is_new ? record.bad_count : 0;
    best.add(is_new ? record.best_key : -INFINITY, chunk);
  });
  best.merge_warp();
  maximum = quick_max(maximum);
  summary.bad_count = __reduce_add_sync(kFullWarp, bad_count);
  summary.best_key = best.key;
  summary.best_chunk = best.chunk;
  if (is_tempered) {
    raw_maximum = quick_max(raw_maximum);
  }
  // The runner-up by key; its z follows from its chunk's record.
  BestChunk second;
  double sum = 0.0;
  double weighted = 0.0;
  double candidates = 0.0;
  double raw_sum = 0.0;
  visit_records(records, num_chunks, [&](int32_t chunk, const ChunkRecord& record, bool is_new) {
    const float key = chunk == best.chunk ? record.second_key : record.best_key;
    second.add(is_new ? key : -INFINITY, chunk);
    const float shift = record.maximum - maximum;  // NaN or -inf of an empty chunk
    const float scale = is_new && shift > -200.0F ? ptx::exp2_approx(shift * kLog2E) : 0.0F;
    sum += scale * record.sum;
    weighted += scale > 0.0F ? scale * fmaf(shift, record.sum, record.weighted) : 0.0F;
    if (is_tempered && is_new) {
      candidates += chunk_scale(record.maximum, maximum) * record.candidate_sum;
      raw_sum += chunk_scale(record.raw_maximum, raw_maximum) * record.raw_sum;
    }
  });
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
    weighted += __shfl_xor_sync(kFullWarp, weighted, offset);
  }
  summary.sum = sum;
  summary.weighted = weighted;
  summary.normaliser = {maximum, reciprocal(summary.sum)};
  if (is_tempered) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      candidates += __shfl_xor_sync(kFullWarp, candidates, offset);
      raw_sum += __shfl_xor_sync(kFullWarp, raw_sum, offset);
    }
    summary.candidates = candidates;
    summary.raw_normaliser = {raw_maximum, reciprocal(raw_sum)};
  }
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
  return summary;
}

/// Chunk of a draw and the candidate mass before it.
struct DrawPlace final {
  int32_t chunk = -1;
  double before = 0.0;
};

/// The chunk in which the running candidate mass passes `target`; the last chunk with candidate
/// mass if rounding leaves none. A lane adds neighbouring chunks.
__device__ inline DrawPlace draw_chunk(const TokenStatsArgs& args, const ChunkRecord* records,
                                       float maximum, double target) {
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  DrawPlace place;
  double total = 0.0;
#pragma unroll 1
  for (int32_t base = lane * kRecordGroup; base - lane * kRecordGroup < num_chunks;
       base += 32 * kRecordGroup) {
    double terms[kRecordGroup];
    double mine = 0.0;
#pragma unroll
    for (int32_t i = 0; i < kRecordGroup; ++i) {
      const ChunkRecord& record = records[min(base + i, num_chunks - 1)];
      const double mass = chunk_scale(record.maximum, maximum) * record.candidate_sum;
      terms[i] = base + i < num_chunks ? mass : 0.0;
      mine += terms[i];
    }
    double inclusive = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
      inclusive += lane >= offset ? other : 0.0;
    }
    const unsigned filled = __ballot_sync(kFullWarp, mine > 0.0);
    const unsigned passed = __ballot_sync(kFullWarp, mine > 0.0 && total + inclusive > target);
    if (filled != 0) {
      const int owner =
          passed != 0 ? __ffs(static_cast<int>(passed)) - 1 : 31 - __clz(static_cast<int>(filled));
      double running = total + (inclusive - mine);
      DrawPlace own;
#pragma unroll
      for (int32_t i = 0; i < kRecordGroup; ++i) {
        if (terms[i] > 0.0 && (own.chunk < 0 || !(running > target))) {
          own = {base + i, running};
        }
        running += terms[i];
      }
      place.chunk = __shfl_sync(kFullWarp, own.chunk, owner);
      place.before = __shfl_sync(kFullWarp, own.before, owner);
    }
    if (passed != 0) {
      break;
    }
    total += __shfl_sync(kFullWarp, inclusive, 31);
  }
  return place;
}

/// A column and its logit at temperature 1.
struct Choice final {
  int32_t column = -1;  // -1 = none
  float logit = -INFINITY;
};

/// Weight of a candidate's logit, relative to the maximum of its chunk; 0 of any other column.
__device__ __forceinline__ float draw_power(const RowTransform& transform, float logit,
                                            float maximum) {
  return logit == -INFINITY ? 0.0F
                            : ptx::exp2_approx((transform.tempered(logit) - maximum) * kLog2E);
}

/// Weights of 8 neighbouring columns; returns their sum, one rounded in fp32.
__device__ __forceinline__ double lane_powers(const RowTransform& transform,
                                              const float (&logits)[8], float maximum,
                                              float (&powers)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    powers[i] = draw_power(transform, logits[i], maximum);
  }
  return ((powers[0] + powers[1]) + (powers[2] + powers[3])) +
         ((powers[4] + powers[5]) + (powers[6] + powers[7]));
}

/// Reads the chunk of the draw and weighs its segments; in each, a lane has 8 neighbouring columns.
/// By every warp of the CTA; how many there are changes no result.
template <typename T>
__device__ void weigh_segments(const TokenStatsArgs& args, const T* source,
                               const RowTransform& transform, const Exclusion& exclusion,
                               const ChunkRecord* records, FinishShared& shared) {
  if (shared.draw.chunk < 0) {
    return;
  }
  const int32_t first = shared.draw.chunk * static_cast<int32_t>(kStatsChunkColumns);
  const auto num_warps = static_cast<int32_t>(blockDim.x >> 5);
  const auto read = [&](int32_t segment) {
    const int32_t column = first + lane_column(segment);
    if (args.is_vec && column + 8 <= args.num_columns) {
      return *reinterpret_cast<const Vec<T, 8>*>(source + column);
    }
    Vec<T, 8> values;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values.values[i] =
          column + i < args.num_columns ? source[column + i] : from_float<T>(-INFINITY);
    }
    return values;
  };
  auto segment = static_cast<int32_t>(threadIdx.x >> 5);
  Vec<T, 8> following;
  if (segment < kDrawSegments) {
    following = read(segment);
  }
  const float maximum = records[shared.draw.chunk].maximum;
  const uint64_t excluded = excluded_mask(exclusion, first);
  for (; segment < kDrawSegments; segment += num_warps) {
    const int32_t column = first + lane_column(segment);
    const Vec<T, 8> values = following;
    if (segment + num_warps < kDrawSegments) {
      following = read(segment + num_warps);
    }
    float logits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = RowTransform::sanitized(to_float(values.values[i]));
      const bool is_choice = (excluded >> (8 * segment + i) & 1) == 0;
      logits[i] = is_choice ? transform.logit(x, column + i) : -INFINITY;
    }
    store_floats<8, true>(shared.logits + lane_column(segment), logits);
    float powers[8];
    const double mass = warp_sum(lane_powers(transform, logits, maximum, powers));
    if ((threadIdx.x & 31) == 0) {
      shared.draw.segments[segment] = mass;
    }
  }
}

/// The column drawn: the first whose running candidate mass passes the target, or the last
/// candidate of the chunk if rounding leaves none. By one warp, after the segments have been
/// weighed.
__device__ inline Choice pick_column(const RowTransform& transform, const ChunkRecord* records,
                                     float row_maximum, const FinishShared& shared) {
  const DrawShared& draw = shared.draw;
  if (draw.chunk < 0) {
    return {};
  }
  const float maximum = records[draw.chunk].maximum;
  const double scale = chunk_scale(maximum, row_maximum);
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  const double weight = lane < kDrawSegments ? draw.segments[lane] : 0.0;
  double until = weight;
#pragma unroll
  for (int offset = 1; offset < kDrawSegments; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, until, offset);
    until += lane >= offset ? other : 0.0;
  }
  const unsigned weighty = __ballot_sync(kFullWarp, weight > 0.0);
  const unsigned reached =
      __ballot_sync(kFullWarp, weight > 0.0 && draw.before + until * scale > draw.target);
  if (weighty == 0) {
    return {};
  }
  const int segment =
      reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : 31 - __clz(static_cast<int>(weighty));
  const double before = __shfl_sync(kFullWarp, until - weight, segment);
  float logits[8];
  float powers[8];
  load_floats<8, true>(shared.logits + lane_column(segment), logits);
  const double mine = lane_powers(transform, logits, maximum, powers);
  double inclusive = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += lane >= offset ? other : 0.0;
  }
  const unsigned filled = __ballot_sync(kFullWarp, mine > 0.0);
  const unsigned passed = __ballot_sync(
      kFullWarp, mine > 0.0 && draw.before + (before + inclusive) * scale > draw.target);
  const int owner =
      passed != 0 ? __ffs(static_cast<int>(passed)) - 1 : 31 - __clz(static_cast<int>(filled));
  Choice choice;
  double running = before + (inclusive - mine);
  bool is_found = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    running += powers[i];
    if (powers[i] > 0.0F && !is_found) {
      choice = {draw.chunk * static_cast<int32_t>(kStatsChunkColumns) + lane_column(segment) + i,
                logits[i]};
      is_found = draw.before + running * scale > draw.target;
    }
  }
  return {__shfl_sync(kFullWarp, choice.column, owner),
          __shfl_sync(kFullWarp, choice.logit, owner)};
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
__device__ inline void write_partial(const TokenStatsArgs& args, int64_t row, const Choice& greedy,
                                     const RowSummary& summary) {
  if (threadIdx.x != 0) {
    return;
  }
  float* stats = args.stats + row * args.stats_stride;
  const bool has_mass = summary.sum > 0.0;
  stats[0] = has_mass ? summary.normaliser.maximum : -INFINITY;
  stats[1] = has_mass ? static_cast<float>(summary.sum) : 0.0F;
  stats[2] = has_mass ? static_cast<float>(summary.weighted) : 0.0F;
  stats[3] = greedy.column < 0 ? -INFINITY : summary.best_z;
  stats[4] = summary.second_z;
  stats[5] = greedy.logit;
  stats[6] = 0.0F;
  stats[7] = static_cast<float>(summary.bad_count);
  args.ids[row] = greedy.column < 0 ? -1 : args.vocab_start + greedy.column;
}

/// The record of a row with a chosen column. By the first warp; the exponentials in lanes.
__device__ inline void write_record(const TokenStatsArgs& args, const RowTransform& transform,
                                    int64_t row, const Choice& greedy, const Choice& chosen,
                                    const RowSummary& summary) {
  const int lane = threadIdx.x & 31;
  const float z = lane == kStatsMaxProb      ? summary.best_z
                  : lane == kStatsSecondProb ? summary.second_z
                                             : transform.tempered(chosen.logit);
  const bool is_raw = lane == kStatsRawConfidence && transform.is_tempered;
  float value =
      is_raw ? summary.raw_normaliser.probability(chosen.logit) : summary.normaliser.probability(z);
  if (lane == kStatsEntropy || lane == kStatsLogSumExp) {
    const auto nearest = static_cast<float>(summary.sum);
    const float logarithm =
        logf(nearest) + static_cast<float>(summary.sum - nearest) * summary.normaliser.inverse_sum;
    const float mean = static_cast<float>(summary.weighted) * summary.normaliser.inverse_sum;
    value = lane == kStatsEntropy ? fmaxf(logarithm - mean, 0.0F)
                                  : summary.normaliser.maximum + logarithm;
  } else if (lane == kStatsMaxLogit) {
    value = greedy.logit;
  } else if (lane == kStatsBadCount) {
    value = static_cast<float>(summary.bad_count);
  }
  if (lane < kTokenStatsColumns) {
    args.stats[row * args.stats_stride + lane] = value;
  }
  if (lane == 0) {
    args.ids[row] = args.vocab_start + chosen.column;
  }
}

/// Writes the result of a row. By every thread of a CTA, after its records are complete; they call
/// collect() where the list of the top-k has to be complete.
template <typename T, typename Collect>
__device__ void finish_row(const TokenStatsArgs& args, const T* source,
                           const RowTransform& transform, const Exclusion& exclusion, int64_t row,
                           const ChunkRecord* records, FinishShared& shared,
                           const Collect& collect) {
  const bool is_first_warp = threadIdx.x < 32;
  const bool is_drawn = transform.is_tempered && args.uniforms != nullptr && !args.is_partial;
  const bool has_top_k = args.top_k > 0;
  if (!is_first_warp && !is_drawn && !has_top_k) {
    return;
  }
  RowSummary summary;
  Choice greedy;
  Choice drawn;
  if (is_first_warp) {
    summary = summarize(args, records, transform.is_tempered);
    greedy.column = summary.best_column;
    if (greedy.column >= 0) {
      greedy.logit = logit_of_key(args, source, transform, summary.best_key, greedy.column);
    }
  }
  if (is_drawn) {
    if (is_first_warp) {
      const double target = args.uniforms[row] * summary.candidates;
      const DrawPlace place = summary.candidates > 0.0
                                  ? draw_chunk(args, records, summary.normaliser.maximum, target)
                                  : DrawPlace{};
      if (threadIdx.x == 0) {
        shared.draw.chunk = place.chunk;
        shared.draw.before = place.before;
        shared.draw.target = target;
      }
    }
    __syncthreads();
    weigh_segments(args, source, transform, exclusion, records, shared);
    __syncthreads();
    if (is_first_warp) {
      drawn = pick_column(transform, records, summary.normaliser.maximum, shared);
    }
  }
  if (is_first_warp) {
    if (has_top_k && threadIdx.x == 0) {
      shared.normaliser = summary.normaliser;
    }
    if (args.is_partial) {
      write_partial(args, row, greedy, summary);
    } else if (summary.best_chunk < 0) {
      write_empty(args, row, summary.bad_count);
    } else {
      // Copies: a choice of two references would be one of two places in local memory.
      const Choice chosen = drawn.column >= 0 ? Choice(drawn) : Choice(greedy);
      write_record(args, transform, row, greedy, chosen, summary);
    }
  }
  if (!has_top_k) {
    return;
  }
  collect();
  __syncthreads();
  order_top_k(args, source, transform, records, shared);
  write_top_k(args, source, transform, row, shared);
}

}  // namespace diffulex::cuda
