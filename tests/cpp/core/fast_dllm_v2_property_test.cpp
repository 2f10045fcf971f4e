// SPDX-License-Identifier: Apache-2.0
// fast_dllm_v2 under random scripts against the two-cache decoder: invariants after every step,
// termination, no page leak, no read of an unwritten slot, and for every request the tokens of an
// undisturbed run.

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/dual_cache_decoder.h"
#include "core/dual_cache_simulator.h"
#include "core/property_script.h"

namespace diffulex {
namespace {

using test::DualCacheDecoder;
using test::DualCacheResult;
using test::DualCacheSimulator;
using test::ExpectedResult;
using test::ScriptCoverage;

class Script final : public test::PropertyScript {
 public:
  explicit Script(uint32_t seed) : PropertyScript(seed) {
    options_.strategy = "fast_dllm_v2";
    options_.block_size = pick({4, 8});
    options_.page_size = pick({4, 8, 16, 32});
    options_.buffer_size = uniform(2, 5);  // D need not be a power of two
    options_.max_model_len = uniform(20, 90);
    options_.max_num_reqs = uniform(1, 5);
    options_.vocab_size = pick({12, 60, 400});
    options_.mask_token_id = 0;
    options_.stop_token_ids = {1};
    options_.thresholds.accept = pick({0.0F, 0.3F, 0.7F, 0.95F, 1.0F});
    options_.enable_chunked_prefill = uniform(0, 1) == 0;
    options_.masked_rows_only = uniform(0, 1) == 0;
    options_.fdv2_use_block_cache = uniform(0, 2) > 0;
    options_.group_decode_by_rows = uniform(0, 1) == 0;
    const int32_t longest = options_.page_span(options_.max_model_len);
    const int32_t least =
        options_.enable_chunked_prefill ? options_.decode_rows() : longest + options_.block_size;
    draw_common_options(options_.num_pages_for(longest), least);
    if (draws_max_nfe_) {
      options_.max_num_batched_tokens =
          std::max(options_.max_num_batched_tokens, longest + options_.block_size);
    }
  }

  int32_t num_refines() const { return num_refines_; }
  int32_t num_commits() const { return num_commits_; }

 private:
  ExpectedResult expect(int64_t /*req_id*/, const std::vector<int32_t>& prompt,
                        const SamplingParams& params) override {
    const DualCacheResult result = DualCacheDecoder(options_, prompt, params).decode();
    num_refines_ += result.num_refines;
    num_commits_ += result.num_commits;
    return ExpectedResult{result.output, result.reason, result.nfe};
  }
  std::vector<int32_t> special_lengths() const override {
    const int32_t block = options_.block_size;
    const int32_t len = options_.decode_rows();
    return {
        1,   block - 1, block,   block + 1, options_.page_size - 1,    options_.page_size, len - 1,
        len, len + 1,   2 * len, 3 * len,   options_.max_model_len - 1};
  }

  int32_t num_refines_ = 0;
  int32_t num_commits_ = 0;
};

class FastDllmV2Script : public testing::TestWithParam<int32_t> {};

TEST_P(FastDllmV2Script, EqualsTheTwoCacheDecoder) {
  constexpr int32_t kScriptsPerCase = 400;
  ScriptCoverage seen;
  int32_t num_refines = 0;
  int32_t num_commits = 0;
  int32_t num_mixed_plans = 0;
  for (int32_t i = 0; i < kScriptsPerCase && !HasFailure(); ++i) {
    const auto seed = static_cast<uint32_t>(GetParam() * kScriptsPerCase + i);
    Script script(seed);
    SCOPED_TRACE("script " + std::to_string(seed) + ": sub-block " +
                 std::to_string(script.options().block_size) + ", sub-blocks " +
                 std::to_string(script.options().buffer_size) + ", page " +
                 std::to_string(script.options().page_size));
    DualCacheSimulator sim(script.options());
    script.run(sim);
    seen.add(script.stats(), script.num_capped());
    num_refines += script.num_refines();
    num_commits += script.num_commits();
    num_mixed_plans += sim.num_mixed_plans();
  }
  // The scripts must reach what they are meant to test.
  EXPECT_GT(seen.num_preemptions, kScriptsPerCase);
  EXPECT_GT(seen.num_prefix_hit_tokens, kScriptsPerCase);
  EXPECT_GT(seen.num_cancelled_steps, kScriptsPerCase / 2);
  EXPECT_GT(seen.num_aborted, kScriptsPerCase / 4);
  EXPECT_GT(seen.num_capped, kScriptsPerCase / 10);
  EXPECT_GT(num_refines, kScriptsPerCase);
  EXPECT_GT(num_commits, kScriptsPerCase / 2);
  EXPECT_GT(num_mixed_plans, kScriptsPerCase / 2);
}

INSTANTIATE_TEST_SUITE_P(Seeds, FastDllmV2Script, testing::Range(0, 8));

EngineOptions small_options(int32_t num_reqs) {
  EngineOptions options;
  options.strategy = "fast_dllm_v2";
  options.block_size = 4;
  options.buffer_size = 2;
  options.page_size = 4;
  options.num_pages = 64;
  options.max_num_reqs = num_reqs;
  options.max_num_batched_tokens = 128;
  options.max_model_len = 64;
  options.mask_token_id = 0;
  options.vocab_size = 400;
  options.thresholds.accept = 0.7F;
  return options;
}

std::vector<int32_t> make_prompt(int32_t len) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < len; ++i) {
    prompt.push_back(2 + i % 300);
  }
  return prompt;
}

