// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/multi_bd.h"

#include "core/strategy/strategy_base.h"

namespace diffulex {
namespace {

/// The shared life cycle without a deviation; the rules say whether the sampler may edit.
class MultiBd final : public Strategy {
 public:
  explicit MultiBd(const EngineOptions& options) : options_(options) {}

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

 private:
  EngineOptions options_;
};

}  // namespace

std::unique_ptr<Strategy> make_multi_bd(const EngineOptions& options) {
  return std::make_unique<MultiBd>(options);
}

}  // namespace diffulex
