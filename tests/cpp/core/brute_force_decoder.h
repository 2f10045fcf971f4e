// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "core/toy_model.h"
#include "diffulex/core/options.h"
#include "diffulex/core/philox.h"
#include "diffulex/core/status_enums.h"

// The oracle of the property tests: multi-block decoding of one request as the specification
// describes it, without cache, pages, batches or preemption. Every step runs all positions again
// and recounts everything from the tokens.

namespace diffulex::test {

struct BruteForceResult {
  std::vector<int32_t> output;
  FinishReason reason = FinishReason::kNone;
  int32_t nfe = 0;
};

class BruteForceDecoder {
 public:
  BruteForceDecoder(const EngineOptions& options, const std::vector<int32_t>& prompt,
                    const SamplingParams& params)
      : options_(options),
        params_(params),
        prompt_len_(static_cast<int32_t>(prompt.size())),
        limit_end_(std::min(prompt_len_ + params.max_tokens, options.max_model_len)),
        tokens_(prompt.begin(), prompt.end()) {
    if (!params.ignore_eos) {
      stops_.insert(options.stop_token_ids.begin(), options.stop_token_ids.end());
      stops_.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
    }
    head_ = prompt_len_ / options.block_size;
    const int32_t tail = prompt_len_ % options.block_size;
    if (tail > 0) {
      states_.push_back(BlockStatus::kActive);
      steps_.push_back(0);
      tokens_.resize(static_cast<size_t>((head_ + 1) * options.block_size), mask());
    }
  }

  BruteForceResult decode() {
    BruteForceResult result;
    if (states_.empty()) {
      ++result.nfe;  // the prompt alone
      result.reason = stop_reason(result.nfe);
    }
    while (result.reason == FinishReason::kNone) {
      activate();
      step();
      ++result.nfe;
      result.reason = stop_reason(result.nfe);
    }
    const int32_t end = std::min(settled_end(), first_stop());
    result.output.assign(tokens_.begin() + prompt_len_, tokens_.begin() + end);
    return result;
  }

 private:
  [[nodiscard]] int32_t mask() const { return options_.mask_token_id; }
  [[nodiscard]] int32_t start_of(size_t i) const {
    return (head_ + static_cast<int32_t>(i)) * options_.block_size;
  }
  [[nodiscard]] bool is_open(int32_t position) const {
    return position >= prompt_len_ && tokens_[static_cast<size_t>(position)] == mask();
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
    while (end < limit_end_ && end < static_cast<int32_t>(tokens_.size()) && !is_open(end)) {
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

  void activate() {
    const auto cursor = states_.size();
    if (cursor == static_cast<size_t>(options_.buffer_size) || start_of(cursor) >= limit_end_ ||
        first_stop() < limit_end_) {
      return;
    }
    if (cursor > 0 && progress(cursor - 1) < options_.thresholds.add_block) {
      return;
    }
    states_.push_back(BlockStatus::kActive);
    steps_.push_back(0);
    tokens_.resize(tokens_.size() + static_cast<size_t>(options_.block_size), mask());
  }

  void step() {
    std::vector<int64_t> inputs(tokens_.begin(), tokens_.end());
    std::vector<int32_t> visible(inputs.size());
    for (size_t p = 0; p < inputs.size(); ++p) {
      visible[p] = (static_cast<int32_t>(p) / options_.block_size + 1) * options_.block_size;
    }
    std::vector<ToyKey> keys;
    const std::vector<uint64_t> outputs = toy_forward({}, inputs, visible, keys);
    std::vector<bool> gates;
    for (size_t i = 0; i < states_.size(); ++i) {
      gates.push_back(i == 0 || progress(i - 1) >= options_.thresholds.semi_complete);
    }
    const std::vector<BlockStatus> before = states_;
    for (size_t i = 0; i < states_.size(); ++i) {
      if (states_[i] == BlockStatus::kActive) {
        accept(i, gates[i], outputs);
      }
    }
    for (size_t i = 0; i < states_.size(); ++i) {
      const bool is_next = i == 0 || states_[i - 1] == BlockStatus::kToCache;
      if (states_[i] == BlockStatus::kActive && num_open(i) == 0 && is_next) {
        states_[i] = BlockStatus::kToCache;
      }
    }
    size_t stored = 0;
    while (stored < before.size() && before[stored] == BlockStatus::kToCache) {
      ++stored;  // frozen before this forward, hence stored by it
    }
    states_.erase(states_.begin(), states_.begin() + static_cast<std::ptrdiff_t>(stored));
    steps_.erase(steps_.begin(), steps_.begin() + static_cast<std::ptrdiff_t>(stored));
    head_ += static_cast<int32_t>(stored);
  }

  void accept(size_t i, bool gate, const std::vector<uint64_t>& outputs) {
    const float threshold = params_.accept_threshold.value_or(options_.thresholds.accept);
    const bool is_greedy = params_.temperature < kGreedyTemperature;
    const int32_t draw = steps_[i]++;
    int32_t best = -1;
    std::vector<int32_t> chosen;
    for (int32_t p = start_of(i); p < start_of(i) + options_.block_size; ++p) {
      if (!is_open(p)) {
        continue;
      }
      const float confidence = toy_confidence(outputs[static_cast<size_t>(p)]);
      if (confidence > threshold) {
        chosen.push_back(p);
      }
      if (best < 0 || confidence > toy_confidence(outputs[static_cast<size_t>(best)])) {
        best = p;
      }
    }
    if (chosen.empty() && gate && best >= 0) {
      chosen.push_back(best);
    }
    for (const int32_t p : chosen) {
      const double uniform =
          is_greedy ? 0.5 : philox_uniform(params_.seed.value(), p, draw, RandomStream::kToken);
      tokens_[static_cast<size_t>(p)] = static_cast<int32_t>(
          toy_token(outputs[static_cast<size_t>(p)], uniform, options_.vocab_size));
    }
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
      if (tokens_[static_cast<size_t>(p)] != tokens_[static_cast<size_t>(settled - 1)]) {
        break;
      }
      ++run;
    }
    return params_.max_repetition_run > 0 && run >= params_.max_repetition_run
               ? FinishReason::kMaxRepetitionRunReached
               : FinishReason::kNone;
  }

  EngineOptions options_;
  SamplingParams params_;
  int32_t prompt_len_;
  int32_t limit_end_;
  std::vector<int32_t> tokens_;
  std::set<int32_t> stops_;
  int32_t head_ = 0;                 // block id of states_[0]
  std::vector<BlockStatus> states_;  // valid buffer blocks
  std::vector<int32_t> steps_;       // sampler steps of each
};

}  // namespace diffulex::test
