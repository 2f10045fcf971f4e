// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <vector>

#include "core/scheduler/mailbox.h"
#include "diffulex/core/scheduler.h"

// The end of a step: results, cancellation, finished requests, and the invariants.

namespace diffulex {
namespace {

[[nodiscard]] const char* describe(WriteCheck check) noexcept {
  switch (check) {
    case WriteCheck::kOk:
      return "an open position";
    case WriteCheck::kNotActive:
      return "a position of a block that is not ACTIVE";
    case WriteCheck::kNotEditable:
      return "a prompt position";
    case WriteCheck::kMaskToken:
      return "the mask token";
    case WriteCheck::kOutOfVocab:
      return "an id outside the vocabulary";
    case WriteCheck::kNotOpen:
      return "a position that holds a token";
  }
  return "unknown";
}

/// Largest probability of a descriptor: 1 with room for rounding.
constexpr float kMaxMergeProb = 1.001F;

/// Positions tested at once when looking for writes.
constexpr int32_t kWriteGroup = 4;

/// Whether any of kWriteGroup entries differs from -1 ("unchanged"). Most positions of a step are
/// unchanged, and -1 has all bits set, so one conjunction skips a group.
[[nodiscard]] bool has_writes(const int64_t* write_ids) noexcept {
  return (write_ids[0] & write_ids[1] & write_ids[2] & write_ids[3]) != -1;
}

/// Whether every descriptor stands at an editable position that holds a token after the writes, and
/// is a part of a distribution over the vocabulary.
[[nodiscard]] Status check_merge(StepPlan& plan, const SamplerOutput& output,
                                 const EngineOptions& options) {
  const auto width = static_cast<size_t>(options.block_size);
  const auto top_k = static_cast<size_t>(options.token_merge_top_k);
  const Span<const uint8_t> is_valid = output.merge_valid();
  for (size_t at = 0; at < static_cast<size_t>(plan.num_blocks()) * width; ++at) {
    if (is_valid[at] == 0) {
      continue;
    }
    const auto rel = static_cast<int32_t>(at % width);
    const bool is_open = plan.blk_tokens()[at] == options.mask_token_id;
    bool is_sound = rel >= plan.blk_editable_start()[at / width] &&
                    (!is_open || output.write_ids()[at] >= 0) &&
                    output.merge_residual()[at] >= 0.0F && output.merge_residual()[at] <= 1.0F;
    for (size_t k = at * top_k; k < (at + 1) * top_k; ++k) {
      const int64_t id = output.merge_topk_ids()[k];
      const float prob = output.merge_topk_probs()[k];
      const int64_t id_end =
          options.vocab_size > 0 ? options.vocab_size : std::numeric_limits<int32_t>::max();
      is_sound = is_sound && id >= 0 && id < id_end && prob >= 0.0F && prob <= kMaxMergeProb;
    }
    if (!is_sound) {
      return make_error(StatusCode::kInvalidArgument, "complete_step: expected a merge descriptor ",
                        "of ids and probabilities at a decided position, got one of id ",
                        output.merge_topk_ids()[at * top_k], " with probability ",
                        output.merge_topk_probs()[at * top_k], ", residual ",
                        output.merge_residual()[at], " at position ", rel, " of block ",
                        plan.blk_id()[at / width]);
    }
  }
  return {};
}

/// The next canvas must be whole: an id at every real position, and in the argmax canvas too. Rows
/// without a finite candidate have none; their request fails.
[[nodiscard]] Status check_canvases(const BlockRules& rules, StepPlan& plan,
                                    const SamplerOutput& output) {
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    const auto index = static_cast<size_t>(blk);
    if ((output.flags()[index] & kSamplerBadLogits) != 0) {
      continue;
    }
    const size_t first = index * static_cast<size_t>(rules.block_size);
    const auto num_valid = static_cast<size_t>(plan.blk_valid_len()[index]);
    for (size_t rel = 0; rel < static_cast<size_t>(rules.block_size); ++rel) {
      const int64_t token = output.write_ids()[first + rel];
      const int64_t argmax = output.canvas_argmax()[first + rel];
      const bool is_legal =
          rel < num_valid ? token >= 0 && argmax >= 0 && argmax < rules.vocab_size : token == -1;
      if (!is_legal) {
        return make_error(StatusCode::kInvalidArgument, "complete_step: expected a canvas of ",
                          num_valid, " ids below ", rules.vocab_size, ", got token ", token,
                          " and argmax ", argmax, " at position ", rel, " of canvas ",
                          plan.blk_id()[index]);
      }
    }
  }
  return {};
}

/// Requests with a seed row have a choice of it, or -1 when it had no finite candidate; the others
/// have none.
[[nodiscard]] Status check_seeds(const BlockRules& rules, StepPlan& plan,
                                 const SamplerOutput& output, size_t num_reqs) {
  for (size_t r = 0; r < num_reqs; ++r) {
    const int64_t token = output.pending_next_token()[r];
    const bool is_token = token >= 0 && token <= 0x7fffffff && token != rules.mask_token_id &&
                          (rules.vocab_size == 0 || token < rules.vocab_size);
    if (token != -1 && !(is_token && plan.seed_row()[r] >= 0)) {
      return make_error(StatusCode::kInvalidArgument, "complete_step: expected ",
                        plan.seed_row()[r] >= 0 ? "the next token" : "no next token (-1)",
                        " of request ", plan.req_ids()[r], ", got ", token);
    }
  }
  return {};
}

}  // namespace

