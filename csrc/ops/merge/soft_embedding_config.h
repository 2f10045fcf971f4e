// SPDX-License-Identifier: Apache-2.0
#pragma once

// How soft_embedding cuts its product on CUDA: a function of host shapes only.
//
// The vocabulary is taken in chunks whose probabilities [R, columns] stay in the second-level
// cache. A chunk is multiplied in row x column tiles; where these are too few for the device, the
// depth is cut into splits whose sums are kept apart in fp32 and added in order at the end. Both
// depend on the number of rows; a batch-invariant product has the shortest chunks, whole, which
// take no more memory.

#include <cstddef>
#include <cstdint>

#include "diffulex/ops/dtype.h"

namespace diffulex {

inline constexpr int64_t kSoftTileRows = 128;
inline constexpr int64_t kSoftTileColumns = 128;
/// Depth of one pipeline stage; chunks are whole multiples.
inline constexpr int64_t kSoftTileDepth = 32;

struct SoftEmbeddingPlan {
  int64_t chunk_columns = 0;      // vocabulary columns per chunk, a multiple of kSoftTileDepth
  int32_t num_splits = 1;         // of the depth of a chunk
  int64_t probability_bytes = 0;  // [R, chunk_columns], a multiple of 256
  int64_t sum_bytes = 0;          // [num_splits, R, H] float32

  [[nodiscard]] constexpr int64_t bytes() const { return probability_bytes + sum_bytes; }
};

[[nodiscard]] constexpr SoftEmbeddingPlan soft_embedding_plan(int64_t num_rows, int64_t vocab_size,
                                                              int64_t hidden_size,
                                                              DType embedding_dtype,
                                                              bool is_batch_invariant = false) {
  constexpr int64_t kChunkBytes = int64_t{32} << 20;
  constexpr int64_t kMinChunkColumns = 1024;
  // Two tiles per multiprocessor of a large device.
  constexpr int64_t kWantedTiles = 264;
  constexpr int64_t kMaxSplits = 16;
  const auto round_up = [](int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
  };
  SoftEmbeddingPlan plan;
  if (num_rows <= 0 || vocab_size <= 0 || hidden_size <= 0) {
    return plan;
  }
  const int64_t row_bytes = num_rows * dtype_bytes(embedding_dtype);
  int64_t columns = kChunkBytes / row_bytes;
  columns = columns < kMinChunkColumns || is_batch_invariant ? kMinChunkColumns : columns;
  columns = columns > vocab_size ? vocab_size : columns;
  plan.chunk_columns = round_up(columns, kSoftTileDepth);
  const int64_t tiles = ((num_rows + kSoftTileRows - 1) / kSoftTileRows) *
                        ((hidden_size + kSoftTileColumns - 1) / kSoftTileColumns);
  const int64_t stages = plan.chunk_columns / kSoftTileDepth;
  int64_t splits = is_batch_invariant ? 1 : kWantedTiles / tiles;
  splits = splits > kMaxSplits ? kMaxSplits : splits;
  splits = splits > stages ? stages : splits;
  plan.num_splits = static_cast<int32_t>(splits < 1 ? 1 : splits);
  plan.probability_bytes = round_up(row_bytes * plan.chunk_columns, 256);
  plan.sum_bytes = plan.num_splits * num_rows * hidden_size * int64_t{4};
  return plan;
}

}  // namespace diffulex
