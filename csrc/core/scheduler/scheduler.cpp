// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/scheduler/device_batch.h"
#include "core/scheduler/mailbox.h"
#include "core/scheduler/step_writes.h"
#include "core/scheduler/waiting_queue.h"

namespace diffulex {
namespace {

[[nodiscard]] const EngineOptions& checked(const EngineOptions& options) {
  const Status status = options.validate();
  DIFFULEX_CHECK(status.ok(), "Scheduler: expected valid options, got ", status.message());
  return options;
}

/// Prompts run beside decoding requests where these leave them at least one such part of the rows.
constexpr int32_t kPromptShare = 4;

[[nodiscard]] std::unique_ptr<Strategy> checked(Result<std::unique_ptr<Strategy>> strategy) {
  DIFFULEX_CHECK(strategy.ok(), "Scheduler: ", strategy.status().message());
  return std::move(strategy).value();
}

}  // namespace

Scheduler::Scheduler(const EngineOptions& options, KVCacheManager& kv_cache)
    : Scheduler(options, kv_cache, checked(make_strategy(checked(options)))) {}

Scheduler::Scheduler(const EngineOptions& options, KVCacheManager& kv_cache,
                     std::unique_ptr<Strategy> strategy)
    : options_(checked(options)),
      kv_cache_(kv_cache),
      strategy_(std::move(strategy)),
      rules_(make_block_rules(options)),
      layout_(PlanLayout::of(options)),
      mailbox_(std::make_unique<Mailbox>()),
      waiting_(std::make_unique<WaitingQueue>()),
      writes_(std::make_unique<StepWrites>(options_)),
      device_batch_(std::make_unique<DeviceBatch>()) {
  DIFFULEX_CHECK(strategy_ != nullptr, "Scheduler: expected a strategy, got none");
  DIFFULEX_CHECK(
      kv_cache.num_pages() == options.num_pages && kv_cache.page_size() == options.page_size,
      "Scheduler: expected a page manager of the same options, got ", kv_cache.num_pages(),
      " pages of ", kv_cache.page_size());
  const auto max_reqs = static_cast<size_t>(options.max_num_reqs);
  const auto max_rows = std::max(max_reqs * static_cast<size_t>(options.decode_rows()),
                                 static_cast<size_t>(options.max_num_batched_tokens));
  running_.reserve(max_reqs);
  plan_requests_.reserve(max_reqs);
  decode_order_.reserve(max_reqs);
  free_slots_.reserve(max_reqs);
  for (int32_t slot = options.max_num_reqs - 1; slot >= 0; --slot) {
    free_slots_.push_back(slot);
  }
  events_.requests.reserve(max_reqs);
  events_.appended_tokens.reserve(max_reqs * static_cast<size_t>(options.decode_rows()));
  events_.committed.reserve(max_rows / static_cast<size_t>(options.block_size) + max_reqs);
  events_.finished.reserve(2 * max_reqs);
  events_.preempted.reserve(max_reqs);
  publish_stats();
}

Scheduler::~Scheduler() = default;

Result<int64_t> Scheduler::add_request(std::unique_ptr<Request> request) {
  DIFFULEX_CHECK(request != nullptr, "add_request: expected a request, got none");
  const Status status = validate_request(*request);
  if (!status.ok()) {
    request->status = RequestStatus::kFinished;
    request->finish_reason = status.code() == StatusCode::kOutOfRange
                                 ? FinishReason::kMaxModelLenReached
                                 : FinishReason::kRejected;
    mailbox_->reject();
    return status;
  }
  // Outside the lock: the work grows with the prompt, and touches this request only.
  strategy_->init_request(*request);
  return mailbox_->deliver(std::move(request), options_);
}

bool Scheduler::abort(int64_t req_id) {
  return mailbox_->ask_abort(req_id);
}

SchedulerStats Scheduler::stats() const {
  return mailbox_->stats();
}

bool Scheduler::has_unfinished() const {
  return mailbox_->has_live();
}

void Scheduler::publish_stats() {
  counters_.num_waiting = waiting_->size();
  counters_.num_running = static_cast<int32_t>(running_.size());
  counters_.num_pages = kv_cache_.num_pages();
  counters_.num_free_pages = kv_cache_.num_free_pages();
  counters_.num_cached_units = kv_cache_.num_cached_units();
  mailbox_->publish(counters_);
}

void Scheduler::drain_mailbox() {
  mailbox_->take(arrived_, abort_ids_);
  for (std::unique_ptr<Request>& request : arrived_) {
    waiting_->push_back(*request);
    const int64_t req_id = request->req_id;
    requests_.emplace(req_id, std::move(request));
  }
  arrived_.clear();
}

void Scheduler::apply_aborts() {
  for (const int64_t req_id : abort_ids_) {
    const auto found = requests_.find(req_id);
    if (found == requests_.end() || found->second->status == RequestStatus::kFinished) {
      continue;
    }
    Request& request = *found->second;
    if (request.is_in_plan) {
      request.is_abort_requested = true;  // ends with the step in flight, whose result is dropped
    } else {
      finish_request(request, FinishReason::kAborted);
    }
  }
  abort_ids_.clear();
}

void Scheduler::open_events() {
  if (!events_delivered_) {
    return;
  }
  events_.requests.clear();
  events_.appended_tokens.clear();
  events_.committed.clear();
  events_.finished.clear();
  events_.preempted.clear();
  events_delivered_ = false;
}

PlanKind Scheduler::schedule(StepPlan& plan) {
  DIFFULEX_CHECK(in_flight_ == 0, "schedule: expected no plan in flight, got step ",
                 next_step_id_ - 1);
  DIFFULEX_CHECK(plan.layout() == layout_, "schedule: expected a plan of ", layout_.describe(),
                 ", got ", plan.layout().describe());
  open_events();
  drain_mailbox();
  apply_aborts();
  plan_requests_.clear();
  device_batch_->clear();
  const bool is_mixed = can_mix();
  const bool is_decode_first = !is_mixed && must_decode();
  is_prompt_due_ = false;
  if (is_mixed) {
    plan_mixed(plan);
  } else if (!is_decode_first) {
    plan.reset(PlanKind::kPrefill, next_step_id_);
    plan_prefill(plan, options_.max_num_batched_tokens);
  }
  if (plan_requests_.empty()) {
    plan.reset(PlanKind::kDecode, next_step_id_);
    plan_decode(plan);
  }
  if (plan_requests_.empty() && is_decode_first) {
    plan.reset(PlanKind::kPrefill, next_step_id_);
    plan_prefill(plan, options_.max_num_batched_tokens);
  }
  if (plan_requests_.empty()) {
    DIFFULEX_CHECK(running_.empty() && waiting_->size() == 0,
                   "schedule: expected work to be planned, ", "got ", running_.size(),
                   " running and ", waiting_->size(), " waiting requests");
    plan.reset(PlanKind::kIdle, next_step_id_);
    prefill_streak_ = 0;
    publish_stats();
    return PlanKind::kIdle;
  }
  plan.seal();
  prefill_streak_ = plan.num_decode_reqs() == 0 ? prefill_streak_ + 1 : 0;
  ++next_step_id_;
  in_flight_ = plan.identity();
  publish_stats();
  return plan.kind();
}

bool Scheduler::must_decode() const {
  if (options_.max_consecutive_prefill_batches == 0 ||
      prefill_streak_ < options_.max_consecutive_prefill_batches) {
    return false;
  }
  return std::any_of(running_.begin(), running_.end(), [this](const Request* request) {
    return !strategy_
                ->pages_needed(*request, {request->context_len(), options_.max_num_batched_tokens})
                .is_prefill;
  });
}

bool Scheduler::can_mix() const {
  if (options_.mixed_step_rows == 0 || is_prompt_due_) {
    return false;
  }
  int32_t num_rows = 0;
  for (const Request* request : running_) {
    const StepNeed need = strategy_->pages_needed(
        *request, {request->context_len(), options_.max_num_batched_tokens});
    num_rows += need.is_prefill ? 0 : need.num_rows;
  }
  // A prompt that got a few rows a step only would keep its pages for long: it runs alone.
  const int32_t left = options_.mixed_step_rows - num_rows;
  const int32_t least = std::max(options_.block_size, options_.mixed_step_rows / kPromptShare);
  return num_rows > 0 && left >= least;
}

void Scheduler::plan_mixed(StepPlan& plan) {
  plan.reset(PlanKind::kPrefill, next_step_id_);
  plan_decode(plan);
  // Requests that decode are in the plan by now, and keep their pages.
  plan_prefill(plan, options_.mixed_step_rows);
  if (plan.num_reqs() > plan.num_decode_reqs()) {
    return;
  }
  plan.set_kind(PlanKind::kDecode);
  is_prompt_due_ = waiting_->head() != nullptr ||
                   std::any_of(running_.begin(), running_.end(), [](const Request* request) {
                     return request->status == RequestStatus::kPrefilling;
                   });
}

int32_t Scheduler::pick_decode_group() const {
  int32_t oldest_rows = 0;
  for (const Request* request : running_) {
    const StepNeed need = strategy_->pages_needed(
        *request, {request->context_len(), options_.max_num_batched_tokens});
    if (need.is_prefill) {
      continue;
    }
    if (need.num_rows == put_off_rows_) {
      return put_off_rows_;
    }
    oldest_rows = oldest_rows == 0 ? need.num_rows : oldest_rows;
  }
  return oldest_rows;
}

void Scheduler::plan_decode(StepPlan& plan) {
  const int32_t group_rows = options_.group_decode_by_rows ? pick_decode_group() : 0;
  // Groups rotate on their own, so that one cannot make another start over.
  const bool is_small_group = group_rows != 0 && group_rows < options_.decode_rows();
  int64_t& first_id = decode_first_ids_[is_small_group ? 1 : 0];
  put_off_rows_ = 0;
  const auto first =
      std::find_if(running_.begin(), running_.end(),
                   [first_id](const Request* request) { return request->req_id == first_id; });
  const auto pivot = first == running_.end() ? running_.begin() : first;
  decode_order_.assign(pivot, running_.end());
  decode_order_.insert(decode_order_.end(), running_.begin(), pivot);
  first_id = -1;
  // A batch has room for all that its requests might run, so that what each runs changes no batch.
  int32_t budget = options_.max_num_batched_tokens;
  for (Request* request : decode_order_) {
    if (request->status == RequestStatus::kWaiting) {
      continue;  // preempted for a request before it
    }
    const StepNeed need = strategy_->pages_needed(*request, {request->context_len(), budget});
    if (need.is_prefill) {
      continue;  // an unfinished chunked span, when a decode batch was forced
    }
    if (group_rows != 0 && need.num_rows != group_rows) {
      put_off_rows_ = put_off_rows_ == 0 ? need.num_rows : put_off_rows_;
      continue;  // keeps its pages and its place
    }
    if (need.num_rows > budget) {
      first_id = request->req_id;
      break;
    }
    if (take_pages(*request, need.page_len, Yields::kAll)) {
      enter_plan(plan, *request, need);
      budget -= need.num_rows;
    }
  }
  plan.set_decode_end();
}

bool Scheduler::take_pages(Request& request, int32_t page_len, Yields yields) {
  while (!kv_cache_.try_grow(request.page_table, page_len)) {
    const auto newest = std::find_if(running_.rbegin(), running_.rend(), [&](const Request* other) {
      return other == &request ? yields == Yields::kNewer : !other->is_in_plan;
    });
    if (newest == running_.rend()) {
      preempt_request(request);
      return false;
    }
    if (*newest == &request) {
      return false;
    }
    preempt_request(**newest);
  }
  return true;
}

void Scheduler::enter_plan(StepPlan& plan, Request& request, const StepNeed& need) {
  strategy_->begin_step(request, need);
  const int32_t num_rows = request.step.num_rows;
  DIFFULEX_CHECK(num_rows > 0 && num_rows <= need.num_rows, "begin_step: expected 1 to ",
                 need.num_rows, " rows of request ", request.req_id, ", got ", num_rows);
  const int32_t req_idx = plan.append_request(request.req_id, request.request_slot, num_rows);
  plan.set_page_table(req_idx, request.page_table.epoch,
                      Span<const int32_t>(request.page_table.pages));
  strategy_->write_rows(request, kv_cache_, plan, req_idx);
  strategy_->write_sampler_inputs(request, plan, req_idx);
  request.is_in_plan = true;
  plan_requests_.push_back(&request);
}

Status Scheduler::preempt(int64_t req_id) {
  if (in_flight_ != 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "preempt: expected no plan in flight, got step ", next_step_id_ - 1);
  }
  open_events();
  const auto found = requests_.find(req_id);
  if (found == requests_.end()) {
    return make_error(StatusCode::kNotFound, "preempt: expected a known request, got ", req_id);
  }
  if (found->second->request_slot < 0) {
    return make_error(StatusCode::kInvalidArgument, "preempt: expected a running request, got ",
                      to_string(found->second->status));
  }
  preempt_request(*found->second);
  publish_stats();
  return {};
}

