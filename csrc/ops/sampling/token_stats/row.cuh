// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared pieces of the two token_stats passes: arguments, chunk records, the element transform.
// N stored rows, R result rows, V columns, Kt top-k columns. See
// ops/sampling/token_stats_config.h for the order of operations.

#include <cfloat>
#include <cstdint>

#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

/// Partial statistics of one chunk of one row, the first 16 bytes for every row; its size keeps the
/// 16-byte reads of neighbouring lanes in different banks. z is the transformed logit, e =
/// exp(z - maximum).
struct alignas(16) ChunkRecord final {
  float maximum;   // of z over the normaliser, -inf if empty
  float sum;       // of e over the normaliser
  float weighted;  // of e * (z - maximum) over the normaliser
  float best_key;  // what the greedy choice compares; -inf = no candidate
  float best_z;
  // Of the row's best chunk, and of every chunk for a top-k.
  float second_key;
  float second_z;
  int32_t best_column;  // lowest column with best_key
  // For tempered rows.
  float raw_maximum;  // as maximum and sum at temperature 1
  float raw_sum;
  float candidate_sum;  // of e over the candidates
  int32_t bad_count;
  int32_t reserved[8];
};
static_assert(sizeof(ChunkRecord) == kStatsRecordBytes, "workspace formula");

struct TokenStatsArgs final {
  const void* logits;        // [N, V]
  const void* extra_logits;  // [M, V] or null
  int64_t logits_stride;
  int64_t extra_stride;
  int64_t num_stored;     // N
  int64_t num_extra;      // M
  const void* row_index;  // [R] or null
  bool is_row_int64;
  const float* inv_temperature;  // [R] or null
  const double* uniforms;        // [R] or null
  const int64_t* forbidden_ids;
  int32_t num_forbidden;
  const int64_t* penalty_ids;  // [R] or null
  const float* penalties;      // [R], with penalty_ids
  int64_t* ids;                // [R]
  float* stats;                // [R, 8]
  int64_t stats_stride;
  int64_t* topk_ids;  // [R, Kt] or null
  float* topk_probs;  // [R, Kt]
  int64_t topk_ids_stride;
  int64_t topk_probs_stride;
  int32_t top_k;
  ChunkRecord* records;  // [R, chunks]
  int64_t num_rows;      // R
  int64_t num_columns;   // V
  int64_t num_chunks;
  int64_t vocab_start;
  int64_t vocab_limit;  // INT64_MAX = none
  float softcap;
  int32_t exclusion;  // ExclusionMode
  bool is_partial;
  bool is_vec;  // rows start at multiples of 16 bytes

  /// What both ops of rows of logits take alike.
  template <typename Params>
  static TokenStatsArgs of(const Params& params) {
    TokenStatsArgs args{};
    args.logits = params.logits.data;
    args.logits_stride = params.logits.stride[0];
    args.num_stored = params.logits.size[0];
    const int64_t bytes = dtype_bytes(params.logits.dtype);
    args.is_vec = is_aligned16(args.logits) && args.logits_stride * bytes % 16 == 0;
    if (params.extra_logits.present()) {
      args.extra_logits = params.extra_logits.data;
      args.extra_stride = params.extra_logits.stride[0];
      args.num_extra = params.extra_logits.size[0];
      args.is_vec =
          args.is_vec && is_aligned16(args.extra_logits) && args.extra_stride * bytes % 16 == 0;
    }
    if (params.row_index.present()) {
      args.row_index = params.row_index.data;
      args.is_row_int64 = params.row_index.dtype == DType::kI64;
    }
    if (params.inv_temperature.present()) {
      args.inv_temperature = params.inv_temperature.template as<const float>();
    }
    if (params.uniforms.present()) {
      args.uniforms = params.uniforms.template as<const double>();
    }
    if (params.forbidden_ids.present()) {
      args.forbidden_ids = params.forbidden_ids.template as<const int64_t>();
      args.num_forbidden = static_cast<int32_t>(params.forbidden_ids.size[0]);
    }
    args.ids = params.ids.template as<int64_t>();
    args.stats = params.stats.template as<float>();
    args.stats_stride = params.stats.stride[0];
    args.num_rows = params.ids.size[0];
    args.num_columns = params.logits.size[1];
    args.vocab_limit = params.vocab_limit < 0 ? INT64_MAX : params.vocab_limit;
    args.softcap = params.softcap;
    args.exclusion = static_cast<int32_t>(params.exclusion);
    return args;
  }
};

