// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/scheduler/mailbox.h"
#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

[[nodiscard]] const EngineOptions& checked(const EngineOptions& options) {
  const Status status = options.validate();
  DIFFULEX_CHECK(status.ok(), "Scheduler: expected valid options, got ", status.message());
  return options;
}

[[nodiscard]] std::unique_ptr<Strategy> checked(Result<std::unique_ptr<Strategy>> strategy) {
  DIFFULEX_CHECK(strategy.ok(), "Scheduler: ", strategy.status().message());
  return std::move(strategy).value();
}

[[nodiscard]] Status check_token_id(const char* where, int32_t id, int32_t vocab_size) {
  if (id >= 0 && (vocab_size == 0 || id < vocab_size)) {
    return {};
  }
  if (vocab_size == 0) {
    return make_error(StatusCode::kInvalidArgument, where, ": expected ids >= 0, got ", id);
  }
  return make_error(StatusCode::kInvalidArgument, where, ": expected ids in [0, ", vocab_size,
                    "), got ", id);
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
      mailbox_(std::make_unique<Mailbox>()) {
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
  writes_.reserve(max_reqs * static_cast<size_t>(options.decode_rows()));
  events_.requests.reserve(max_reqs);
  events_.appended_tokens.reserve(max_reqs * static_cast<size_t>(options.decode_rows()));
  events_.committed.reserve(max_rows / static_cast<size_t>(options.block_size) + max_reqs);
  events_.finished.reserve(2 * max_reqs);
  events_.preempted.reserve(max_reqs);
  publish_stats();
}

Scheduler::~Scheduler() = default;

Status Scheduler::validate_request(const Request& request) const {
  DIFFULEX_RETURN_IF_ERROR(request.params.validate());
  if (request.prompt_ids.empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "add_request: expected at least one prompt token, got 0");
  }
  if (request.prompt_ids.size() >= static_cast<size_t>(options_.max_model_len)) {
    return make_error(StatusCode::kOutOfRange, "add_request: expected a prompt shorter than ",
                      "max_model_len ", options_.max_model_len, ", got ", request.prompt_ids.size(),
                      " tokens");
  }
  for (const int32_t id : request.prompt_ids) {
    DIFFULEX_RETURN_IF_ERROR(check_token_id("add_request: prompt", id, options_.vocab_size));
  }
  const BlockRules& rules = request.buffer.rules();
  if (rules.block_size != rules_.block_size || rules.buffer_size != rules_.buffer_size ||
      rules.mask_token_id != rules_.mask_token_id) {
    return make_error(StatusCode::kInvalidArgument, "add_request: expected a request built with ",
                      "the options of the scheduler, got block_size ", rules.block_size,
                      ", buffer_size ", rules.buffer_size, ", mask_token_id ", rules.mask_token_id);
  }
  int32_t num_stop_ids = static_cast<int32_t>(options_.stop_token_ids.size());
  for (const int32_t id : request.params.stop_token_ids) {
    DIFFULEX_RETURN_IF_ERROR(
        check_token_id("SamplingParams.stop_token_ids", id, options_.vocab_size));
    if (id == options_.mask_token_id) {
      return make_error(StatusCode::kInvalidArgument, "SamplingParams.stop_token_ids: expected no ",
                        "mask token, got ", id);
    }
    ++num_stop_ids;
  }
  if (num_stop_ids > kMaxStopIds) {
    return make_error(StatusCode::kInvalidArgument, "SamplingParams.stop_token_ids: expected at ",
                      "most ", kMaxStopIds, " ids together with the engine's, got ", num_stop_ids);
  }
  const int64_t limit_end = std::min(int64_t{request.prompt_len} + request.params.max_tokens,
                                     int64_t{options_.max_model_len});
  const int32_t span = options_.page_span(static_cast<int32_t>(limit_end));
  const int32_t num_pages = kv_cache_.num_pages_for(span);
  if (num_pages > kv_cache_.num_pages()) {
    return make_error(StatusCode::kOutOfPages, "add_request: expected a request of at most ",
                      kv_cache_.num_pages(), " pages, got ", num_pages, " pages for ", limit_end,
                      " tokens");
  }
  return {};
}

namespace {

/// Seed of a request. At temperature 0 an answer must be the same every time, also under a strategy
/// that draws all the same; above it, requests without a seed differ by their id.
uint64_t effective_seed(const SamplingParams& params, const EngineOptions& options,
                        int64_t req_id) {
  if (params.seed.has_value()) {
    return *params.seed;
  }
  return params.is_sampled() ? derive_request_seed(options.seed, req_id) : options.seed;
}

}  // namespace

Result<int64_t> Scheduler::add_request(std::unique_ptr<Request> request) {
  DIFFULEX_CHECK(request != nullptr, "add_request: expected a request, got none");
  const Status status = validate_request(*request);
  if (!status.ok()) {
    request->status = RequestStatus::kFinished;
    request->finish_reason = status.code() == StatusCode::kOutOfRange
                                 ? FinishReason::kMaxModelLenReached
                                 : FinishReason::kRejected;
    const std::lock_guard<std::mutex> lock(mailbox_->mutex);
    ++mailbox_->num_rejected;
    return status;
  }
  // Outside the lock: the work grows with the prompt, and touches this request only.
  strategy_->init_request(*request);
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  const int64_t req_id = mailbox_->next_req_id++;
  request->req_id = req_id;
  request->seed = effective_seed(request->params, options_, req_id);
  mailbox_->live_ids.insert(req_id);
  mailbox_->arrivals.push_back(std::move(request));
  return req_id;
}

