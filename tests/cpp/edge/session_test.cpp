// SPDX-License-Identifier: Apache-2.0
// Answers of the engine, token for token, and what a session refuses.
#include "diffulex/edge/session.h"

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/json_reader.h"
#include "edge/hash_model.h"

namespace diffulex::test {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kVocab = 640;

const std::vector<Json>& cases() {
  static const Json file = Json::load(DIFFULEX_TEST_DATA_DIR "/edge/session_cases.json");
  return file.items();
}

const Json& case_of(const std::string& name) {
  for (const Json& item : cases()) {
    if (item.at("name").as_string() == name) {
      return item;
    }
  }
  throw std::runtime_error("no case " + name);
}

EdgeOptions options_of(const Json& item) {
  return EdgeOptions::parse(item.at("conf").as_string()).value();
}

SamplingParams params_of(const Json& json, SamplingParams params) {
  for (const auto& [key, value] : json.members()) {
    if (key == "max_tokens") {
      params.max_tokens = value.as_int();
    } else if (key == "temperature") {
      params.temperature = static_cast<float>(value.as_double());
    } else if (key == "top_p") {
      params.top_p = static_cast<float>(value.as_double());
    } else if (key == "top_k") {
      params.top_k = value.as_int();
    } else if (key == "min_p") {
      params.min_p = static_cast<float>(value.as_double());
    } else if (key == "seed") {
      params.seed = static_cast<uint64_t>(value.as_int());
    } else if (key == "stop_token_ids") {
      params.stop_token_ids = value.as_ints();
    } else {
      throw std::runtime_error("unknown parameter " + key);
    }
  }
  return params;
}

/// A session and the model inside it.
struct Opened {
  std::unique_ptr<EdgeSession> session;
  HashModel* model = nullptr;
};

Opened open_session(const EdgeOptions& options, int32_t max_rows = 256, int32_t max_logits = 64) {
  auto model = std::make_unique<HashModel>(
      EdgeLimits{kVocab, max_rows, max_logits, options.engine.max_model_len});
  Opened opened;
  opened.model = model.get();
  opened.session = EdgeSession::create(options, std::move(model)).value();
  return opened;
}

Status refusal(const EdgeOptions& options, const EdgeLimits& limits) {
  return EdgeSession::create(options, std::make_unique<HashModel>(limits)).status();
}

/// Runs the requests of a case.
void expect_answers(const Json& item, int32_t max_rows, int32_t max_logits) {
  const EdgeOptions options = options_of(item);
  const Opened opened = open_session(options, max_rows, max_logits);
  int32_t index = 0;
  for (const Json& request : item.at("requests").items()) {
    SCOPED_TRACE(item.at("name").as_string() + ", request " + std::to_string(index++));
    const std::vector<int32_t> prompt = request.at("prompt").as_ints();
    std::vector<int32_t> streamed;
    const Result<RequestResult> result = opened.session->generate(
        prompt, params_of(request.at("params"), options.request), [&](const EdgeStep& step) {
          streamed.insert(streamed.end(), step.tokens.begin(), step.tokens.end());
        });
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(result.value().output_ids, request.at("output").as_ints());
    EXPECT_EQ(to_string(result.value().finish_reason), request.at("reason").as_string());
    EXPECT_EQ(result.value().nfe, request.at("nfe").as_int());
    EXPECT_EQ(streamed, result.value().output_ids);
  }
}

TEST(EdgeSession, RepeatsTheEngine) {
  ASSERT_GE(cases().size(), 16U);
  for (const Json& item : cases()) {
    expect_answers(item, 256, 64);
  }
}

TEST(EdgeSession, SplitsForwardsAtBlocks) {
  for (const Json& item : cases()) {
    const EdgeOptions options = options_of(item);
    const int32_t rows = options.engine.att_block_size();
    // A prompt of d2f is one call.
    const bool has_whole_prompts = options.engine.strategy == "d2f";
    expect_answers(item, has_whole_prompts ? 159 : rows, rows);
    expect_answers(item, has_whole_prompts ? 160 : rows + 1, rows + 3);
  }
}

TEST(EdgeSession, CountsItsWork) {
  const Json& item = case_of("sdar_n4");
  const EdgeOptions options = options_of(item);
  const Opened whole = open_session(options);
  const Opened split = open_session(options, 8, 8);
  const std::vector<int32_t> prompt(96, 3);
  for (const Opened* opened : {&whole, &split}) {
    ASSERT_TRUE(opened->session->generate(prompt, options.request).ok());
    EXPECT_EQ(opened->session->stats().num_calls, opened->model->num_calls);
    EXPECT_GE(opened->session->stats().model_seconds, 0.0);
  }
  EXPECT_EQ(whole.session->stats().num_calls, whole.session->stats().num_forwards);
  EXPECT_EQ(split.session->stats().num_forwards, whole.session->stats().num_forwards);
  EXPECT_GE(split.session->stats().num_calls, split.session->stats().num_forwards + 12);
}

TEST(EdgeSession, EndsWhenCancelled) {
  const EdgeOptions options = options_of(case_of("sdar"));
  const Opened opened = open_session(options);
  EdgeSession& session = *opened.session;
  const std::vector<int32_t> prompt = {1, 2, 3};
  int32_t steps = 0;
  const Result<RequestResult> result =
      session.generate(prompt, options.request, [&](const EdgeStep& step) {
        if (++steps == 3) {
          std::thread(&EdgeSession::cancel, &session).join();  // from any thread
        }
        EXPECT_EQ(step.is_finished, steps == 4);
      });
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().finish_reason, FinishReason::kAborted);
  EXPECT_EQ(steps, 4);
  EXPECT_FALSE(session.is_running());
  session.cancel();  // nothing to cancel
  EXPECT_TRUE(session.generate(prompt, options.request).ok());
}

