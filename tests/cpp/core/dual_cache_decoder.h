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

// The oracle of the dual-cache property tests: one request decoded with two caches as the
// specification describes it, without pages, batches or preemption.

namespace diffulex::test {

/// One forward of rows at positions [first, first + tokens.size()) whose keys are written into
/// `cache`, layer by layer, before the rows read all of it. Returns the outputs.
inline std::vector<uint64_t> toy_cache_only_forward(std::vector<ToyKey>& cache, size_t first,
                                                    const std::vector<int64_t>& tokens) {
  const auto fold = [&cache](auto member) {
    uint64_t digest = 0;
    for (const ToyKey& key : cache) {
      digest = toy_hash(digest, key.*member);
    }
    return digest;
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    cache[first + i].layer1 = toy_hash(static_cast<uint64_t>(tokens[i]), first + i);
  }
  const uint64_t layer1 = fold(&ToyKey::layer1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    cache[first + i].layer2 = toy_hash(cache[first + i].layer1, layer1);
  }
  const uint64_t layer2 = fold(&ToyKey::layer2);
  std::vector<uint64_t> outputs;
  for (size_t i = 0; i < tokens.size(); ++i) {
    outputs.push_back(toy_hash(cache[first + i].layer2, layer2));
  }
  return outputs;
}

struct DualCacheResult {
  std::vector<int32_t> output;
  FinishReason reason = FinishReason::kNone;
  int32_t nfe = 0;
  int32_t num_refines = 0;
  int32_t num_commits = 0;
};

class DualCacheDecoder {
 public:
  DualCacheDecoder(const EngineOptions& options, const std::vector<int32_t>& prompt,
                   const SamplingParams& params)
      : options_(options),
        params_(params),
        len_(options.block_size * options.buffer_size),
        prompt_len_(static_cast<int32_t>(prompt.size())),
        limit_end_(std::min(prompt_len_ + params.max_tokens, options.max_model_len)),
        tokens_(prompt.begin(), prompt.end()) {
    if (!params.ignore_eos) {
      stops_.insert(options.stop_token_ids.begin(), options.stop_token_ids.end());
      stops_.insert(params.stop_token_ids.begin(), params.stop_token_ids.end());
    }
    is_known_.assign(prompt.size(), true);
  }

  DualCacheResult decode() {
    const int32_t base = prompt_len_ / len_ * len_;
    extend(base + len_);
    if (base > 0) {
      const uint64_t last = prefill(base);
      ++result_.nfe;
      if (base == prompt_len_) {
        set(base, toy_token(last, 0.5, options_.vocab_size));
      }
      result_.reason = stop_reason();
    }
    for (int32_t start = base; result_.reason == FinishReason::kNone; start += len_) {
      decode_block(start);
    }
    const int32_t end = std::min(settled_end(), first_stop());
    result_.output.assign(tokens_.begin() + prompt_len_, tokens_.begin() + end);
    return result_;
  }

 private:
  void extend(int32_t len) {
    tokens_.resize(static_cast<size_t>(len), options_.mask_token_id);
    is_known_.resize(static_cast<size_t>(len), false);
  }
  void set(int32_t position, int64_t token) {
    tokens_[static_cast<size_t>(position)] = static_cast<int32_t>(token);
    is_known_[static_cast<size_t>(position)] = true;
  }
  [[nodiscard]] bool is_known(int32_t position) const {
    return is_known_[static_cast<size_t>(position)];
  }
  [[nodiscard]] bool all_known(int32_t begin, int32_t end) const {
    return std::all_of(is_known_.begin() + begin, is_known_.begin() + end,
                       [](bool known) { return known; });
  }
  [[nodiscard]] std::vector<int64_t> inputs(int32_t begin, int32_t end) const {
    return std::vector<int64_t>(tokens_.begin() + begin, tokens_.begin() + end);
  }

  /// Block-causal over D-blocks; returns the output of the last row.
  uint64_t prefill(int32_t base) {
    std::vector<int32_t> visible;
    for (int32_t p = 0; p < base; ++p) {
      visible.push_back((p / len_ + 1) * len_);
    }
    return toy_forward({}, inputs(0, base), visible, prefix_cache_).back();
  }

  /// All D rows over the prefix cache, every fresh key visible.
  std::vector<uint64_t> full_forward(int32_t base, std::vector<ToyKey>& keys) {
    const std::vector<int32_t> visible(static_cast<size_t>(len_), base + len_);
    ++result_.nfe;
    return toy_forward(prefix_cache_, inputs(base, base + len_), visible, keys);
  }

