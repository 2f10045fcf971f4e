// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/strategy/strategy_base.h"
#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// The life cycle of strategies with a block buffer, whole. One that differs in a phase overrides
/// that hook and calls the one of this class for what it keeps. If its decode steps are no longer
/// those of decode_rules.h, it overrides decodes_by_rules as well: a device that runs ahead knows
/// no hooks.
class MaskFillStrategy : public Strategy {
 public:
  explicit MaskFillStrategy(const EngineOptions& options) : options_(options) {}

  void init_request(Request& request) const override { init_mask_fill_request(options_, request); }

  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override {
    return mask_fill_need(options_, request, query);
  }

  void begin_step(Request& request, const StepNeed& need) const override {
    begin_mask_fill_step(options_, request, need);
  }

  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    write_block_causal_rows(request, kv_cache, plan, req_idx);
  }

  void write_sampler_inputs(const Request& request, StepPlan& plan,
                            int32_t req_idx) const override {
    write_active_blocks(options_, request, plan, req_idx);
  }

  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override {
    return finish_mask_fill_step(options_, request, {plan, req_idx, output, writes});
  }

  void on_preempt(Request& request) const override { preempt_mask_fill_request(options_, request); }

  [[nodiscard]] bool decodes_by_rules(const Request& request) const override {
    return mask_fill_decodes_by_rules(options_, request);
  }

 protected:
  [[nodiscard]] const EngineOptions& options() const noexcept { return options_; }

 private:
  EngineOptions options_;
};

}  // namespace diffulex
