// SPDX-License-Identifier: Apache-2.0
// Prompts that run in the steps of decoding requests.

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "core/brute_force_decoder.h"
#include "core/engine_simulator.h"
#include "core/scheduler_requests.h"

namespace diffulex {
namespace {

using test::BruteForceDecoder;
using test::EngineSimulator;
using test::fixed_len;
using test::prompt_of;
using test::scheduler_options;

EngineOptions mixed_options(int32_t mixed_step_rows) {
  EngineOptions options = scheduler_options();
  options.buffer_size = 1;
  options.max_num_batched_tokens = 72;
  options.enable_chunked_prefill = true;
  options.mixed_step_rows = mixed_step_rows;
  return options;
}

/// One request that decodes: its prompt has run.
int64_t start_decoding(EngineSimulator& sim, int32_t first = 0) {
  const int64_t id = sim.add(prompt_of(4, first), fixed_len(40));
  EXPECT_NE(sim.forward(), PlanKind::kIdle);
  sim.complete();
  return id;
}

std::vector<int64_t> ids_of(EngineSimulator& sim) {
  const Span<int64_t> ids = sim.plan().req_ids();
  return {ids.begin(), ids.end()};
}

TEST(MixedSteps, ChunksTakeWhatDecodingLeaves) {
  const EngineOptions options = mixed_options(20);
  EngineSimulator sim(options);
  const int64_t first = start_decoding(sim);
  const std::vector<int32_t> prompt = prompt_of(39, 20);
  const int64_t second = sim.add(prompt, fixed_len(9));
  for (const int32_t num_rows : {16, 16, 8}) {  // of 39 and the rest of their block; 20 less 4
    ASSERT_EQ(sim.forward(), PlanKind::kPrefill);
    EXPECT_EQ(ids_of(sim), (std::vector<int64_t>{first, second}));
    EXPECT_EQ(sim.plan().num_decode_reqs(), 1);
    EXPECT_EQ(sim.plan().cu_seqlens_q()[1], 4);
    EXPECT_EQ(sim.plan().num_rows(), num_rows + 4);
    sim.complete();
  }
  const SchedulerStats stats = sim.core().stats();
  EXPECT_EQ(stats.num_prefill_steps, 1);
  EXPECT_EQ(stats.num_mixed_steps, 3);
  EXPECT_EQ(stats.num_decode_steps, 0);
  ASSERT_EQ(sim.forward(), PlanKind::kDecode);
  EXPECT_EQ(sim.plan().num_decode_reqs(), 2);
  EXPECT_EQ(sim.plan().num_reqs(), 2);
  sim.complete();
  sim.drain();
  EXPECT_EQ(sim.core().take_result(second).value().output_ids,
            BruteForceDecoder(options, prompt, fixed_len(9)).decode().output);
  EXPECT_EQ(sim.core().take_result(first).value().output_ids,
            BruteForceDecoder(options, prompt_of(4, 0), fixed_len(40)).decode().output);
}

TEST(MixedSteps, APromptThatWouldGetFewRowsRunsAlone) {
  EngineSimulator sim(mixed_options(10));  // two decode with eight rows
  start_decoding(sim);
  start_decoding(sim, 9);
  const int64_t id = sim.add(prompt_of(20, 20), fixed_len(8));
  ASSERT_EQ(sim.forward(), PlanKind::kPrefill);
  EXPECT_EQ(ids_of(sim), std::vector<int64_t>{id});
  EXPECT_EQ(sim.plan().num_decode_reqs(), 0);
  sim.complete();
  sim.drain();
}

TEST(MixedSteps, APromptThatDoesNotFitWholeRunsAlone) {
  for (const bool is_short : {false, true}) {
    EngineOptions options = mixed_options(20);
    options.enable_chunked_prefill = false;
    EngineSimulator sim(options);
    start_decoding(sim);
    sim.add(prompt_of(is_short ? 12 : 20, 20), fixed_len(8));
    if (!is_short) {  // a decode step first, then the turn of the prompt
      ASSERT_EQ(sim.forward(), PlanKind::kDecode);
      sim.complete();
    }
    ASSERT_EQ(sim.forward(), PlanKind::kPrefill);
    EXPECT_EQ(sim.plan().num_reqs(), is_short ? 2 : 1);
    sim.complete();
    sim.drain();
  }
}

TEST(MixedSteps, AStepWithDecodingRequestsEndsARunOfPrefills) {
  EngineOptions options = mixed_options(40);
  options.max_consecutive_prefill_batches = 1;
  EngineSimulator sim(options);
  start_decoding(sim);
  sim.add(prompt_of(60, 20), fixed_len(4));
  for (int32_t i = 0; i < 2; ++i) {
    ASSERT_EQ(sim.forward(), PlanKind::kPrefill);
    EXPECT_EQ(sim.plan().num_reqs(), 2);
    sim.complete();
  }
  sim.drain();
}

/// Prompts that do not fit beside each other, in few pages and many chunks.
TEST(MixedSteps, RequestsDoNotTakeTurnsInStartingOver) {
  for (const int32_t mixed_step_rows : {0, 16}) {
    for (const int32_t max_consecutive : {0, 1, 2}) {
      EngineOptions options = mixed_options(mixed_step_rows);
      options.num_pages = 16;
      options.max_num_batched_tokens = 16;
      options.enable_prefix_caching = false;
      options.max_consecutive_prefill_batches = max_consecutive;
      EngineSimulator sim(options);
      std::vector<int64_t> ids;
      for (int32_t i = 0; i < 3; ++i) {
        ids.push_back(sim.add(prompt_of(40, 10 * i), fixed_len(10)));
      }
      int32_t num_steps = 0;
      for (; sim.core().has_unfinished() && num_steps < 400; ++num_steps) {
        ASSERT_NE(sim.forward(), PlanKind::kIdle);
        sim.complete();
      }
      EXPECT_LT(num_steps, 400) << mixed_step_rows << " rows, " << max_consecutive << " batches";
      for (int32_t i = 0; i < 3 && num_steps < 400; ++i) {
        EXPECT_EQ(sim.core().take_result(ids[static_cast<size_t>(i)]).value().output_ids,
                  BruteForceDecoder(options, prompt_of(40, 10 * i), fixed_len(10)).decode().output);
      }
    }
  }
}

}  // namespace
}  // namespace diffulex
