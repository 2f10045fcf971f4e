// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/block_buffer.h"

#include <algorithm>

namespace diffulex {

BlockRules make_block_rules(const EngineOptions& options) {
  BlockRules rules;
  rules.block_size = options.block_size;
  rules.buffer_size = options.buffer_size;
  rules.mask_token_id = options.mask_token_id;
  rules.vocab_size = options.vocab_size;
  rules.add_block_threshold = options.thresholds.add_block;
  rules.semi_complete_threshold = options.thresholds.semi_complete;
  rules.token_stability_threshold = options.thresholds.token_stability;
  rules.is_editing = options.rewrites_tokens();
  rules.is_canvas = options.has_canvas();
  rules.starts_at_prompt = options.starts_at_prompt();
  rules.stores_settled = options.stores_settled();
  return rules;
}

BlockRules make_block_rules(const EngineOptions& options, const SamplingParams& params) {
  BlockRules rules = make_block_rules(options);
  rules.add_block_threshold = params.add_block_threshold.value_or(rules.add_block_threshold);
  rules.semi_complete_threshold =
      params.semi_complete_threshold.value_or(rules.semi_complete_threshold);
  rules.token_stability_threshold =
      params.token_stability_threshold.value_or(rules.token_stability_threshold);
  return rules;
}

void BlockBuffer::init(Span<const int32_t> prompt, int32_t limit_end, Span<const int32_t> fixed) {
  const auto prompt_len = static_cast<int32_t>(prompt.size());
  DIFFULEX_CHECK(prompt_len > 0 && prompt_len < limit_end,
                 "BlockBuffer::init: expected 0 < prompt length < ", limit_end, ", got ",
                 prompt_len);
  DIFFULEX_CHECK(fixed.size() <= static_cast<size_t>(limit_end - prompt_len),
                 "BlockBuffer::init: expected at most ", limit_end - prompt_len,
                 " tokens after the prompt, got ", fixed.size());
  // The buffer never starts past the block of the last response position.
  const int32_t last_head = (limit_end - 1) / rules_.block_size;
  // Blocks that start after the prompt start anywhere: the last one reaches up to one further.
  const bool starts_anywhere = rules_.is_canvas || rules_.starts_at_prompt;
  const int32_t num_blocks = last_head + rules_.buffer_size + (starts_anywhere ? 1 : 0);
  const auto capacity = static_cast<size_t>(num_blocks) * static_cast<size_t>(rules_.block_size);
  tokens_.assign(capacity, rules_.mask_token_id);
  std::copy(prompt.begin(), prompt.end(), tokens_.begin());
  std::transform(fixed.begin(), fixed.end(), tokens_.begin() + prompt_len,
                 [this](int32_t id) { return id < 0 ? rules_.mask_token_id : id; });
  has_fixed_ = fixed.size() > 0;
  init_buffer(rules_, state_, prompt_len, limit_end);
  for (int32_t i = 0; has_fixed_ && i < state_.num_valid; ++i) {
    count_masks(i);
  }
}

int32_t BlockBuffer::open_masks(const Block& block) const {
  const int32_t* tokens = tokens_.data() + block_start(rules_, state_, block);
  return static_cast<int32_t>(
      std::count(tokens + block.editable_start, tokens + rules_.block_size, rules_.mask_token_id));
}

void BlockBuffer::count_masks(int32_t index) {
  Block& block = state_.blocks[index];
  block.num_masks = open_masks(block);
}

Span<const int32_t> BlockBuffer::tokens() const noexcept {
  if (tokens_.empty()) {
    return {};
  }
  return Span<const int32_t>(tokens_.data(),
                             static_cast<size_t>(start() + rules_.buffer_size * rules_.block_size));
}

const Block& BlockBuffer::block(int32_t index) const {
  DIFFULEX_CHECK(index >= 0 && index < rules_.buffer_size,
                 "BlockBuffer::block: expected an index in [0, ", rules_.buffer_size, "), got ",
                 index);
  return state_.blocks[index];
}

Span<const int32_t> BlockBuffer::block_tokens(int32_t index) const {
  const auto begin = static_cast<size_t>(block_start(rules_, state_, block(index)));
  if (tokens_.empty()) {
    return {};
  }
  return tokens().subspan(begin, static_cast<size_t>(rules_.block_size));
}

BlockStatus BlockBuffer::block_status(int32_t block_id) const noexcept {
  const int32_t index = block_id - state_.blocks[0].block_id;
  if (index < 0) {
    const int32_t end = state_.origin + (block_id + 1) * rules_.block_size;
    return end <= state_.context_len ? BlockStatus::kInCache : BlockStatus::kToCache;
  }
  return index < rules_.buffer_size ? state_.blocks[index].status : BlockStatus::kDummy;
}

Status BlockBuffer::check_integrity() const {
  DIFFULEX_RETURN_IF_ERROR(check_blocks());
  return check_output_facts();
}

Status BlockBuffer::check_blocks() const {
  const int32_t block_size = rules_.block_size;
  if (tokens_.size() < static_cast<size_t>(start() + rules_.buffer_size * block_size)) {
    return make_error(StatusCode::kInternal, "BlockBuffer: expected tokens up to the buffer end, ",
                      "got ", tokens_.size());
  }
  // Under causal visibility the KV of final tokens may be stored in any portion.
  const int32_t unit = rules_.is_canvas ? 1 : block_size;
  const int32_t end = rules_.is_canvas ? frozen_end(rules_, state_) : start();
  // Of a prompt before block 0 all is stored at once.
  const int32_t first = rules_.starts_at_prompt ? state_.origin : 0;
  const bool is_empty = state_.context_len == 0;
  if (!is_empty && (state_.context_len < first || (state_.context_len - first) % unit != 0 ||
                    state_.context_len > end)) {
    return make_error(StatusCode::kInternal, "BlockBuffer: expected context_len 0 or ", first,
                      " plus a multiple of ", unit, " at most ", end, ", got ", state_.context_len);
  }
  bool has_active = false;
  for (int32_t i = 0; i < rules_.buffer_size; ++i) {
    const Block& block = state_.blocks[i];
    const bool is_dummy = block.status == BlockStatus::kDummy;
    if (block.block_id != state_.blocks[0].block_id + i || is_dummy != (i >= state_.num_valid)) {
      return make_error(StatusCode::kInternal, "BlockBuffer: expected consecutive blocks with ",
                        state_.num_valid, " valid, got block ", block.block_id, " ",
                        to_string(block.status), " at ", i);
    }
    const bool is_frozen =
        block.status == BlockStatus::kToCache || block.status == BlockStatus::kInCache;
    if (is_frozen && has_active) {
      return make_error(StatusCode::kInternal, "BlockBuffer: expected no frozen block behind an ",
                        "ACTIVE one, got block ", block.block_id);
    }
    if (block.status == BlockStatus::kInCache) {
      return make_error(StatusCode::kInternal, "BlockBuffer: expected no IN_CACHE block in the ",
                        "buffer between steps, got block ", block.block_id);
    }
    has_active = has_active || block.status == BlockStatus::kActive;
    // Tokens that stand from the start are counted when their block becomes ACTIVE.
    const int32_t num_masks = rules_.is_canvas         ? 0
                              : is_dummy && has_fixed_ ? block_size
                                                       : open_masks(block);
    if (num_masks != block.num_masks || (is_frozen && num_masks != 0) ||
        (is_dummy && num_masks != block_size && !rules_.is_canvas)) {
      return make_error(StatusCode::kInternal, "BlockBuffer: expected ", num_masks,
                        " open masks in ", to_string(block.status), " block ", block.block_id,
                        ", got ", block.num_masks);
    }
  }
  return {};
}

Status BlockBuffer::check_output_facts() const {
  int32_t settled = state_.prompt_len;
  int32_t run_len = 0;
  const auto token_at = [this](int32_t position) { return tokens_[static_cast<size_t>(position)]; };
  const bool settles_frozen = rules_.is_editing || rules_.is_canvas;
  const int32_t settle_limit =
      settles_frozen ? std::min(frozen_end(rules_, state_), state_.limit_end) : state_.limit_end;
  while (settled < settle_limit &&
         (rules_.is_canvas || token_at(settled) != rules_.mask_token_id)) {
    const bool repeats = settled > state_.prompt_len && token_at(settled) == token_at(settled - 1);
    run_len = repeats ? run_len + 1 : 1;
    ++settled;
  }
  // Tokens that stand from the start settle with the first step, which reports them.
  const bool is_new = has_fixed_ && state_.settled_end == state_.prompt_len && state_.run_len == 0;
  if (!is_new && (settled != state_.settled_end || run_len != state_.run_len)) {
    return make_error(StatusCode::kInternal, "BlockBuffer: expected settled_end ", settled,
                      " and run_len ", run_len, ", got ", state_.settled_end, " and ",
                      state_.run_len);
  }
  int32_t stop_pos = kNoPosition;
  // Stop ids of a canvas count once it is committed.
  const int32_t end =
      std::min(rules_.is_canvas ? settled : valid_end(rules_, state_), state_.limit_end);
  for (int32_t position = end - 1; position >= state_.prompt_len; --position) {
    // Masks are looked up too: a mask id is never a stop id.
    if (is_stop_id(state_, token_at(position))) {
      stop_pos = position;
    }
  }
  if (stop_pos != state_.stop_pos) {
    return make_error(StatusCode::kInternal, "BlockBuffer: expected stop_pos ", stop_pos, ", got ",
                      state_.stop_pos);
  }
  return {};
}

}  // namespace diffulex
