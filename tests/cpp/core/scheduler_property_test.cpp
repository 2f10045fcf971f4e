// SPDX-License-Identifier: Apache-2.0
// Random scripts against the brute-force decoder: invariants after every step, termination, no page
// leak, and for every request the tokens of an undisturbed run without cache.

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "core/brute_force_decoder.h"
#include "core/engine_simulator.h"

namespace diffulex {
namespace {

using test::BruteForceDecoder;
using test::BruteForceResult;
using test::EngineSimulator;

struct Submitted {
  std::vector<int32_t> prompt;
  SamplingParams params;
  bool is_aborted = false;
};

class Script {
 public:
  explicit Script(uint32_t seed) : rng_(seed) {
    options_.block_size = pick({4, 8});
    options_.page_size = pick({4, 8, 16, 32});
    options_.buffer_size = uniform(1, 6);
    options_.max_model_len = uniform(20, 90);
    options_.max_num_reqs = uniform(1, 5);
    options_.vocab_size = pick({12, 60, 400});
    options_.mask_token_id = 0;
    options_.stop_token_ids = {1};
    options_.thresholds.add_block = pick({0.0F, 0.1F, 0.5F, 1.0F});
    options_.thresholds.semi_complete = pick({0.0F, 0.5F, 0.9F, 1.0F});
    options_.thresholds.accept = pick({0.0F, 0.3F, 0.7F, 0.95F, 1.0F});
    options_.enable_prefix_caching = uniform(0, 3) > 0;
    options_.enable_chunked_prefill = uniform(0, 1) == 0;
    options_.decode_headroom = uniform(0, 1) == 0;
    options_.masked_rows_only = uniform(0, 1) == 0;
    options_.max_consecutive_prefill_batches = uniform(0, 2);
    const int32_t padded = (options_.max_model_len + options_.block_size - 1) /
                           options_.block_size * options_.block_size;
    const int32_t least = options_.enable_chunked_prefill
                              ? options_.decode_rows()
                              : std::max(padded + options_.block_size, options_.decode_rows());
    options_.max_num_batched_tokens = least + uniform(0, 3) * options_.block_size;
    options_.mixed_step_rows = uniform(0, 2) * options_.max_num_batched_tokens / 2;
    const int32_t one = options_.num_pages_for(options_.max_model_len);
    options_.num_pages = one + uniform(0, one * 2);
    // A forward cap cuts where the count of forwards says, so it can be compared with the brute
    // force only where nothing adds or saves forwards.
    draws_max_nfe_ = uniform(0, 3) == 0;
    if (draws_max_nfe_) {
      options_.enable_prefix_caching = false;
      options_.enable_chunked_prefill = false;
      options_.max_num_batched_tokens =
          std::max(options_.max_num_batched_tokens,
                   std::max(padded + options_.block_size, options_.decode_rows()));
      options_.num_pages = one * options_.max_num_reqs;
    }
    for (auto& base : bases_) {
      base.resize(static_cast<size_t>(options_.max_model_len));
      for (int32_t& token : base) {
        token = uniform(0, options_.vocab_size - 1);  // the mask and the stop id may occur
      }
    }
  }

  const EngineOptions& options() const { return options_; }
  const SchedulerStats& stats() const { return stats_; }
  /// Requests that max_nfe ended.
  int32_t num_capped() const { return num_capped_; }
  /// Requests with a template.
  int32_t num_templates() const { return num_templates_; }

