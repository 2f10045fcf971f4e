// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "core/strategy/mask_fill.h"
#include "core/strategy/strategies.h"

namespace diffulex {
namespace {

/// Several blocks in flight after a prompt whose rows all see the whole prompt. The KV of a prompt
/// position therefore depends on every prompt token: nothing is shared between requests, and KV
/// lost to a preemption is rebuilt by two forwards, the prompt's and that of the blocks after it.
class D2f final : public MaskFillStrategy {
 public:
  using MaskFillStrategy::MaskFillStrategy;

  void init_request(Request& request) const override {
    MaskFillStrategy::init_request(request);
    request.prefix_limit = 0;
    request.share_limit = 0;
  }

  [[nodiscard]] StepNeed pages_needed(const Request& request,
                                      const StepQuery& query) const override {
    if (!rebuilds_prompt(request, query.context_len)) {
      return MaskFillStrategy::pages_needed(request, query);
    }
    StepNeed need;
    need.is_prefill = true;
    need.is_final = starts_at_prompt() || request.resume_until == stored_prompt_end(request);
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
    MaskFillStrategy::begin_step(request, need);
    if (!is_prompt) {
      return;
    }
    RequestStep& step = request.step;
    step.row_mode = RowMode::kPrefillPrefixFull;
    if (!starts_at_prompt()) {
      step.store_end =
          stored_prompt_end(request);  // the tail is seen by the rest, though not stored
      step.saved_pos = options().logits_shift ? step.store_end - 1 : -1;
      mark_stored(request.buffer.rules(), request.buffer.state(), step.first_pos, step.store_end);
    }
  }

  void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                  int32_t req_idx) const override {
    MaskFillStrategy::write_rows(request, kv_cache, plan, req_idx);
    if (request.step.row_mode == RowMode::kPrefillPrefixFull) {
      const auto r = static_cast<size_t>(req_idx);
      const int32_t block_size = options().block_size;
      plan.prefix_lens()[r] = request.prompt_len;
      if (!starts_at_prompt()) {
        plan.padded_prefix_lens()[r] =
            (request.prompt_len + block_size - 1) / block_size * block_size;
      }
    }
  }

  void on_preempt(Request& request) const override {
    // A prompt forward that never ended also was the first denoising step under full visibility; a
    // decode step would not repeat it exactly. The request starts over instead.
    const bool starts_over = request.needs_prompt_prefill;
    MaskFillStrategy::on_preempt(request);
    request.prefix_limit = 0;
    if (starts_over) {
      request.needs_prompt_prefill = true;
      request.resume_until = 0;
    }
  }

 private:
  /// As options().starts_at_prompt().
  [[nodiscard]] bool starts_at_prompt() const noexcept { return !options().d2f_block_grid; }
  /// End of the prompt's KV: on the grid its tail is stored with the block that it begins.
  [[nodiscard]] int32_t stored_prompt_end(const Request& request) const noexcept {
    return starts_at_prompt() ? request.prompt_len
                              : request.prompt_len / options().block_size * options().block_size;
  }
  /// Whether the next resume forward is that of the prompt.
  [[nodiscard]] bool rebuilds_prompt(const Request& request, int32_t context_len) const noexcept {
    return request.resume_until > 0 && context_len < stored_prompt_end(request);
  }
  /// End of that forward. The blocks after the prompt see what is stored of it, so they are
  /// rebuilt along with it; on the grid the rows of a tail are not what is stored, and blocks come
  /// later.
  [[nodiscard]] int32_t rebuild_end(const Request& request) const noexcept {
    return starts_at_prompt() ? request.resume_until : request.prompt_len;
  }
};

}  // namespace

std::unique_ptr<Strategy> make_d2f(const EngineOptions& options) {
  return std::make_unique<D2f>(options);
}

}  // namespace diffulex