TEST(EdgeSession, ShowsTheBlocksBeingDenoised) {
  const EdgeOptions options = options_of(case_of("sdar_n4"));
  const Opened opened = open_session(options);
  EdgeSession& session = *opened.session;
  ASSERT_TRUE(session.start(std::vector<int32_t>{1, 2, 3}, options.request).ok());
  ASSERT_TRUE(session.step().ok());
  const Result<RequestSnapshot> snapshot = session.snapshot();
  ASSERT_TRUE(snapshot.ok());
  ASSERT_FALSE(snapshot.value().blocks.empty());
  const std::vector<int32_t>& tokens = snapshot.value().blocks[0].tokens;
  EXPECT_EQ(std::vector<int32_t>(tokens.begin(), tokens.begin() + 3),
            (std::vector<int32_t>{1, 2, 3}));
  EXPECT_THAT(tokens, ::testing::Contains(options.engine.mask_token_id));
}

TEST(EdgeSession, SurvivesAFailureOfTheModel) {
  const Json& item = case_of("sdar");
  const EdgeOptions options = options_of(item);
  const Opened opened = open_session(options);
  EdgeSession& session = *opened.session;
  opened.model->on_run = [](int32_t call) {
    return call == 3 ? Status(StatusCode::kInternal, "model: expected memory, got none") : Status();
  };
  const Json& request = item.at("requests").items()[0];
  const std::vector<int32_t> prompt = request.at("prompt").as_ints();
  const SamplingParams params = params_of(request.at("params"), options.request);
  const Result<RequestResult> failed = session.generate(prompt, params);
  EXPECT_EQ(failed.status().message(), "model: expected memory, got none");
  EXPECT_FALSE(session.is_running());
  EXPECT_EQ(session.take_result().status().code(), StatusCode::kNotFound);
  const Result<RequestResult> result = session.generate(prompt, params);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(result.value().output_ids, request.at("output").as_ints());
}

TEST(EdgeSession, EndsARequestWithoutFiniteLogits) {
  class NanModel final : public EdgeModel {
   public:
    EdgeLimits limits() const override { return {kVocab, 256, 64, 160}; }
    Result<const float*> run(const EdgeCall& call) override {
      logits_.assign(call.logits_rows.size() * kVocab, std::numeric_limits<float>::quiet_NaN());
      return logits_.data();
    }

   private:
    std::vector<float> logits_;
  };
  const EdgeOptions options = options_of(case_of("sdar"));
  auto session = EdgeSession::create(options, std::make_unique<NanModel>()).value();
  const auto result = session->generate(std::vector<int32_t>{1, 2}, options.request);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().finish_reason, FinishReason::kError);
}

