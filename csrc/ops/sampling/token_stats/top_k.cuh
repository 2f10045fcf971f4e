// SPDX-License-Identifier: Apache-2.0
#pragma once

// The Kt best candidates of a row, by one CTA. The Kt-th largest among the two best keys of every
// chunk is a lower bound of the Kt-th key of the row, and close to it, so only chunks that reach it
// are read, and few of their columns enter the list that is then put in order.

#include <cfloat>
#include <cstdint>

#include "ops/sampling/token_stats/chunks.cuh"
#include "ops/sampling/token_stats/row.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

/// Columns the list may hold; more (many ties) take the slow way.
inline constexpr int32_t kTopKListEntries = 1024;

/// Segments of a chunk that are weighed apart for a draw: what a warp reads at once.
inline constexpr int32_t kDrawSegments = kChunkLoads;

/// Where a draw falls, as far as the records tell, and the mass of that chunk's segments.
struct DrawShared final {
  int32_t chunk;                   // -1 = nothing can be drawn
  double before;                   // candidate mass before the chunk
  double target;                   // of the candidate mass
  double segments[kDrawSegments];  // relative to the chunk's maximum
};

/// A sum of exponentials relative to its largest term.
struct Normaliser final {
  float maximum = -INFINITY;
  float inverse_sum = 0.0F;  // 0 when nothing has weight

  /// Share of exp(z); 0 of -inf.
  __device__ __forceinline__ float probability(float z) const {
    return z == -INFINITY ? 0.0F : ptx::exp2_approx((z - maximum) * kLog2E) * inverse_sum;
  }
};

/// 1 / sum of a sum of at least one, 0 of an empty one.
__device__ __forceinline__ float reciprocal(double sum) {
  return sum > 0.0 ? __frcp_rn(static_cast<float>(sum)) : 0.0F;
}

/// What the warps that finish a row share.
struct FinishShared final {
  uint64_t list[kTopKListEntries];   // ranked keys and columns, unordered
  float logits[kStatsChunkColumns];  // of the chunk of a draw
  uint64_t top[kStatsMaxTopK];       // best first, 0 = none
  Normaliser normaliser;             // of the row
  DrawShared draw;
  unsigned long long next;
  uint32_t threshold;  // ordered_bits of the least key that may belong to the top-k
  int32_t count;
};

/// One value of the row, sanitised.
template <typename T>
__device__ __forceinline__ float value_at(const TokenStatsArgs& args, const T* source,
                                          int64_t column) {
  return column < args.num_columns ? RowTransform::sanitized(to_float(source[column])) : -INFINITY;
}

/// The logit at temperature 1 of a candidate with this key.
template <typename T>
__device__ __forceinline__ float logit_of_key(const TokenStatsArgs& args, const T* source,
                                              const RowTransform& transform, float key,
                                              int64_t column) {
  if (transform.softcap == 0.0F) {
    return key;
  }
  return column == transform.penalty_column
             ? transform.logit(value_at(args, source, column), column)
             : transform.capped(key);
}

/// ranked() of a candidate, 0 of any other column.
template <typename T>
__device__ __forceinline__ uint64_t candidate_entry(const TokenStatsArgs& args, const T* source,
                                                    const RowTransform& transform, int64_t column) {
  const float x = value_at(args, source, column);
  return x != -INFINITY && is_candidate(args, column) ? ranked(transform.key(x, column), column)
                                                      : 0;
}

