// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "core/toy_model.h"
#include "core/toy_sampler.h"
#include "diffulex/core/options.h"
#include "diffulex/core/philox.h"
#include "diffulex/core/status_enums.h"

// The oracle of the property tests: block-buffer decoding of one request as the specification
// describes it, without cache, pages, batches or preemption. Every step runs all positions again
// (under d2f all behind the prompt, whose keys are those of the first forward) and recounts
// everything from the tokens. The prompt and the first blocks share the first forward. Under d2f as
// published block 0 starts where the prompt ends; on the grid blocks are those of the positions.

namespace diffulex::test {

struct BruteForceResult {
  std::vector<int32_t> output;
  FinishReason reason = FinishReason::kNone;
  int32_t nfe = 0;
};

class BruteForceDecoder {
 public:
  /// `stores_early` false: every block takes a forward of its own to be stored.
  BruteForceDecoder(const EngineOptions& options, const std::vector<int32_t>& prompt,
                    const SamplingParams& params, bool stores_early = true)
      : options_(options),
        stores_early_(stores_early),
        params_(params),
        prompt_len_(static_cast<int32_t>(prompt.size())),
        limit_end_(std::min(prompt_len_ + params.max_tokens, options.max_model_len)),
        tokens_(prompt.begin(), prompt.end()) {
    if (!params.ignore_eos) {
      stops_.insert(options.stop_token_ids.begin(), options.stop_token_ids.end());
      stops_.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
    }
    first_ = is_d2f() && !options.d2f_block_grid ? prompt_len_ : 0;
    head_ = (prompt_len_ - first_) / options.block_size;
    if ((prompt_len_ - first_) % options.block_size > 0) {
      open_block();
    }
  }

  BruteForceResult decode() {
    BruteForceResult result;
    while (result.reason == FinishReason::kNone) {
      activate();
      step();
      ++result.nfe;
      result.reason = stop_reason(result.nfe);
    }
    const int32_t end = std::min(settled_end(), first_stop());
    for (int32_t p = prompt_len_; p < end; ++p) {
      result.output.push_back(token_at(p));
    }
    return result;
  }

 private:
  struct ValidBlock {
    BlockStatus status = BlockStatus::kActive;
    int32_t num_steps = 0;
    int32_t open_steps = 0;
    int32_t post_edit_steps = 0;
    float same_token_ratio = 1.0F;
  };

  [[nodiscard]] bool is_d2f() const { return options_.strategy == "d2f"; }
  [[nodiscard]] bool is_editing() const {
    return options_.is_editing || options_.strategy == "dmax";
  }
  /// End of the prompt whose keys are those of the first forward.
  [[nodiscard]] int32_t kept_prompt_end() const {
    return first_ > 0 ? first_ : prompt_len_ / options_.block_size * options_.block_size;
  }
  /// Whether a forward over tokens that do not change any more makes the keys that are stored.
  [[nodiscard]] bool makes_final_keys() const {
    return stores_early_ && is_editing() && options_.token_merge_top_k == 0;
  }
  [[nodiscard]] int32_t mask() const { return options_.mask_token_id; }
  [[nodiscard]] int32_t start_of(size_t i) const {
    return first_ + (head_ + static_cast<int32_t>(i)) * options_.block_size;
  }
  [[nodiscard]] bool is_open(int32_t position) const {
    return position >= prompt_len_ && tokens_[static_cast<size_t>(position)] == mask();
  }
  /// Token of a template, -1 where none is fixed.
  [[nodiscard]] int32_t fixed_at(int32_t position) const {
    const auto at = static_cast<size_t>(position - prompt_len_);
    const bool is_inside = position >= prompt_len_ && at < params_.template_token_ids.size();
    return is_inside ? params_.template_token_ids[at] : -1;
  }
  /// What stands at a position, also where no block was opened yet.
  [[nodiscard]] int32_t token_at(int32_t position) const {
    const auto at = static_cast<size_t>(position);
    const int32_t fixed = fixed_at(position);
    return at < tokens_.size() ? tokens_[at] : fixed < 0 ? mask() : fixed;
  }
  [[nodiscard]] int32_t num_open(size_t i) const {
    int32_t count = 0;
    for (int32_t p = start_of(i); p < start_of(i) + options_.block_size; ++p) {
      count += is_open(p) ? 1 : 0;
    }
    return count;
  }
  [[nodiscard]] float progress(size_t i) const {
    return static_cast<float>(options_.block_size - num_open(i)) /
           static_cast<float>(options_.block_size);
  }
  [[nodiscard]] int32_t settled_end() const {
    int32_t end = prompt_len_;
    if (is_editing()) {
      size_t num_frozen = 0;
      while (num_frozen < blocks_.size() && blocks_[num_frozen].status == BlockStatus::kToCache) {
        ++num_frozen;
      }
      return std::min(std::max(start_of(num_frozen), prompt_len_), limit_end_);
    }
    while (end < limit_end_ && token_at(end) != mask()) {
      ++end;
    }
    return end;
  }
  [[nodiscard]] int32_t first_stop() const {
    const int32_t end = std::min(limit_end_, static_cast<int32_t>(tokens_.size()));
    for (int32_t p = prompt_len_; p < end; ++p) {
      if (stops_.count(tokens_[static_cast<size_t>(p)]) > 0) {
        return p;
      }
    }
    return 1 << 30;
  }

