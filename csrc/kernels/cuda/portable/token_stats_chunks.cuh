// SPDX-License-Identifier: Apache-2.0
#pragma once

// First pass of token_stats: one warp reads one chunk of one row into registers (eight 16-byte
// loads in flight per lane for 16-bit logits) and writes its record.

#include <cstdint>

#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/portable/token_stats.cuh"

namespace diffulex::cuda {

inline constexpr int kChunkThreads = 128;
inline constexpr int kChunkWarps = kChunkThreads / 32;
inline constexpr int kChunkLoads = static_cast<int>(kStatsChunkColumns) / (32 * 8);
inline constexpr int kChunkValues = kChunkLoads * 8;
// Differences below this have no weight in fp32; the clamp keeps 0 * inf out of the sums.
inline constexpr float kLowestDifference = -200.0F;

/// Column of value `i` of this lane, relative to the chunk.
__device__ __forceinline__ int64_t value_column(int i) {
  return i / 8 * 256 + static_cast<int>(threadIdx.x & 31) * 8 + i % 8;
}

/// The two largest keys and their z; ties keep both.
struct TopTwo final {
  float best_key = -INFINITY;
  float best_z = -INFINITY;
  float second_key = -INFINITY;
  float second_z = -INFINITY;

  __device__ __forceinline__ void add(float key, float z) {
    if (key > best_key) {
      second_key = best_key;
      second_z = best_z;
      best_key = key;
      best_z = z;
    } else if (key > second_key) {
      second_key = key;
      second_z = z;
    }
  }
  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float key = __shfl_xor_sync(kFullWarp, best_key, offset);
      const float z = __shfl_xor_sync(kFullWarp, best_z, offset);
      const float next_key = __shfl_xor_sync(kFullWarp, second_key, offset);
      const float next_z = __shfl_xor_sync(kFullWarp, second_z, offset);
      add(key, z);
      add(next_key, next_z);
    }
  }
};

template <typename T>
__device__ __forceinline__ void load_chunk(const TokenStatsArgs& args, const T* source,
                                           int64_t first, float (&values)[kChunkValues]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int load = 0; load < kChunkLoads; ++load) {
    const int64_t column = first + load * 256 + lane * 8;
    float piece[8];
    if (args.is_vec && column + 8 <= args.num_columns) {
      load_floats<8, true>(source + column, piece);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        piece[i] = column + i < args.num_columns ? to_float(source[column + i]) : -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[load * 8 + i] = piece[i];
    }
  }
}

/// Chunk without exclusions, penalty, tail or non-finite values.
__device__ __forceinline__ void plain_chunk(const RowTransform& transform,
                                            const float (&values)[kChunkValues], const TopTwo& top,
                                            ChunkRecord& record) {
  record.best_key = top.best_key;
  record.second_key = top.second_key;
  record.best_z = transform.tempered(transform.capped(top.best_key));
  record.second_z = transform.tempered(transform.capped(top.second_key));
  record.maximum = record.best_z;
  record.bad_count = 0;
  float sum = 0.0F;
  float weighted = 0.0F;
  const bool is_capped = transform.softcap > 0.0F;
#pragma unroll
  for (int i = 0; i < kChunkValues; ++i) {
    const float logit = is_capped ? transform.capped(values[i]) : values[i];
    const float difference =
        fmaxf(logit * transform.inv_temperature - record.maximum, kLowestDifference);
    const float power = expf(difference);
    sum += power;
    weighted = fmaf(power, difference, weighted);
  }
  record.sum = warp_sum(sum);
  record.weighted = warp_sum(weighted);
  record.candidate_sum = record.sum;
  record.raw_maximum = record.maximum;
  record.raw_sum = record.sum;
  if (transform.is_tempered) {
    record.raw_maximum = transform.capped(top.best_key);
    float raw_sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      raw_sum += expf(fmaxf(transform.capped(values[i]) - record.raw_maximum, kLowestDifference));
    }
    record.raw_sum = warp_sum(raw_sum);
  }
}