TEST(EdgeSession, RefusesBadRequests) {
  const EdgeOptions options = options_of(case_of("sdar"));
  const Opened opened = open_session(options);
  EdgeSession& session = *opened.session;
  const auto message = [&](const std::vector<int32_t>& prompt, const SamplingParams& params) {
    return session.generate(prompt, params).status().message();
  };
  EXPECT_THAT(message({}, options.request), HasSubstr("prompt"));
  EXPECT_THAT(message({1, kVocab}, options.request), HasSubstr("640"));
  EXPECT_THAT(message(std::vector<int32_t>(160, 1), options.request), HasSubstr("160"));
  SamplingParams params = options.request;
  params.max_tokens = 0;
  EXPECT_THAT(message({1}, params), HasSubstr("max_tokens"));
  params = options.request;
  params.penalty_lambda = 0.5F;
  EXPECT_THAT(message({1}, params), HasSubstr("penalty_lambda: expected 0"));
  EXPECT_EQ(opened.model->num_calls, 0);

  EXPECT_THAT(session.step().status().message(), HasSubstr("expected a running request, got none"));
  EXPECT_EQ(session.snapshot().status().code(), StatusCode::kNotFound);
  ASSERT_TRUE(session.start(std::vector<int32_t>{1}, options.request).ok());
  EXPECT_THAT(session.start(std::vector<int32_t>{1}, options.request).message(),
              HasSubstr("expected no running request, got request"));
  EXPECT_EQ(session.take_result().status().code(), StatusCode::kNotFound);
}

TEST(EdgeSession, NamesTheFlagForPromptsThatNeedMoreRows) {
  const EdgeOptions options = options_of(case_of("d2f"));
  const Opened opened = open_session(options, 64, 64);
  const Status status = opened.session->start(std::vector<int32_t>(65, 1), options.request);
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(
      status.message(),
      "prompt: expected at most 64 tokens under d2f (export with a larger --max-rows), got 65");
  EXPECT_TRUE(opened.session->generate(std::vector<int32_t>(64, 1), options.request).ok());
}

TEST(EdgeSession, RefusesSettingsThatDoNotGoTogether) {
  const EdgeOptions options = options_of(case_of("sdar"));
  const EdgeLimits limits = {kVocab, 256, 64, 160};
  EXPECT_TRUE(refusal(options, limits).ok());

  EdgeOptions wrong = options;
  wrong.engine.strategy = "dmax";
  EXPECT_EQ(refusal(wrong, limits).message(),
            "strategy: expected multi_bd, d2f or fast_dllm_v2, got dmax");
  wrong = options;
  wrong.engine.block_size = 5;
  EXPECT_THAT(refusal(wrong, limits).message(), HasSubstr("block_size"));
  wrong = options;
  wrong.request.temperature = -1.0F;
  EXPECT_THAT(refusal(wrong, limits).message(), HasSubstr("temperature"));
  wrong = options;
  wrong.engine.page_size = 0;
  EXPECT_THAT(refusal(wrong, limits).message(), HasSubstr("page_size"));
  wrong = options_of(case_of("dual_cache"));
  wrong.engine.buffer_size = 0;
  EXPECT_THAT(refusal(wrong, limits).message(), HasSubstr("buffer_size"));
  EXPECT_EQ(EdgeSession::create(options, nullptr).status().message(),
            "model: expected a model, got none");

  EXPECT_EQ(refusal(options, {kVocab + 1, 256, 64, 160}).message(),
            "vocab_size: expected 641 as the program has, got 640");
  EXPECT_EQ(refusal(options, {kVocab, 256, 64, 159}).message(),
            "max_model_len: expected at most 159 positions of the program, got 160");
  EXPECT_EQ(refusal(options, {kVocab, 7, 64, 160}).message(),
            "block_size: expected at most 7 rows in a call of the program, got 8");
  EXPECT_EQ(refusal(options, {kVocab, 256, 4, 160}).message(),
            "block_size: expected at most 4 rows in a call of the program, got 8");

  EdgeOptions longer = options_of(case_of("dual_cache"));
  longer.engine.block_size = 32;
  longer.engine.buffer_size = 4;
  longer.engine.max_num_batched_tokens = 1024;
  longer.engine.max_model_len = 130;
  EXPECT_EQ(refusal(longer, {kVocab, 256, 128, 130}).message(),
            "block_size: expected whole blocks in the 162 cache rows of the program, got 256 rows "
            "of blocks of 128 for max_model_len 130");
  longer.engine.max_model_len = 128;
  EXPECT_TRUE(refusal(longer, {kVocab, 256, 128, 130}).ok());
}

}  // namespace
}  // namespace diffulex::test
