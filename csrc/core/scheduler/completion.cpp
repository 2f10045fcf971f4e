// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/scheduler/device_batch.h"
#include "core/scheduler/mailbox.h"
#include "core/scheduler/step_writes.h"
#include "core/scheduler/waiting_queue.h"
#include "diffulex/core/scheduler.h"

// The end of a step: results, cancellation, finished requests.

namespace diffulex {
Result<const StepEvents*> Scheduler::complete_step(StepPlan& plan, const SamplerOutput& output) {
  const bool is_idle = in_flight_ == 0 && plan.kind() == PlanKind::kIdle;
  if (!is_idle) {
    if (in_flight_ != plan.identity()) {
      return make_error(StatusCode::kInvalidArgument,
                        "complete_step: expected the plan in flight, ", "got step ",
                        plan.step_id());
    }
    const Status status = writes_->collect(plan, output, Span<Request* const>(plan_requests_));
    if (!status.ok()) {
      return status;
    }
  }
  open_events();
  events_.step_id = plan.step_id();
  events_.kind = plan.kind();
  if (!is_idle) {
    drain_mailbox();
    apply_aborts();
    for (size_t r = 0; r < plan_requests_.size(); ++r) {
      finish_plan_request(plan, static_cast<int32_t>(r), output);
    }
    // Requests that only pad the plan to a graph bucket come after the real ones.
    counters_.num_rows += plan.cu_seqlens_q()[plan_requests_.size()];
    ++(plan.kind() == PlanKind::kDecode ? counters_.num_decode_steps
       : plan.num_decode_reqs() > 0     ? counters_.num_mixed_steps
                                        : counters_.num_prefill_steps);
    in_flight_ = 0;
    plan_requests_.clear();
    publish_stats();
#ifndef NDEBUG
    const Status integrity = check_integrity();
    DIFFULEX_CHECK(integrity.ok(), integrity.message());
#endif
  }
  events_delivered_ = true;
  return &events_;
}

void Scheduler::finish_plan_request(StepPlan& plan, int32_t req_idx, const SamplerOutput& output) {
  Request& request = *plan_requests_[static_cast<size_t>(req_idx)];
  const BufferState& state = request.buffer.state();
  request.is_in_plan = false;
  const Span<const BlockWrite> writes = writes_->take_below(plan.first_block(req_idx + 1));
  // Filled in place: a copy of a local would wait for its small stores to become wide loads.
  RequestEvent& event = events_.requests.emplace_back();
  event.req_id = request.req_id;
  event.request_slot = request.request_slot;
  event.is_prefill = request.step.is_prefill;
  event.appended_begin = static_cast<int32_t>(events_.appended_tokens.size());
  event.num_preemptions = request.num_preemptions;
  if (request.is_abort_requested) {
    strategy_->on_preempt(request);  // drops what the forward was about to do
    event.finish_reason = FinishReason::kAborted;
  } else {
    const int32_t old_settled = state.settled_end;
    const int32_t old_context = state.context_len;
    const StepOutcome outcome = strategy_->finish_step(request, plan, req_idx, output, writes);
    const int32_t* tokens = request.buffer.token_data();
    for (int32_t position = old_settled; position < output_end(state); ++position) {
      events_.appended_tokens.push_back(tokens[position]);
    }
    const auto blocks_before = [this, &state](int32_t position) {
      return std::max(position - state.origin, 0) / rules_.block_size;
    };
    for (int32_t id = blocks_before(old_context); id < blocks_before(state.context_len); ++id) {
      events_.committed.push_back(CommittedBlock{request.req_id, id});
    }
    kv_cache_.register_prefix(request.page_table, request.tokens(),
                              std::min(state.context_len, request.share_limit));
    event.new_tokens = outcome.new_tokens;
    event.finish_reason = outcome.finish_reason;
    counters_.num_new_tokens += outcome.new_tokens;
  }
  event.appended_len = static_cast<int32_t>(events_.appended_tokens.size()) - event.appended_begin;
  event.nfe = request.nfe;
  event.is_finished = event.finish_reason != FinishReason::kNone;
  if (event.is_finished) {
    device_batch_->leave(request, event.finish_reason != FinishReason::kAborted);
    finish_request(request, event.finish_reason);
  }
}

void Scheduler::finish_request(Request& request, FinishReason reason) {
  const int32_t slot = request.request_slot;
  request.finish_reason = reason;
  request.status = RequestStatus::kCompleted;
  if (slot >= 0) {
    kv_cache_.release(request.page_table);
    device_batch_->leave(request, false);
    remove_running(request);
    free_slots_.push_back(slot);
    request.request_slot = -1;
  } else {
    waiting_->remove(request);
  }
  request.status = RequestStatus::kFinished;
  events_.finished.push_back(FinishedRequest{request.req_id, reason, slot});
  ++counters_.num_finished;
  counters_.num_aborted += reason == FinishReason::kAborted ? 1 : 0;
  counters_.num_failed += reason == FinishReason::kError ? 1 : 0;
  mailbox_->forget(request.req_id);
}

Status Scheduler::cancel_step(StepPlan& plan) {
  if (in_flight_ != plan.identity()) {
    return make_error(StatusCode::kInvalidArgument, "cancel_step: expected the plan in flight, ",
                      "got step ", plan.step_id());
  }
  open_events();
  // Newest first, so that the oldest ends up at the head of the queue.
  for (size_t i = running_.size(); i > 0; --i) {
    Request& request = *running_[i - 1];
    if (request.is_in_plan) {
      preempt_request(request);
    }
  }
  in_flight_ = 0;
  plan_requests_.clear();
  ++counters_.num_cancelled_steps;
  publish_stats();
#ifndef NDEBUG
  const Status integrity = check_integrity();
  DIFFULEX_CHECK(integrity.ok(), integrity.message());
#endif
  return {};
}

int32_t Scheduler::flush_prefix_cache() {
  const int32_t num_dropped = kv_cache_.flush_prefixes();
  publish_stats();
  return num_dropped;
}

void Scheduler::release_all() {
  open_events();
  drain_mailbox();
  abort_ids_.clear();
  while (!running_.empty()) {
    Request& request = *running_.back();
    if (request.is_in_plan) {
      strategy_->on_preempt(request);
      request.is_in_plan = false;
    }
    finish_request(request, FinishReason::kAborted);
  }
  while (waiting_->head() != nullptr) {
    finish_request(*waiting_->head(), FinishReason::kAborted);
  }
  in_flight_ = 0;
  plan_requests_.clear();
  publish_stats();
}

}  // namespace diffulex
