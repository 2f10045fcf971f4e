// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/plan_simulator.h"

namespace diffulex::test {

/// What the scripts of a property test reached, summed over them.
struct ScriptCoverage {
  int64_t num_preemptions = 0;
  int64_t num_prefix_hit_tokens = 0;
  int64_t num_cancelled_steps = 0;
  int64_t num_aborted = 0;
  int64_t num_capped = 0;  // requests that max_nfe ended

  void add(const SchedulerStats& stats, int32_t capped) {
    num_preemptions += stats.num_preemptions;
    num_prefix_hit_tokens += stats.num_prefix_hit_tokens;
    num_cancelled_steps += stats.num_cancelled_steps;
    num_aborted += stats.num_aborted;
    num_capped += capped;
  }
};

/// What an oracle says of a request.
struct ExpectedResult {
  std::vector<int32_t> output;
  FinishReason reason = FinishReason::kNone;
  int32_t nfe = 0;
};

/// A random script: requests arrive, are aborted, preempted and cancelled at random; invariants are
/// checked after every step and every result is compared with the oracle of the subclass, which
/// knows of none of that.
class PropertyScript {
 public:
  explicit PropertyScript(uint32_t seed) : rng_(seed) {}
  virtual ~PropertyScript() = default;
  PropertyScript(const PropertyScript&) = delete;
  PropertyScript& operator=(const PropertyScript&) = delete;

  const EngineOptions& options() const { return options_; }
  const SchedulerStats& stats() const { return stats_; }
  int32_t num_capped() const { return num_capped_; }

