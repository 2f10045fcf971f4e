// SPDX-License-Identifier: Apache-2.0
#pragma once

// Second pass of token_stats: one CTA per row adds the chunk records in chunk order in fp64, then
// reads again the one chunk that holds the chosen id, and for top-k the few chunks that can.

#include <cstdint>

#include "diffulex/kernels/sampling.h"
#include "kernels/common/log_sum.h"
#include "kernels/cuda/common/ordered_key.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/portable/token_stats.cuh"

namespace diffulex::cuda {

inline constexpr int kFinishThreads = 256;
inline constexpr int kFinishWarps = kFinishThreads / 32;
inline constexpr int kFinishValues = static_cast<int>(kStatsChunkColumns) / kFinishThreads;
/// Chunks a row may have when top-k is asked for (bits of a shared-memory set).
inline constexpr int32_t kMaxTopKChunks = 4096;

struct FinishShared final {
  double terms[4][kFinishThreads];  // sum, weighted, candidates, raw sum of one batch of chunks
  double scan[kFinishWarps];
  double totals[4];
  double maximum;
  double raw_maximum;
  double before;  // candidate mass of the chunks before the drawn one
  uint64_t keys[kFinishWarps];
  float floats[kFinishWarps];
  int32_t ints[kFinishWarps];
  int32_t chunk;
  int32_t first_column;
  int32_t last_column;
  uint64_t top[kStatsMaxTopK];
  uint32_t visited[kMaxTopKChunks / 32];
};

__device__ inline uint64_t block_max(uint64_t value, FinishShared& shared) {
  value = warp_max(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    shared.keys[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  uint64_t result = 0;
#pragma unroll
  for (int warp = 0; warp < kFinishWarps; ++warp) {
    result = shared.keys[warp] > result ? shared.keys[warp] : result;
  }
  return result;
}

__device__ inline float block_max(float value, FinishShared& shared) {
  value = warp_max(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    shared.floats[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  float result = -INFINITY;
#pragma unroll
  for (int warp = 0; warp < kFinishWarps; ++warp) {
    result = fmaxf(result, shared.floats[warp]);
  }
  return result;
}

__device__ inline int32_t block_sum(int32_t value, FinishShared& shared) {
  value = warp_sum(value);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) {
    shared.ints[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  int32_t result = 0;
#pragma unroll
  for (int warp = 0; warp < kFinishWarps; ++warp) {
    result += shared.ints[warp];
  }
  return result;
}

/// exp(value - maximum) with an empty chunk (-inf) giving 0.
__device__ __forceinline__ double chunk_scale(float value, double maximum) {
  return value == -INFINITY ? 0.0 : exp(static_cast<double>(value) - maximum);
}

/// What the records say about a row.
struct RowSummary final {
  LogSum log_sum;  // of the normaliser
  double entropy;
  LogSum raw_log_sum;
  double candidates;  // candidate mass relative to exp(maximum)
  float best_key;
  float best_z;
  float second_z;  // -inf = none
  int32_t best_chunk;
  int32_t bad_count;
};

/// Adds the records of `row` in chunk order.
__device__ inline RowSummary summarize(const TokenStatsArgs& args, const ChunkRecord* records,
                                       FinishShared& shared) {
  RowSummary summary{};
  const int32_t num_chunks = static_cast<int32_t>(args.num_chunks);
  uint64_t best = 0;
  float maximum = -INFINITY;
  float raw_maximum = -INFINITY;
  int32_t bad = 0;
  for (int32_t chunk = threadIdx.x; chunk < num_chunks; chunk += kFinishThreads) {
    const ChunkRecord& record = records[chunk];
    maximum = fmaxf(maximum, record.maximum);
    raw_maximum = fmaxf(raw_maximum, record.raw_maximum);
    bad += record.bad_count;
    if (record.best_key > -INFINITY) {
      const uint64_t entry = ranked(record.best_key, chunk);
      best = entry > best ? entry : best;
    }
  }
  best = block_max(best, shared);
  maximum = block_max(maximum, shared);
  raw_maximum = block_max(raw_maximum, shared);
  summary.bad_count = block_sum(bad, shared);
  summary.best_chunk = best == 0 ? -1 : ranked_index(best);
  summary.best_key = -INFINITY;
  summary.second_z = -INFINITY;
  if (best != 0) {
    summary.best_key = records[summary.best_chunk].best_key;
    summary.best_z = records[summary.best_chunk].best_z;
    // The runner-up by key; its z follows from its chunk's record.
    uint64_t second = 0;
    for (int32_t chunk = threadIdx.x; chunk < num_chunks; chunk += kFinishThreads) {
      const float key =
          chunk == summary.best_chunk ? records[chunk].second_key : records[chunk].best_key;
      if (key > -INFINITY) {
        const uint64_t entry = ranked(key, chunk);
        second = entry > second ? entry : second;
      }
    }
    second = block_max(second, shared);
    if (second != 0) {
      const int32_t chunk = ranked_index(second);
      summary.second_z =
          chunk == summary.best_chunk ? records[chunk].second_z : records[chunk].best_z;
    }
  }
  double totals[4] = {0.0, 0.0, 0.0, 0.0};
  for (int32_t base = 0; base < num_chunks; base += kFinishThreads) {
    const int32_t chunk = base + static_cast<int32_t>(threadIdx.x);
    __syncthreads();
    if (chunk < num_chunks) {
      const ChunkRecord& record = records[chunk];
      const double scale = chunk_scale(record.maximum, maximum);
      const double shift = scale == 0.0 ? 0.0 : static_cast<double>(record.maximum) - maximum;
      shared.terms[0][threadIdx.x] = scale * record.sum;
      shared.terms[1][threadIdx.x] = scale * (record.weighted + shift * record.sum);
      shared.terms[2][threadIdx.x] = scale * record.candidate_sum;
      shared.terms[3][threadIdx.x] = chunk_scale(record.raw_maximum, raw_maximum) * record.raw_sum;
    }
    __syncthreads();
    if (threadIdx.x < 4) {
      const int32_t count = num_chunks - base < kFinishThreads ? num_chunks - base : kFinishThreads;
      double total = base == 0 ? 0.0 : shared.totals[threadIdx.x];
      for (int32_t i = 0; i < count; ++i) {
        total += shared.terms[threadIdx.x][i];
      }
      shared.totals[threadIdx.x] = total;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    totals[i] = num_chunks > 0 ? shared.totals[i] : 0.0;
  }
  summary.candidates = totals[2];
  summary.log_sum = LogSum{maximum, log(totals[0])};
  summary.entropy = totals[0] > 0.0 ? log(totals[0]) - totals[1] / totals[0] : 0.0;
  summary.raw_log_sum = LogSum{raw_maximum, log(totals[3])};
  if (threadIdx.x == 0) {
    shared.maximum = maximum;
  }
  __syncthreads();
  return summary;
}

/// One value of the row, sanitised.
template <typename T>
__device__ __forceinline__ float value_at(const TokenStatsArgs& args, const T* source,
                                          int64_t column) {
  return column < args.num_columns ? RowTransform::sanitized(to_float(source[column])) : -INFINITY;
}

/// Lowest column of the winning chunk whose key is the row's largest.
template <typename T>
__device__ int32_t greedy_column(const TokenStatsArgs& args, const T* source,
                                 const RowTransform& transform, const RowSummary& summary,
                                 FinishShared& shared) {
  if (threadIdx.x == 0) {
    shared.first_column = INT32_MAX;
  }
  __syncthreads();
  const int64_t first = summary.best_chunk * kStatsChunkColumns + threadIdx.x * kFinishValues;
#pragma unroll
  for (int i = kFinishValues - 1; i >= 0; --i) {
    const int64_t column = first + i;
    const float x = value_at(args, source, column);
    if (x != -INFINITY && transform.key(x, column) == summary.best_key &&
        is_candidate(args, column)) {
      atomicMin(&shared.first_column, static_cast<int32_t>(column));
    }
  }
  __syncthreads();
  return shared.first_column;
}

/// Chunk in which the running candidate mass passes `target`; the last chunk with candidate mass if
/// rounding leaves none. Also sets shared.before.
__device__ inline int32_t draw_chunk(const TokenStatsArgs& args, const ChunkRecord* records,
                                     double target, FinishShared& shared) {
  const int32_t num_chunks = static_cast<int32_t>(args.num_chunks);
  // Of thread 0 alone, which walks the chunks in order.
  int32_t found = -1;
  int32_t last = -1;
  double total = 0.0;
  double found_before = 0.0;
  double last_before = 0.0;
  for (int32_t base = 0; base < num_chunks; base += kFinishThreads) {
    const int32_t chunk = base + static_cast<int32_t>(threadIdx.x);
    __syncthreads();
    if (chunk < num_chunks) {
      shared.terms[2][threadIdx.x] =
          chunk_scale(records[chunk].maximum, shared.maximum) * records[chunk].candidate_sum;
    }
    __syncthreads();
    if (threadIdx.x == 0 && found < 0) {
      for (int32_t i = 0; i < kFinishThreads && base + i < num_chunks; ++i) {
        const double term = shared.terms[2][i];
        if (term > 0.0) {
          last = base + i;
          last_before = total;
        }
        if (term > 0.0 && total + term > target) {
          found = base + i;
          found_before = total;
          break;
        }
        total += term;
      }
    }
  }
  if (threadIdx.x == 0) {
    shared.chunk = found < 0 ? last : found;
    shared.before = found < 0 ? last_before : found_before;
  }
  __syncthreads();
  return shared.chunk;
}

/// Column drawn by the uniform of the row: the first whose running candidate mass passes
/// u * total, or the last candidate of the chunk if rounding leaves none.
template <typename T>
__device__ int32_t drawn_column(const TokenStatsArgs& args, const T* source,
                                const RowTransform& transform, const ChunkRecord* records,
                                double target, FinishShared& shared) {
  const int32_t chunk = draw_chunk(args, records, target, shared);
  if (chunk < 0) {
    return -1;
  }
  const float maximum = records[chunk].maximum;
  const double scale = chunk_scale(maximum, shared.maximum);
  const int64_t first = chunk * kStatsChunkColumns + threadIdx.x * kFinishValues;
  float powers[kFinishValues];
  double mine = 0.0;
#pragma unroll
  for (int i = 0; i < kFinishValues; ++i) {
    const int64_t column = first + i;
    const float x = value_at(args, source, column);
    powers[i] = 0.0F;
    if (x != -INFINITY && is_candidate(args, column)) {
      powers[i] = expf(transform.tempered(transform.logit(x, column)) - maximum);
    }
    mine += powers[i];
  }
  double inclusive = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double other = __shfl_up_sync(kFullWarp, inclusive, offset);
    inclusive += (threadIdx.x & 31) >= offset ? other : 0.0;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 31) {
    shared.scan[threadIdx.x >> 5] = inclusive;
  }
  if (threadIdx.x == 0) {
    shared.first_column = INT32_MAX;
    shared.last_column = -1;
  }
  __syncthreads();
  double running = inclusive - mine;
  for (int warp = 0; warp < static_cast<int>(threadIdx.x >> 5); ++warp) {
    running += shared.scan[warp];
  }
#pragma unroll
  for (int i = 0; i < kFinishValues; ++i) {
    running += powers[i];
    if (powers[i] > 0.0F) {
      atomicMax(&shared.last_column, static_cast<int32_t>(first + i));
      if (shared.before + running * scale > target) {
        atomicMin(&shared.first_column, static_cast<int32_t>(first + i));
      }
    }
  }
  __syncthreads();
  return shared.first_column == INT32_MAX ? shared.last_column : shared.first_column;
}

/// Fills shared.top with the Kt best candidates, best first; 0 where there are fewer. Chunks are
/// visited by descending best key until none can beat the last entry.
template <typename T>
__device__ void collect_top_k(const TokenStatsArgs& args, const T* source,
                              const RowTransform& transform, const ChunkRecord* records,
                              FinishShared& shared) {
  const int32_t num_chunks = static_cast<int32_t>(args.num_chunks);
  for (int i = threadIdx.x; i < kMaxTopKChunks / 32; i += kFinishThreads) {
    shared.visited[i] = 0;
  }
  if (threadIdx.x < kStatsMaxTopK) {
    shared.top[threadIdx.x] = 0;
  }
  __syncthreads();
  for (int32_t visits = 0; visits < num_chunks; ++visits) {
    uint64_t next = 0;
    for (int32_t chunk = threadIdx.x; chunk < num_chunks; chunk += kFinishThreads) {
      const bool is_open = (shared.visited[chunk / 32] >> (chunk % 32) & 1) == 0;
      if (is_open && records[chunk].best_key > -INFINITY) {
        const uint64_t entry = ranked(records[chunk].best_key, chunk);
        next = entry > next ? entry : next;
      }
    }
    next = block_max(next, shared);
    const int32_t chunk = ranked_index(next);
    if (next == 0 ||
        ranked(records[chunk].best_key, chunk * kStatsChunkColumns) <= shared.top[args.top_k - 1]) {
      // Ties with the last entry in lower columns sit in chunks that rank first, so none is lost.
      break;
    }
    const int64_t first = chunk * kStatsChunkColumns + threadIdx.x * kFinishValues;
    uint64_t entries[kFinishValues];
#pragma unroll
    for (int i = 0; i < kFinishValues; ++i) {
      const float x = value_at(args, source, first + i);
      entries[i] = x != -INFINITY && is_candidate(args, first + i)
                       ? ranked(transform.key(x, first + i), first + i)
                       : 0;
    }
    while (true) {
      uint64_t mine = 0;
#pragma unroll
      for (int i = 0; i < kFinishValues; ++i) {
        mine = entries[i] > mine ? entries[i] : mine;
      }
      const uint64_t best = block_max(mine, shared);
      if (best <= shared.top[args.top_k - 1]) {
        break;
      }
#pragma unroll
      for (int i = 0; i < kFinishValues; ++i) {
        entries[i] = entries[i] == best ? 0 : entries[i];
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int32_t place = args.top_k - 1;
        for (; place > 0 && shared.top[place - 1] < best; --place) {
          shared.top[place] = shared.top[place - 1];
        }
        shared.top[place] = best;
        shared.visited[chunk / 32] |= 1U << (chunk % 32);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      shared.visited[chunk / 32] |= 1U << (chunk % 32);
    }
    __syncthreads();
  }
}

/// Records of a row without source: no candidate anywhere.
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
  for (int32_t i = threadIdx.x; i < args.top_k; i += kFinishThreads) {
    args.topk_ids[row * args.topk_ids_stride + i] = -1;
    args.topk_probs[row * args.topk_probs_stride + i] = args.is_partial ? -INFINITY : 0.0F;
  }
}

}  // namespace diffulex::cuda
