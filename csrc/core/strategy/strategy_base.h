// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/core/strategy.h"

// The life cycle that strategies with a block buffer share, as functions over Request. A strategy
// that differs in one phase replaces that function and keeps the others.

namespace diffulex {

/// What the sampler decided for one request of a plan.
struct RequestOutput {
  StepPlan& plan;
  int32_t req_idx;
  const SamplerOutput& output;
  Span<const BlockWrite> writes;  // of this request, in block order
};

// Parts that every strategy uses.

/// Sets L and the stop ids of a validated request.
void init_request_limits(const EngineOptions& options, Request& request);

/// Reserves what `num_steps` forwards append to, so that steps do not allocate.
void reserve_step_records(const EngineOptions& options, Request& request, size_t num_steps);

/// Rows [begin, end) to be prefilled.
struct PrefillSpan {
  int32_t begin = 0;
  int32_t end = 0;
  int32_t chunk_limit = 0;  // chunks end at or before it; rows after it are not stored
  int32_t granularity = 1;  // chunks end at multiples of it
};

/// The span cut to the budget: whole, or the longest legal chunk, or nothing.
[[nodiscard]] StepNeed cut_prefill_span(const EngineOptions& options, const PrefillSpan& span,
                                        int32_t row_budget);

/// Enters the forward of `need`: its rows, from the first without KV on, and the request's status.
RequestStep& open_step(Request& request, const StepNeed& need);

/// Counts a completed forward that gave `new_tokens`.
void record_forward(const EngineOptions& options, Request& request, bool is_prefill,
                    int32_t new_tokens);

/// What check_stop needs to know of `request`.
[[nodiscard]] StopLimits stop_limits(const Request& request);

/// Applies the checked writes of a step and lists them in last_writes; returns how many open
/// positions they filled.
int32_t apply_writes(Request& request, const RequestOutput& result);

/// Takes over the verdicts on the request's blocks; returns whether any row had no finite
/// candidate.
[[nodiscard]] bool apply_verdicts(Request& request, const RequestOutput& result);

// Parts of block-buffer strategies.

/// Limits, blocks and reserved memory of a validated request.
void init_mask_fill_request(const EngineOptions& options, Request& request);

/// Rows and pages of the next forward: the prompt, then (after a preemption) the lost KV, then
/// decode steps of Q rows. Non-final chunks end at a block boundary before the first ACTIVE block.
[[nodiscard]] StepNeed mask_fill_need(const EngineOptions& options, const Request& request,
                                      const StepQuery& query);

/// Enters the forward: counts steps, activates, marks what will be stored.
void begin_mask_fill_step(const EngineOptions& options, Request& request, const StepNeed& need);

/// Fills the rows, slots and per-request arrays of the forward that request.step describes.
void write_block_causal_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                             int32_t req_idx);

/// Appends every ACTIVE block with its logits rows, and the row to save (shifted logits).
void write_active_blocks(const EngineOptions& options, const Request& request, StepPlan& plan,
                         int32_t req_idx);

/// Applies the sampler output and the block status table, then checks the stop conditions.
[[nodiscard]] StepOutcome finish_mask_fill_step(const EngineOptions& options, Request& request,
                                                const RequestOutput& result);

/// Whether decode_rules.h says everything about the request's decode steps: the logits rows are
/// those of its own positions, and its limit does not still have to be derived from its throughput.
[[nodiscard]] bool mask_fill_decodes_by_rules(const EngineOptions& options, const Request& request);

/// Reverts a step in flight and forgets all KV.
void preempt_mask_fill_request(const EngineOptions& options, Request& request);

}  // namespace diffulex