  void run(PlanSimulator& sim) {
    int32_t left_to_add = uniform(3, 9);
    int32_t budget = 40000;
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
      check_snapshots(sim);
    }
    EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options_.num_pages);  // no leak
    stats_ = sim.core().stats();
    EXPECT_EQ(stats_.num_running, 0);
    EXPECT_EQ(stats_.num_waiting, 0);
    for (const auto& [id, request] : submitted_) {
      check_result(sim, id, request);
    }
  }

 protected:
  struct Submitted {
    std::vector<int32_t> prompt;
    SamplingParams params;
    bool is_aborted = false;
  };

  [[nodiscard]] virtual ExpectedResult expect(int64_t req_id, const std::vector<int32_t>& prompt,
                                              const SamplingParams& params) = 0;
  /// Draws parameters that only some strategies read.
  virtual void draw_params(SamplingParams& /*params*/) {}
  /// Prompt lengths worth trying more often than others.
  [[nodiscard]] virtual std::vector<int32_t> special_lengths() const = 0;

  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + uniform(0, static_cast<int32_t>(values.size()) - 1));
  }
  int32_t uniform(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng_);
  }

  /// Draws what does not depend on the strategy; after the sizes are set.
  void draw_common_options(int32_t longest_pages, int32_t least_rows) {
    options_.enable_prefix_caching = uniform(0, 3) > 0;
    options_.decode_headroom = uniform(0, 1) == 0;
    options_.max_consecutive_prefill_batches = uniform(0, 2);
    options_.max_num_batched_tokens = least_rows + uniform(0, 3) * options_.decode_rows();
    options_.mixed_step_rows = uniform(0, 2) * options_.max_num_batched_tokens / 2;
    options_.num_pages = longest_pages + uniform(0, longest_pages * 2);
    // A forward cap cuts where the count of forwards says, so it can be compared with the oracle
    // only where nothing adds or saves forwards.
    draws_max_nfe_ = uniform(0, 3) == 0;
    if (draws_max_nfe_) {
      options_.enable_prefix_caching = false;
      options_.enable_chunked_prefill = false;
      options_.num_pages = longest_pages * options_.max_num_reqs;
    }
    for (auto& base : bases_) {
      base.resize(static_cast<size_t>(options_.max_model_len));
      for (int32_t& token : base) {
        token = uniform(0, options_.vocab_size - 1);  // the mask and the stop id may occur
      }
    }
  }

  EngineOptions options_;
  bool draws_max_nfe_ = false;

 private:
  /// A new request, or an earlier one again: the twin hits what the first one generated.
  void submit(PlanSimulator& sim) {
    Submitted request = draw_request();
    draw_params(request.params);
    if (!submitted_.empty() && uniform(0, 2) == 0) {
      auto twin = submitted_.begin();
      std::advance(twin, uniform(0, static_cast<int32_t>(submitted_.size()) - 1));
      request = twin->second;
      request.is_aborted = false;
    }
    submitted_.emplace(sim.add(request.prompt, request.params), request);
  }

  Submitted draw_request() {
    Submitted request;
    const std::vector<int32_t>& base = bases_[static_cast<size_t>(uniform(0, 1))];
    int32_t len = uniform(1, options_.max_model_len - 1);
    if (uniform(0, 1) == 0) {
      const std::vector<int32_t> lengths = special_lengths();
      const int32_t special =
          lengths[static_cast<size_t>(uniform(0, static_cast<int32_t>(lengths.size()) - 1))];
      len = special >= 1 && special < options_.max_model_len ? special : len;
    }
    request.prompt.assign(base.begin(), base.begin() + len);
    if (uniform(0, 2) == 0) {
      request.prompt.back() = uniform(0, options_.vocab_size - 1);
    }
    SamplingParams& params = request.params;
    const int32_t rows = options_.decode_rows();
    params.max_tokens = uniform(0, 2) > 0 ? uniform(1, 60)
                                          : pick({1, options_.block_size - 1, options_.block_size,
                                                  options_.block_size + 1, rows, rows + 1, 1000});
    params.max_tokens = std::max(params.max_tokens, 1);
    params.ignore_eos = uniform(0, 2) == 0;
    params.max_repetition_run = uniform(0, 4) == 0 ? 3 : 0;
    params.max_nfe = draws_max_nfe_ && uniform(0, 1) == 0 ? uniform(1, 12) : 0;
    if (uniform(0, 2) == 0) {
      params.temperature = 0.7F;
      params.seed = static_cast<uint64_t>(uniform(0, 1 << 30)) << 20;
    }
    if (uniform(0, 3) == 0) {
      params.accept_threshold = 0.5F;
    }
    if (uniform(0, 3) == 0) {
      params.stop_token_ids = {2, 3};
    }
    return request;
  }

  void disturb(PlanSimulator& sim) {
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

  void abort_one(PlanSimulator& sim) {
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

  /// The final output never changes, and a snapshot shows what was streamed.
  void check_snapshots(PlanSimulator& sim) {
    for (const Request* request : sim.core().scheduler().running()) {
      const Result<RequestSnapshot> snapshot = sim.core().snapshot(request->req_id);
      ASSERT_TRUE(snapshot.ok()) << snapshot.status().message();
      ASSERT_EQ(snapshot.value().output_ids, sim.streamed(request->req_id));
      for (const BlockSnapshot& block : snapshot.value().blocks) {
        ASSERT_EQ(static_cast<int32_t>(block.tokens.size()), options_.block_size);
        for (const int32_t rel : block.newly_written) {
          ASSERT_GE(block.start + rel, request->prompt_len);
          ASSERT_LT(rel, options_.block_size);
        }
      }
    }
  }

  void check_result(PlanSimulator& sim, int64_t id, const Submitted& request) {
    SCOPED_TRACE("request " + std::to_string(id));
    const Result<RequestResult> taken = sim.core().take_result(id);
    ASSERT_TRUE(taken.ok()) << taken.status().message();
    const RequestResult& result = taken.value();
    const ExpectedResult expected = expect(id, request.prompt, request.params);
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
    EXPECT_EQ(result.output_ids, expected.output);
    EXPECT_LE(result.output_ids.size(), static_cast<size_t>(request.params.max_tokens));  // I7
    if (result.finish_reason == FinishReason::kMaxNewTokensReached) {
      EXPECT_EQ(result.output_ids.size(), static_cast<size_t>(request.params.max_tokens));
    } else if (result.finish_reason == FinishReason::kMaxModelLenReached) {
      EXPECT_EQ(result.output_ids.size() + request.prompt.size(),
                static_cast<size_t>(options_.max_model_len));
    }
    if (draws_max_nfe_) {
      EXPECT_EQ(result.num_preemptions, 0);
      num_capped_ += result.finish_reason == FinishReason::kMaxNfeReached ? 1 : 0;
    }
    if (result.num_preemptions == 0 && result.num_cached_tokens == 0 &&
        !options_.enable_chunked_prefill) {
      EXPECT_EQ(result.nfe, expected.nfe);
    }
  }

  std::mt19937 rng_;
  SchedulerStats stats_;
  int32_t num_capped_ = 0;
  std::vector<int32_t> bases_[2];
  std::map<int64_t, Submitted> submitted_;
};

}  // namespace diffulex::test