Status Scheduler::collect_writes(StepPlan& plan, const SamplerOutput& output) {
  writes_.clear();
  next_write_ = 0;
  const int32_t block_size = rules_.block_size;
  if (output.block_size() != block_size || output.max_num_blocks() != layout_.max_num_blocks() ||
      output.merge_top_k() != layout_.merge_top_k) {
    return make_error(StatusCode::kInvalidArgument, "complete_step: expected an output of ",
                      layout_.max_num_blocks(), " blocks of ", block_size, " with merge_top_k ",
                      layout_.merge_top_k, ", got ", output.max_num_blocks(), " of ",
                      output.block_size(), " with ", output.merge_top_k());
  }
  if (layout_.merge_top_k > 0) {
    DIFFULEX_RETURN_IF_ERROR(check_merge(plan, output, options_));
  }
  if (rules_.is_canvas) {
    DIFFULEX_RETURN_IF_ERROR(check_canvases(rules_, plan, output));
  }
  if (options_.has_dual_cache()) {
    DIFFULEX_RETURN_IF_ERROR(check_seeds(rules_, plan, output, plan_requests_.size()));
  }
  const bool may_rewrite = rules_.is_editing || rules_.is_canvas;
  const int64_t* write_ids = output.write_ids().data();
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    const auto index = static_cast<size_t>(blk);
    const Request& request = *plan_requests_[static_cast<size_t>(plan.blk_req()[index])];
    const BufferState& state = request.buffer.state();
    const int32_t buffer_idx = plan.blk_id()[index] - state.blocks[0].block_id;
    const Block& block = state.blocks[buffer_idx];
    const int32_t* tokens = request.buffer.token_data() + block_start(rules_, state, block);
    const int64_t* block_writes = write_ids + int64_t{blk} * block_size;
    for (int32_t rel = 0; rel < block_size; ++rel) {
      // The last group of a canvas may reach into what follows in the arena: it only looks longer.
      if (rel % kWriteGroup == 0 && !has_writes(block_writes + rel)) {
        rel += kWriteGroup - 1;
        continue;
      }
      const int64_t token = block_writes[rel];
      if (token == -1) {
        continue;
      }
      const WriteCheck check = check_write(rules_, block, rel, tokens[rel], token);
      if (check != WriteCheck::kOk) {
        return make_error(StatusCode::kInvalidArgument, "complete_step: expected a token for an ",
                          "open position, got ", describe(check), ": token ", token,
                          " at position ", rel, " of block ", block.block_id, " of request ",
                          request.req_id);
      }
      if (may_rewrite && token == tokens[rel]) {
        continue;  // repeats what stands there
      }
      // Field by field: a copy of a temporary would wait for its stores to become one load.
      BlockWrite& write = writes_.emplace_back();
      write.blk = blk;
      write.rel = rel;
      write.token = static_cast<int32_t>(token);
    }
  }
  return {};
}

Result<const StepEvents*> Scheduler::complete_step(StepPlan& plan, const SamplerOutput& output) {
  const bool is_idle = in_flight_ == 0 && plan.kind() == PlanKind::kIdle;
  if (!is_idle) {
    if (in_flight_ != plan.identity()) {
      return make_error(StatusCode::kInvalidArgument,
                        "complete_step: expected the plan in flight, ", "got step ",
                        plan.step_id());
    }
    const Status status = collect_writes(plan, output);
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
    ++(plan.kind() == PlanKind::kPrefill ? counters_.num_prefill_steps
                                         : counters_.num_decode_steps);
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
  const size_t first_write = next_write_;
  while (next_write_ < writes_.size() && writes_[next_write_].blk < plan.first_block(req_idx + 1)) {
    ++next_write_;
  }
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
    const Span<const BlockWrite> writes(writes_.data() + first_write, next_write_ - first_write);
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
    leave_batch(request, event.finish_reason != FinishReason::kAborted);
    finish_request(request, event.finish_reason);
  }
}