bool Scheduler::abort(int64_t req_id) {
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  if (mailbox_->live_ids.count(req_id) == 0) {
    return false;
  }
  mailbox_->aborts.push_back(req_id);
  return true;
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  SchedulerStats stats = mailbox_->stats;
  stats.num_waiting += static_cast<int32_t>(mailbox_->arrivals.size());
  stats.num_requests = mailbox_->next_req_id;
  stats.num_rejected = mailbox_->num_rejected;
  return stats;
}

bool Scheduler::has_unfinished() const {
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  return !mailbox_->live_ids.empty();
}

void Scheduler::publish_stats() {
  counters_.num_waiting = num_waiting_;
  counters_.num_running = static_cast<int32_t>(running_.size());
  counters_.num_pages = kv_cache_.num_pages();
  counters_.num_free_pages = kv_cache_.num_free_pages();
  counters_.num_cached_units = kv_cache_.num_cached_units();
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  mailbox_->stats = counters_;
}

void Scheduler::drain_mailbox() {
  {
    const std::lock_guard<std::mutex> lock(mailbox_->mutex);
    arrived_.swap(mailbox_->arrivals);
    abort_ids_.swap(mailbox_->aborts);
  }
  for (std::unique_ptr<Request>& request : arrived_) {
    push_waiting_back(*request);
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
  batch_requests_.clear();
  is_batch_intact_ = false;
  const bool is_decode_first = must_decode();
  if (!is_decode_first) {
    plan.reset(PlanKind::kPrefill, next_step_id_);
    plan_prefill(plan);
  }
  if (plan_requests_.empty()) {
    plan.reset(PlanKind::kDecode, next_step_id_);
    plan_decode(plan);
  }
  if (plan_requests_.empty() && is_decode_first) {
    plan.reset(PlanKind::kPrefill, next_step_id_);
    plan_prefill(plan);
  }
  if (plan_requests_.empty()) {
    DIFFULEX_CHECK(running_.empty() && num_waiting_ == 0, "schedule: expected work to be planned, ",
                   "got ", running_.size(), " running and ", num_waiting_, " waiting requests");
    plan.reset(PlanKind::kIdle, next_step_id_);
    prefill_streak_ = 0;
    publish_stats();
    return PlanKind::kIdle;
  }
  plan.seal();
  prefill_streak_ = plan.kind() == PlanKind::kPrefill ? prefill_streak_ + 1 : 0;
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
  for (Request* request : decode_order_) {
    const int32_t budget = options_.max_num_batched_tokens - plan.num_rows();
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
    if (reserve_pages(*request, need.page_len)) {
      enter_plan(plan, *request, need);
    }
  }
}

bool Scheduler::reserve_pages(Request& request, int32_t page_len) {
  while (!kv_cache_.try_grow(request.page_table, page_len)) {
    const auto newest = std::find_if(
        running_.rbegin(), running_.rend(),
        [&request](const Request* other) { return !other->is_in_plan && other != &request; });
    Request& victim = newest == running_.rend() ? request : **newest;
    preempt_request(victim);
    if (&victim == &request) {
      return false;
    }
  }
  return true;
}

void Scheduler::enter_plan(StepPlan& plan, Request& request, const StepNeed& need) {
  strategy_->begin_step(request, need);
  const int32_t req_idx = plan.append_request(request.req_id, request.request_slot, need.num_rows);
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
  leave_batch(request, false);
  remove_running(request);
  events_.preempted.push_back(PreemptedRequest{request.req_id, request.request_slot});
  free_slots_.push_back(request.request_slot);
  request.request_slot = -1;
  request.is_in_plan = false;
  request.status = RequestStatus::kWaiting;
  request.blocked_until_step = -1;
  ++request.num_preemptions;
  ++counters_.num_preemptions;
  push_waiting_front(request);
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

void Scheduler::push_waiting_front(Request& request) {
  request.prev_waiting = nullptr;
  request.next_waiting = waiting_head_;
  (waiting_head_ == nullptr ? waiting_tail_ : waiting_head_->prev_waiting) = &request;
  waiting_head_ = &request;
  ++num_waiting_;
}

void Scheduler::push_waiting_back(Request& request) {
  request.next_waiting = nullptr;
  request.prev_waiting = waiting_tail_;
  (waiting_tail_ == nullptr ? waiting_head_ : waiting_tail_->next_waiting) = &request;
  waiting_tail_ = &request;
  ++num_waiting_;
}

void Scheduler::remove_waiting(Request& request) {
  (request.prev_waiting == nullptr ? waiting_head_ : request.prev_waiting->next_waiting) =
      request.next_waiting;
  (request.next_waiting == nullptr ? waiting_tail_ : request.next_waiting->prev_waiting) =
      request.prev_waiting;
  request.next_waiting = nullptr;
  request.prev_waiting = nullptr;
  --num_waiting_;
}

void Scheduler::remove_running(const Request& request) {
  const auto found = std::find(running_.begin(), running_.end(), &request);
  DIFFULEX_CHECK(found != running_.end(), "Scheduler: expected request ", request.req_id,
                 " to be running, got status ", to_string(request.status));
  running_.erase(found);
}

}  // namespace diffulex
