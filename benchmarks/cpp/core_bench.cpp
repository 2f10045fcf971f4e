// SPDX-License-Identifier: Apache-2.0
// Host cost of one engine step, schedule + complete_step, with the forward and the sampler replaced
// by nothing: the time the scheduler adds to every forward. Prints the median and the 99th
// percentile in microseconds (counters p50_us, p99_us); the target is a median of at most 30 us
// with 64 running requests.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include <benchmark/benchmark.h>

#include "diffulex/core/engine_core.h"

namespace diffulex {
namespace {

constexpr int32_t kNumReqs = 64;
constexpr int32_t kPromptLen = 200;

[[nodiscard]] EngineOptions bench_options(int32_t buffer_size) {
  EngineOptions options;
  options.block_size = 32;
  options.page_size = 32;
  options.buffer_size = buffer_size;
  options.max_num_reqs = kNumReqs;
  options.max_model_len = 4096;
  options.max_num_batched_tokens = kNumReqs * 32 * std::max(buffer_size, 8);
  options.num_pages = kNumReqs * (4096 / 32);
  options.mask_token_id = 1;
  options.vocab_size = 1000;
  options.stop_token_ids = {2, 3};
  return options;
}

/// Accepts the first three open positions of every block: about what a threshold accepts.
void accept_some(StepPlan& plan, SamplerOutput& output) {
  const int32_t block_size = plan.block_size();
  const Span<int32_t> row_index = plan.blk_row_index();
  output.clear(plan.num_blocks());
  for (int32_t blk = 0; blk < plan.num_blocks(); ++blk) {
    int32_t accepted = 0;
    int32_t left = 0;
    for (int32_t rel = 0; rel < block_size; ++rel) {
      const auto at = static_cast<size_t>(blk * block_size + rel);
      if (row_index[at] < 0) {
        continue;
      }
      if (accepted < 3) {
        output.write_ids()[at] = 10 + (rel + blk) % 900;
        ++accepted;
      } else {
        ++left;
      }
    }
    output.flags()[static_cast<size_t>(blk)] = left == 0 ? kSamplerCommittable : 0;
  }
}

class Load {
 public:
  explicit Load(const EngineOptions& options)
      : core_(options), plans_{StepPlan(options), StepPlan(options)}, output_(options) {
    fill();
  }

  /// Microseconds of one decode step, or a negative value for a step that is not counted.
  double step() {
    StepPlan& plan = plans_[static_cast<size_t>(num_steps_++ % 2)];
    const auto begin = std::chrono::steady_clock::now();
    const PlanKind kind = core_.schedule(plan);
    const auto planned = std::chrono::steady_clock::now();
    accept_some(plan, output_);
    const auto sampled = std::chrono::steady_clock::now();
    const Result<const StepEvents*> events = core_.complete_step(plan, output_);
    const auto end = std::chrono::steady_clock::now();
    if (!events.ok()) {
      throw std::runtime_error(events.status().message());
    }
    const bool is_full = kind == PlanKind::kDecode && plan.num_reqs() == kNumReqs;
    for (const FinishedRequest& finished : events.value()->finished) {
      (void)core_.take_result(finished.req_id).value();
    }
    fill();
    const std::chrono::duration<double, std::micro> cost = (planned - begin) + (end - sampled);
    return is_full ? cost.count() : -1.0;
  }

 private:
  void fill() {
    SamplingParams params;
    params.max_tokens = 2000;
    while (num_added_ - core_.stats().num_finished < kNumReqs) {
      std::vector<int32_t> prompt(kPromptLen);
      for (size_t i = 0; i < prompt.size(); ++i) {
        prompt[i] = static_cast<int32_t>((static_cast<size_t>(num_added_) * 31 + i) % 900) + 10;
      }
      (void)core_.add_request(Span<const int32_t>(prompt), params).value();
      ++num_added_;
    }
  }

  EngineCore core_;
  StepPlan plans_[2];
  SamplerOutput output_;
  int64_t num_steps_ = 0;
  int64_t num_added_ = 0;
};

void host_step_cost(benchmark::State& state) {
  Load load(bench_options(static_cast<int32_t>(state.range(0))));
  std::vector<double> costs;
  for (auto iteration : state) {
    const double cost = load.step();
    state.SetIterationTime(std::max(cost, 0.0) * 1e-6);
    if (cost >= 0.0) {
      costs.push_back(cost);
    }
  }
  std::sort(costs.begin(), costs.end());
  if (!costs.empty()) {
    state.counters["p50_us"] = costs[costs.size() / 2];
    state.counters["p99_us"] = costs[costs.size() * 99 / 100];
  }
  state.counters["running"] = kNumReqs;
}

BENCHMARK(host_step_cost)
    ->ArgName("buffer_size")
    ->Arg(1)
    ->Arg(4)
    ->UseManualTime()
    ->Iterations(4000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace diffulex
