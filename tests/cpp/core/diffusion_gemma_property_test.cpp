// SPDX-License-Identifier: Apache-2.0
// diffusion_gemma under random scripts against the canvas decoder: invariants after every step,
// termination, no page leak, no stale self-conditioning signal, and for every request the tokens of
// an undisturbed run.

#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/canvas_decoder.h"
#include "core/canvas_simulator.h"
#include "core/property_script.h"

namespace diffulex {
namespace {

using test::CanvasDecoder;
using test::CanvasResult;
using test::CanvasSimulator;
using test::ExpectedResult;
using test::ScriptCoverage;

class Script final : public test::PropertyScript {
 public:
  explicit Script(uint32_t seed) : PropertyScript(seed) {
    options_.strategy = "diffusion_gemma";
    options_.block_size = pick({1, 3, 4, 8, 13});
    options_.page_size = pick({4, 8, 16, 64});
    options_.buffer_size = 1;
    options_.max_model_len = uniform(20, 70);
    options_.max_num_reqs = uniform(1, 5);
    options_.vocab_size = pick({12, 60, 400});
    options_.mask_token_id = 0;
    options_.stop_token_ids = {1, 5};
    options_.max_denoising_steps = uniform(1, 6);
    options_.stability_threshold = uniform(0, 3);
    options_.t_min = pick({0.0F, 0.4F});
    options_.t_max = pick({0.8F, 1.0F});
    options_.seed = static_cast<uint64_t>(uniform(0, 1 << 30));
    options_.enable_chunked_prefill = uniform(0, 1) == 0;
    options_.group_decode_by_rows = uniform(0, 1) == 0;
    const int32_t longest = options_.max_model_len + 2 * options_.block_size;
    const int32_t least = options_.enable_chunked_prefill ? options_.decode_rows() : longest;
    draw_common_options(options_.num_pages_for(options_.max_model_len), least);
    if (draws_max_nfe_) {
      options_.max_num_batched_tokens = std::max(options_.max_num_batched_tokens, longest);
    }
  }

  int32_t num_canvases() const { return num_canvases_; }
  int32_t num_converged() const { return num_converged_; }

 private:
  ExpectedResult expect(int64_t req_id, const std::vector<int32_t>& prompt,
                        const SamplingParams& params) override {
    const uint64_t seed = params.seed.value_or(
        params.is_sampled() ? derive_request_seed(options_.seed, req_id) : options_.seed);
    const CanvasResult result = CanvasDecoder(options_, prompt, params, seed).decode();
    num_canvases_ += result.num_canvases;
    num_converged_ += result.num_converged;
    return ExpectedResult{result.output, result.reason, result.nfe};
  }
  std::vector<int32_t> special_lengths() const override {
    const int32_t page = options_.page_size;
    return {1,
            options_.block_size - 1,
            options_.block_size,
            options_.block_size + 1,
            page - 1,
            page,
            page + 1,
            options_.max_model_len - 1};
  }

