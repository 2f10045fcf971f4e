// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "diffulex/core/scheduler.h"

// Phase A of schedule(): continuing chunks, then admission in strict order of arrival.

namespace diffulex {
namespace {

/// Steps after which a request that did not fit looks for a longer prefix hit again. A lookup costs
/// as much as the prompt is long, so a blocked head of the queue must not repeat it every step.
constexpr int64_t kLookupInterval = 16;

}  // namespace

void Scheduler::plan_prefill(StepPlan& plan) {
  plan_continuing(plan);
  const auto max_reqs = static_cast<size_t>(options_.max_num_reqs);
  while (waiting_head_ != nullptr && plan_requests_.size() < max_reqs &&
         running_.size() < max_reqs) {
    if (!try_admit(plan, *waiting_head_)) {
      break;
    }
  }
}

void Scheduler::plan_continuing(StepPlan& plan) {
  decode_order_.assign(running_.begin(), running_.end());
  for (Request* request : decode_order_) {
    if (request->status != RequestStatus::kPrefilling) {
      continue;
    }
    const StepQuery query{request->context_len(),
                          options_.max_num_batched_tokens - plan.num_rows()};
    const StepNeed need = strategy_->pages_needed(*request, query);
    if (need.is_prefill && need.num_rows > 0 && reserve_pages(*request, need.page_len)) {
      enter_plan(plan, *request, need);
    }
  }
}

bool Scheduler::try_admit(StepPlan& plan, Request& request) {
  if (!running_.empty() && next_step_id_ < request.blocked_until_step &&
      kv_cache_.num_free_pages() <= request.blocked_free_pages) {
    return false;
  }
  const PrefixHit hit = kv_cache_.lookup_prefix(request.tokens(), request.prefix_limit);
  const StepNeed need = strategy_->pages_needed(
      request, {hit.len, options_.max_num_batched_tokens - plan.num_rows()});
  if (need.is_prefill && need.num_rows == 0) {
    return false;
  }
  const int32_t num_pages = std::max(kv_cache_.num_pages_for(need.page_len) - hit.num_pages, 0);
  // Claiming a hit takes its ownerless pages out of the free queue as well.
  const int32_t num_free = kv_cache_.num_free_pages() - hit.num_free_pages;
  const bool is_alone = running_.empty() && plan_requests_.empty();
  if (num_free - num_pages < headroom_pages() && !(is_alone && num_pages <= num_free)) {
    request.blocked_until_step = next_step_id_ + kLookupInterval;
    request.blocked_free_pages = kv_cache_.num_free_pages();
    return false;
  }
  kv_cache_.claim_prefix(request.page_table, request.tokens(), hit.len);
  const bool has_grown = kv_cache_.try_grow(request.page_table, need.page_len);
  DIFFULEX_CHECK(has_grown, "schedule: expected ", num_pages, " free pages, got ",
                 kv_cache_.num_free_pages());
  if (rules_.is_canvas) {
    mark_canvas_cached(rules_, request.buffer.state(), hit.len);
  } else {
    mark_cached(rules_, request.buffer.state(), hit.len);
  }
  counters_.num_prefix_query_tokens += request.prefix_limit;
  counters_.num_prefix_hit_tokens += hit.len;
  request.num_cached_tokens = hit.len;
  request.status = RequestStatus::kPending;
  request.request_slot = free_slots_.back();
  free_slots_.pop_back();
  remove_waiting(request);
  running_.push_back(&request);
  if (need.is_prefill) {
    enter_plan(plan, request, need);
  }
  return true;
}

int32_t Scheduler::headroom_pages() const noexcept {
  if (!options_.decode_headroom) {
    return 0;
  }
  const int64_t wanted = int64_t{kv_cache_.num_pages_for(options_.decode_rows())} *
                         (static_cast<int64_t>(running_.size()) + 1);
  return static_cast<int32_t>(std::min(wanted, int64_t{kv_cache_.num_pages() / 4}));
}

}  // namespace diffulex