inline constexpr float kLog2E = 1.44269504F;
inline constexpr int32_t kModeRenormalize = 1;
inline constexpr int32_t kModeOff = 2;

/// What one row's elements go through.
struct RowTransform final {
  float softcap;
  float penalty;
  float inv_temperature;   // 1 for greedy rows
  int64_t penalty_column;  // -1 = none
  bool is_tempered;

  __device__ static float sanitized(float x) {
    if (isnan(x)) {
      return -INFINITY;
    }
    return fminf(x, FLT_MAX);
  }
  __device__ float capped(float x) const {
    return softcap > 0.0F ? softcap * tanhf(x / softcap) : x;
  }
  __device__ float penalty_at(int64_t column) const {
    return column == penalty_column ? penalty : 0.0F;
  }
  /// Sanitised value to what the greedy choice compares.
  __device__ float key(float x, int64_t column) const { return x - penalty_at(column); }
  /// Sanitised value to the logit at temperature 1.
  __device__ float logit(float x, int64_t column) const {
    // A soft cap would make a missing value a finite one.
    return x == -INFINITY ? x : capped(x) - penalty_at(column);
  }
  __device__ float tempered(float logit_value) const {
    if (!is_tempered || logit_value == -INFINITY) {
      return logit_value;
    }
    return fminf(fmaxf(logit_value * inv_temperature, -FLT_MAX), FLT_MAX);
  }
};

/// Source row of result row `row`; null for an empty or out-of-range one.
template <typename T>
__device__ __forceinline__ const T* source_row(const TokenStatsArgs& args, int64_t row) {
  const int64_t source =
      args.row_index == nullptr ? row : load_index(args.row_index, args.is_row_int64, row);
  if (source >= 0 && source < args.num_stored) {
    return static_cast<const T*>(args.logits) + source * args.logits_stride;
  }
  const int64_t extra = source - args.num_stored;
  if (source >= 0 && args.extra_logits != nullptr && extra < args.num_extra) {
    return static_cast<const T*>(args.extra_logits) + extra * args.extra_stride;
  }
  return nullptr;
}

/// What is read about a row, apart from its logits: issued before them, looked at after.
struct RowInputs final {
  float inverse = 0.0F;     // of the temperature
  int64_t penalty_id = -1;  // -1 = none
  float penalty = 0.0F;
  int64_t forbidden_id = -1;  // of lane i < num_forbidden
};

__device__ __forceinline__ RowInputs row_inputs(const TokenStatsArgs& args, int64_t row) {
  RowInputs inputs;
  const auto lane = static_cast<int32_t>(threadIdx.x & 31);
  if (lane < args.num_forbidden) {
    inputs.forbidden_id = args.forbidden_ids[lane];
  }
  if (args.inv_temperature != nullptr) {
    inputs.inverse = args.inv_temperature[row];
  }
  if (args.penalty_ids != nullptr) {
    inputs.penalty_id = args.penalty_ids[row];
    inputs.penalty = args.penalties[row];
  }
  return inputs;
}

__device__ __forceinline__ RowTransform row_transform(const TokenStatsArgs& args,
                                                      const RowInputs& inputs) {
  RowTransform transform;
  transform.softcap = args.softcap;
  transform.penalty = inputs.penalty;
  transform.is_tempered = inputs.inverse != 0.0F;
  transform.inv_temperature = transform.is_tempered ? inputs.inverse : 1.0F;
  transform.penalty_column = inputs.penalty_id < 0 ? -1 : inputs.penalty_id - args.vocab_start;
  return transform;
}

__device__ __forceinline__ bool is_forbidden(const TokenStatsArgs& args, int64_t column) {
  const int64_t id = args.vocab_start + column;
  bool result = id >= args.vocab_limit;
  for (int32_t i = 0; i < args.num_forbidden; ++i) {
    result = result || args.forbidden_ids[i] == id;
  }
  return result;
}

__device__ __forceinline__ bool is_candidate(const TokenStatsArgs& args, int64_t column) {
  return column < args.num_columns && (args.exclusion == kModeOff || !is_forbidden(args, column));
}

}  // namespace diffulex::cuda