TEST(FastDllmV2, ReachesEveryLimitExactly) {
  for (const bool has_block_cache : {true, false}) {
    EngineOptions options = small_options(2);
    options.fdv2_use_block_cache = has_block_cache;
    for (const int32_t len : {1, 3, 4, 5, 7, 8, 9, 15, 16, 63}) {
      for (const int32_t max_tokens : {1, 3, 4, 5, 7, 8, 9, 16, 17, 1000}) {
        SCOPED_TRACE(std::to_string(len) + " and " + std::to_string(max_tokens));
        DualCacheSimulator sim(options);
        SamplingParams params;
        params.max_tokens = max_tokens;
        const int64_t id = sim.add(make_prompt(len), params);
        sim.drain();
        const RequestResult result = sim.core().take_result(id).value();
        const DualCacheResult expected =
            DualCacheDecoder(options, make_prompt(len), params).decode();
        EXPECT_EQ(static_cast<int32_t>(result.output_ids.size()), std::min(max_tokens, 64 - len));
        EXPECT_EQ(result.output_ids, expected.output);
        EXPECT_EQ(result.nfe, expected.nfe);
        EXPECT_EQ(result.finish_reason, len + max_tokens <= 64 ? FinishReason::kMaxNewTokensReached
                                                               : FinishReason::kMaxModelLenReached);
      }
    }
  }
}

TEST(FastDllmV2, GroupsTakeTurns) {
  EngineOptions options = small_options(4);
  options.group_decode_by_rows = true;
  options.thresholds.accept = 0.99F;
  DualCacheSimulator sim(options);
  for (int32_t i = 0; i < 4; ++i) {
    SamplingParams params;
    params.max_tokens = 30;
    sim.add(make_prompt(5 + 3 * i), params);
  }
  int32_t put_off = 0;
  std::map<int64_t, int32_t> waited;
  while (sim.core().has_unfinished() && !HasFailure()) {
    const PlanKind kind = sim.forward();
    if (kind == PlanKind::kDecode) {
      EXPECT_GT(sim.plan().uniform_q_len(), 0);
      for (const Request* request : sim.core().scheduler().running()) {
        int32_t& count = waited[request->req_id];
        count = request->step.is_in_flight ? 0 : count + 1;
        EXPECT_LE(count, 1);  // two groups: never put off twice in a row
        put_off += count;
      }
    }
    sim.complete();
  }
  EXPECT_GT(put_off, 10);
}

TEST(FastDllmV2, RefusesWhatItCannotRun) {
  EngineOptions options = small_options(1);
  options.buffer_size = 1;
  const Status status = options.validate();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("N >= 2"), std::string::npos) << status.message();
  // The pool must hold the whole last D-block, not only the response.
  options = small_options(1);
  options.num_pages = 3;
  EngineCore core(options);
  SamplingParams params;
  params.max_tokens = 4;
  const std::vector<int32_t> prompt = make_prompt(8);
  EXPECT_EQ(core.add_request(Span<const int32_t>(prompt), params).status().code(),
            StatusCode::kOutOfPages);
}

TEST(FastDllmV2, ChecksThePendingToken) {
  const EngineOptions options = small_options(1);
  for (const int64_t token : {int64_t{0}, int64_t{400}, int64_t{-2}, int64_t{1} << 40}) {
    DualCacheSimulator sim(options);
    SamplingParams params;
    const int64_t id = sim.add(make_prompt(8), params);
    sim.forward();
    ASSERT_EQ(sim.plan().seed_row()[0], 0);
    const int64_t legal = sim.output().pending_next_token()[0];
    sim.output().pending_next_token()[0] = token;
    EXPECT_EQ(sim.core().complete_step(sim.plan(), sim.output()).status().code(),
              StatusCode::kInvalidArgument);
    sim.output().pending_next_token()[0] = legal;  // nothing was applied
    sim.complete();
    EXPECT_EQ(sim.streamed(id), std::vector<int32_t>{static_cast<int32_t>(legal)});
    sim.forward();
    sim.output().pending_next_token()[0] = 5;  // no seed row in this plan
    EXPECT_EQ(sim.core().complete_step(sim.plan(), sim.output()).status().code(),
              StatusCode::kInvalidArgument);
  }
}

TEST(FastDllmV2, BadLogitsFailTheRequest) {
  const EngineOptions options = small_options(1);
  DualCacheSimulator sim(options);
  const int64_t seedless = sim.add(make_prompt(8), SamplingParams());
  sim.forward();
  sim.output().pending_next_token()[0] = -1;
  sim.complete();
  EXPECT_EQ(sim.core().take_result(seedless).value().finish_reason, FinishReason::kError);
  const int64_t stuck = sim.add(make_prompt(5), SamplingParams());
  sim.forward();
  sim.output().clear(sim.plan().num_blocks());  // a step without progress
  sim.complete();
  EXPECT_EQ(sim.core().take_result(stuck).value().finish_reason, FinishReason::kError);
  EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options.num_pages);
}

