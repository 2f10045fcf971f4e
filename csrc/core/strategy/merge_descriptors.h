// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/strategy/strategy_base.h"
#include "diffulex/core/request.h"
#include "diffulex/core/step_plan.h"

// Token-merge descriptors of a request: kept on the host between steps, so that they survive a
// preemption, and sent along with the rows of every forward.

namespace diffulex {

/// Memory for the descriptors of `num_positions` positions, none of them set.
void init_merge(MergeDescriptors& merge, int32_t num_positions, int32_t top_k);

/// Fills the merge arrays of the rows of plan request `req_idx`.
void write_merge_rows(const Request& request, StepPlan& plan, int32_t req_idx);

/// Takes over the descriptors of every block of the request that was sampled, wholesale.
void apply_merge(Request& request, const RequestOutput& result);

/// Drops the descriptors of positions [begin, end).
void drop_merge(MergeDescriptors& merge, int32_t begin, int32_t end);

}  // namespace diffulex