  void run() {
    EngineSimulator sim(options_);
    int32_t left_to_add = uniform(3, 9);
    int32_t budget = 20000;
    while ((left_to_add > 0 || sim.core().has_unfinished()) && !testing::Test::HasFailure()) {
      ASSERT_GT(budget--, 0) << "no termination";
      while (left_to_add > 0 && uniform(0, 3) == 0) {
        submit(sim);
        --left_to_add;
      }
      disturb(sim);
      const PlanKind kind = sim.forward();
      if (uniform(0, 25) == 0) {
        abort_one(sim);  // with the step in flight
      }
      if (kind != PlanKind::kIdle && !draws_max_nfe_ && uniform(0, 20) == 0) {
        sim.cancel();
      } else {
        sim.complete();
      }
    }
    EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options_.num_pages);  // no leak
    stats_ = sim.core().stats();
    EXPECT_EQ(stats_.num_running, 0);
    EXPECT_EQ(stats_.num_waiting, 0);
    for (const auto& [id, request] : submitted_) {
      check_result(sim, id, request);
    }
  }

 private:
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + uniform(0, static_cast<int32_t>(values.size()) - 1));
  }
  int32_t uniform(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng_);
  }

  void submit(EngineSimulator& sim) {
    Submitted request;
    const std::vector<int32_t>& base = bases_[static_cast<size_t>(uniform(0, 1))];
    const int32_t len = uniform(1, options_.max_model_len - 1);
    request.prompt.assign(base.begin(), base.begin() + len);
    if (uniform(0, 2) == 0) {
      request.prompt.back() = uniform(0, options_.vocab_size - 1);
    }
    request.params.max_tokens = uniform(1, 60);
    request.params.ignore_eos = uniform(0, 2) == 0;
    request.params.max_repetition_run = uniform(0, 4) == 0 ? 3 : 0;
    request.params.max_nfe = draws_max_nfe_ && uniform(0, 1) == 0 ? uniform(1, 12) : 0;
    if (uniform(0, 2) == 0) {
      request.params.temperature = 0.7F;
      request.params.seed = static_cast<uint64_t>(uniform(0, 1 << 30)) << 20;
    }
    if (uniform(0, 3) == 0) {
      request.params.accept_threshold = 0.5F;
    }
    if (uniform(0, 3) == 0) {
      request.params.stop_token_ids = {2, 3};
    }
    if (uniform(0, 2) == 0) {
      request.params.template_token_ids = draw_template(request);
    }
    const int64_t id = sim.add(request.prompt, request.params);
    submitted_.emplace(id, request);
  }

  /// Fixed tokens, none of them a stop id, around free positions.
  std::vector<int32_t> draw_template(const Submitted& request) {
    const int32_t room = options_.max_model_len - static_cast<int32_t>(request.prompt.size());
    std::vector<int32_t> ids(
        static_cast<size_t>(uniform(1, std::min(room, request.params.max_tokens))));
    const int32_t share = uniform(0, 4);
    for (int32_t& id : ids) {
      id = uniform(0, 3) < share ? uniform(4, options_.vocab_size - 1) : -1;
    }
    ids[static_cast<size_t>(uniform(0, static_cast<int32_t>(ids.size()) - 1))] = -1;
    ++num_templates_;
    return ids;
  }

  void disturb(EngineSimulator& sim) {
    if (uniform(0, 30) == 0) {
      abort_one(sim);
    }
    if (!draws_max_nfe_ && uniform(0, 12) == 0 && !sim.core().scheduler().running().empty()) {
      const Span<Request* const> running = sim.core().scheduler().running();
      const int32_t victim = uniform(0, static_cast<int32_t>(running.size()) - 1);
      const Status status = sim.core().preempt(running[static_cast<size_t>(victim)]->req_id);
      ASSERT_TRUE(status.ok()) << status.message();
      sim.check_integrity();
    }
  }

  void abort_one(EngineSimulator& sim) {
    if (submitted_.empty()) {
      return;
    }
    auto entry = submitted_.begin();
    std::advance(entry, uniform(0, static_cast<int32_t>(submitted_.size()) - 1));
    if (sim.core().abort(entry->first)) {
      entry->second.is_aborted = true;
      EXPECT_TRUE(sim.core().abort(entry->first));  // idempotent while it lives
    }
  }

  void check_result(EngineSimulator& sim, int64_t id, const Submitted& request) {
    SCOPED_TRACE("request " + std::to_string(id));
    const Result<RequestResult> taken = sim.core().take_result(id);
    ASSERT_TRUE(taken.ok()) << taken.status().message();
    const RequestResult& result = taken.value();
    const BruteForceResult expected =
        BruteForceDecoder(options_, request.prompt, request.params).decode();
    EXPECT_EQ(result.output_ids, sim.streamed(id));
    EXPECT_EQ(static_cast<int32_t>(result.new_tokens_per_step.size()), result.nfe);
    if (result.finish_reason == FinishReason::kAborted) {
      EXPECT_TRUE(request.is_aborted);
      ASSERT_LE(result.output_ids.size(), expected.output.size());
      EXPECT_TRUE(
          std::equal(result.output_ids.begin(), result.output_ids.end(), expected.output.begin()));
      return;
    }
    EXPECT_EQ(result.finish_reason, expected.reason) << to_string(result.finish_reason);
    if (draws_max_nfe_) {
      EXPECT_EQ(result.num_preemptions, 0);
      EXPECT_EQ(result.nfe, expected.nfe);
      num_capped_ += result.finish_reason == FinishReason::kMaxNfeReached ? 1 : 0;
    }
    EXPECT_EQ(result.output_ids, expected.output);
    for (size_t i = 0; i < result.output_ids.size(); ++i) {
      const std::vector<int32_t>& ids = request.params.template_token_ids;
      EXPECT_TRUE(i >= ids.size() || ids[i] < 0 || ids[i] == result.output_ids[i]);
    }
    EXPECT_LE(result.output_ids.size(), static_cast<size_t>(request.params.max_tokens));  // I7
    if (result.num_preemptions == 0 && result.num_cached_tokens == 0 &&
        !options_.enable_chunked_prefill) {
      EXPECT_EQ(result.nfe, expected.nfe);
    }
  }

  std::mt19937 rng_;
  EngineOptions options_;
  SchedulerStats stats_;
  bool draws_max_nfe_ = false;
  int32_t num_capped_ = 0;
  int32_t num_templates_ = 0;
  std::vector<int32_t> bases_[2];
  std::map<int64_t, Submitted> submitted_;
};