  int32_t num_canvases_ = 0;
  int32_t num_converged_ = 0;
};

class DiffusionGemmaScript : public testing::TestWithParam<int32_t> {};

TEST_P(DiffusionGemmaScript, EqualsTheCanvasDecoder) {
  constexpr int32_t kScriptsPerCase = 400;
  ScriptCoverage seen;
  int32_t num_canvases = 0;
  int32_t num_converged = 0;
  int32_t num_mixed_passes = 0;
  for (int32_t i = 0; i < kScriptsPerCase && !HasFailure(); ++i) {
    const auto seed = static_cast<uint32_t>(GetParam() * kScriptsPerCase + i);
    Script script(seed);
    SCOPED_TRACE("script " + std::to_string(seed) + ": canvas " +
                 std::to_string(script.options().block_size) + ", page " +
                 std::to_string(script.options().page_size));
    CanvasSimulator sim(script.options());
    script.run(sim);
    EXPECT_EQ(sim.num_mixed_plans(), 0);  // B rows in every decode forward
    seen.add(script.stats(), script.num_capped());
    num_canvases += script.num_canvases();
    num_converged += script.num_converged();
    num_mixed_passes += sim.num_mixed_passes();
  }
  // The scripts must reach what they are meant to test.
  EXPECT_GT(seen.num_preemptions, kScriptsPerCase);
  EXPECT_GT(seen.num_prefix_hit_tokens, kScriptsPerCase);
  EXPECT_GT(seen.num_cancelled_steps, kScriptsPerCase / 2);
  EXPECT_GT(seen.num_aborted, kScriptsPerCase / 4);
  EXPECT_GT(seen.num_capped, kScriptsPerCase / 10);
  EXPECT_GT(num_converged, kScriptsPerCase);
  EXPECT_GT(num_canvases, num_converged + kScriptsPerCase);
  EXPECT_GT(num_mixed_passes, kScriptsPerCase);
}

INSTANTIATE_TEST_SUITE_P(Seeds, DiffusionGemmaScript, testing::Range(0, 8));

EngineOptions small_options(int32_t num_reqs) {
  EngineOptions options;
  options.strategy = "diffusion_gemma";
  options.block_size = 4;
  options.page_size = 4;
  options.num_pages = 64;
  options.max_num_reqs = num_reqs;
  options.max_num_batched_tokens = 128;
  options.max_model_len = 64;
  options.vocab_size = 400;
  options.max_denoising_steps = 3;
  return options;
}

std::vector<int32_t> make_prompt(int32_t len) {
  std::vector<int32_t> prompt;
  for (int32_t i = 0; i < len; ++i) {
    prompt.push_back(2 + i % 300);
  }
  return prompt;
}

TEST(DiffusionGemma, ReachesEveryLimitExactly) {
  const EngineOptions options = small_options(2);
  for (const int32_t len : {1, 3, 4, 5, 8, 60, 61, 63}) {
    for (const int32_t max_tokens : {1, 3, 4, 5, 8, 9, 1000}) {
      SCOPED_TRACE(std::to_string(len) + " and " + std::to_string(max_tokens));
      CanvasSimulator sim(options);
      SamplingParams params;
      params.max_tokens = max_tokens;
      params.seed = 9;
      const int64_t id = sim.add(make_prompt(len), params);
      sim.drain();
      const RequestResult result = sim.core().take_result(id).value();
      const CanvasResult expected = CanvasDecoder(options, make_prompt(len), params, 9).decode();
      EXPECT_EQ(static_cast<int32_t>(result.output_ids.size()), std::min(max_tokens, 64 - len));
      EXPECT_EQ(result.output_ids, expected.output);
      EXPECT_EQ(result.nfe, expected.nfe);
      EXPECT_EQ(result.decided_tokens, static_cast<int32_t>(result.output_ids.size()));
    }
  }
}

TEST(DiffusionGemma, SamplingParametersOfTheRequestAreIgnored) {
  const EngineOptions options = small_options(1);
  std::vector<std::vector<int32_t>> outputs;
  for (const float temperature : {0.0F, 1.3F}) {
    CanvasSimulator sim(options);
    SamplingParams params;
    params.max_tokens = 12;
    params.seed = 3;
    params.temperature = temperature;
    params.top_k = 2;
    params.top_p = 0.5F;
    const int64_t id = sim.add(make_prompt(6), params);
    sim.forward();
    sim.complete();
    sim.forward();
    EXPECT_EQ(sim.plan().num_filtered_rows(), 0);
    EXPECT_EQ(sim.plan().num_sampled_rows(), 4);
    sim.complete();
    sim.drain();
    outputs.push_back(sim.core().take_result(id).value().output_ids);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
}

TEST(DiffusionGemma, RequestsWithoutSeedAreEqualAtTemperatureZeroOnly) {
  EngineOptions options = small_options(1);
  options.seed = 11;
  CanvasSimulator sim(options);
  const auto outputs = [&](float temperature) {
    std::vector<std::vector<int32_t>> found;
    for (int32_t i = 0; i < 5; ++i) {
      SamplingParams params;
      params.max_tokens = 12;
      params.temperature = temperature;
      const int64_t id = sim.add(make_prompt(6), params);
      sim.drain();
      found.push_back(sim.core().take_result(id).value().output_ids);
    }
    return found;
  };
  SamplingParams params;
  params.max_tokens = 12;
  const CanvasResult expected = CanvasDecoder(options, make_prompt(6), params, 11).decode();
  EXPECT_EQ(outputs(0.0F), std::vector<std::vector<int32_t>>(5, expected.output));
  const std::vector<std::vector<int32_t>> drawn = outputs(1.0F);
  EXPECT_EQ(std::set<std::vector<int32_t>>(drawn.begin(), drawn.end()).size(), drawn.size());
}

TEST(DiffusionGemma, CommitsTheArgmaxCanvasAtTheLastStep) {
  EngineOptions options = small_options(1);
  options.max_denoising_steps = 1;
  CanvasSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 4;
  const int64_t id = sim.add(make_prompt(6), params);
  sim.forward();
  sim.complete();
  sim.forward();
  EXPECT_EQ(sim.plan().blk_steps_left()[0], 1);
  // A sampler that reports real convergence only: the step count decides.
  sim.output().flags()[0] = 0;
  for (size_t rel = 0; rel < 4; ++rel) {
    sim.output().write_ids()[rel] = 7;
    sim.output().canvas_argmax()[rel] = 20 + static_cast<int64_t>(rel);
  }
  sim.complete();
  EXPECT_EQ(sim.core().take_result(id).value().output_ids, (std::vector<int32_t>{20, 21, 22, 23}));
}

TEST(DiffusionGemma, ChecksTheCanvas) {
  const EngineOptions options = small_options(1);
  for (const int64_t token : {int64_t{-1}, int64_t{400}, int64_t{-2}}) {
    CanvasSimulator sim(options);
    sim.add(make_prompt(62), SamplingParams());  // two real positions
    sim.forward();
    sim.complete();
    sim.forward();
    ASSERT_EQ(sim.plan().blk_valid_len()[0], 2);
    for (const bool is_argmax : {false, true}) {
      int64_t& entry = is_argmax ? sim.output().canvas_argmax()[1] : sim.output().write_ids()[1];
      const int64_t legal = entry;
      entry = token;
      EXPECT_EQ(sim.core().complete_step(sim.plan(), sim.output()).status().code(),
                StatusCode::kInvalidArgument);
      entry = legal;
    }
    sim.output().write_ids()[2] = 3;  // past the end of the shortened canvas
    EXPECT_FALSE(sim.core().complete_step(sim.plan(), sim.output()).ok());
    sim.output().write_ids()[2] = -1;
    sim.complete();
  }
}

TEST(DiffusionGemma, RefusesWhatItCannotRun) {
  EXPECT_TRUE(small_options(1).validate().ok());
  const auto message_of = [](void (*change)(EngineOptions&)) {
    EngineOptions options = small_options(1);
    options.max_num_batched_tokens = 8192;
    change(options);
    return options.validate().message();
  };
  EXPECT_NE(message_of([](EngineOptions& o) { o.vocab_size = 0; }).find("vocab_size"),
            std::string::npos);
  EXPECT_NE(message_of([](EngineOptions& o) { o.buffer_size = 2; }).find("buffer_size"),
            std::string::npos);
  EXPECT_NE(message_of([](EngineOptions& o) { o.block_size = 1025; }).find("block_size"),
            std::string::npos);
  EXPECT_NE(message_of([](EngineOptions& o) { o.page_size = 12; }).find("page_size"),
            std::string::npos);
  EXPECT_NE(message_of([](EngineOptions& o) { o.max_denoising_steps = 0; }).find("max_denoising"),
            std::string::npos);
  EXPECT_EQ(message_of([](EngineOptions& o) { o.block_size = 1024; }), "");
}

TEST(DiffusionGemma, BadLogitsFailTheRequest) {
  const EngineOptions options = small_options(1);
  CanvasSimulator sim(options);
  const int64_t id = sim.add(make_prompt(6), SamplingParams());
  sim.forward();
  sim.complete();
  sim.forward();
  sim.output().clear(1);
  sim.output().flags()[0] = kSamplerBadLogits;
  sim.complete();
  const RequestResult result = sim.core().take_result(id).value();
  EXPECT_EQ(result.finish_reason, FinishReason::kError);
  EXPECT_TRUE(result.output_ids.empty());
  EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options.num_pages);
}

TEST(DiffusionGemma, MaskIdIsAnOrdinaryToken) {
  EngineOptions options = small_options(1);
  options.max_denoising_steps = 1;
  CanvasSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 4;
  const int64_t id = sim.add(make_prompt(6), params);
  sim.forward();
  sim.complete();
  sim.forward();
  for (size_t rel = 0; rel < 4; ++rel) {
    sim.output().write_ids()[rel] = options.mask_token_id;
    sim.output().canvas_argmax()[rel] = options.mask_token_id;
  }
  sim.complete();
  EXPECT_EQ(sim.core().take_result(id).value().output_ids, (std::vector<int32_t>{0, 0, 0, 0}));
}

TEST(DiffusionGemma, ResumeEncodesACommittedCanvasWithThePrompt) {
  EngineOptions options = small_options(1);
  options.enable_prefix_caching = false;
  options.max_denoising_steps = 1;
  CanvasSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 9;
  params.seed = 4;
  const int64_t id = sim.add(make_prompt(6), params);
  sim.forward();
  sim.complete();
  sim.forward();
  sim.complete();  // canvas 0 is committed, its KV is still to be stored
  ASSERT_TRUE(sim.core().preempt(id).ok());
  const Request* request = sim.core().scheduler().find_request(id);
  EXPECT_EQ(request->resume_until, 10);
  EXPECT_EQ(request->context_len(), 0);
  EXPECT_EQ(sim.forward(), PlanKind::kPrefill);
  EXPECT_EQ(sim.plan().num_rows(), 10);
  sim.complete();
  EXPECT_EQ(request->context_len(), 10);
  EXPECT_EQ(request->resume_until, 0);
  EXPECT_EQ(request->buffer.block_status(0), BlockStatus::kInCache);
  EXPECT_EQ(request->buffer.block(0).status, BlockStatus::kActive);  // canvas 1, opened
  sim.drain();
  EXPECT_EQ(sim.core().take_result(id).value().output_ids,
            CanvasDecoder(options, make_prompt(6), params, 4).decode().output);
}

TEST(DiffusionGemma, ResumeMayHitInsideACommittedCanvas) {
  EngineOptions options = small_options(2);
  options.block_size = 8;
  options.max_denoising_steps = 1;
  CanvasSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 20;
  params.seed = 4;
  const int64_t first = sim.add(make_prompt(6), params);
  while (sim.core().scheduler().find_request(first) == nullptr ||
         sim.core().scheduler().find_request(first)->context_len() < 14) {
    sim.forward();
    sim.complete();
  }
  ASSERT_TRUE(sim.core().abort(first));  // positions 0..11 stay in the prefix cache
  const int64_t second = sim.add(make_prompt(6), params);
  const Request* request = nullptr;
  do {
    sim.forward();
    sim.complete();
    request = sim.core().scheduler().find_request(second);
  } while (request->buffer.block(0).status != BlockStatus::kToCache);
  ASSERT_TRUE(sim.core().preempt(second).ok());
  EXPECT_EQ(sim.forward(), PlanKind::kPrefill);
  EXPECT_EQ(request->num_cached_tokens, 12);
  EXPECT_EQ(sim.plan().num_rows(), 2);  // positions 12 and 13 of the canvas at 6..13
  sim.complete();
  sim.drain();
  EXPECT_EQ(sim.core().take_result(second).value().output_ids,
            CanvasDecoder(options, make_prompt(6), params, 4).decode().output);
}

TEST(DiffusionGemma, EveryFullPageIsShared) {
  EngineOptions options = small_options(2);
  options.block_size = 13;
  CanvasSimulator sim(options);
  SamplingParams params;
  params.max_tokens = 13;
  sim.add(make_prompt(11), params);
  sim.forward();
  sim.complete();
  EXPECT_EQ(sim.core().kv_cache().num_cached_units(), 2);  // positions 0..7 of 0..10
  sim.drain();
  const int64_t id = sim.add(make_prompt(8), params);
  EXPECT_EQ(sim.forward(), PlanKind::kDecode);  // fully cached: no prefill forward
  sim.complete();
  sim.drain();
  EXPECT_EQ(sim.core().take_result(id).value().num_cached_tokens, 8);
}

}  // namespace
}  // namespace diffulex
