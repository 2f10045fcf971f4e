// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status_enums.h"

namespace diffulex {

/// One diffusion block: the B positions from block_start of block_rules.h on. Its tokens live in
/// the request's token store. A plain struct, copied to and from devices bytewise.
struct Block {
  int32_t block_id = 0;
  BlockStatus status = BlockStatus::kDummy;
  BlockType type = BlockType::kInContext;
  int32_t editable_start = 0;     // first relative position that may be written
  int32_t num_masks = 0;          // masks at relative positions >= editable_start
  int32_t total_steps = 0;        // forwards spent ACTIVE, the one in flight included
  int32_t open_steps = 0;         // completed sampler steps with an open gate
  int32_t post_edit_steps = 0;    // completed sampler steps that began without an open position
  int32_t valid_commit_len = 0;   // leading positions that count as output (canvas strategies)
  float same_token_ratio = 1.0F;  // last verdict; 1 for samplers that never rewrite
  bool commit_ready = false;      // the sampler allows freezing the content
  bool same_as_previous = false;  // last verdict: no position changed
  bool all_confident = false;     // last verdict: every position above its bound
  bool stored_this_step = false;  // every position has a KV slot in the forward in flight
};

}  // namespace diffulex