/// Schedules of the sampler and its draws go by the sampled steps of the sub-block alone.
TEST(FastDllmV2, StepsOfASubBlockReachTheSampler) {
  EngineOptions options = small_options(1);
  options.thresholds.accept = 0.99F;
  DualCacheSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 20;
  const int64_t id = sim.add(make_prompt(9), params);
  std::map<int32_t, int32_t> steps;
  int32_t most = 0;
  for (int32_t i = 0; sim.core().has_unfinished() && !HasFailure(); ++i) {
    if (i % 5 == 4) {
      ASSERT_TRUE(sim.core().preempt(id).ok());
    }
    sim.forward();
    if (sim.plan().num_blocks() > 0) {
      const int32_t taken = steps[sim.plan().blk_id()[0]]++;
      EXPECT_EQ(sim.plan().blk_open_steps()[0], taken);
      EXPECT_EQ(sim.plan().blk_step()[0], taken);
      EXPECT_EQ(sim.plan().blk_total_steps()[0], taken + 1);
      most = std::max(most, taken);
    }
    sim.complete();
  }
  EXPECT_GT(most, 1);
}

TEST(FastDllmV2, ResumeRebuildsTheBlockCacheOfTheLastInit) {
  EngineOptions options = small_options(1);
  options.enable_prefix_caching = false;
  options.thresholds.accept = 0.99F;
  DualCacheSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 20;
  const int64_t id = sim.add(make_prompt(9), params);
  const Request* request = nullptr;
  do {
    sim.forward();
    request = sim.core().scheduler().find_request(id);
    sim.complete();
  } while (request->step.row_mode != RowMode::kCacheOnly);
  ASSERT_EQ(request->context_len(), 8);
  const int32_t steps = request->buffer.block(0).total_steps;
  const std::vector<int32_t> before = sim.streamed(id);
  ASSERT_TRUE(sim.core().preempt(id).ok());
  EXPECT_EQ(request->resume_until, 8);
  EXPECT_FALSE(request->dual_cache.is_initialized);
  EXPECT_EQ(sim.forward(), PlanKind::kPrefill);  // the prompt again, without a seed
  EXPECT_EQ(sim.plan().num_rows(), 8);
  EXPECT_EQ(sim.plan().seed_row()[0], -1);
  sim.complete();
  EXPECT_EQ(sim.forward(), PlanKind::kDecode);  // the last INIT again, not sampled
  EXPECT_EQ(sim.plan().num_rows(), 8);
  EXPECT_EQ(sim.plan().num_blocks(), 0);
  EXPECT_EQ(sim.plan().input_ids()[0], request->tokens()[8]);
  EXPECT_EQ(sim.plan().input_ids()[1], options.mask_token_id);
  sim.complete();
  EXPECT_EQ(sim.streamed(id), before);
  EXPECT_EQ(request->buffer.block(0).total_steps, steps);
  sim.forward();
  EXPECT_EQ(sim.plan().row_mode()[0], static_cast<int32_t>(RowMode::kCacheOnly));
  EXPECT_EQ(sim.plan().blk_step()[0], steps);
  sim.complete();
  sim.drain();
  EXPECT_EQ(sim.core().take_result(id).value().output_ids,
            DualCacheDecoder(options, make_prompt(9), params).decode().output);
}

TEST(FastDllmV2, ProvisionalPagesAreNotShared) {
  EngineOptions options = small_options(2);
  options.page_size = 8;
  DualCacheSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 40;
  sim.add(make_prompt(17), params);
  sim.forward();  // the prompt up to 16
  sim.complete();
  const int32_t cached = sim.core().kv_cache().num_cached_units();
  EXPECT_EQ(cached, 2);
  while (sim.core().scheduler().running()[0]->context_len() == 16) {
    EXPECT_EQ(sim.core().kv_cache().num_cached_units(), cached);
    sim.forward();
    sim.complete();
  }
  EXPECT_EQ(sim.core().kv_cache().num_cached_units(), cached + 1);
}

TEST(FastDllmV2, AlignedPromptRecomputesItsLastBlock) {
  const EngineOptions options = small_options(2);
  DualCacheSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 3;
  const int64_t first = sim.add(make_prompt(16), params);
  sim.drain();
  const int64_t second = sim.add(make_prompt(16), params);
  sim.drain();
  const RequestResult result = sim.core().take_result(second).value();
  EXPECT_EQ(result.num_cached_tokens, 8);  // the row of position 15 gives the first token
  EXPECT_EQ(result.output_ids, sim.core().take_result(first).value().output_ids);
  const int64_t third = sim.add(make_prompt(17), params);
  sim.drain();
  EXPECT_EQ(sim.core().take_result(third).value().num_cached_tokens, 16);
}

}  // namespace
}  // namespace diffulex
