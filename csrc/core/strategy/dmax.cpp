// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/dmax.h"

#include <algorithm>

#include "core/strategy/merge_descriptors.h"
#include "core/strategy/strategy_base.h"

namespace diffulex {
namespace {

class Dmax final : public Strategy {
 public:
  explicit Dmax(const EngineOptions& options) : options_(options) {}

  void init_request(Request& request) const override {
    init_mask_fill_request(options_, request);
    if (options_.token_merge_top_k > 0) {
      const auto num_positions = static_cast<int32_t>(request.confidences.size());
      init_merge(request.merge, num_positions, options_.token_merge_top_k);
    }
    if (stores_soft_embeddings()) {
      // Stored KV depends on the descriptors too, except that of full prompt blocks.
      request.share_limit = request.prompt_len / options_.block_size * options_.block_size;
    }
  }

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
    if (!request.merge.empty()) {
      write_merge_rows(request, plan, req_idx);
    }
  }

  void write_sampler_inputs(const Request& request, StepPlan& plan,
                            int32_t req_idx) const override {
    write_active_blocks(options_, request, plan, req_idx);
  }

  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override {
    const RequestOutput result{plan, req_idx, output, writes};
    const BlockRules& rules = request.buffer.rules();
    const int32_t old_frozen = frozen_end(rules, request.buffer.state());
    if (!request.merge.empty()) {
      apply_merge(request, result);
    }
    const StepOutcome outcome = finish_mask_fill_step(options_, request, result);
    if (!request.merge.empty() && !stores_soft_embeddings()) {
      drop_merge(request.merge, old_frozen, frozen_end(rules, request.buffer.state()));
    }
    return outcome;
  }

  [[nodiscard]] bool decodes_by_rules(const Request& request) const override {
    // Soft stores keep descriptors of frozen blocks, which are not among the sampler's last ones.
    return !stores_soft_embeddings() && mask_fill_decodes_by_rules(options_, request);
  }

  void on_preempt(Request& request) const override {
    preempt_mask_fill_request(options_, request);
    request.prefix_limit = std::min(request.prefix_limit, request.share_limit);
  }

 private:
  [[nodiscard]] bool stores_soft_embeddings() const noexcept {
    return options_.token_merge_top_k > 0 && options_.dmax_store_soft_embeddings;
  }

  EngineOptions options_;
};

}  // namespace

std::unique_ptr<Strategy> make_dmax(const EngineOptions& options) {
  return std::make_unique<Dmax>(options);
}

}  // namespace diffulex
