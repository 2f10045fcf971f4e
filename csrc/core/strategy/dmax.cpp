// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>

#include "core/strategy/mask_fill.h"
#include "core/strategy/merge_descriptors.h"
#include "core/strategy/strategies.h"

namespace diffulex {
namespace {

/// The life cycle of multi_bd under editing rules, with token-merge descriptors: what the sampler
/// says about a token replaces its input embedding in the next forward. A block that is frozen
/// drops its descriptors, so that the stored KV is a function of the tokens, unless
/// dmax_store_soft_embeddings keeps them.
class Dmax final : public MaskFillStrategy {
 public:
  using MaskFillStrategy::MaskFillStrategy;

  void init_request(Request& request) const override {
    MaskFillStrategy::init_request(request);
    if (options().token_merge_top_k > 0) {
      const auto num_positions = static_cast<int32_t>(request.confidences.size());
      init_merge(request.merge, num_positions, options().token_merge_top_k);
    }
    if (stores_soft_embeddings()) {
      // Stored KV depends on the descriptors too, except that of full prompt blocks.
      request.share_limit = request.prompt_len / options().block_size * options().block_size;
    }
  }

  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    MaskFillStrategy::write_rows(request, kv_cache, plan, req_idx);
    if (!request.merge.empty()) {
      write_merge_rows(request, plan, req_idx);
    }
  }

  [[nodiscard]] StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                        const SamplerOutput& output,
                                        Span<const BlockWrite> writes) const override {
    const BlockRules& rules = request.buffer.rules();
    const int32_t old_frozen = frozen_end(rules, request.buffer.state());
    if (!request.merge.empty()) {
      apply_merge(request, {plan, req_idx, output, writes});
    }
    const StepOutcome outcome =
        MaskFillStrategy::finish_step(request, plan, req_idx, output, writes);
    if (!request.merge.empty() && !stores_soft_embeddings()) {
      drop_merge(request.merge, old_frozen, frozen_end(rules, request.buffer.state()));
    }
    return outcome;
  }

  [[nodiscard]] bool decodes_by_rules(const Request& request) const override {
    // Soft stores keep descriptors of frozen blocks, which are not among the sampler's last ones.
    return !stores_soft_embeddings() && MaskFillStrategy::decodes_by_rules(request);
  }

  void on_preempt(Request& request) const override {
    MaskFillStrategy::on_preempt(request);
    request.prefix_limit = std::min(request.prefix_limit, request.share_limit);
  }

 private:
  [[nodiscard]] bool stores_soft_embeddings() const noexcept {
    return options().token_merge_top_k > 0 && options().dmax_store_soft_embeddings;
  }
};

}  // namespace

std::unique_ptr<Strategy> make_dmax(const EngineOptions& options) {
  return std::make_unique<Dmax>(options);
}

}  // namespace diffulex