  void decode_block(int32_t base) {
    std::vector<ToyKey> block_cache;
    for (int32_t start = base; start < base + len_; start += options_.block_size) {
      int32_t draw = 0;
      while (!all_known(start, start + options_.block_size)) {
        if (block_cache.empty() || !is_known(start)) {
          const std::vector<uint64_t> outputs = full_forward(base, block_cache);
          accept(start, draw++, outputs, base);
        } else if (options_.fdv2_use_block_cache) {
          std::vector<ToyKey> cache = prefix_cache_;
          cache.insert(cache.end(), block_cache.begin(), block_cache.end());
          const std::vector<uint64_t> outputs = toy_cache_only_forward(
              cache, static_cast<size_t>(start), inputs(start, start + options_.block_size));
          block_cache.assign(cache.begin() + base, cache.end());
          ++result_.nfe;
          ++result_.num_refines;
          accept(start, draw++, outputs, start);
        } else {
          std::vector<ToyKey> dropped;
          accept(start, draw++, full_forward(base, dropped), base);
          ++result_.num_refines;
        }
        result_.reason = stop_reason();
        if (result_.reason != FinishReason::kNone) {
          return;
        }
      }
    }
    std::vector<ToyKey> keys;
    const std::vector<uint64_t> outputs = full_forward(base, keys);
    prefix_cache_.insert(prefix_cache_.end(), keys.begin(), keys.end());
    ++result_.num_commits;
    extend(base + 2 * len_);
    set(base + len_, toy_token(outputs.back(), 0.5, options_.vocab_size));
    result_.reason = stop_reason();
  }

  /// Threshold acceptance with the gate always open; position p is predicted by the row before it.
  void accept(int32_t start, int32_t draw, const std::vector<uint64_t>& outputs, int32_t row0) {
    const float threshold = params_.accept_threshold.value_or(options_.thresholds.accept);
    const bool is_greedy = params_.temperature < kGreedyTemperature;
    const auto output_of = [&](int32_t position) {
      return outputs.at(static_cast<size_t>(position - 1 - row0));
    };
    int32_t best = -1;
    std::vector<int32_t> chosen;
    for (int32_t p = start; p < start + options_.block_size; ++p) {
      if (is_known(p)) {
        continue;
      }
      const float confidence = toy_confidence(output_of(p));
      if (confidence > threshold) {
        chosen.push_back(p);
      }
      if (best < 0 || confidence > toy_confidence(output_of(best))) {
        best = p;
      }
    }
    if (chosen.empty()) {
      chosen.push_back(best);
    }
    for (const int32_t p : chosen) {
      const double uniform =
          is_greedy ? 0.5 : philox_uniform(params_.seed.value(), p, draw, RandomStream::kToken);
      set(p, toy_token(output_of(p), uniform, options_.vocab_size));
    }
  }

  [[nodiscard]] int32_t settled_end() const {
    const int32_t limit = std::min(limit_end_, static_cast<int32_t>(tokens_.size()));
    int32_t end = prompt_len_;
    while (end < limit && is_known(end)) {
      ++end;
    }
    return end;
  }
  [[nodiscard]] int32_t first_stop() const {
    const int32_t end = std::min(limit_end_, static_cast<int32_t>(tokens_.size()));
    for (int32_t p = prompt_len_; p < end; ++p) {
      if (is_known(p) && stops_.count(tokens_[static_cast<size_t>(p)]) > 0) {
        return p;
      }
    }
    return 1 << 30;
  }
  [[nodiscard]] FinishReason stop_reason() const {
    const int32_t settled = settled_end();
    if (first_stop() < settled) {
      return FinishReason::kEosTokenGenerated;
    }
    if (settled == limit_end_) {
      return limit_end_ == prompt_len_ + params_.max_tokens ? FinishReason::kMaxNewTokensReached
                                                            : FinishReason::kMaxModelLenReached;
    }
    if (params_.max_nfe > 0 && result_.nfe >= params_.max_nfe) {
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
  int32_t len_;  // D
  int32_t prompt_len_;
  int32_t limit_end_;
  std::vector<int32_t> tokens_;
  std::vector<bool> is_known_;
  std::set<int32_t> stops_;
  std::vector<ToyKey> prefix_cache_;
  DualCacheResult result_;
};

}  // namespace diffulex::test
