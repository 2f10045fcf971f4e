// SPDX-License-Identifier: Apache-2.0
#include "core/strategy/d2f.h"

#include <algorithm>

#include "core/strategy/strategy_base.h"

namespace diffulex {
namespace {

class D2f final : public Strategy {
 public:
  explicit D2f(const EngineOptions& options) : options_(options) {}

  void init_request(Request& request) const override {
    init_mask_fill_request(options_, request);
    request.prefix_limit = 0;
    request.share_limit = 0;
  }

  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override {
    if (!rebuilds_prompt(request, query.context_len)) {
      return mask_fill_need(options_, request, query);
    }
    StepNeed need;
    need.is_prefill = true;
    need.is_final =
        options_.starts_at_prompt() || request.resume_until == stored_prompt_end(request);
    need.num_rows = rebuild_end(request);
    // The pages of the second forward as well: two requests that resume would otherwise take them
    // from each other in every step.
    need.page_len = request.resume_until;
    if (need.num_rows > query.row_budget) {
      need.is_final = false;
      need.num_rows = 0;
    }
    return need;
  }

  void begin_step(Request& request, const StepNeed& need) const override {
    const bool is_prompt = need.is_prefill && (request.needs_prompt_prefill ||
                                               rebuilds_prompt(request, request.context_len()));
    begin_mask_fill_step(options_, request, need);
    if (!is_prompt) {
      return;
    }
    RequestStep& step = request.step;
    step.row_mode = RowMode::kPrefillPrefixFull;
    if (!options_.starts_at_prompt()) {
      step.store_end =
          stored_prompt_end(request);  // the tail is seen by the rest, though not stored
      step.saved_pos = options_.logits_shift ? step.store_end - 1 : -1;
      mark_stored(request.buffer.rules(), request.buffer.state(), step.first_pos, step.store_end);
    }
  }

  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    write_block_causal_rows(request, kv_cache, plan, req_idx);
    if (request.step.row_mode == RowMode::kPrefillPrefixFull) {
      const auto r = static_cast<size_t>(req_idx);
      const int32_t block_size = options_.block_size;
      plan.prefix_lens()[r] = request.prompt_len;
      if (!options_.starts_at_prompt()) {
        plan.padded_prefix_lens()[r] =
            (request.prompt_len + block_size - 1) / block_size * block_size;
      }
    }
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

  void on_preempt(Request& request) const override {
    // A prompt forward that never ended also was the first denoising step under full visibility; a
    // decode step would not repeat it exactly. The request starts over instead.
    const bool starts_over = request.needs_prompt_prefill;
    preempt_mask_fill_request(options_, request);
    request.prefix_limit = 0;
    if (starts_over) {
      request.needs_prompt_prefill = true;
      request.resume_until = 0;
    }
  }

  [[nodiscard]] bool decodes_by_rules(const Request& request) const override {
    return mask_fill_decodes_by_rules(options_, request);
  }

 private:
  /// End of the prompt's KV: on the grid its tail is stored with the block that it begins.
  [[nodiscard]] int32_t stored_prompt_end(const Request& request) const noexcept {
    return options_.starts_at_prompt()
               ? request.prompt_len
               : request.prompt_len / options_.block_size * options_.block_size;
  }
  /// Whether the next resume forward is that of the prompt.
  [[nodiscard]] bool rebuilds_prompt(const Request& request, int32_t context_len) const noexcept {
    return request.resume_until > 0 && context_len < stored_prompt_end(request);
  }
  /// End of that forward. The blocks after the prompt see what is stored of it, so they are
  /// rebuilt along with it; on the grid the rows of a tail are not what is stored, and blocks come
  /// later.
  [[nodiscard]] int32_t rebuild_end(const Request& request) const noexcept {
    return options_.starts_at_prompt() ? request.resume_until : request.prompt_len;
  }

  EngineOptions options_;
};

}  // namespace

std::unique_ptr<Strategy> make_d2f(const EngineOptions& options) {
  return std::make_unique<D2f>(options);
}

}  // namespace diffulex