void Scheduler::finish_request(Request& request, FinishReason reason) {
  const int32_t slot = request.request_slot;
  request.finish_reason = reason;
  request.status = RequestStatus::kCompleted;
  if (slot >= 0) {
    kv_cache_.release(request.page_table);
    leave_batch(request, false);
    remove_running(request);
    free_slots_.push_back(slot);
    request.request_slot = -1;
  } else {
    remove_waiting(request);
  }
  request.status = RequestStatus::kFinished;
  events_.finished.push_back(FinishedRequest{request.req_id, reason, slot});
  ++counters_.num_finished;
  counters_.num_aborted += reason == FinishReason::kAborted ? 1 : 0;
  counters_.num_failed += reason == FinishReason::kError ? 1 : 0;
  const std::lock_guard<std::mutex> lock(mailbox_->mutex);
  mailbox_->live_ids.erase(request.req_id);
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
  while (waiting_head_ != nullptr) {
    finish_request(*waiting_head_, FinishReason::kAborted);
  }
  in_flight_ = 0;
  plan_requests_.clear();
  publish_stats();
}

Status Scheduler::check_request(const Request& request) const {
  DIFFULEX_RETURN_IF_ERROR(request.buffer.check_integrity());
  const bool is_running = request.request_slot >= 0;
  const bool has_running_status = request.status == RequestStatus::kPending ||
                                  request.status == RequestStatus::kPrefilling ||
                                  request.status == RequestStatus::kDecoding;
  if (is_running != has_running_status || (!is_running && !request.page_table.pages.empty())) {
    return make_error(StatusCode::kInternal, "Scheduler: expected pages and a slot exactly while ",
                      "running, got ", to_string(request.status), " with slot ",
                      request.request_slot, " and ", request.page_table.pages.size(), " pages");
  }
  const auto covered =
      static_cast<int64_t>(request.page_table.pages.size()) * kv_cache_.page_size();
  if (is_running && covered < request.context_len()) {
    return make_error(StatusCode::kInternal, "Scheduler: expected pages for ",
                      request.context_len(), " positions of request ", request.req_id, ", got ",
                      covered);
  }
  // Everything from the context on may still be written, up to the last page.
  const int64_t first_open = request.context_len() / kv_cache_.page_size();
  for (int64_t position = first_open * kv_cache_.page_size(); is_running && position < covered;
       position += kv_cache_.page_size()) {
    if (!kv_cache_.is_writable(request.page_table, static_cast<int32_t>(position))) {
      return make_error(StatusCode::kInternal, "Scheduler: expected private pages from position ",
                        request.context_len(), " of request ", request.req_id,
                        " on, got a shared one at ", position);
    }
  }
  const int32_t output_len = request.settled_end() - request.prompt_len;
  if (output_len > request.params.max_tokens || request.settled_end() > options_.max_model_len) {
    return make_error(StatusCode::kInternal, "Scheduler: expected at most ",
                      request.params.max_tokens, " output tokens, got ", output_len);
  }
  return {};
}

Status Scheduler::check_integrity() const {
  DIFFULEX_RETURN_IF_ERROR(kv_cache_.check_integrity());
  std::vector<int32_t> ref_counts(static_cast<size_t>(kv_cache_.num_pages()), 0);
  std::vector<bool> is_slot_used(static_cast<size_t>(options_.max_num_reqs), false);
  int32_t num_waiting = 0;
  size_t num_running = 0;
  for (const auto& entry : requests_) {
    const Request& request = *entry.second;
    if (request.status == RequestStatus::kFinished) {
      continue;
    }
    DIFFULEX_RETURN_IF_ERROR(check_request(request));
    num_waiting += request.status == RequestStatus::kWaiting ? 1 : 0;
    if (request.request_slot >= 0) {
      ++num_running;
      if (is_slot_used[static_cast<size_t>(request.request_slot)]) {
        return make_error(StatusCode::kInternal, "Scheduler: expected one owner per request slot, ",
                          "got two of slot ", request.request_slot);
      }
      is_slot_used[static_cast<size_t>(request.request_slot)] = true;
    }
    for (const int32_t page : request.page_table.pages) {
      ++ref_counts[static_cast<size_t>(page)];
    }
  }
  for (int32_t page = 0; page < kv_cache_.num_pages(); ++page) {
    if (ref_counts[static_cast<size_t>(page)] != kv_cache_.pool().ref_count(page)) {
      return make_error(StatusCode::kInternal, "Scheduler: expected ",
                        ref_counts[static_cast<size_t>(page)], " references to page ", page,
                        ", got ", kv_cache_.pool().ref_count(page));
    }
  }
  if (num_waiting != num_waiting_ || num_running != running_.size() ||
      num_running + free_slots_.size() != static_cast<size_t>(options_.max_num_reqs)) {
    return make_error(StatusCode::kInternal, "Scheduler: expected ", num_waiting, " waiting and ",
                      num_running, " running requests, got ", num_waiting_, " and ",
                      running_.size(), " with ", free_slots_.size(), " free slots");
  }
  return {};
}

}  // namespace diffulex
