// SPDX-License-Identifier: Apache-2.0
#include "diffulex/edge/session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "diffulex/ops/visible_ends.h"
#include "edge/row_stage.h"

namespace diffulex {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// Switches off everything that concerns several requests, and refuses what does not go together.
Status fit_one_request(EngineOptions* engine) {
  engine->max_num_reqs = 1;
  engine->num_pages = 1;  // their number follows from sizes that are not checked yet
  engine->enable_prefix_caching = false;
  engine->decode_headroom = false;
  DIFFULEX_RETURN_IF_ERROR(engine->validate());
  engine->num_pages = engine->max_pages_per_req();
  return engine->validate();
}

Status check_limits(const EngineOptions& engine, const EdgeLimits& limits) {
  if (engine.vocab_size != limits.vocab_size) {
    return make_error(StatusCode::kInvalidArgument, "vocab_size: expected ", limits.vocab_size,
                      " as the program has, got ", engine.vocab_size);
  }
  if (engine.max_model_len > limits.max_model_len) {
    return make_error(StatusCode::kInvalidArgument, "max_model_len: expected at most ",
                      limits.max_model_len, " positions of the program, got ",
                      engine.max_model_len);
  }
  // A block attends to itself: it is not split.
  const int32_t rows = engine.att_block_size();
  if (rows > limits.max_rows || rows > limits.max_logits) {
    return make_error(StatusCode::kInvalidArgument, "block_size: expected at most ",
                      std::min(limits.max_rows, limits.max_logits),
                      " rows in a call of the program, got ", rows);
  }
  const int32_t span = engine.page_span(engine.max_model_len);
  const int64_t cache_rows = int64_t{limits.max_model_len} + kEdgeSpareRows;
  if (span > cache_rows) {
    return make_error(StatusCode::kInvalidArgument, "block_size: expected whole blocks in the ",
                      cache_rows, " cache rows of the program, got ", span, " rows of blocks of ",
                      rows, " for max_model_len ", engine.max_model_len);
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<EdgeSession>> EdgeSession::create(const EdgeOptions& options,
                                                         std::unique_ptr<EdgeModel> model) {
  if (model == nullptr) {
    return make_error(StatusCode::kInvalidArgument, "model: expected a model, got none");
  }
  EdgeOptions own = options;
  if (!own.engine.has(kIsExportable)) {
    return make_error(StatusCode::kUnsupported, "strategy: expected ",
                      strategies_with(kIsExportable), ", got ", own.engine.strategy);
  }
  DIFFULEX_RETURN_IF_ERROR(fit_one_request(&own.engine));
  DIFFULEX_RETURN_IF_ERROR(own.request.validate());
  DIFFULEX_RETURN_IF_ERROR(check_limits(own.engine, model->limits()));
  return std::unique_ptr<EdgeSession>(new EdgeSession(std::move(own), std::move(model)));
}

EdgeSession::EdgeSession(EdgeOptions options, std::unique_ptr<EdgeModel> model)
    : options_(std::move(options)),
      model_(std::move(model)),
      limits_(model_->limits()),
      core_(options_.engine),
      plan_(options_.engine),
      output_(options_.engine),
      rows_(std::make_unique<EdgeRowStage>(options_, plan_)) {}

EdgeSession::~EdgeSession() = default;

Status EdgeSession::start(Span<const int32_t> prompt, const SamplingParams& params) {
  if (is_running()) {
    return make_error(StatusCode::kInvalidArgument,
                      "EdgeSession::start: expected no running request, got request ",
                      req_id_.load());
  }
  if (params.penalty_lambda.value_or(0.0F) > 0.0F) {
    return make_error(StatusCode::kUnsupported,
                      "SamplingParams.penalty_lambda: expected 0 for a session in C++, got ",
                      *params.penalty_lambda);
  }
  const auto most = static_cast<size_t>(limits_.max_rows);
  if (options_.engine.has(kSeesWholePrompt) && prompt.size() > most) {
    // Its rows see each other, so that one call takes them all.
    return make_error(StatusCode::kOutOfRange, "prompt: expected at most ", most, " tokens under ",
                      options_.engine.strategy, " (export with a larger --max-rows), got ",
                      prompt.size());
  }
  Result<int64_t> added = core_.add_request(prompt, params);
  DIFFULEX_RETURN_IF_ERROR(added.status());
  if (req_id_ >= 0) {
    (void)core_.take_result(req_id_);  // of a request whose result was never taken
  }
  req_id_ = added.value();
  is_finished_ = false;
  return {};
}

void EdgeSession::cancel() noexcept {
  const int64_t req_id = req_id_;
  if (req_id >= 0) {
    core_.abort(req_id);
  }
}

Result<EdgeStep> EdgeSession::step() {
  if (!is_running()) {
    return make_error(StatusCode::kInvalidArgument,
                      "EdgeSession::step: expected a running request, got none");
  }
  if (core_.schedule(plan_) != PlanKind::kIdle) {
    const Status status = run_plan();
    if (!status.ok()) {
      fail_request();
      return status;
    }
  }
  Result<const StepEvents*> completed = core_.complete_step(plan_, output_);
  DIFFULEX_RETURN_IF_ERROR(completed.status());
  const StepEvents& events = *completed.value();
  EdgeStep step;
  for (const RequestEvent& event : events.requests) {
    const Span<const int32_t> tokens = events.appended(event);
    step.tokens.assign(tokens.begin(), tokens.end());
    step.new_tokens = event.new_tokens;
  }
  if (!events.finished.empty()) {
    step.is_finished = is_finished_ = true;
    step.finish_reason = events.finished[0].finish_reason;
  }
  return step;
}

Status EdgeSession::run_plan() {
  stats_.num_forwards += 1;
  const Clock::time_point start = Clock::now();
  const Result<const float*> logits = run_model();
  DIFFULEX_RETURN_IF_ERROR(logits.status());
  const Clock::time_point middle = Clock::now();
  stats_.model_seconds += Seconds(middle - start).count();
  DIFFULEX_RETURN_IF_ERROR(rows_->run(plan_, logits.value(), output_));
  stats_.sampling_seconds += Seconds(Clock::now() - middle).count();
  return {};
}

Result<const float*> EdgeSession::run_model() {
  DIFFULEX_RETURN_IF_ERROR(visible_ends(plan_, &visible_end_));
  const size_t num_rows = visible_end_.size();
  const auto vocab = static_cast<size_t>(limits_.vocab_size);
  const float* logits = nullptr;
  for (size_t begin = 0; begin < num_rows;) {
    const Result<size_t> end = end_of_call(begin);
    DIFFULEX_RETURN_IF_ERROR(end.status());
    const Result<const float*> rows = call_rows(begin, end.value());
    DIFFULEX_RETURN_IF_ERROR(rows.status());
    logits = rows.value();
    if (begin > 0 || end.value() < num_rows) {
      logits_.resize(static_cast<size_t>(plan_.num_logits_rows()) * vocab);
      for (size_t i = 0; i < call_entries_.size(); ++i) {
        std::copy_n(rows.value() + i * vocab, vocab, logits_.data() + call_entries_[i] * vocab);
      }
      logits = logits_.data();
    }
    begin = end.value();
  }
  return logits;
}

/// Longest run of rows from `begin` on that the program takes at once and after which no row sees
/// what comes later.
Result<size_t> EdgeSession::end_of_call(size_t begin) {
  const auto asked = plan_.logits_rows();
  size_t end = begin;
  int64_t num_logits = 0;
  int64_t seen = 0;
  for (size_t next = begin + 1; next <= visible_end_.size(); ++next) {
    num_logits += std::count(asked.begin(), asked.end(), static_cast<int32_t>(next - 1));
    seen = std::max(seen, visible_end_[next - 1]);
    if (next - begin > static_cast<size_t>(limits_.max_rows) || num_logits > limits_.max_logits) {
      break;
    }
    if (next == visible_end_.size() || seen <= plan_.positions()[next]) {
      end = next;
    }
  }
  if (end == begin) {
    return make_error(StatusCode::kOutOfRange, "EdgeSession: expected rows that a call of ",
                      limits_.max_rows, " rows and ", limits_.max_logits,
                      " logits takes (export with a larger --max-rows), got more from position ",
                      plan_.positions()[begin], " on");
  }
  return end;
}

Result<const float*> EdgeSession::call_rows(size_t begin, size_t end) {
  call_rows_.clear();
  call_entries_.clear();
  for (size_t i = 0; i < plan_.logits_rows().size(); ++i) {
    const auto row = static_cast<size_t>(plan_.logits_rows()[i]);
    if (row >= begin && row < end) {
      call_rows_.push_back(static_cast<int64_t>(row - begin));
      call_entries_.push_back(i);
    }
  }
  if (call_rows_.empty()) {
    call_rows_.push_back(0);  // a program gives one row at least
  }
  EdgeCall call;
  call.tokens = plan_.input_ids().subspan(begin, end - begin);
  call.positions = plan_.positions().subspan(begin, end - begin);
  call.visible_end = Span<const int64_t>(visible_end_).subspan(begin, end - begin);
  call.logits_rows = call_rows_;
  stats_.num_calls += 1;
  return model_->run(call);
}

void EdgeSession::fail_request() {
  (void)core_.cancel_step(plan_);
  core_.abort(req_id_);
  if (core_.schedule(plan_) == PlanKind::kIdle) {
    (void)core_.complete_step(plan_, output_);
  }
  (void)core_.take_result(req_id_.exchange(-1));
}

Result<RequestResult> EdgeSession::take_result() {
  if (req_id_ < 0 || !is_finished_) {
    return make_error(StatusCode::kNotFound,
                      "EdgeSession::take_result: expected a finished request, got none");
  }
  return core_.take_result(req_id_.exchange(-1));
}

Result<RequestSnapshot> EdgeSession::snapshot() const {
  return core_.snapshot(req_id_);
}

Result<RequestResult> EdgeSession::generate(Span<const int32_t> prompt,
                                            const SamplingParams& params,
                                            const std::function<void(const EdgeStep&)>& on_step) {
  DIFFULEX_RETURN_IF_ERROR(start(prompt, params));
  while (is_running()) {
    const Result<EdgeStep> result = step();
    DIFFULEX_RETURN_IF_ERROR(result.status());
    if (on_step) {
      on_step(result.value());
    }
  }
  return take_result();
}

}  // namespace diffulex
