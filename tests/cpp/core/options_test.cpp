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
      {[](auto& o) { o.strategy = "nope"; },
       "strategy: expected one of d2f, diffusion_gemma, dmax, fast_dllm_v2, multi_bd", "\"nope\"",
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
      {[](auto& o) { o.max_post_edit_steps = -1; }, "max_post_edit_steps", "got -1"},
      {[](auto& o) { o.penalty_lambda = -0.5F; }, "penalty_lambda", "got -0.5"},
      {[](auto& o) { o.auto_max_nfe_warmup_steps = 0; }, "auto_max_nfe_warmup_steps", "got 0"},
      {[](auto& o) { o.auto_max_nfe_tpf_floor = 0.0; }, "auto_max_nfe_tpf_floor", "got 0"},
      {[](auto& o) { o.max_consecutive_prefill_batches = -1; }, "max_consecutive_prefill_batches",
       "got -1"},
      {[](auto& o) { o.mixed_step_rows = o.max_num_batched_tokens + 1; }, "mixed_step_rows",
       "got "},
      {[](auto& o) { o.num_pages = 1 << 30; }, "slots", "below 2^31"},
      {[](auto& o) {
         o.strategy = "d2f";
         o.is_editing = true;
       },
       "is_editing: expected strategy multi_bd or dmax", "got d2f"},
      {[](auto& o) {
         o.strategy = "dmax";
         o.logits_shift = true;
       },
       "logits_shift: expected strategy multi_bd or d2f", "got dmax"},
      {[](auto& o) { o.is_editing = o.logits_shift = true; },
       "logits_shift: expected no shift together with is_editing", "got both"},
      {[](auto& o) { o.token_merge_top_k = 1; }, "token_merge_top_k: expected strategy dmax",
       "got multi_bd"},
      {[](auto& o) {
         o.strategy = "dmax";
         o.token_merge_top_k = 17;
       },
       "token_merge_top_k: expected a value in [0, 16], the most", "got 17"},
      {[](auto& o) {
         o.strategy = "dmax";
         o.token_merge_top_k = -1;
       },
       "token_merge_top_k: expected a value in [0, 16]", "got -1"},
      {[](auto& o) { o.dmax_store_soft_embeddings = true; },
       "dmax_store_soft_embeddings: expected strategy dmax", "got multi_bd"},
      {[](auto& o) {
         o.strategy = "d2f";
         o.enable_chunked_prefill = true;
       },
       "enable_chunked_prefill: expected false with d2f", "got true"},
      {[](auto& o) { o.strategy = "fast_dllm_v2"; },
       "buffer_size: expected N >= 2 sub-blocks with fast_dllm_v2", "got 1"},
      {[](auto& o) {
         o.strategy = "diffusion_gemma";
         o.vocab_size = 300;
         o.buffer_size = 2;
       },
       "buffer_size: expected 1 with diffusion_gemma", "got 2"},
      {[](auto& o) {
         o.strategy = "diffusion_gemma";
         o.vocab_size = 300;
         o.block_size = 1025;
       },
       "block_size: expected a canvas length in [1, 1024]", "got 1025"},
      {[](auto& o) {
         o.strategy = "diffusion_gemma";
         o.vocab_size = 300;
         o.page_size = 512;
       },
       "page_size: expected one of 4, 8, 16, 32, 64, 128, 256", "got 512"},
      {[](auto& o) { o.page_size = 64; }, "page_size: expected one of 4, 8, 16, 32", "got 64"},
      {[](auto& o) { o.max_denoising_steps = 0; }, "max_denoising_steps: expected >= 1", "got 0"},
      {[](auto& o) { o.stability_threshold = -1; }, "stability_threshold: expected >= 0", "got -1"},
      {[](auto& o) { o.t_min = 0.9F; }, "t_min, t_max: expected 0 <= t_min <= t_max", "got 0.9"},
      {[](auto& o) { o.t_min = o.t_max = 0.0F; }, "t_max > 0", "got 0 and 0"},
      {[nan](auto& o) { o.t_max = nan; }, "t_min, t_max", "nan"},
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

TEST(EngineOptions, SizesOfTheStrategies) {
  EngineOptions options = valid_options();
  options.strategy = "fast_dllm_v2";
  options.block_size = 8;
  options.buffer_size = 4;
  options.page_size = 8;
  options.max_model_len = 100;
  EXPECT_TRUE(options.validate().ok()) << options.validate().message();
  EXPECT_EQ(options.decode_rows(), 32);
  EXPECT_EQ(options.att_block_size(), 32);
  EXPECT_EQ(options.max_pages_per_req(), 16);  // 100 rounded up to 32, in pages of 8
  EXPECT_EQ(options.page_span(33), 64);
  options.strategy = "multi_bd";
  EXPECT_EQ(options.att_block_size(), 8);
  EXPECT_EQ(options.max_pages_per_req(), 13);
  EXPECT_EQ(options.page_span(33), 33);
  for (const int32_t canvas : {1, 5, 256, 1024}) {
    for (const int32_t page_size : {4, 32, 64, 128, 256}) {
      EngineOptions gemma = valid_options();
      gemma.strategy = "diffusion_gemma";
      gemma.block_size = canvas;
      gemma.page_size = page_size;
      gemma.max_num_batched_tokens = 4096;
      gemma.vocab_size = 300;
      EXPECT_TRUE(gemma.validate().ok()) << gemma.validate().message();
      EXPECT_EQ(gemma.decode_rows(), canvas);
    }
  }
}

TEST(EngineOptions, WhatTheStrategyForces) {
  EngineOptions options = valid_options();
  EXPECT_FALSE(options.rewrites_tokens());
  EXPECT_TRUE(options.shares_prefixes());
  options.strategy = "dmax";
  EXPECT_TRUE(options.rewrites_tokens());
  options.strategy = "d2f";
  EXPECT_FALSE(options.rewrites_tokens());
  EXPECT_FALSE(options.shares_prefixes());
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
      {[](auto& p) { p.edit_threshold = -0.1F; }, "edit_threshold: expected a value in [0, 1]"},
      {[](auto& p) { p.add_block_threshold = 2.0F; }, "add_block_threshold: expected a value in"},
      {[](auto& p) { p.semi_complete_threshold = NAN; }, "semi_complete_threshold: expected a"},
      {[](auto& p) { p.token_stability_threshold = 1.5F; }, "token_stability_threshold: expected"},
      {[](auto& p) { p.max_post_edit_steps = -1; }, "max_post_edit_steps: expected >= 0, got -1"},
      {[](auto& p) { p.penalty_lambda = INFINITY; },
       "penalty_lambda: expected a finite value >= 0"},
      {[](auto& p) { p.top_p = -0.5F; }, "top_p: expected a finite value >= 0, got -0.5"},
      {[](auto& p) { p.top_p = NAN; }, "top_p: expected a finite value"},
      {[](auto& p) { p.min_p = 1.5F; }, "min_p: expected a value in [0, 1], got 1.5"},
  };
  for (const auto& [change, message] : cases) {
    SamplingParams params;
    change(params);
    EXPECT_EQ(params.validate().code(), StatusCode::kInvalidArgument) << message;
    EXPECT_THAT(params.validate().message(), HasSubstr("SamplingParams." + message));
  }
}

TEST(SamplingParams, FiltersActOnSampledRequestsOnly) {
  SamplingParams params;
  params.top_p = 1.0F;
  params.top_k = -3;
  EXPECT_TRUE(params.validate().ok());
  EXPECT_FALSE(params.is_filtered());
  params.top_k = 5;
  EXPECT_FALSE(params.is_filtered());  // greedy
  params.temperature = 1.0F;
  EXPECT_TRUE(params.is_filtered());
  params.top_k = 0;
  EXPECT_FALSE(params.is_filtered());
  params.top_p = 0.0F;
  EXPECT_TRUE(params.is_filtered());
  params.top_p = 2.0F;
  EXPECT_FALSE(params.is_filtered());
  params.min_p = 0.01F;
  EXPECT_TRUE(params.is_filtered());
}

}  // namespace
}  // namespace diffulex
