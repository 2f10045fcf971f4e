// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "diffulex/core/engine_core.h"

namespace diffulex::test {

inline constexpr int32_t kMask = 99;
inline constexpr int32_t kStop = 50;

inline EngineOptions small_options() {
  EngineOptions options;
  options.block_size = 4;
  options.page_size = 4;
  options.num_pages = 64;
  options.max_num_reqs = 4;
  options.max_model_len = 46;  // neither a multiple of the block nor of the page
  options.max_num_batched_tokens = 128;
  options.mask_token_id = kMask;
  options.vocab_size = 200;
  options.stop_token_ids = {kStop};
  return options;
}

inline std::vector<int32_t> prompt_of(int32_t len) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < len; ++i) {
    prompt.push_back(100 + i);
  }
  return prompt;
}

inline SamplingParams tokens_of(int32_t max_tokens) {
  SamplingParams params;
  params.max_tokens = max_tokens;
  return params;
}

template <typename T>
std::vector<std::remove_const_t<T>> list(Span<T> values) {
  return std::vector<std::remove_const_t<T>>(values.begin(), values.end());
}

/// An engine whose sampler is the test: writes by position, and the verdict on every block.
class Bench {
 public:
  explicit Bench(const EngineOptions& options)
      : options_(options), core_(options), plan_(options), output_(options) {}

  EngineCore& core() { return core_; }
  StepPlan& plan() { return plan_; }
  SamplerOutput& output() { return output_; }
  const Request& request(int64_t id) { return *core_.find_request(id); }

  int64_t add(int32_t prompt_len, const SamplingParams& params) {
    return core_.add_request(Span<const int32_t>(prompt_of(prompt_len)), params).value();
  }

  PlanKind schedule() {
    const PlanKind kind = core_.schedule(plan_);
    output_.clear(plan_.num_blocks());
    return kind;
  }

  void write(int32_t position, int64_t token) {
    for (size_t blk = 0; blk < static_cast<size_t>(plan_.num_blocks()); ++blk) {
      const int32_t rel = position - plan_.blk_start()[blk];
      if (rel >= 0 && rel < options_.block_size) {
        output_.write_ids()[blk * static_cast<size_t>(options_.block_size) +
                            static_cast<size_t>(rel)] = token;
        return;
      }
    }
    FAIL() << "no block at " << position;
  }

  void commit(size_t blk) { output_.flags()[blk] |= kSamplerCommittable; }

  RequestEvent complete() {
    const Result<const StepEvents*> events = core_.complete_step(plan_, output_);
    EXPECT_TRUE(events.ok()) << events.status().message();
    return events.ok() ? events.value()->requests.at(0) : RequestEvent();
  }

  /// One whole step: writes of (position, token), and whether the first block may be frozen.
  RequestEvent step(const std::vector<std::pair<int32_t, int32_t>>& writes, bool is_ready = false) {
    schedule();
    for (const auto& [position, token] : writes) {
      write(position, token);
    }
    if (is_ready) {
      commit(0);
    }
    return complete();
  }

 private:
  EngineOptions options_;
  EngineCore core_;
  StepPlan plan_;
  SamplerOutput output_;
};

/// What the toy model needs: it proposes every id but 0.
inline EngineOptions toy_options() {
  EngineOptions options = small_options();
  options.mask_token_id = 0;
  options.stop_token_ids = {1};
  return options;
}

}  // namespace diffulex::test
