// SPDX-License-Identifier: Apache-2.0
#pragma once

// The record of a chunk that the packed sums cannot take: values that are not finite or too large,
// or fewer than two candidates.

#include <climits>
#include <cstdint>

#include "ops/sampling/token_stats/row.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

/// Any chunk, element by element, read again from memory; the transform by value, in registers.
template <typename T>
__device__ __noinline__ ChunkRecord chunk_by_element(const TokenStatsArgs& args,
                                                     const RowTransform transform, const T* source,
                                                     int64_t first) {
  ChunkRecord record{};
  const int lane = threadIdx.x & 31;
  // Differences below this have no weight in fp32; the clamp keeps 0 * inf out of the sums.
  constexpr float kLowestDifference = -200.0F;
  float second_key = -INFINITY;
  float best_z = -INFINITY;
  float second_z = -INFINITY;
  float maximum = -INFINITY;
  float raw_maximum = -INFINITY;
  int32_t bad = 0;
  float best_key = -INFINITY;
  int32_t best_column = INT32_MAX;
  for (int64_t column = first + lane; column < first + kStatsChunkColumns; column += 32) {
    if (column >= args.num_columns) {
      break;
    }
    const float stored = to_float(source[column]);
    bad += isfinite(stored) ? 0 : 1;
    const float x = RowTransform::sanitized(stored);
    const float logit = transform.logit(x, column);
    const float z = transform.tempered(logit);
    if (logit == -INFINITY) {
      continue;
    }
    const bool is_choice = is_candidate(args, column);
    if (is_choice) {
      const float key = transform.key(x, column);
      if (key > best_key) {
        second_key = best_key;
        second_z = best_z;
        best_key = key;
        best_z = z;
        best_column = static_cast<int32_t>(column);
      } else if (key > second_key) {
        second_key = key;
        second_z = z;
      }
    }
    if (is_choice || args.exclusion != kModeRenormalize) {
      maximum = fmaxf(maximum, z);
      raw_maximum = fmaxf(raw_maximum, logit);
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float key = __shfl_xor_sync(kFullWarp, best_key, offset);
    const float z = __shfl_xor_sync(kFullWarp, best_z, offset);
    const int32_t column = __shfl_xor_sync(kFullWarp, best_column, offset);
    const float other_key = __shfl_xor_sync(kFullWarp, second_key, offset);
    const float other_z = __shfl_xor_sync(kFullWarp, second_z, offset);
    const bool is_theirs = key > best_key || (key == best_key && column < best_column);
    const float lesser_key = is_theirs ? best_key : key;
    const float lesser_z = is_theirs ? best_z : z;
    best_key = is_theirs ? key : best_key;
    best_z = is_theirs ? z : best_z;
    best_column = is_theirs ? column : best_column;
    const bool is_other = other_key > second_key;
    second_key = is_other ? other_key : second_key;
    second_z = is_other ? other_z : second_z;
    const bool is_lesser = lesser_key > second_key;
    second_key = is_lesser ? lesser_key : second_key;
    second_z = is_lesser ? lesser_z : second_z;
  }
  record.best_key = best_key;
  record.best_z = best_z;
  record.best_column = best_column == INT32_MAX ? -1 : best_column;
  record.second_key = second_key;
  record.second_z = second_z;
  record.maximum = warp_max(maximum);
  record.raw_maximum = warp_max(raw_maximum);
  record.bad_count = warp_sum(bad);
  float sum = 0.0F;
  float weighted = 0.0F;
  float candidate_sum = 0.0F;
  float raw_sum = 0.0F;
  for (int64_t column = first + lane; column < first + kStatsChunkColumns; column += 32) {
    if (column >= args.num_columns) {
      break;
    }
    const float x = RowTransform::sanitized(to_float(source[column]));
    const float logit = transform.logit(x, column);
    const bool is_choice = is_candidate(args, column);
    if (logit == -INFINITY || (!is_choice && args.exclusion == kModeRenormalize)) {
      continue;
    }
    const float difference = fmaxf(transform.tempered(logit) - record.maximum, kLowestDifference);
    const float power = expf(difference);
    sum += power;
    weighted = fmaf(power, difference, weighted);
    candidate_sum += is_choice ? power : 0.0F;
    raw_sum += expf(fmaxf(logit - record.raw_maximum, kLowestDifference));
  }
  record.sum = warp_sum(sum);
  record.weighted = warp_sum(weighted);
  record.candidate_sum = warp_sum(candidate_sum);
  record.raw_sum = warp_sum(raw_sum);
  return record;
}

}  // namespace diffulex::cuda