class RandomScript : public testing::TestWithParam<int32_t> {};

TEST_P(RandomScript, EqualsTheBruteForceDecoder) {
  constexpr int32_t kScriptsPerCase = 300;
  SchedulerStats seen;
  int32_t num_capped = 0;
  int32_t num_templates = 0;
  for (int32_t i = 0; i < kScriptsPerCase && !HasFailure(); ++i) {
    const auto seed = static_cast<uint32_t>(GetParam() * kScriptsPerCase + i);
    Script script(seed);
    SCOPED_TRACE("script " + std::to_string(seed) + ": block " +
                 std::to_string(script.options().block_size) + ", buffer " +
                 std::to_string(script.options().buffer_size) + ", page " +
                 std::to_string(script.options().page_size));
    script.run();
    seen.num_preemptions += script.stats().num_preemptions;
    seen.num_prefix_hit_tokens += script.stats().num_prefix_hit_tokens;
    seen.num_cancelled_steps += script.stats().num_cancelled_steps;
    seen.num_aborted += script.stats().num_aborted;
    num_capped += script.num_capped();
    num_templates += script.num_templates();
  }
  // The scripts must reach what they are meant to test.
  EXPECT_GT(seen.num_preemptions, kScriptsPerCase);
  EXPECT_GT(seen.num_prefix_hit_tokens, kScriptsPerCase);
  EXPECT_GT(seen.num_cancelled_steps, kScriptsPerCase / 2);
  EXPECT_GT(seen.num_aborted, kScriptsPerCase / 4);
  EXPECT_GT(num_capped, kScriptsPerCase / 10);
  EXPECT_GT(num_templates, kScriptsPerCase);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomScript, testing::Range(0, 8));

}  // namespace
}  // namespace diffulex
