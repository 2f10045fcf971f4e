// SPDX-License-Identifier: Apache-2.0
// Blocks that the step which confirms them stores as well, one fact per test.

#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/bench.h"
#include "core/brute_force_decoder.h"

namespace diffulex {
namespace {

using test::Bench;
using test::BruteForceDecoder;
using test::kStop;
using test::list;
using test::prompt_of;
using test::small_options;
using test::tokens_of;
using test::toy_options;
using testing::ElementsAre;

// Without the early store the sampler's tokens are the same, and the forwards more.
TEST(StoringEarly, ChangesNoToken) {
  EngineOptions options = toy_options();
  options.is_editing = true;
  options.thresholds.accept = 0.3F;
  options.thresholds.edit = 0.9F;
  SamplingParams params = tokens_of(30);
  params.ignore_eos = true;
  for (const int32_t buffer_size : {1, 2, 4}) {
    options.buffer_size = buffer_size;
    int32_t num_saved = 0;
    for (int32_t prompt_len = 1; prompt_len <= 16; ++prompt_len) {
      const std::vector<int32_t> prompt = prompt_of(prompt_len);
      const auto early = BruteForceDecoder(options, prompt, params).decode();
      const auto late = BruteForceDecoder(options, prompt, params, false).decode();
      EXPECT_EQ(early.output, late.output);
      EXPECT_LE(early.nfe, late.nfe);
      num_saved += late.nfe - early.nfe;
    }
    // With more blocks another one is refined meanwhile as a rule.
    EXPECT_TRUE(num_saved > 0 || buffer_size > 1);
  }
}

TEST(StoringEarly, ABlockThatItsLastStepConfirmedTakesNoFurtherForward) {
  EngineOptions options = small_options();
  options.is_editing = true;
  Bench bench(options);
  const int64_t id = bench.add(4, tokens_of(20));
  bench.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}});
  bench.schedule();
  EXPECT_THAT(list(bench.plan().slot_mapping()), testing::Each(testing::Ge(0)));
  bench.commit(0);
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 8);
  EXPECT_EQ(bench.request(id).settled_end(), 8);
  bench.schedule();
  EXPECT_EQ(bench.plan().blk_start()[0], 8);
}

TEST(StoringEarly, ARewrittenTokenNeedsAnotherForward) {
  EngineOptions options = small_options();
  options.is_editing = true;
  Bench bench(options);
  const int64_t id = bench.add(4, tokens_of(20));
  bench.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}});
  bench.step({{5, 9}}, true);  // what was stored is the KV of 2
  EXPECT_EQ(bench.request(id).context_len(), 4);
  EXPECT_EQ(bench.request(id).settled_end(), 8);
  bench.schedule();
  EXPECT_EQ(bench.plan().num_blocks(), 0);
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 8);
}

TEST(StoringEarly, AStopIdInTheStoredBlockEndsTheRequest) {
  EngineOptions options = small_options();
  options.is_editing = true;
  Bench bench(options);
  const int64_t id = bench.add(4, tokens_of(20));
  bench.step({{4, 1}, {5, kStop}, {6, 3}, {7, 4}});
  EXPECT_EQ(bench.step({}, true).finish_reason, FinishReason::kEosTokenGenerated);
  EXPECT_THAT(list(bench.request(id).output()), ElementsAre(1));
}

TEST(StoringEarly, KeepsThePlaceOfTheBlockForAStep) {
  EngineOptions options = small_options();
  options.is_editing = true;
  options.buffer_size = 2;
  Bench bench(options);
  const int64_t id = bench.add(4, tokens_of(40));
  bench.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}});
  bench.step({{8, 5}});  // opens the second block
  bench.schedule();
  bench.commit(0);  // the first one is frozen and stored
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 8);
  EXPECT_EQ(bench.request(id).buffer.num_valid(), 1);
  bench.step({{9, 6}});  // refines the second alone, as the store forward did
  EXPECT_EQ(bench.request(id).buffer.num_valid(), 1);
  bench.step({{10, 7}});
  EXPECT_EQ(bench.request(id).buffer.num_valid(), 2);
}

}  // namespace
}  // namespace diffulex
