// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/block.h"
#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/step_plan.h"

// Which rows of a forward the sampler needs logits of, and what it draws with.
//
// Unshifted families: position p is predicted by the row of position p. Shifted families: by the
// row of position p - 1, wherever that stands:
//
//   p - 1 was run by this forward              its row
//   p - 1 is in the cache only, p starts the   the row saved for the request slot by the forward
//   first block that is run                    that stored p - 1 ("carry")

namespace diffulex {

/// Fills tokens, row indices and logits rows of plan block `blk`: those of its open positions, or
/// of every editable position where the sampler may rewrite tokens.
void write_block_rows(const EngineOptions& options, const Request& request, const Block& block,
                      StepPlan& plan, int32_t blk);

/// Lets the plan save the row of request.step.saved_pos for the request slot. `first_index` is the
/// number of logits rows before those of the request.
void write_saved_row(const Request& request, StepPlan& plan, int32_t req_idx, int32_t first_index);

}  // namespace diffulex
