// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reading one block of the acceptance ops: one CTA per block, one thread per position. Nb blocks, B
// positions, R statistics rows.

#include <cstdint>

#include "diffulex/core/accept_rules.h"
#include "diffulex/ops/sampling.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/reduce.cuh"

namespace diffulex::cuda {

inline constexpr int32_t kMaxAcceptThreads = static_cast<int32_t>(kMaxAcceptPositions);
inline constexpr int32_t kMaxAcceptWarps = kMaxAcceptThreads / 32;

/// What every acceptance op reads, and the two outputs per position.
struct AcceptInputs final {
  const int64_t* tokens;          // [Nb, B]
  const int32_t* row_index;       // [Nb, B]
  const int32_t* editable_start;  // [Nb] or null
  const int32_t* valid_len;       // [Nb] or null
  const int64_t* ids;             // [R]
  const float* stats;             // [R, 8]
  int64_t* write_ids;             // [Nb, B]
  float* confidence;              // [Nb, B]
  int32_t* flags;                 // [Nb]
  int64_t tokens_stride;
  int64_t row_index_stride;
  int64_t stats_stride;
  int64_t write_ids_stride;
  int64_t confidence_stride;
  int64_t num_rows;    // R
  int32_t block_size;  // B
};

/// A position as its thread reads it.
struct AcceptPosition final {
  bool is_editable = false;
  bool is_missing = false;  // editable, but without a row
  bool is_ready = false;    // editable, with a proposal
  int64_t token = -1;
  int64_t id = -1;
  int32_t row = -1;
  const float* stats = nullptr;  // of the row; null without one
};

__device__ __forceinline__ int32_t valid_end(const AcceptInputs& inputs, int64_t block) {
  const int32_t end = inputs.valid_len == nullptr ? inputs.block_size : inputs.valid_len[block];
  return end < inputs.block_size ? end : inputs.block_size;
}

__device__ __forceinline__ AcceptPosition read_position(const AcceptInputs& inputs, int64_t block,
                                                        int32_t index) {
  AcceptPosition position;
  const int32_t start = inputs.editable_start == nullptr ? 0 : inputs.editable_start[block];
  position.is_editable = index >= start && index < valid_end(inputs, block);
  if (!position.is_editable) {
    return position;
  }
  position.token = inputs.tokens[block * inputs.tokens_stride + index];
  position.row = inputs.row_index[block * inputs.row_index_stride + index];
  if (position.row < 0 || position.row >= inputs.num_rows) {
    position.is_missing = true;
    return position;
  }
  position.stats = inputs.stats + position.row * inputs.stats_stride;
  position.id = inputs.ids[position.row];
  position.is_ready = position.id >= 0;
  return position;
}

/// Maximum over the CTA; `scratch` holds one entry per warp and may be reused after a barrier.
__device__ __forceinline__ uint64_t cta_max(uint64_t value, uint64_t* scratch) {
  value = warp_max(value);
  if ((threadIdx.x & 31) == 0) {
    scratch[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  uint64_t result = 0;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) {
    result = scratch[warp] > result ? scratch[warp] : result;
  }
  return result;
}

/// Minimum over the CTA, as cta_max.
__device__ __forceinline__ uint32_t cta_min(uint32_t value, uint32_t* scratch) {
  value = __reduce_min_sync(kFullWarp, value);
  if ((threadIdx.x & 31) == 0) {
    scratch[threadIdx.x >> 5] = value;
  }
  __syncthreads();
  uint32_t result = UINT32_MAX;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) {
    result = scratch[warp] < result ? scratch[warp] : result;
  }
  return result;
}

/// Writes what position `index` of a block decided: the id it changes to, if it does, and how
/// probable its proposal is.
__device__ __forceinline__ void write_position(const AcceptInputs& inputs, int64_t block,
                                               int32_t index, bool is_changed, int64_t id,
                                               float probability) {
  inputs.write_ids[block * inputs.write_ids_stride + index] = is_changed ? id : -1;
  inputs.confidence[block * inputs.confidence_stride + index] = probability;
}

/// Writes what a block decided, of which `num_same` of `num_decoded` tokens are what they were. One
/// thread; `Args` names the outputs.
template <typename Args>
__device__ __forceinline__ void write_summary(const Args& args, int64_t block,
                                              const AcceptSummary& summary, int32_t num_same,
                                              int32_t num_decoded) {
  args.inputs.flags[block] = accept_flags(summary);
  args.masks_left[block] = summary.masks_left;
  args.same_token_ratio[block] = same_token_share(num_same, num_decoded);
}

template <typename Params>
[[nodiscard]] AcceptInputs accept_inputs(const Params& params) {
  AcceptInputs inputs{};
  inputs.tokens = params.tokens.template as<const int64_t>();
  inputs.tokens_stride = params.tokens.stride[0];
  inputs.row_index = params.row_index.template as<const int32_t>();
  inputs.row_index_stride = params.row_index.stride[0];
  if (params.valid_len.present()) {
    inputs.valid_len = params.valid_len.template as<const int32_t>();
  }
  inputs.ids = params.ids.template as<const int64_t>();
  inputs.stats = params.stats.template as<const float>();
  inputs.stats_stride = params.stats.stride[0];
  inputs.num_rows = params.ids.size[0];
  inputs.write_ids = params.write_ids.template as<int64_t>();
  inputs.write_ids_stride = params.write_ids.stride[0];
  inputs.confidence = params.confidence.template as<float>();
  inputs.confidence_stride = params.confidence.stride[0];
  inputs.flags = params.flags.template as<int32_t>();
  inputs.block_size = static_cast<int32_t>(params.tokens.size[1]);
  return inputs;
}

/// Threads for a block: whole warps.
[[nodiscard]] inline unsigned accept_threads(const AcceptInputs& inputs) {
  return static_cast<unsigned>(ceil_div(inputs.block_size, 32) * 32);
}

}  // namespace diffulex::cuda
