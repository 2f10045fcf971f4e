// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Decoding thresholds, each in [0, 1].
struct Thresholds {
  float add_block = 0.1F;        // progress of the last valid block that opens the next one
  float semi_complete = 0.9F;    // predecessor progress that grants the forced acceptance
  float accept = 0.9F;           // confidence that accepts a masked position
  float edit = 0.0F;             // confidence that overwrites a token (editing samplers)
  float remask = 0.4F;           // read by no sampler; kept for configuration files
  float token_stability = 0.0F;  // least same_token_ratio of the last block to open the next one
};

/// Temperatures below this are greedy.
inline constexpr float kGreedyTemperature = 1e-5F;

/// Per-request parameters.
struct SamplingParams {
  float temperature = 0.0F;        // >= 0; below kGreedyTemperature = greedy
  float top_p = 1.0F;              // >= 0; >= 1 = off. The filters act on sampled requests only
  int32_t top_k = 0;               // <= 0 = off
  float min_p = 0.0F;              // in [0, 1]; 0 = off
  int32_t max_tokens = 512;        // >= 1, generated tokens
  int32_t max_nfe = 0;             // cap on forwards; 0 = none
  int32_t max_repetition_run = 0;  // trailing equal tokens that end the request; 0 = none
  bool ignore_eos = false;         // stop ids do not end the request
  std::vector<int32_t> stop_token_ids;  // in addition to those of the engine
  // The first tokens of the answer: fixed where >= 0; -1, or the mask id: free. Stop ids end the
  // request at free positions. Only for strategies that never rewrite a token.
  std::vector<int32_t> template_token_ids;
  std::optional<uint64_t> seed;  // absent: the engine seed if greedy, else from it and the id
  // Present: override the field of Thresholds or of EngineOptions for this request.
  std::optional<float> accept_threshold;
  std::optional<float> edit_threshold;
  std::optional<float> add_block_threshold;
  std::optional<float> semi_complete_threshold;
  std::optional<float> token_stability_threshold;
  std::optional<int32_t> max_post_edit_steps;
  std::optional<float> penalty_lambda;

  /// Whether tokens are drawn at random.
  [[nodiscard]] bool is_sampled() const noexcept { return temperature >= kGreedyTemperature; }
  /// Whether a filter narrows the draws.
  [[nodiscard]] bool is_filtered() const noexcept {
    return is_sampled() && (top_p < 1.0F || top_k > 0 || min_p > 0.0F);
  }
  /// First violated range as kInvalidArgument.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

/// Largest token_merge_top_k: what the kernels take, kMergeMaxTopK of ops/merge.h. The
/// core includes no kernel header, so the number stands here a second time.
inline constexpr int32_t kMaxMergeTopK = 16;

/// What a strategy does that others do not; bits of a set.
enum StrategyTrait : uint32_t {
  kSeesWholePrompt = 1U << 0U,  // rows of a prompt see all of it, so that nothing of it is shared
  kHasCanvas = 1U << 1U,        // blocks are canvases: no mask token, blocks right after the prompt
  kHasDualCache = 1U << 2U,     // blocks of N sub-blocks with a separate block cache
  kMayEdit = 1U << 3U,          // samplers may rewrite tokens: is_editing
  kAlwaysEdits = 1U << 4U,      // they do, whatever is_editing says
  kMergesTokens = 1U << 5U,     // descriptors replace input embeddings: token_merge_top_k
  kShiftsLogits = 1U << 6U,     // models whose row predicts the next position: logits_shift
  kIsExportable = 1U << 7U,     // an exported program can be decoded by it
};

/// Traits of a built-in strategy; none for other names.
[[nodiscard]] DIFFULEX_API uint32_t strategy_traits(const std::string& name) noexcept;
/// The built-in strategies with a trait, for messages: "a, b or c".
[[nodiscard]] DIFFULEX_API std::string strategies_with(StrategyTrait trait);

/// Configuration of the core. Immutable once a scheduler was built from it.
struct EngineOptions {
#define DIFFULEX_OPTION(Type, name, value) Type name = value;
#include "diffulex/core/engine_options.def"
#undef DIFFULEX_OPTION

  /// Whether the strategy has a trait.
  [[nodiscard]] bool has(StrategyTrait trait) const noexcept {
    return (strategy_traits(strategy) & trait) != 0;
  }
  /// Whether the strategy may rewrite tokens of an ACTIVE block.
  [[nodiscard]] bool rewrites_tokens() const noexcept { return is_editing || has(kAlwaysEdits); }
  /// Whether requests say when a token is overwritten: all of them are, with kAlwaysEdits.
  [[nodiscard]] bool has_edits() const noexcept {
    return is_editing && has(kMayEdit) && !has(kAlwaysEdits);
  }
  /// Whether the first block starts where the prompt ends, which is then stored as a whole.
  [[nodiscard]] bool starts_at_prompt() const noexcept {
    return has(kSeesWholePrompt) && !d2f_block_grid;
  }
  /// Whether the KV of a forward that rewrites none of a block's tokens is the block's final KV:
  /// mixed embeddings are not what is stored.
  [[nodiscard]] bool stores_settled() const noexcept {
    return rewrites_tokens() && token_merge_top_k == 0;
  }
  /// Whether blocks are canvases: no mask token, blocks right after the prompt.
  [[nodiscard]] bool has_canvas() const noexcept { return has(kHasCanvas); }
  /// Whether decoding runs over blocks of N sub-blocks with a separate block cache.
  [[nodiscard]] bool has_dual_cache() const noexcept { return has(kHasDualCache); }
  /// Whether KV may be shared between requests: not where the KV of a prompt position depends on
  /// the whole prompt.
  [[nodiscard]] bool shares_prefixes() const noexcept {
    return enable_prefix_caching && !has(kSeesWholePrompt);
  }

  /// Rows of one request in its largest decode step: B * N.
  [[nodiscard]] int32_t decode_rows() const noexcept { return block_size * buffer_size; }
  /// Block size of the visibility rule: B, or D = B * N with a dual cache.
  [[nodiscard]] int32_t att_block_size() const noexcept {
    return has_dual_cache() ? decode_rows() : block_size;
  }
  /// Positions a response that ends at `limit_end` may need pages for.
  [[nodiscard]] int32_t page_span(int32_t limit_end) const noexcept {
    const int32_t unit = has_dual_cache() ? decode_rows() : 1;
    return (limit_end + unit - 1) / unit * unit;
  }
  /// Pages that cover positions [0, len).
  [[nodiscard]] int32_t num_pages_for(int32_t len) const noexcept {
    return (len + page_size - 1) / page_size;
  }
  /// Page-table width: pages of the longest response.
  [[nodiscard]] int32_t max_pages_per_req() const noexcept {
    return num_pages_for(page_span(max_model_len));
  }

  /// First violated rule as kInvalidArgument, or kUnsupported for an unknown strategy.
  [[nodiscard]] DIFFULEX_API Status validate() const;
};

}  // namespace diffulex