/// Any chunk, element by element. `values` are replaced by logits at temperature 1.
__device__ __noinline__ void special_chunk(const TokenStatsArgs& args,
                                           const RowTransform& transform, int64_t first,
                                           float* values, ChunkRecord& record) {
  TopTwo top;
  uint64_t candidates = 0;
  uint64_t normaliser = 0;
  float maximum = -INFINITY;
  float raw_maximum = -INFINITY;
  int32_t bad = 0;
  for (int i = 0; i < kChunkValues; ++i) {
    const int64_t column = first + value_column(i);
    const bool is_real = column < args.num_columns;
    bad += is_real && !isfinite(values[i]) ? 1 : 0;
    const float x = RowTransform::sanitized(values[i]);
    const float logit = is_real ? transform.logit(x, column) : -INFINITY;
    const float z = transform.tempered(logit);
    values[i] = logit;
    if (logit == -INFINITY) {
      continue;
    }
    const bool is_choice = is_candidate(args, column);
    if (is_choice) {
      candidates |= uint64_t{1} << i;
      top.add(transform.key(x, column), z);
    }
    if (is_choice || args.exclusion != kModeRenormalize) {
      normaliser |= uint64_t{1} << i;
      maximum = fmaxf(maximum, z);
      raw_maximum = fmaxf(raw_maximum, logit);
    }
  }
  top.merge_warp();
  record.best_key = top.best_key;
  record.best_z = top.best_z;
  record.second_key = top.second_key;
  record.second_z = top.second_z;
  record.maximum = warp_max(maximum);
  record.raw_maximum = warp_max(raw_maximum);
  record.bad_count = warp_sum(bad);
  float sum = 0.0F;
  float weighted = 0.0F;
  float candidate_sum = 0.0F;
  float raw_sum = 0.0F;
  for (int i = 0; i < kChunkValues; ++i) {
    if ((normaliser >> i & 1) == 0) {
      continue;
    }
    const float difference =
        fmaxf(transform.tempered(values[i]) - record.maximum, kLowestDifference);
    const float power = expf(difference);
    sum += power;
    weighted = fmaf(power, difference, weighted);
    candidate_sum += (candidates >> i & 1) != 0 ? power : 0.0F;
    raw_sum += expf(fmaxf(values[i] - record.raw_maximum, kLowestDifference));
  }
  record.sum = warp_sum(sum);
  record.weighted = warp_sum(weighted);
  record.candidate_sum = warp_sum(candidate_sum);
  record.raw_sum = warp_sum(raw_sum);
}

/// True when some element of the chunk needs the element-by-element path, values aside.
__device__ __forceinline__ bool has_special_columns(const TokenStatsArgs& args,
                                                    const RowTransform& transform, int64_t first) {
  const int64_t end = first + kStatsChunkColumns;
  if (end > args.num_columns ||
      (transform.penalty_column >= first && transform.penalty_column < end)) {
    return true;
  }
  if (args.exclusion == kModeOff) {
    return false;
  }
  bool result = args.vocab_start + end > args.vocab_limit;
  for (int32_t i = 0; i < args.num_forbidden; ++i) {
    const int64_t column = args.forbidden_ids[i] - args.vocab_start;
    result = result || (column >= first && column < end);
  }
  return result;
}

template <typename T>
__global__ void __launch_bounds__(kChunkThreads)
    chunk_kernel(const __grid_constant__ TokenStatsArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kChunkWarps + (threadIdx.x >> 5);
  if (index >= args.num_rows * args.num_chunks) {
    return;
  }
  const int64_t row = index / args.num_chunks;
  const int64_t first = index % args.num_chunks * kStatsChunkColumns;
  const T* source = source_row<T>(args, row);
  if (source == nullptr) {
    return;  // the second pass does not read this row's records
  }
  const RowTransform transform = row_transform(args, row);
  float values[kChunkValues];
  load_chunk(args, source, first, values);
  TopTwo top;
  float finite = 0.0F;  // NaN as soon as one value is not finite
#pragma unroll
  for (int i = 0; i < kChunkValues; ++i) {
    finite = fmaf(values[i], 0.0F, finite);
    top.second_key = fmaxf(top.second_key, fminf(top.best_key, values[i]));
    top.best_key = fmaxf(top.best_key, values[i]);
  }
  const bool is_special =
      has_special_columns(args, transform, first) || __any_sync(kFullWarp, isnan(finite)) != 0;
  ChunkRecord record{};
  bool is_plain = !is_special;
  if (is_plain) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float best = __shfl_xor_sync(kFullWarp, top.best_key, offset);
      const float second = __shfl_xor_sync(kFullWarp, top.second_key, offset);
      top.second_key = fmaxf(fminf(top.best_key, best), fmaxf(top.second_key, second));
      top.best_key = fmaxf(top.best_key, best);
    }
    is_plain = fabsf(transform.capped(top.best_key) * transform.inv_temperature) <= FLT_MAX;
  }
  if (is_plain) {
    plain_chunk(transform, values, top, record);
  } else {
    float copy[kChunkValues];
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
      copy[i] = values[i];
    }
    special_chunk(args, transform, first, copy, record);
  }
  if ((threadIdx.x & 31) == 0) {
    args.records[index] = record;
  }
}

}  // namespace diffulex::cuda
