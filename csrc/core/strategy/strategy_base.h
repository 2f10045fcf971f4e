// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/core/strategy.h"

// The life cycle that mask-filling strategies share, as functions over Request. A strategy that
// differs in one phase replaces that function and keeps the others.

namespace diffulex {

/// Limits, blocks and reserved memory of a validated request.
void init_mask_fill_request(const EngineOptions& options, Request& request);

/// Rows and pages of the next forward: the prompt, then (after a preemption) the lost KV, then
/// decode steps of Q rows. Non-final chunks end at a block boundary before the first ACTIVE block.
[[nodiscard]] StepNeed mask_fill_need(const EngineOptions& options, const Request& request,
                                      const StepQuery& query);

/// Enters the forward: counts steps, activates, marks what will be stored.
void begin_mask_fill_step(Request& request, const StepNeed& need);

/// Fills the token rows and per-request arrays of a block-causal forward.
void write_block_causal_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                             int32_t req_idx);

/// Appends every ACTIVE block with its logits rows.
void write_active_blocks(const EngineOptions& options, const Request& request, StepPlan& plan,
                         int32_t req_idx);

/// What the sampler decided for one request of a plan.
struct RequestOutput {
  StepPlan& plan;
  int32_t req_idx;
  const SamplerOutput& output;
  Span<const BlockWrite> writes;  // of this request, in block order
};

/// Applies the sampler output and the block status table, then checks the stop conditions.
[[nodiscard]] StepOutcome finish_mask_fill_step(const EngineOptions& options, Request& request,
                                                const RequestOutput& result);

/// Reverts a step in flight and forgets all KV.
void preempt_mask_fill_request(Request& request);

}  // namespace diffulex
