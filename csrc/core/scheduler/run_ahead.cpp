// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/scheduler/device_batch.h"
#include "core/scheduler/mailbox.h"
#include "core/scheduler/waiting_queue.h"
#include "diffulex/core/scheduler.h"

// Running ahead: a device decodes on while the host still completes the step before.

namespace diffulex {
namespace {

[[nodiscard]] DecodeRequest make_decode_request(const Request& request) {
  DecodeRequest result;
  const SamplingParams& params = request.params;
  const RequestStep& step = request.step;
  result.seed = request.seed;
  result.rules = request.buffer.rules();
  result.state = request.buffer.state();
  result.forward = BufferForward{step.first_pos, step.num_valid_rows, step.store_end,
                                 step.has_activated, step.has_sampling};
  result.limits =
      StopLimits{params.max_tokens, request.nfe, request.max_nfe, params.max_repetition_run};
  result.inv_temperature = params.is_sampled() ? 1.0F / params.temperature : 0.0F;
  result.accept_threshold = request.accept_threshold;
  result.edit_threshold = request.edit_threshold;
  result.penalty = request.penalty;
  result.max_post_edit_steps = request.max_post_edit_steps;
  if (params.is_filtered()) {
    result.top_p = params.top_p;
    result.min_p = params.min_p;
    result.top_k = params.top_k;
  }
  result.request_slot = request.request_slot;
  result.carry_pos = request.carry_pos;
  result.is_running = true;
  return result;
}

/// Copies `count` entries of every [Nb, width] array of an output.
template <typename T>
void copy_entries(Span<const T> from, size_t from_blk, Span<T> to, size_t to_blk, size_t width) {
  std::copy_n(from.data() + from_blk * width, width, to.data() + to_blk * width);
}

}  // namespace

bool Scheduler::can_run_ahead(const StepPlan& plan) const {
  if (in_flight_ != plan.identity() || plan.kind() != PlanKind::kDecode) {
    return false;
  }
  return std::all_of(plan_requests_.begin(), plan_requests_.end(), [this](const Request* request) {
    return strategy_->decodes_by_rules(*request);
  });
}

Status Scheduler::start_run_ahead(const StepPlan& plan, DecodeBatch& batch) {
  if (!can_run_ahead(plan)) {
    return make_error(StatusCode::kInvalidArgument, "start_run_ahead: expected a decode plan in ",
                      "flight of requests that decode by the rules alone, got step ",
                      plan.step_id());
  }
  batch.reset();
  for (size_t r = 0; r < plan_requests_.size(); ++r) {
    const Request& request = *plan_requests_[r];
    const BufferState& state = request.buffer.state();
    DecodeRequest decode = make_decode_request(request);
    strategy_->complete_decode_request(request, decode);
    batch.append(decode, request.buffer.token_data(), buffer_start(request.buffer.rules(), state),
                 Span<const int64_t>(request.prev_argmax));
    static_cast<void>(
        batch.set_pages(static_cast<int32_t>(r), Span<const int32_t>(request.page_table.pages)));
  }
  device_batch_->start(plan_requests_);
  return {};
}

bool Scheduler::could_admit() const {
  if (waiting_->head() == nullptr ||
      running_.size() >= static_cast<size_t>(options_.max_num_reqs)) {
    return false;
  }
  // As try_admit: a request that found too few pages is not looked at again for a while.
  return next_step_id_ >= waiting_->head()->blocked_until_step ||
         kv_cache_.num_free_pages() > waiting_->head()->blocked_free_pages;
}

RunAhead Scheduler::reserve_ahead(DecodeBatch& batch) {
  if (in_flight_ == 0 || !device_batch_->is_intact() || plan_requests_.size() != running_.size() ||
      could_admit() || mailbox_->has_mail()) {
    return RunAhead::kStop;
  }
  bool has_new_pages = false;
  for (size_t r = 0; r < plan_requests_.size(); ++r) {
    Request& request = *plan_requests_[r];
    if (!strategy_->decodes_by_rules(request) ||
        !kv_cache_.try_grow(request.page_table, strategy_->page_len_ahead(request))) {
      return RunAhead::kStop;
    }
    has_new_pages = batch.set_pages(device_batch_->plan_rows()[r],
                                    Span<const int32_t>(request.page_table.pages)) ||
                    has_new_pages;
  }
  return has_new_pages ? RunAhead::kGoNewPages : RunAhead::kGo;
}

int32_t Scheduler::context_len_ahead() const {
  int32_t longest = 0;
  for (const Request* request : plan_requests_) {
    longest = std::max(longest, strategy_->context_len_ahead(*request));
  }
  return longest;
}

PlanKind Scheduler::schedule_ahead(StepPlan& plan) {
  DIFFULEX_CHECK(in_flight_ == 0, "schedule_ahead: expected no plan in flight, got step ",
                 next_step_id_ - 1);
  DIFFULEX_CHECK(plan.layout() == layout_, "schedule_ahead: expected a plan of ",
                 layout_.describe(), ", got ", plan.layout().describe());
  open_events();
  drain_mailbox();
  apply_aborts();
  plan_requests_.clear();
  device_batch_->begin_plan();
  plan.reset(PlanKind::kDecode, next_step_id_);
  const Span<Request* const> batch = device_batch_->requests();
  for (size_t row = 0; row < batch.size(); ++row) {
    Request* request = batch[row];
    if (request == nullptr) {
      continue;
    }
    const StepNeed need = strategy_->pages_needed(
        *request, {request->context_len(), options_.max_num_batched_tokens - plan.num_rows()});
    const auto num_pages = static_cast<int32_t>(request->page_table.pages.size());
    DIFFULEX_CHECK(!need.is_prefill && kv_cache_.num_pages_for(need.page_len) <= num_pages,
                   "schedule_ahead: expected a decode step within ", num_pages,
                   " pages of request ", request->req_id, ", got one of ", need.page_len,
                   " positions");
    enter_plan(plan, *request, need);
    device_batch_->add_plan_row(row);
  }
  if (plan_requests_.empty()) {
    plan.reset(PlanKind::kIdle, next_step_id_);
    publish_stats();
    return PlanKind::kIdle;
  }
  plan.set_decode_end();
  plan.seal();
  prefill_streak_ = 0;
  ++next_step_id_;
  in_flight_ = plan.identity();
  publish_stats();
  return PlanKind::kDecode;
}

void Scheduler::collect_output(StepPlan& plan, const SamplerOutput& by_row,
                               SamplerOutput& output) const {
  const Span<const int32_t> plan_rows = device_batch_->plan_rows();
  DIFFULEX_CHECK(in_flight_ == plan.identity() && plan_rows.size() == plan_requests_.size(),
                 "collect_output: expected the plan in flight of a device, got step ",
                 plan.step_id());
  if (layout_.has_dual_cache) {
    for (size_t r = 0; r < plan_rows.size(); ++r) {
      output.pending_next_token()[r] =
          by_row.pending_next_token()[static_cast<size_t>(plan_rows[r])];
    }
  }
  const auto width = static_cast<size_t>(rules_.block_size);
  const size_t canvas_width = layout_.has_canvas ? width : 0;
  const auto depth = width * static_cast<size_t>(layout_.merge_top_k);
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    const auto to = static_cast<size_t>(blk);
    const auto r = static_cast<size_t>(plan.blk_req()[to]);
    const int32_t first_id = plan_requests_[r]->buffer.state().blocks[0].block_id;
    const auto from =
        static_cast<size_t>(plan_rows[r] * rules_.buffer_size + plan.blk_id()[to] - first_id);
    copy_entries(by_row.write_ids(), from, output.write_ids(), to, width);
    copy_entries(by_row.confidence(), from, output.confidence(), to, width);
    copy_entries(by_row.masks_left(), from, output.masks_left(), to, 1);
    copy_entries(by_row.flags(), from, output.flags(), to, 1);
    copy_entries(by_row.same_token_ratio(), from, output.same_token_ratio(), to, 1);
    if (canvas_width > 0) {
      copy_entries(by_row.canvas_argmax(), from, output.canvas_argmax(), to, canvas_width);
    }
    if (depth > 0) {
      copy_entries(by_row.merge_valid(), from, output.merge_valid(), to, width);
      copy_entries(by_row.merge_topk_ids(), from, output.merge_topk_ids(), to, depth);
      copy_entries(by_row.merge_topk_probs(), from, output.merge_topk_probs(), to, depth);
      copy_entries(by_row.merge_residual(), from, output.merge_residual(), to, width);
    }
  }
}

}  // namespace diffulex