  void open_block() {
    blocks_.emplace_back();
    const auto begin = static_cast<int32_t>(tokens_.size());
    const int32_t end = start_of(blocks_.size());
    for (int32_t p = begin; p < end; ++p) {
      tokens_.push_back(fixed_at(p) < 0 ? mask() : fixed_at(p));
    }
    soft_.resize(tokens_.size());
  }

  void activate() {
    const auto cursor = blocks_.size();
    if (cursor == static_cast<size_t>(options_.buffer_size) || start_of(cursor) >= limit_end_ ||
        first_stop() < limit_end_) {
      return;
    }
    const Thresholds& defaults = options_.thresholds;
    if (cursor > 0 &&
        (progress(cursor - 1) < params_.add_block_threshold.value_or(defaults.add_block) ||
         blocks_[cursor - 1].same_token_ratio <
             params_.token_stability_threshold.value_or(defaults.token_stability))) {
      return;
    }
    open_block();
  }

  /// Outputs of the model by position; those of rows that were not run again are the kept ones.
  const std::vector<uint64_t>& forward() {
    const bool is_first = outputs_.empty();
    const size_t base = is_d2f() && !is_first ? static_cast<size_t>(kept_prompt_end()) : 0;
    std::vector<int64_t> inputs;
    std::vector<int32_t> visible;
    for (size_t p = base; p < tokens_.size(); ++p) {
      const bool is_soft = p < soft_.size() && soft_[p].is_valid();
      inputs.push_back(is_soft ? toy_soft_token(soft_[p]) : tokens_[p]);
      const auto position = static_cast<int32_t>(p);
      int32_t end = 0;
      if (is_d2f() && is_first && position < prompt_len_) {
        end = prompt_len_;
      } else {
        end = first_ + ((position - first_) / options_.block_size + 1) * options_.block_size;
      }
      visible.push_back(end);
    }
    const std::vector<ToyKey> context(prompt_keys_.begin(),
                                      prompt_keys_.begin() + static_cast<std::ptrdiff_t>(base));
    std::vector<ToyKey> keys;
    const std::vector<uint64_t> outputs = toy_forward(context, inputs, visible, keys);
    if (is_d2f() && is_first) {
      prompt_keys_.assign(keys.begin(), keys.begin() + kept_prompt_end());
    }
    outputs_.resize(tokens_.size());
    std::copy(outputs.begin(), outputs.end(), outputs_.begin() + static_cast<std::ptrdiff_t>(base));
    return outputs_;
  }