/// ordered_bits of a lower bound of the Kt-th largest among the two best keys of every chunk, exact
/// for bfloat16 and to 1/128 of the value for other types; 0 when there are fewer. By each warp
/// alike.
__device__ inline uint32_t top_k_threshold(const TokenStatsArgs& args, const ChunkRecord* records) {
  constexpr int32_t kHeld = 2 * 4;  // keys of a lane: rows of 262,144 columns in one go
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  const auto key_of = [&](int32_t chunk, float key) {
    return chunk < num_chunks && key > -INFINITY ? ordered_bits(key) >> 16 : 0U;
  };
  uint32_t keys[kHeld];
#pragma unroll
  for (int32_t i = 0; i < kHeld; i += 2) {
    const int32_t chunk = lane + 16 * i;
    const ChunkRecord& record = records[min(chunk, num_chunks - 1)];
    keys[i] = key_of(chunk, record.best_key);
    keys[i + 1] = key_of(chunk, record.second_key);
  }
  uint32_t threshold = 0;
#pragma unroll 1
  for (uint32_t bit = 1U << 15; bit != 0; bit >>= 1) {
    const uint32_t trial = threshold | bit;
    int32_t count = 0;
#pragma unroll
    for (int32_t i = 0; i < kHeld; ++i) {
      count += keys[i] >= trial ? 1 : 0;
    }
    for (int32_t chunk = lane + 16 * kHeld; chunk < num_chunks; chunk += 32) {
      count += key_of(chunk, records[chunk].best_key) >= trial ? 1 : 0;
      count += key_of(chunk, records[chunk].second_key) >= trial ? 1 : 0;
    }
    threshold = __reduce_add_sync(kFullWarp, count) >= args.top_k ? trial : threshold;
  }
  return threshold << 16;
}

/// The exact slow way: one pass over the row per entry.
template <typename T>
__device__ void select_one_by_one(const TokenStatsArgs& args, const T* source,
                                  const RowTransform& transform, const ChunkRecord* records,
                                  FinishShared& shared) {
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

/// The list of this CTA.
struct TopKList final {
  FinishShared* shared;

  __device__ __forceinline__ void append(uint64_t entry) const {
    const int32_t place = atomicAdd(&shared->count, 1);
    if (place < kTopKListEntries) {
      shared->list[place] = entry;
    }
  }
};

/// Appends the candidates of a chunk that has arrived whose key is at least `least`, by one warp;
/// not the penalised column.
template <typename T, typename List>
__device__ __forceinline__ void append_chunk(const TokenStatsArgs& args, const Exclusion& exclusion,
                                             int32_t first, float least, const LaneChunk<T>& chunk,
                                             List& list) {
  uint64_t skipped = lane_bit(exclusion.penalty_column, first);
  if (has_excluded(exclusion, first)) {
    skipped |= excluded_mask(exclusion, first);
  }
#pragma unroll 2
  for (int load = 0; load < kChunkLoads; ++load) {
    float values[8];
    chunk.read(load, values);
    const float best = fmaxf(fmaxf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3])),
                             fmaxf(fmaxf(values[4], values[5]), fmaxf(values[6], values[7])));
    if (!(best >= least)) {
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float x = fminf(values[i], FLT_MAX);
      if (!(values[i] >= least)) {  // NaN too
        continue;
      }
      const int32_t column = first + lane_column(load) + i;
      if (x > -INFINITY && (skipped >> (8 * load + i) & 1) == 0 && column < args.num_columns) {
        list.append(ranked(x, column));
      }
    }
  }
}

/// Appends the penalised column where it may belong to the top-k. By one thread.
template <typename T, typename List>
__device__ __forceinline__ void append_penalised(const TokenStatsArgs& args, const T* source,
                                                 const RowTransform& transform,
                                                 const Exclusion& exclusion, uint32_t threshold,
                                                 List& list) {
  if (exclusion.penalty_column >= 0) {
    const uint64_t entry = candidate_entry(args, source, transform, exclusion.penalty_column);
    if (entry >> 32 >= threshold && entry != 0) {
      list.append(entry);
    }
  }
}

/// True when a chunk with this best key may hold some of the top-k.
__device__ __forceinline__ bool reaches(float best_key, float least) {
  return best_key > -INFINITY && best_key >= least;
}

__device__ __forceinline__ float least_key(uint32_t threshold) {
  return threshold == 0 ? -INFINITY : ordered_value(threshold);
}

/// By every thread of the CTA, before a barrier.
__device__ __forceinline__ void clear_top_k(FinishShared& shared) {
  if (threadIdx.x == 0) {
    shared.count = 0;
  }
  for (int32_t i = threadIdx.x; i < kStatsMaxTopK; i += static_cast<int32_t>(blockDim.x)) {
    shared.top[i] = 0;
  }
}

