// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/ops/comm.h"

namespace diffulex {

/// Epochs of a buffer: a rank may still read one and clear another while its peers write the third.
inline constexpr int32_t kNumEpochs = 3;
/// Buffers of gather_records: its words carry the number of their exchange, and need no clearing.
inline constexpr int32_t kNumGathers = 2;

/// Rows that one rank owns in a two-shot sum of `num_rows` rows; the last owners have fewer.
[[nodiscard]] constexpr int64_t owned_rows(int64_t num_rows, int32_t world) {
  return (num_rows + world - 1) / world;
}

/// Bytes of an epoch that a sum uses, from its beginning on.
[[nodiscard]] constexpr int64_t collective_bytes(CollectiveAlgorithm algorithm, int32_t world,
                                                 int64_t num_rows, int64_t width,
                                                 int64_t element_bytes) {
  const int64_t row_bytes = width * element_bytes;
  if (algorithm == CollectiveAlgorithm::kTwoShot) {
    // The parts of the rows of this rank, then every sum in fp32.
    return (world - 1) * owned_rows(num_rows, world) * row_bytes +
           num_rows * width * static_cast<int64_t>(sizeof(float));
  }
  return (world - 1) * num_rows * row_bytes;
}

}  // namespace diffulex
