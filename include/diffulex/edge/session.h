// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "diffulex/core/engine_core.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/edge/model.h"
#include "diffulex/edge/options.h"
#include "diffulex/export.h"

namespace diffulex {

class EdgeRowStage;

/// What one forward brought.
struct EdgeStep {
  std::vector<int32_t> tokens;  // newly settled output, never taken back
  int32_t new_tokens = 0;       // masks filled
  bool is_finished = false;
  FinishReason finish_reason = FinishReason::kNone;
};

/// Work of a session since its construction.
struct EdgeStats {
  int64_t num_forwards = 0;  // steps of the engine
  int64_t num_calls = 0;     // calls of the model; long prompts take several a forward
  double model_seconds = 0.0;
  double sampling_seconds = 0.0;
};

/// Decodes one request at a time with the scheduler and the samplers of the engine over a model
/// that the embedder supplies. Tokens are those of the engine for the same logits, settings and
/// order of requests (a request without a seed draws by its number).
///
/// One thread calls it; cancel() may come from any thread.
class DIFFULEX_API EdgeSession final {
 public:
  /// kInvalidArgument or kUnsupported when the settings are wrong, do not go together with the
  /// limits of the model, or need what a session lacks.
  [[nodiscard]] static Result<std::unique_ptr<EdgeSession>> create(
      const EdgeOptions& options, std::unique_ptr<EdgeModel> model);
  ~EdgeSession();
  EdgeSession(const EdgeSession&) = delete;
  EdgeSession& operator=(const EdgeSession&) = delete;

  /// Begins a request; `params` are complete, take options().request for the defaults.
  /// kInvalidArgument for bad parameters or ids and while a request is unfinished, kOutOfRange for
  /// a prompt that is too long.
  [[nodiscard]] Status start(Span<const int32_t> prompt, const SamplingParams& params);
  /// Runs one forward. A failure of the model ends the request; the session can start another one.
  [[nodiscard]] Result<EdgeStep> step();
  /// Whether step() has anything to do.
  [[nodiscard]] bool is_running() const noexcept { return req_id_ >= 0 && !is_finished_; }
  /// Asks for the end of the running request; the step after the one in flight reports it.
  void cancel() noexcept;
  /// Record of the request that ended last, handed out once; kNotFound if there is none.
  [[nodiscard]] Result<RequestResult> take_result();
  /// Denoising state of the request, masks included, until its result is taken.
  [[nodiscard]] Result<RequestSnapshot> snapshot() const;

  /// start, step until the end, take_result. `on_step` sees every step and may cancel().
  [[nodiscard]] Result<RequestResult> generate(
      Span<const int32_t> prompt, const SamplingParams& params,
      const std::function<void(const EdgeStep&)>& on_step = nullptr);

  [[nodiscard]] const EdgeOptions& options() const noexcept { return options_; }
  [[nodiscard]] const EdgeStats& stats() const noexcept { return stats_; }

 private:
  EdgeSession(EdgeOptions options, std::unique_ptr<EdgeModel> model);

  [[nodiscard]] Status run_plan();
  [[nodiscard]] Result<const float*> run_model();
  [[nodiscard]] Result<size_t> end_of_call(size_t begin);
  [[nodiscard]] Result<const float*> call_rows(size_t begin, size_t end);
  void fail_request();

  EdgeOptions options_;
  std::unique_ptr<EdgeModel> model_;
  EdgeLimits limits_;
  EngineCore core_;
  StepPlan plan_;
  SamplerOutput output_;
  std::unique_ptr<EdgeRowStage> rows_;
  std::vector<int64_t> visible_end_;  // of the real rows of the plan
  std::vector<int64_t> call_rows_;    // logits rows of a call
  std::vector<size_t> call_entries_;  // entries of the plan that they are
  std::vector<float> logits_;         // [n, V] of a plan that takes several calls
  std::atomic<int64_t> req_id_{-1};
  bool is_finished_ = false;
  EdgeStats stats_;
};

}  // namespace diffulex