/// Clears the top-k and finds its threshold. By every thread of the CTA.
__device__ inline void begin_top_k(const TokenStatsArgs& args, const ChunkRecord* records,
                                   FinishShared& shared) {
  const uint32_t threshold = args.num_chunks == 0 ? 0 : top_k_threshold(args, records);
  if (threadIdx.x == 0) {
    shared.threshold = threshold;
  }
  clear_top_k(shared);
  __syncthreads();
}

/// Appends what may belong to the top-k. By all warps of the CTA but the first, if there are more;
/// `chunk` is scratch of the thread's warp.
template <typename T>
__device__ void collect_top_k(const TokenStatsArgs& args, const T* source,
                              const RowTransform& transform, const Exclusion& exclusion,
                              const ChunkRecord* records, const LaneChunk<T>& chunk,
                              FinishShared& shared) {
  const int32_t first_warp = blockDim.x > 32 ? 1 : 0;
  const int32_t num_warps = static_cast<int32_t>(blockDim.x >> 5) - first_warp;
  // Only the chunks that take part count, so that they spread over the warps.
  int32_t turn = static_cast<int32_t>(threadIdx.x >> 5) - first_warp;
  if (turn < 0) {
    return;
  }
  TopKList list{&shared};
  const float least = least_key(shared.threshold);
  const auto num_chunks = static_cast<int32_t>(args.num_chunks);
  int32_t base = -32;
  unsigned open = 0;             // of the chunks from `base` on
  const auto next_chunk = [&] {  // first column of the next one of this warp, -1 = none
    for (;;) {
      while (open == 0) {
        base += 32;
        if (base >= num_chunks) {
          return -1;
        }
        const int32_t mine = base + static_cast<int32_t>(threadIdx.x & 31);
        const float key = mine < num_chunks ? records[mine].best_key : -INFINITY;
        open = __ballot_sync(kFullWarp, reaches(key, least));
      }
      const int32_t number = base + __ffs(static_cast<int>(open)) - 1;
      const bool is_mine = turn == 0;
      open &= open - 1;
      turn = is_mine ? num_warps - 1 : turn - 1;
      if (is_mine) {
        return number * static_cast<int32_t>(kStatsChunkColumns);
      }
    }
  };
  for (int32_t first = next_chunk(); first >= 0;) {
    start_chunk(args, source, first, chunk);
    ptx::cp_async_commit();
    const int32_t next = next_chunk();
    if (next >= 0) {
      prefetch_chunk(args, source, next);
    }
    ptx::cp_async_wait<0>();
    append_chunk(args, exclusion, first, least, chunk, list);
    first = next;
  }
  if (static_cast<int32_t>(threadIdx.x) == 32 * first_warp) {
    append_penalised(args, source, transform, exclusion, shared.threshold, list);
  }
}

/// Puts the list in order. By every thread of the CTA, between barriers.
template <typename T>
__device__ void order_top_k(const TokenStatsArgs& args, const T* source,
                            const RowTransform& transform, const ChunkRecord* records,
                            FinishShared& shared) {
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
                            const RowTransform& transform, int64_t row,
                            const FinishShared& shared) {
  for (int32_t i = threadIdx.x; i < args.top_k; i += static_cast<int32_t>(blockDim.x)) {
    const uint64_t entry = shared.top[i];
    int64_t id = -1;
    float value = args.is_partial ? -INFINITY : 0.0F;
    if (entry != 0) {
      const int64_t column = ranked_index(entry);
      id = args.vocab_start + column;
      const float key = ordered_value(static_cast<uint32_t>(entry >> 32));
      const float z = transform.tempered(logit_of_key(args, source, transform, key, column));
      value = args.is_partial ? z : shared.normaliser.probability(z);
    }
    args.topk_ids[row * args.topk_ids_stride + i] = id;
    args.topk_probs[row * args.topk_probs_stride + i] = value;
  }
}

}  // namespace diffulex::cuda
