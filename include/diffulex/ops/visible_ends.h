// SPDX-License-Identifier: Apache-2.0
#pragma once

// The visibility of a plan with one request as one number a row, for models whose cache is one
// array of rows indexed by absolute position instead of pages.

#include <cstdint>
#include <string>
#include <vector>

#include "diffulex/core/status.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/ops/row_interval.h"

namespace diffulex {

/// Writes one end a real row of the plan's only request to `ends`: the row attends to the cache
/// rows [0, end) after the keys and values of all rows of the call were written to their positions.
/// kInvalidArgument unless the plan has exactly one request that is not a dummy, kUnsupported where
/// its keys are no range that starts at 0.
[[nodiscard]] inline Status visible_ends(StepPlan& plan, std::vector<int64_t>* ends) {
  ends->clear();
  const int32_t num_reqs = plan.num_reqs() - plan.num_padded_reqs();
  if (num_reqs != 1) {
    return Status(StatusCode::kInvalidArgument,
                  "visible_ends: expected a plan of 1 request, got " + std::to_string(num_reqs));
  }
  RequestMask mask;
  const int32_t bits = plan.mask_kinds()[0];
  mask.kind = bits & 0xFF;
  mask.num_valid =
      num_valid_rows(plan.cu_seqlens_q()[0], plan.cu_seqlens_q()[1], plan.valid_slices()[0]);
  mask.context_len = plan.context_lens()[0];
  mask.start_position = mask.context_len;
  mask.prefix_len = plan.prefix_lens()[0];
  mask.padded_prefix_len = plan.padded_prefix_lens()[0];
  mask.block_size = plan.att_block_size();
  mask.block_origin = mask_block_origin(mask);
  if (bits != mask.kind) {
    return Status(StatusCode::kUnsupported,
                  "visible_ends: expected a mask kind without bits, got " + std::to_string(bits));
  }
  const bool is_cache_only = mask.kind == static_cast<int32_t>(MaskKind::kCacheOnly);
  for (int32_t row = 0; row < mask.num_valid; ++row) {
    const int64_t position = plan.positions()[static_cast<size_t>(row)];
    if (!is_cache_only && position != int64_t{mask.start_position} + row) {
      return Status(StatusCode::kUnsupported,
                    "visible_ends: expected row " + std::to_string(row) + " at position " +
                        std::to_string(int64_t{mask.start_position} + row) + ", got " +
                        std::to_string(position));
    }
    ends->push_back(row_interval(mask, row).end);
  }
  return {};
}

}  // namespace diffulex
