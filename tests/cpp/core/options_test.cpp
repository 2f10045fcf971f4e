// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/options.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace diffulex {
namespace {

using testing::HasSubstr;

EngineOptions valid_options() {
  EngineOptions options;
  options.num_pages = 8;
  return options;
}

struct BadOptions {
  std::function<void(EngineOptions&)> change;
  std::string field;
  std::string got;
  StatusCode code = StatusCode::kInvalidArgument;
};

TEST(EngineOptions, DefaultsNeedOnlyAPoolSize) {
  EXPECT_TRUE(valid_options().validate().ok()) << valid_options().validate().message();
  EXPECT_THAT(EngineOptions().validate().message(),
              HasSubstr("EngineOptions.num_pages: expected >= 1, got 0"));
}

TEST(EngineOptions, EveryRuleNamesFieldAndValue) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<BadOptions> cases = {
      {[](auto& o) { o.strategy = "nope"; }, "strategy: expected one of multi_bd", "\"nope\"",
       StatusCode::kUnsupported},
      {[](auto& o) { o.block_size = 5; }, "block_size: expected one of 4, 8, 16, 32", "got 5"},
      {[](auto& o) { o.block_size = 64; }, "block_size", "got 64"},
      {[](auto& o) { o.buffer_size = 0; }, "buffer_size", "got 0"},
      {[](auto& o) { o.buffer_size = 33; }, "buffer_size", "got 33"},
      {[](auto& o) { o.page_size = 12; }, "page_size", "got 12"},
      {[](auto& o) { o.num_pages = -1; }, "num_pages", "got -1"},
      {[](auto& o) { o.max_num_reqs = 0; }, "max_num_reqs", "got 0"},
      {[](auto& o) { o.max_model_len = 1; }, "max_model_len", "got 1"},
      {[](auto& o) { o.max_num_batched_tokens = 2079; }, "max_num_batched_tokens: expected >= 2080",
       "got 2079"},
      {[](auto& o) {
         o.enable_chunked_prefill = true;
         o.buffer_size = 4;
         o.max_num_batched_tokens = 127;
       },
       "max_num_batched_tokens: expected >= 128", "got 127"},
      {[](auto& o) { o.vocab_size = -1; }, "vocab_size", "got -1"},
      {[](auto& o) { o.mask_token_id = -1; }, "mask_token_id", "got -1"},
      {[](auto& o) {
         o.vocab_size = 10;
         o.mask_token_id = 10;
       },
       "mask_token_id: expected < vocab_size 10", "got 10"},
      {[](auto& o) { o.stop_token_ids = {-2}; }, "stop_token_ids", "got -2"},
      {[](auto& o) { o.stop_token_ids = {0}; }, "stop_token_ids: expected no mask token", "got 0"},
      {[](auto& o) { o.stop_token_ids.assign(33, 5); }, "stop_token_ids: expected at most 32",
       "got 33"},
      {[](auto& o) { o.thresholds.add_block = -0.1F; }, "thresholds.add_block", "got -0.1"},
      {[](auto& o) { o.thresholds.semi_complete = 1.5F; }, "thresholds.semi_complete", "got 1.5"},
      {[nan](auto& o) { o.thresholds.accept = nan; }, "thresholds.accept", "got nan"},
      {[](auto& o) { o.thresholds.edit = 2.0F; }, "thresholds.edit", "got 2"},
      {[](auto& o) { o.thresholds.remask = 2.0F; }, "thresholds.remask", "got 2"},
      {[](auto& o) { o.thresholds.token_stability = 2.0F; }, "thresholds.token_stability", "got 2"},
      {[](auto& o) { o.auto_max_nfe_warmup_steps = 0; }, "auto_max_nfe_warmup_steps", "got 0"},
      {[](auto& o) { o.auto_max_nfe_tpf_floor = 0.0; }, "auto_max_nfe_tpf_floor", "got 0"},
      {[](auto& o) { o.max_consecutive_prefill_batches = -1; }, "max_consecutive_prefill_batches",
       "got -1"},
      {[](auto& o) { o.num_pages = 1 << 30; }, "slots", "below 2^31"},
  };
  for (const BadOptions& bad : cases) {
    EngineOptions options = valid_options();
    bad.change(options);
    const Status status = options.validate();
    EXPECT_EQ(status.code(), bad.code) << bad.field;
    EXPECT_THAT(status.message(), HasSubstr(bad.field));
    EXPECT_THAT(status.message(), HasSubstr(bad.got));
  }
}

TEST(EngineOptions, SmallestLegalRowBudget) {
  EngineOptions options = valid_options();
  options.max_num_batched_tokens = 2080;  // 2048 rounded up to 32, plus 32
  EXPECT_TRUE(options.validate().ok());
  options.buffer_size = 4;
  options.enable_chunked_prefill = true;
  options.max_num_batched_tokens = 128;
  EXPECT_TRUE(options.validate().ok());
}

TEST(SamplingParams, EveryRuleNamesFieldAndValue) {
  EXPECT_TRUE(SamplingParams().validate().ok());
  const std::vector<std::pair<std::function<void(SamplingParams&)>, std::string>> cases = {
      {[](auto& p) { p.temperature = -1.0F; }, "temperature: expected a finite value >= 0, got -1"},
      {[](auto& p) { p.temperature = INFINITY; }, "temperature"},
      {[](auto& p) { p.max_tokens = 0; }, "max_tokens: expected >= 1, got 0"},
      {[](auto& p) { p.max_nfe = -1; }, "max_nfe: expected >= 0, got -1"},
      {[](auto& p) { p.max_repetition_run = -3; }, "max_repetition_run: expected >= 0, got -3"},
      {[](auto& p) { p.stop_token_ids = {4, -7}; }, "stop_token_ids: expected ids >= 0, got -7"},
      {[](auto& p) { p.accept_threshold = 1.01F; }, "accept_threshold: expected a value in [0, 1]"},
  };
  for (const auto& [change, message] : cases) {
    SamplingParams params;
    change(params);
    EXPECT_EQ(params.validate().code(), StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(params.validate().message(), HasSubstr("SamplingParams." + message));
  }
}

}  // namespace
}  // namespace diffulex
