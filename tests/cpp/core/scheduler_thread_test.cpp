// SPDX-License-Identifier: Apache-2.0
// add_request, abort and stats from other threads while one thread steps; run under TSan as well.

#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/engine_simulator.h"
#include "core/scheduler_requests.h"

namespace diffulex {
namespace {

TEST(SchedulerThreads, AddAbortAndStatsWhileStepping) {
  const EngineOptions options = test::scheduler_options();
  test::EngineSimulator sim(options);
  constexpr int kThreads = 3;
  constexpr int kRequestsPerThread = 40;
  std::atomic<int> running_threads{kThreads};
  std::atomic<int> aborted{0};
  std::vector<std::vector<int64_t>> ids(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kRequestsPerThread; ++i) {
        const std::vector<int32_t> prompt = {2 + t, 3, 4, 5, 2 + i % 7};
        SamplingParams params;
        params.max_tokens = 1 + i % 20;
        const int64_t id = sim.core().add_request(Span<const int32_t>(prompt), params).value();
        ids[static_cast<size_t>(t)].push_back(id);
        if (i % 5 == 0 && sim.core().abort(id)) {
          ++aborted;
        }
        const SchedulerStats stats = sim.core().stats();
        EXPECT_GE(stats.num_requests, i + 1);
        EXPECT_LE(stats.num_free_pages, stats.num_pages);
      }
      --running_threads;
    });
  }
  while (running_threads > 0 || sim.core().has_unfinished()) {
    sim.forward();
    sim.complete();
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  int64_t last = -1;
  int num_aborted = 0;
  for (const std::vector<int64_t>& of_thread : ids) {
    last = -1;
    for (const int64_t id : of_thread) {
      EXPECT_GT(id, last);  // ascending
      last = id;
      const RequestResult result = sim.core().take_result(id).value();
      num_aborted += result.finish_reason == FinishReason::kAborted ? 1 : 0;
      EXPECT_FALSE(sim.core().abort(id));
    }
  }
  EXPECT_LE(num_aborted, aborted);
  EXPECT_GT(num_aborted, 0);
  EXPECT_EQ(sim.core().stats().num_finished, kThreads * kRequestsPerThread);
  EXPECT_EQ(sim.core().kv_cache().num_free_pages(), options.num_pages);
}

}  // namespace
}  // namespace diffulex
