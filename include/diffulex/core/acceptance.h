// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/export.h"

namespace diffulex {

/// One block as the mask-filling acceptance rule sees it. Arrays have block_size entries.
struct MaskFillBlock {
  const int64_t* tokens = nullptr;     // current content
  const int64_t* proposals = nullptr;  // proposed id per position, -1 = no finite candidate
  const float* confidence = nullptr;   // probability of the proposal
  int32_t block_size = 0;
  int32_t editable_start = 0;
  int64_t mask_token_id = 0;
  float threshold = 0.0F;
  bool gate = false;  // the best open position may be forced
};

/// Reference threshold rule: open positions with confidence > threshold take their proposal; if
/// there is none and the gate is open, the most confident one does (ties: lowest position). Fills
/// write_ids (-1 = unchanged) and returns the open positions left.
DIFFULEX_HOST_DEVICE inline int32_t accept_by_threshold(const MaskFillBlock& block,
                                                        int64_t* write_ids) noexcept {
  int32_t best = -1;
  int32_t num_open = 0;
  int32_t num_accepted = 0;
  for (int32_t i = 0; i < block.block_size; ++i) {
    write_ids[i] = -1;
    if (i < block.editable_start || block.tokens[i] != block.mask_token_id) {
      continue;
    }
    ++num_open;
    if (block.proposals[i] < 0) {
      continue;
    }
    if (block.confidence[i] > block.threshold) {
      write_ids[i] = block.proposals[i];
      ++num_accepted;
    }
    if (best < 0 || block.confidence[i] > block.confidence[best]) {
      best = i;
    }
  }
  if (num_accepted == 0 && block.gate && best >= 0) {
    write_ids[best] = block.proposals[best];
    num_accepted = 1;
  }
  return num_open - num_accepted;
}

}  // namespace diffulex