  void step() {
    const std::vector<uint64_t>& outputs = forward();
    const float semi_complete =
        params_.semi_complete_threshold.value_or(options_.thresholds.semi_complete);
    std::vector<bool> gates;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      gates.push_back(i == 0 || progress(i - 1) >= semi_complete);
    }
    const std::vector<ValidBlock> before = blocks_;
    const std::vector<int32_t> tokens_before = tokens_;
    std::vector<bool> is_ready(blocks_.size(), false);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].status == BlockStatus::kActive) {
        is_ready[i] = sample(i, gates[i], outputs);
      }
    }
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const bool is_next = i == 0 || blocks_[i - 1].status == BlockStatus::kToCache;
      if (blocks_[i].status == BlockStatus::kActive && num_open(i) == 0 && is_ready[i] && is_next) {
        blocks_[i].status = BlockStatus::kToCache;
        if (!options_.dmax_store_soft_embeddings) {
          std::fill_n(soft_.begin() + start_of(i), options_.block_size, ToyDescriptor());
        }
      }
    }
    size_t stored = 0;
    while (stored < before.size() && before[stored].status == BlockStatus::kToCache) {
      ++stored;  // frozen before this forward, hence stored by it
    }
    // Blocks that this forward ran on their final tokens need no other one. They keep their places
    // while others are refined, for when a block is opened must not depend on it.
    size_t final = stored;
    while (makes_final_keys() && final < blocks_.size() && is_unchanged(final, tokens_before)) {
      ++final;
    }
    stored = final == blocks_.size() ? final : stored;
    blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(stored));
    head_ += static_cast<int32_t>(stored);
  }

  /// Whether block i is frozen and holds what it held before the step.
  [[nodiscard]] bool is_unchanged(size_t i, const std::vector<int32_t>& before) const {
    const int32_t start = start_of(i);
    return blocks_[i].status == BlockStatus::kToCache &&
           std::equal(tokens_.begin() + start, tokens_.begin() + start + options_.block_size,
                      before.begin() + start);
  }

  /// Returns whether the block may be frozen.
  bool sample(size_t i, bool gate, const std::vector<uint64_t>& outputs) {
    const bool is_greedy = params_.temperature < kGreedyTemperature;
    ValidBlock& state = blocks_[i];
    const int32_t draw = state.num_steps++;
    const int32_t start = start_of(i);
    ToyBlock block;
    block.editable_start = std::max(prompt_len_ - start, 0);
    block.mask_token_id = mask();
    block.gate = gate;
    block.accept_threshold = params_.accept_threshold.value_or(options_.thresholds.accept);
    block.edit_threshold = params_.edit_threshold.value_or(options_.thresholds.edit);
    block.open_steps = state.open_steps;
    block.post_edit_steps = state.post_edit_steps;
    for (int32_t p = start; p < start + options_.block_size; ++p) {
      block.tokens.push_back(tokens_[static_cast<size_t>(p)]);
      if (p < prompt_len_ || (!is_open(p) && !is_editing())) {
        block.proposals.push_back(-1);
        block.confidence.push_back(0.0F);
        continue;
      }
      const uint64_t output = outputs[static_cast<size_t>(options_.logits_shift ? p - 1 : p)];
      const double uniform =
          is_greedy ? 0.5 : philox_uniform(params_.seed.value(), p, draw, RandomStream::kToken);
      block.proposals.push_back(toy_token(output, uniform, options_.vocab_size));
      block.confidence.push_back(toy_confidence(output));
    }
    state.open_steps += gate ? 1 : 0;
    state.post_edit_steps += num_open(i) == 0 ? 1 : 0;
    const ToyVerdict verdict = toy_sample(options_, block);
    for (size_t rel = 0; rel < verdict.writes.size(); ++rel) {
      if (verdict.writes[rel] >= 0) {
        tokens_[static_cast<size_t>(start) + rel] = static_cast<int32_t>(verdict.writes[rel]);
      }
      if (options_.token_merge_top_k > 0) {
        soft_[static_cast<size_t>(start) + rel] = verdict.descriptors[rel];
      }
    }
    state.same_token_ratio = verdict.same_token_ratio;
    return (verdict.flags & kSamplerCommittable) != 0;
  }

  [[nodiscard]] FinishReason stop_reason(int32_t nfe) const {
    const int32_t settled = settled_end();
    if (first_stop() < settled) {
      return FinishReason::kEosTokenGenerated;
    }
    if (settled == limit_end_) {
      return limit_end_ == prompt_len_ + params_.max_tokens ? FinishReason::kMaxNewTokensReached
                                                            : FinishReason::kMaxModelLenReached;
    }
    if (params_.max_nfe > 0 && nfe >= params_.max_nfe) {
      return FinishReason::kMaxNfeReached;
    }
    int32_t run = 0;
    for (int32_t p = settled - 1; p >= prompt_len_; --p) {
      if (token_at(p) != token_at(settled - 1)) {
        break;
      }
      ++run;
    }
    return params_.max_repetition_run > 0 && run >= params_.max_repetition_run
               ? FinishReason::kMaxRepetitionRunReached
               : FinishReason::kNone;
  }

  EngineOptions options_;
  bool stores_early_;
  SamplingParams params_;
  int32_t prompt_len_;
  int32_t limit_end_;
  std::vector<int32_t> tokens_;
  std::set<int32_t> stops_;
  int32_t first_ = 0;               // position of block 0
  int32_t head_ = 0;                // block id of blocks_[0]
  std::vector<ValidBlock> blocks_;  // of the buffer
  std::vector<ToyDescriptor> soft_;
  std::vector<ToyKey> prompt_keys_;  // d2f: of the first forward
  std::vector<uint64_t> outputs_;    // of the last forward that ran the position
};

}  // namespace diffulex::test
