// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/span.h"
#include "diffulex/core/status_enums.h"

namespace diffulex {

/// What a step did to one request of its plan.
struct RequestEvent {
  int64_t req_id = -1;
  int32_t request_slot = -1;   // during the step
  int32_t appended_begin = 0;  // newly settled output ids: range of appended_tokens
  int32_t appended_len = 0;
  int32_t new_tokens = 0;  // masks filled by this step
  int32_t nfe = 0;
  int32_t num_preemptions = 0;
  bool is_prefill = false;
  bool is_finished = false;
  FinishReason finish_reason = FinishReason::kNone;
};

/// A block whose KV entered the cache.
struct CommittedBlock {
  int64_t req_id = -1;
  int32_t block_id = 0;
};

/// A request that ended. Its result waits in Scheduler::take_result.
struct FinishedRequest {
  int64_t req_id = -1;
  FinishReason finish_reason = FinishReason::kNone;
  int32_t request_slot = -1;  // freed slot, -1 if it held none. A slot freed by schedule() may
                              // already serve another request: drop state by (slot, req_id)
};

/// A request that lost its pages and request slot and waits again.
struct PreemptedRequest {
  int64_t req_id = -1;
  int32_t request_slot = -1;  // freed slot
};

/// Outcome of a step, together with what happened at the boundary before it. Owned by the
/// scheduler; valid until the next complete_step.
struct StepEvents {
  int64_t step_id = 0;
  PlanKind kind = PlanKind::kIdle;
  std::vector<RequestEvent> requests;  // one per request of the plan, in plan order
  std::vector<int32_t> appended_tokens;
  std::vector<CommittedBlock> committed;    // blocks that became IN_CACHE
  std::vector<FinishedRequest> finished;    // of this step and of the boundary before it
  std::vector<PreemptedRequest> preempted;  // since the last events

  /// Newly settled output ids of an event.
  [[nodiscard]] Span<const int32_t> appended(const RequestEvent& event) const noexcept {
    return Span<const int32_t>(appended_tokens.data() + event.appended_begin,
                               static_cast<size_t>(event.appended_len));
  }
};

}  // namespace diffulex
