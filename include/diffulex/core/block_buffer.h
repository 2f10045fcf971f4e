// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/options.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// The constants of the block rules under `options`.
[[nodiscard]] DIFFULEX_API BlockRules make_block_rules(const EngineOptions& options);
/// The same with the thresholds that `params` overrides.
[[nodiscard]] DIFFULEX_API BlockRules make_block_rules(const EngineOptions& options,
                                                       const SamplingParams& params);

/// Window of exactly N consecutive blocks of one request together with its token store. Owns the
/// storage; every transition is a function of block_rules.h on state() and token_data().
class DIFFULEX_API BlockBuffer final {
 public:
  /// An empty buffer; init() makes it usable.
  explicit BlockBuffer(const BlockRules& rules) : rules_(rules) {}

  /// Places the prompt and opens the buffer after its full blocks. Allocates the token store once,
  /// so that no later step does. Precondition: 0 < prompt.size() < limit_end.
  ///
  /// `fixed` are tokens that follow the prompt from the start, up to limit_end; negative ones and
  /// masks are open. A block counts them once it is ACTIVE: count_masks.
  void init(Span<const int32_t> prompt, int32_t limit_end, Span<const int32_t> fixed = {});

  /// Recounts the open masks of buffer block `index`, which has just become ACTIVE.
  void count_masks(int32_t index);

  [[nodiscard]] const BlockRules& rules() const noexcept { return rules_; }
  [[nodiscard]] BufferState& state() noexcept { return state_; }
  [[nodiscard]] const BufferState& state() const noexcept { return state_; }

  /// Token store by absolute position; holds the mask id beyond the buffer.
  [[nodiscard]] int32_t* token_data() noexcept { return tokens_.data(); }
  [[nodiscard]] const int32_t* token_data() const noexcept { return tokens_.data(); }
  /// Tokens from position 0 to the end of the buffer; none before init().
  [[nodiscard]] Span<const int32_t> tokens() const noexcept;
  /// Tokens of buffer block `index`; none before init().
  [[nodiscard]] Span<const int32_t> block_tokens(int32_t index) const;

  [[nodiscard]] int32_t size() const noexcept { return rules_.buffer_size; }
  [[nodiscard]] int32_t num_valid() const noexcept { return state_.num_valid; }
  /// Buffer block `index` in [0, size()).
  [[nodiscard]] const Block& block(int32_t index) const;
  [[nodiscard]] int32_t start() const noexcept { return buffer_start(rules_, state_); }
  /// Status of any block of the request by id, those before the buffer included.
  [[nodiscard]] BlockStatus block_status(int32_t block_id) const noexcept;

  /// Invariants I1, I2, I3, I5 and the incrementally kept facts, recomputed from the tokens.
  /// O(sequence length).
  [[nodiscard]] Status check_integrity() const;

 private:
  [[nodiscard]] Status check_blocks() const;
  [[nodiscard]] Status check_output_facts() const;
  /// Masks of a block at positions that may be written.
  [[nodiscard]] int32_t open_masks(const Block& block) const;

  BlockRules rules_;
  BufferState state_;
  std::vector<int32_t> tokens_;
  bool has_fixed_ = false;
};

}  // namespace diffulex
