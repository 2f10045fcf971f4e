// SPDX-License-Identifier: Apache-2.0
#pragma once

// The Kt best candidates of a row, by one CTA. The Kt-th largest best key of the chunks is a lower
// bound of the Kt-th key of the row, so only chunks at or above it are read, and few of their
// columns enter the list that is then put in order.

#include <cfloat>
#include <cstdint>

#include "kernels/common/log_sum.h"
#include "kernels/cuda/common/ordered_key.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/portable/token_stats.cuh"
#include "kernels/cuda/portable/token_stats_chunks.cuh"

namespace diffulex::cuda {

/// Columns the list may hold; more (many ties) take the slow way.
inline constexpr int32_t kTopKListEntries = 1024;

struct TopKShared final {
  union {
    uint64_t list[kTopKListEntries];   // ranked keys and columns, unordered
    float powers[kStatsChunkColumns];  // of the chunk of a draw, before the list is made
  };
  uint64_t top[kStatsMaxTopK];  // best first, 0 = none
  LogSum log_sum;               // of the row
  unsigned long long next;
  uint32_t threshold;  // ordered_bits of the least key that may belong to the top-k
  int32_t count;
  bool is_open;  // the row has a candidate
};

/// One value of the row, sanitised.
template <typename T>
__device__ __forceinline__ float value_at(const TokenStatsArgs& args, const T* source,
                                          int64_t column) {
  return column < args.num_columns ? RowTransform::sanitized(to_float(source[column])) : -INFINITY;
}

/// ranked() of a candidate, 0 of any other column.
template <typename T>
__device__ __forceinline__ uint64_t candidate_entry(const TokenStatsArgs& args, const T* source,
                                                    const RowTransform& transform, int64_t column) {
  const float x = value_at(args, source, column);
  return x != -INFINITY && is_candidate(args, column) ? ranked(transform.key(x, column), column)
                                                      : 0;
}

/// Sets shared.threshold: the Kt-th largest best key of the chunks, 0 when fewer have one.
__device__ inline void set_threshold(const TokenStatsArgs& args, const ChunkRecord* records,
                                     TopKShared& shared) {
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  for (int32_t chunk = threadIdx.x; chunk < num_chunks; chunk += static_cast<int32_t>(blockDim.x)) {
    const float key = records[chunk].best_key;
    int32_t place = 0;
    for (int32_t other = 0; other < num_chunks; ++other) {
      const float other_key = records[other].best_key;
      place += other_key > key || (other_key == key && other < chunk) ? 1 : 0;
    }
    if (place == args.top_k - 1 && key > -INFINITY) {
      shared.threshold = ordered_bits(key);
    }
  }
}

/// The exact slow way: one pass over the row per entry.
template <typename T>
__device__ void select_one_by_one(const TokenStatsArgs& args, const T* source,
                                  const RowTransform& transform, const ChunkRecord* records,
                                  TopKShared& shared) {
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  const auto num_warps = static_cast<int32_t>(blockDim.x >> 5);
  uint64_t previous = ~uint64_t{0};
  for (int32_t i = 0; i < args.top_k && previous != 0; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      shared.next = 0;
    }
    __syncthreads();
    uint64_t mine = 0;
    for (auto chunk = static_cast<int32_t>(threadIdx.x >> 5); chunk < num_chunks;
         chunk += num_warps) {
      const float key = records[chunk].best_key;
      if (key == -INFINITY || ordered_bits(key) < shared.threshold) {
        continue;
      }
      const int64_t first = chunk * kStatsChunkColumns;
      for (int64_t column = first + (threadIdx.x & 31); column < first + kStatsChunkColumns;
           column += 32) {
        const uint64_t entry = candidate_entry(args, source, transform, column);
        mine = entry < previous && entry > mine ? entry : mine;
      }
    }
    mine = warp_max(mine);
    if ((threadIdx.x & 31) == 0 && mine != 0) {
      atomicMax(&shared.next, static_cast<unsigned long long>(mine));
    }
    __syncthreads();
    previous = shared.next;
    if (threadIdx.x == 0) {
      shared.top[i] = previous;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ void append_entry(TopKShared& shared, uint64_t entry) {
  const int32_t place = atomicAdd(&shared.count, 1);
  if (place < kTopKListEntries) {
    shared.list[place] = entry;
  }
}

/// Appends the candidates of one chunk whose key is at least `least`, by one warp; not the
/// penalised column.
template <typename T>
__device__ void append_chunk(const TokenStatsArgs& args, const T* source,
                             const Exclusion& exclusion, int32_t first, float least,
                             const LaneChunk<T>& chunk, TopKShared& shared) {
  start_chunk(args, source, first, chunk);
  uint64_t skipped = lane_bit(exclusion.penalty_column, first);
  if (has_excluded(exclusion, first)) {
    skipped |= excluded_mask(exclusion, first);
  }
  ptx::cp_async_wait<0>();
#pragma unroll 2
  for (int load = 0; load < kChunkLoads; ++load) {
    float values[8];
    chunk.read(load, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = fminf(values[i], FLT_MAX);
      if (!(values[i] >= least)) {  // NaN too
        continue;
      }
      const int32_t column = first + lane_column(load) + i;
      if (x > -INFINITY && (skipped >> (8 * load + i) & 1) == 0 && column < args.num_columns) {
        append_entry(shared, ranked(x, column));
      }
    }
  }
}

/// Fills shared.top. By every thread of the CTA; `chunk` is scratch of the thread's warp.
template <typename T>
__device__ void collect_top_k(const TokenStatsArgs& args, const T* source,
                              const RowTransform& transform, const Exclusion& exclusion,
                              const ChunkRecord* records, const LaneChunk<T>& chunk,
                              TopKShared& shared) {
  if (threadIdx.x == 0) {
    shared.threshold = 0;
    shared.count = 0;
  }
  for (int32_t i = threadIdx.x; i < kStatsMaxTopK; i += static_cast<int32_t>(blockDim.x)) {
    shared.top[i] = 0;
  }
  __syncthreads();
  set_threshold(args, records, shared);
  __syncthreads();
  const float least = shared.threshold == 0 ? -INFINITY : ordered_value(shared.threshold);
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  const auto num_warps = static_cast<int32_t>(blockDim.x >> 5);
  // Only the chunks that take part count, so that they spread over the warps.
  auto turn = static_cast<int32_t>(threadIdx.x >> 5);
  for (int32_t base = 0; base < num_chunks; base += 32) {
    const int32_t mine = base + static_cast<int32_t>(threadIdx.x & 31);
    const float key = mine < num_chunks ? records[mine].best_key : -INFINITY;
    unsigned open = __ballot_sync(kFullWarp, key > -INFINITY && key >= least);
    for (; open != 0; open &= open - 1) {
      if (turn == 0) {
        const int32_t number = base + __ffs(static_cast<int>(open)) - 1;
        append_chunk(args, source, exclusion, number * static_cast<int32_t>(kStatsChunkColumns),
                     least, chunk, shared);
      }
      turn = turn == 0 ? num_warps - 1 : turn - 1;
    }
  }
  if (threadIdx.x == 0 && exclusion.penalty_column >= 0) {
    const uint64_t entry = candidate_entry(args, source, transform, exclusion.penalty_column);
    if (entry >> 32 >= shared.threshold && entry != 0) {
      append_entry(shared, entry);
    }
  }
  __syncthreads();
  const int32_t count = shared.count;
  if (count > kTopKListEntries) {
    select_one_by_one(args, source, transform, records, shared);
    return;
  }
  // Entries are distinct, so the number of larger ones is a place.
  for (int32_t i = threadIdx.x; i < count; i += static_cast<int32_t>(blockDim.x)) {
    const uint64_t entry = shared.list[i];
    int32_t place = 0;
    for (int32_t other = 0; other < count; ++other) {
      place += shared.list[other] > entry ? 1 : 0;
    }
    if (place < args.top_k) {
      shared.top[place] = entry;
    }
  }
  __syncthreads();
}

template <typename T>
__device__ void write_top_k(const TokenStatsArgs& args, const T* source,
                            const RowTransform& transform, int64_t row, const TopKShared& shared) {
  for (int32_t i = threadIdx.x; i < args.top_k; i += static_cast<int32_t>(blockDim.x)) {
    const uint64_t entry = shared.top[i];
    int64_t id = -1;
    float value = args.is_partial ? -INFINITY : 0.0F;
    if (entry != 0) {
      const int64_t column = ranked_index(entry);
      id = args.vocab_start + column;
      const float z = transform.tempered(transform.logit(value_at(args, source, column), column));
      value = args.is_partial ? z : expf(static_cast<float>(shared.log_sum.log_probability(z)));
    }
    args.topk_ids[row * args.topk_ids_stride + i] = id;
    args.topk_probs[row * args.topk_probs_stride + i] = value;
  }
}

}  // namespace diffulex::cuda
