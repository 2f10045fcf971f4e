// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>

#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/options.h"
#include "diffulex/core/scheduler.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// What an embedder needs: a page manager and a scheduler under one options object. The calls are
/// those of Scheduler, with the same contracts and thread rule.
///
///   schedule(plan) -> run the model on the plan's arrays -> fill a SamplerOutput
///   -> complete_step(plan, output) -> read the events
class DIFFULEX_API EngineCore final {
 public:
  /// Precondition: options.validate() is ok; create() reports it as a value instead.
  explicit EngineCore(const EngineOptions& options);
  /// Validates, then builds.
  [[nodiscard]] static Result<std::unique_ptr<EngineCore>> create(const EngineOptions& options);

  [[nodiscard]] Result<int64_t> add_request(Span<const int32_t> token_ids,
                                            const SamplingParams& params);
  bool abort(int64_t req_id) { return scheduler_.abort(req_id); }
  [[nodiscard]] SchedulerStats stats() const { return scheduler_.stats(); }
  PlanKind schedule(StepPlan& plan) { return scheduler_.schedule(plan); }
  [[nodiscard]] Result<const StepEvents*> complete_step(StepPlan& plan,
                                                        const SamplerOutput& output) {
    return scheduler_.complete_step(plan, output);
  }
  [[nodiscard]] Status cancel_step(StepPlan& plan) { return scheduler_.cancel_step(plan); }
  [[nodiscard]] bool has_unfinished() const { return scheduler_.has_unfinished(); }
  [[nodiscard]] Result<RequestSnapshot> snapshot(int64_t req_id) const {
    return scheduler_.snapshot(req_id);
  }
  [[nodiscard]] const Request* find_request(int64_t req_id) const {
    return scheduler_.find_request(req_id);
  }
  [[nodiscard]] Result<RequestResult> take_result(int64_t req_id) {
    return scheduler_.take_result(req_id);
  }
  [[nodiscard]] Status preempt(int64_t req_id) { return scheduler_.preempt(req_id); }
  void release_all() { scheduler_.release_all(); }
  [[nodiscard]] Status check_integrity() const { return scheduler_.check_integrity(); }

  [[nodiscard]] const EngineOptions& options() const noexcept { return scheduler_.options(); }
  [[nodiscard]] Scheduler& scheduler() noexcept { return scheduler_; }
  [[nodiscard]] const KVCacheManager& kv_cache() const noexcept { return kv_cache_; }

 private:
  KVCacheManager kv_cache_;
  Scheduler scheduler_;
};

}  // namespace diffulex
