// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex::test {

/// One block of mask filling as the oracle sees it.
struct ThresholdBlock {
  const int64_t* tokens = nullptr;     // [B]
  const int64_t* proposals = nullptr;  // [B] -1 = no finite candidate
  const float* confidence = nullptr;   // [B]
  int32_t block_size = 0;              // B
  int32_t editable_start = 0;
  int64_t mask_token_id = 0;
  float threshold = 0.0F;
  bool gate = false;
};

/// The threshold rule, written down once more so that it can judge that of the core: an open
/// position takes its proposal above the threshold; if none is above it and the gate is open, the
/// most confident one does, the first of several. A proposed mask is not written. Fills write_ids
/// [B] and returns the open positions left.
inline int32_t accept_by_threshold(const ThresholdBlock& given, int64_t* write_ids) {
  int32_t num_open = 0;
  int32_t num_above = 0;
  int32_t best = -1;
  for (int32_t i = 0; i < given.block_size; ++i) {
    write_ids[i] = -1;
    if (i < given.editable_start || given.tokens[i] != given.mask_token_id) {
      continue;
    }
    ++num_open;
    if (given.proposals[i] < 0) {
      continue;
    }
    if (best < 0 || given.confidence[i] > given.confidence[best]) {
      best = i;
    }
    if (given.confidence[i] > given.threshold) {
      ++num_above;
      write_ids[i] = given.proposals[i];
    }
  }
  if (num_above == 0 && best >= 0 && given.gate) {
    write_ids[best] = given.proposals[best];
  }
  int32_t num_left = num_open;
  for (int32_t i = 0; i < given.block_size; ++i) {
    write_ids[i] = write_ids[i] == given.mask_token_id ? -1 : write_ids[i];
    num_left -= write_ids[i] >= 0 ? 1 : 0;
  }
  return num_left;
}

}  // namespace diffulex::test