void Scheduler::preempt_request(Request& request) {
  strategy_->on_preempt(request);
  kv_cache_.release(request.page_table);
  device_batch_->leave(request, false);
  remove_running(request);
  events_.preempted.push_back(PreemptedRequest{request.req_id, request.request_slot});
  free_slots_.push_back(request.request_slot);
  request.request_slot = -1;
  request.is_in_plan = false;
  request.status = RequestStatus::kWaiting;
  request.blocked_until_step = -1;
  ++request.num_preemptions;
  ++counters_.num_preemptions;
  waiting_->push_front(request);
}

const Request* Scheduler::find_request(int64_t req_id) const {
  const auto found = requests_.find(req_id);
  return found == requests_.end() ? nullptr : found->second.get();
}

Result<RequestSnapshot> Scheduler::snapshot(int64_t req_id) const {
  const Request* request = find_request(req_id);
  if (request == nullptr) {
    return make_error(StatusCode::kNotFound, "snapshot: expected a known request, got ", req_id);
  }
  return make_snapshot(*request);
}

Result<RequestResult> Scheduler::take_result(int64_t req_id) {
  const auto found = requests_.find(req_id);
  if (found == requests_.end()) {
    return make_error(StatusCode::kNotFound, "take_result: expected a known request, got ", req_id);
  }
  if (found->second->status != RequestStatus::kFinished) {
    return make_error(StatusCode::kInvalidArgument, "take_result: expected a finished request, ",
                      "got ", to_string(found->second->status));
  }
  RequestResult result = make_result(*found->second);
  requests_.erase(found);
  return result;
}

void Scheduler::remove_running(const Request& request) {
  const auto found = std::find(running_.begin(), running_.end(), &request);
  DIFFULEX_CHECK(found != running_.end(), "Scheduler: expected request ", request.req_id,
                 " to be running, got status ", to_string(request.status));
  running_.erase(found);
}

}  // namespace diffulex
