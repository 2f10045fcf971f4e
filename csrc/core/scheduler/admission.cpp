// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/scheduler/waiting_queue.h"
#include "diffulex/core/scheduler.h"

// What a scheduler accepts, and phase A of schedule(): continuing chunks, then admission in strict
// order of arrival.

namespace diffulex {
namespace {

/// Steps after which a request that did not fit looks for a longer prefix hit again. A lookup costs
/// as much as the prompt is long, so a blocked head of the queue must not repeat it every step.
constexpr int64_t kLookupInterval = 16;

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

/// Whether the free positions of a template can be decoded, and the fixed ones be left alone.
[[nodiscard]] Status check_template(const EngineOptions& options, const Request& request) {
  const std::vector<int32_t>& ids = request.params.template_token_ids;
  if (ids.empty()) {
    return {};
  }
  const char* where = "SamplingParams.template_token_ids";
  if (options.rewrites_tokens() || options.has_canvas() || options.has_dual_cache()) {
    return make_error(StatusCode::kUnsupported, where, ": expected a strategy that only fills ",
                      "masks, got ", options.strategy, options.is_editing ? " with editing" : "");
  }
  const size_t room = static_cast<size_t>(options.max_model_len) - request.prompt_ids.size();
  if (ids.size() > room) {
    return make_error(StatusCode::kOutOfRange, where, ": expected at most ", room,
                      " positions after the prompt (max_model_len ", options.max_model_len,
                      "), got ", ids.size());
  }
  bool has_free = false;
  const bool has_stops = !request.params.ignore_eos;
  const auto holds = [](const std::vector<int32_t>& stops, int32_t id) {
    return std::find(stops.begin(), stops.end(), id) != stops.end();
  };
  for (const int32_t id : ids) {
    if (id == -1 || id == options.mask_token_id) {
      has_free = true;
      continue;
    }
    DIFFULEX_RETURN_IF_ERROR(check_token_id(where, id, options.vocab_size));
    if (has_stops &&
        (holds(options.stop_token_ids, id) || holds(request.params.stop_token_ids, id))) {
      return make_error(StatusCode::kInvalidArgument, where, ": expected no stop id among the ",
                        "fixed tokens (or ignore_eos), got ", id);
    }
  }
  if (!has_free) {
    return make_error(StatusCode::kInvalidArgument, where, ": expected at least one free position ",
                      "(-1), got none in ", ids.size());
  }
  return {};
}

}  // namespace

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
  DIFFULEX_RETURN_IF_ERROR(check_template(options_, request));
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

void Scheduler::plan_prefill(StepPlan& plan, int32_t max_rows) {
  if (!plan_continuing(plan, max_rows)) {
    return;  // pages that get free are for the prompts under way
  }
  const auto max_reqs = static_cast<size_t>(options_.max_num_reqs);
  while (waiting_->head() != nullptr && plan_requests_.size() < max_reqs &&
         running_.size() < max_reqs) {
    if (!try_admit(plan, *waiting_->head(), max_rows)) {
      break;
    }
  }
}

bool Scheduler::plan_continuing(StepPlan& plan, int32_t max_rows) {
  bool has_all = true;
  decode_order_.assign(running_.begin(), running_.end());
  for (Request* request : decode_order_) {
    if (request->status != RequestStatus::kPrefilling) {
      continue;
    }
    const StepQuery query{request->context_len(), max_rows - plan.num_rows()};
    const StepNeed need = strategy_->pages_needed(*request, query);
    if (!need.is_prefill || need.num_rows == 0) {
      continue;
    }
    if (take_pages(*request, need.page_len, Yields::kNewer)) {
      enter_plan(plan, *request, need);
    } else {
      has_all = false;  // keeps its place, and waits for older requests to end
    }
  }
  return has_all;
}

bool Scheduler::try_admit(StepPlan& plan, Request& request, int32_t max_rows) {
  if (!running_.empty() && next_step_id_ < request.blocked_until_step &&
      kv_cache_.num_free_pages() <= request.blocked_free_pages) {
    return false;
  }
  const PrefixHit hit = kv_cache_.lookup_prefix(request.tokens(), request.prefix_limit);
  const StepNeed need = strategy_->pages_needed(request, {hit.len, max_rows - plan.num_rows()});
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
  waiting_->remove(request);
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
