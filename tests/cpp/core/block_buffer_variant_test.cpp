// SPDX-License-Identifier: Apache-2.0
// What the variants of block-buffer decoding do differently, one fact per test.

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/bench.h"
#include "core/block_buffer_variants.h"
#include "core/brute_force_decoder.h"
#include "core/engine_simulator.h"
#include "diffulex/ops/attention.h"

namespace diffulex {
namespace {

using test::Bench;
using test::BruteForceDecoder;
using test::EngineSimulator;
using test::kMask;
using test::kStop;
using test::kVariants;
using test::list;
using test::prompt_of;
using test::small_options;
using test::tokens_of;
using test::toy_options;
using test::Variant;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(MaskKind, IsThatOfTheKernels) {
  EXPECT_EQ(mask_kind(RowMode::kPrefillBlockCausal), static_cast<int32_t>(MaskKind::kBlockCausal));
  EXPECT_EQ(mask_kind(RowMode::kDecodeBlockCausal), static_cast<int32_t>(MaskKind::kBlockCausal));
  EXPECT_EQ(mask_kind(RowMode::kCacheOnly), static_cast<int32_t>(MaskKind::kCacheOnly));
  EXPECT_EQ(mask_kind(RowMode::kPrefillPrefixFull), static_cast<int32_t>(MaskKind::kPrefixFull));
  EXPECT_EQ(mask_kind(RowMode::kCausal), static_cast<int32_t>(MaskKind::kCausal));
  EXPECT_EQ(mask_kind(RowMode::kCanvas), static_cast<int32_t>(MaskKind::kFull));
}

// --- limits, for every variant ------------------------------------------------------------------

class VariantLimits : public testing::TestWithParam<Variant> {};

TEST_P(VariantLimits, ExactNumberOfTokens) {
  for (const int32_t buffer_size : {1, 2, 4}) {
    EngineOptions options = toy_options();
    GetParam().apply(options);
    options.buffer_size = buffer_size;
    const int32_t block = options.block_size;
    const int32_t rows = options.decode_rows();
    const int32_t longest = options.max_model_len;
    for (const int32_t max_tokens : {1, block - 1, block, block + 1, rows, rows + 1, 1000}) {
      for (const int32_t prompt_len :
           {1, block - 1, block, block + 1, 2 * block, rows, rows + 1, longest - 1}) {
        SCOPED_TRACE(std::to_string(prompt_len) + " + " + std::to_string(max_tokens));
        SamplingParams params = tokens_of(max_tokens);
        params.ignore_eos = true;
        EngineSimulator sim(options);
        const int64_t id = sim.add(prompt_of(prompt_len), params);
        sim.drain();
        const RequestResult result = sim.core().take_result(id).value();
        const int32_t room = longest - prompt_len;
        EXPECT_EQ(static_cast<int32_t>(result.output_ids.size()), std::min(max_tokens, room));
        EXPECT_EQ(result.finish_reason, max_tokens <= room ? FinishReason::kMaxNewTokensReached
                                                           : FinishReason::kMaxModelLenReached);
        EXPECT_EQ(result.output_ids,
                  BruteForceDecoder(options, prompt_of(prompt_len), params).decode().output);
      }
    }
  }
}

TEST_P(VariantLimits, EveryPromptLength) {
  EngineOptions options = toy_options();
  GetParam().apply(options);
  options.buffer_size = 2;
  options.page_size = 8;
  for (int32_t prompt_len = 1; prompt_len < options.max_model_len; ++prompt_len) {
    SCOPED_TRACE(prompt_len);
    EngineSimulator sim(options);
    const int64_t id = sim.add(prompt_of(prompt_len), tokens_of(9));
    sim.drain();
    EXPECT_EQ(sim.core().take_result(id).value().output_ids,
              BruteForceDecoder(options, prompt_of(prompt_len), tokens_of(9)).decode().output);
  }
  EngineCore core(options);
  const std::vector<int32_t> too_long = prompt_of(options.max_model_len);
  EXPECT_EQ(core.add_request(Span<const int32_t>(too_long), tokens_of(1)).status().code(),
            StatusCode::kOutOfRange);
}

INSTANTIATE_TEST_SUITE_P(All, VariantLimits, testing::ValuesIn(kVariants),
                         [](const auto& tested) { return std::string(tested.param.name); });

// --- the first forward --------------------------------------------------------------------------

// A chunk of prompt rows alone leaves the first block to a decode step.
TEST_P(VariantLimits, AlignedPromptsDecodeAsWithASeparateForward) {
  EngineOptions options = toy_options();
  GetParam().apply(options);
  if (options.strategy == "d2f") {
    return;  // its prompts cannot be cut; EqualsTheBruteForceDecoder covers them
  }
  options.enable_prefix_caching = false;
  for (const int32_t buffer_size : {1, 2, 3}) {
    options.buffer_size = buffer_size;
    for (const int32_t prompt_len : {12, 16, 24}) {
      SCOPED_TRACE(std::to_string(buffer_size) + " blocks, prompt of " +
                   std::to_string(prompt_len));
      RequestResult results[2];
      for (const bool is_cut : {false, true}) {
        EngineOptions cut = options;
        cut.enable_chunked_prefill = is_cut;
        cut.max_num_batched_tokens = is_cut ? prompt_len : options.max_num_batched_tokens;
        EngineSimulator sim(cut);
        const int64_t id = sim.add(prompt_of(prompt_len), tokens_of(15));
        sim.drain();
        results[is_cut ? 1 : 0] = sim.core().take_result(id).value();
      }
      EXPECT_EQ(results[0].output_ids, results[1].output_ids);
      EXPECT_EQ(results[0].nfe + 1, results[1].nfe);
    }
  }
}

TEST(FirstForward, RunsThePromptAndTheFirstBlock) {
  Bench bench(small_options());
  bench.add(8, tokens_of(20));
  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  EXPECT_EQ(bench.plan().num_rows(), 12);
  EXPECT_EQ(bench.plan().num_blocks(), 1);
  EXPECT_EQ(bench.plan().blk_start()[0], 8);
  EXPECT_GE(bench.plan().slot_mapping()[7], 0);
  EXPECT_EQ(bench.plan().slot_mapping()[8], -1);
  bench.write(8, 1);
  EXPECT_EQ(bench.complete().new_tokens, 1);
}

// --- d2f ----------------------------------------------------------------------------------------

TEST(D2f, SharesNoPrefix) {
  EngineOptions options = toy_options();
  options.strategy = "d2f";
  EngineSimulator sim(options);
  for (int32_t i = 0; i < 2; ++i) {
    const int64_t id = sim.add(prompt_of(12), tokens_of(10));
    sim.drain();
    EXPECT_EQ(sim.core().take_result(id).value().num_cached_tokens, 0);
  }
  EXPECT_EQ(sim.core().kv_cache().num_cached_units(), 0);
  EXPECT_EQ(sim.core().stats().num_prefix_query_tokens, 0);
}

TEST(D2f, BlocksStartWhereThePromptEnds) {
  EngineOptions options = small_options();
  options.strategy = "d2f";
  Bench bench(options);
  const int64_t id = bench.add(6, tokens_of(20));
  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  StepPlan& plan = bench.plan();
  EXPECT_EQ(plan.num_rows(), 10);  // prompt and first block
  EXPECT_EQ(plan.blk_start()[0], 6);
  EXPECT_EQ(plan.blk_editable_start()[0], 0);
  EXPECT_EQ(plan.prefix_lens()[0], 6);
  EXPECT_EQ(plan.padded_prefix_lens()[0], 6);
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 6);  // the prompt is cached once, as a whole
  bench.step({{6, 1}, {7, 2}, {8, 3}, {9, 4}}, true);
  bench.schedule();
  // Positions 6 to 9 lie in two pages.
  const std::vector<int32_t>& pages = bench.request(id).page_table.pages;
  EXPECT_THAT(list(plan.slot_mapping()),
              ElementsAre(4 * pages[1] + 2, 4 * pages[1] + 3, 4 * pages[2], 4 * pages[2] + 1));
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 10);
}

TEST(D2f, RebuildsThePromptAndTheBlocksTogether) {
  EngineOptions options = small_options();
  options.strategy = "d2f";
  Bench bench(options);
  const int64_t id = bench.add(6, tokens_of(20));
  bench.step({{6, 1}, {7, 2}, {8, 3}, {9, 4}}, true);
  bench.step({});
  ASSERT_TRUE(bench.core().preempt(id).ok());
  EXPECT_EQ(bench.request(id).resume_until, 10);
  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  StepPlan& plan = bench.plan();
  EXPECT_EQ(plan.row_mode()[0], static_cast<int32_t>(RowMode::kPrefillPrefixFull));
  EXPECT_EQ(plan.prefix_lens()[0], 6);
  EXPECT_EQ(plan.padded_prefix_lens()[0], 6);
  EXPECT_EQ(plan.num_rows(), 10);
  EXPECT_EQ(plan.num_blocks(), 0);
  EXPECT_TRUE(std::all_of(plan.slot_mapping().begin(), plan.slot_mapping().begin() + 10,
                          [](int32_t slot) { return slot >= 0; }));
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 10);
  EXPECT_EQ(bench.schedule(), PlanKind::kDecode);
}

TEST(D2f, OnTheGridRebuildsThePromptAndThenTheBlocks) {
  EngineOptions options = small_options();
  options.strategy = "d2f";
  options.d2f_block_grid = true;
  Bench bench(options);
  const int64_t id = bench.add(6, tokens_of(20));
  bench.step({{6, 1}, {7, 2}}, true);  // the tail block is frozen
  bench.step({});                      // and stored
  ASSERT_EQ(bench.request(id).context_len(), 8);
  ASSERT_TRUE(bench.core().preempt(id).ok());
  EXPECT_EQ(bench.request(id).resume_until, 8);

  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  StepPlan& plan = bench.plan();
  EXPECT_EQ(plan.row_mode()[0], static_cast<int32_t>(RowMode::kPrefillPrefixFull));
  EXPECT_EQ(plan.prefix_lens()[0], 6);
  EXPECT_EQ(plan.padded_prefix_lens()[0], 8);
  EXPECT_EQ(plan.num_rows(), 6);  // the prompt with its tail, which is not stored
  EXPECT_EQ(plan.valid_slices()[0], 6);
  EXPECT_TRUE(std::all_of(plan.slot_mapping().begin(), plan.slot_mapping().begin() + 4,
                          [](int32_t slot) { return slot >= 0; }));
  EXPECT_EQ(plan.slot_mapping()[4], -1);
  EXPECT_EQ(plan.slot_mapping()[5], -1);
  EXPECT_EQ(plan.num_blocks(), 0);
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 4);

  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  EXPECT_EQ(plan.row_mode()[0], static_cast<int32_t>(RowMode::kPrefillBlockCausal));
  EXPECT_EQ(plan.prefix_lens()[0], 0);
  EXPECT_THAT(list(plan.positions()), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(list(plan.input_ids()), ElementsAre(104, 105, 1, 2));
  EXPECT_EQ(plan.context_lens()[0], 4);
  bench.complete();
  EXPECT_EQ(bench.request(id).context_len(), 8);
  EXPECT_EQ(bench.request(id).resume_until, 0);
  EXPECT_EQ(bench.schedule(), PlanKind::kDecode);
}

TEST(D2f, StartsOverWhenThePromptForwardFailed) {
  EngineOptions options = small_options();
  options.strategy = "d2f";
  options.buffer_size = 2;
  Bench bench(options);
  const int64_t id = bench.add(6, tokens_of(20));
  bench.schedule();
  const int32_t num_blocks = bench.plan().num_blocks();
  ASSERT_TRUE(bench.core().cancel_step(bench.plan()).ok());
  EXPECT_EQ(bench.request(id).resume_until, 0);
  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  EXPECT_EQ(bench.plan().row_mode()[0], static_cast<int32_t>(RowMode::kPrefillPrefixFull));
  EXPECT_EQ(bench.plan().num_blocks(), num_blocks);  // denoises as the lost forward did
}

// --- shifted logits -----------------------------------------------------------------------------

TEST(ShiftedLogits, HitsLeaveTheBlockWhoseRowIsNeeded) {
  EngineOptions options = toy_options();
  options.logits_shift = true;
  for (const auto& [prompt_len, hit] : {std::pair{8, 4}, std::pair{9, 8}, std::pair{4, 0}}) {
    SCOPED_TRACE(prompt_len);
    EngineSimulator sim(options);
    int64_t id = -1;
    for (int32_t i = 0; i < 2; ++i) {
      id = sim.add(prompt_of(prompt_len), tokens_of(2));
      sim.drain();
    }
    EXPECT_EQ(sim.core().take_result(id).value().num_cached_tokens, hit);
  }
}

TEST(ShiftedLogits, ResumeRunsTheBlockBeforeTheNextOneAgain) {
  EngineOptions options = small_options();
  options.logits_shift = true;
  Bench bench(options);
  const int64_t id = bench.add(4, tokens_of(20));
  bench.step({});
  bench.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}}, true);
  bench.step({});
  EXPECT_EQ(bench.request(id).carry_pos, 7);
  ASSERT_TRUE(bench.core().preempt(id).ok());
  EXPECT_EQ(bench.request(id).carry_pos, -1);
  ASSERT_EQ(bench.schedule(), PlanKind::kPrefill);
  EXPECT_EQ(bench.request(id).num_cached_tokens, 4);  // not 8, though all of it is cached
  const int32_t last = bench.plan().last_row_index()[0];
  ASSERT_GE(last, 0);
  EXPECT_EQ(
      bench.plan()
          .positions()[static_cast<size_t>(bench.plan().logits_rows()[static_cast<size_t>(last)])],
      7);
  bench.complete();
  EXPECT_EQ(bench.request(id).carry_pos, 7);
}

TEST(ShiftedLogits, SampledRequestsReadTheSavedLogitsThemselves) {
  EngineOptions options = small_options();
  options.logits_shift = true;
  Bench bench(options);
  SamplingParams params = tokens_of(20);
  params.temperature = 0.5F;
  params.top_k = 7;
  const int64_t id = bench.add(4, params);
  bench.step({});
  ASSERT_EQ(bench.schedule(), PlanKind::kDecode);
  StepPlan& plan = bench.plan();
  EXPECT_THAT(list(plan.logits_source()), ElementsAre(bench.request(id).request_slot, -1, -1, -1));
  EXPECT_EQ(plan.num_saved_source_rows(), 1);
  EXPECT_EQ(plan.num_filtered_rows(), 4);
  EXPECT_THAT(list(plan.row_top_k()), ElementsAre(7, 7, 7, 7));
  EXPECT_THAT(list(plan.blk_row_index()), ElementsAre(0, 1, 2, 3));
  // Entries of the next step start from the defaults again.
  bench.write(4, 1);
  bench.complete();
  bench.schedule();
  EXPECT_THAT(list(plan.logits_source()), ElementsAre(-1, -1, -1));
  EXPECT_EQ(plan.num_saved_source_rows(), 0);
}

// --- editing ------------------------------------------------------------------------------------

class Editing : public testing::Test {
 protected:
  Editing() : bench_(make_options()), id_(bench_.add(4, tokens_of(20))) { bench_.step({}); }

  static EngineOptions make_options() {
    EngineOptions options = small_options();
    options.is_editing = true;
    options.buffer_size = 2;
    return options;
  }

  Bench bench_;
  int64_t id_;
};

TEST_F(Editing, AStopIdCountsOnceCommittedAndBlocksActivationUntilThen) {
  bench_.step({{4, 7}, {5, kStop}});
  EXPECT_EQ(bench_.request(id_).buffer.state().stop_pos, 5);
  bench_.step({{6, 8}});
  EXPECT_EQ(bench_.request(id_).buffer.num_valid(), 1);  // far enough, but a stop id stands
  EXPECT_EQ(bench_.step({{5, 9}}).new_tokens, 0);        // edited away
  EXPECT_EQ(bench_.request(id_).buffer.state().stop_pos, kNoPosition);
  EXPECT_EQ(bench_.step({{7, 10}}).new_tokens, 1);
  EXPECT_EQ(bench_.request(id_).buffer.num_valid(), 2);
  EXPECT_TRUE(bench_.request(id_).output().empty());
  EXPECT_FALSE(bench_.step({{6, kStop}}).is_finished);  // edited into place
  const RequestEvent event = bench_.step({}, true);
  EXPECT_EQ(event.finish_reason, FinishReason::kEosTokenGenerated);
  EXPECT_EQ(event.appended_len, 2);
  EXPECT_THAT(list(bench_.request(id_).output()), ElementsAre(7, 9));
}

TEST_F(Editing, CountersOfTheBlock) {
  bench_.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}});
  bench_.schedule();
  EXPECT_EQ(bench_.plan().blk_open_steps()[0], 2);  // the forward of the prompt counts
  EXPECT_EQ(bench_.plan().blk_post_edit_steps()[0], 0);
  EXPECT_EQ(bench_.plan().blk_step()[0], 2);
  bench_.write(4, 9);
  bench_.complete();
  bench_.schedule();
  EXPECT_EQ(bench_.plan().blk_open_steps()[0], 3);
  EXPECT_EQ(bench_.plan().blk_post_edit_steps()[0], 1);
  EXPECT_EQ(bench_.plan().blk_row_index()[0], 0);  // decided positions have rows too
}

TEST_F(Editing, WaitingIsNoLivelock) {
  bench_.step({{4, 1}, {5, 2}, {6, 3}, {7, 4}});
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_FALSE(bench_.step({}).is_finished);
  }
}

TEST_F(Editing, ForbiddenWrites) {
  bench_.step({{4, 1}});
  bench_.schedule();
  const auto refuses = [this](int32_t position, int64_t token, const std::string& message) {
    bench_.output().clear(bench_.plan().num_blocks());
    bench_.write(position, token);
    const Result<const StepEvents*> events =
        bench_.core().complete_step(bench_.plan(), bench_.output());
    ASSERT_FALSE(events.ok());
    EXPECT_THAT(events.status().message(), HasSubstr(message));
  };
  refuses(4, kMask, "got the mask token");
  refuses(5, kMask, "got the mask token");
  refuses(4, 200, "an id outside the vocabulary");
  bench_.output().clear(bench_.plan().num_blocks());
  bench_.write(4, 1);  // repeats what stands there
  bench_.complete();
  EXPECT_TRUE(bench_.request(id_).last_writes.empty());
}

TEST(EditingPrompt, IsNeverRewritten) {
  EngineOptions options = small_options();
  options.is_editing = true;
  Bench bench(options);
  bench.add(6, tokens_of(8));
  bench.schedule();
  bench.write(5, 105);  // even by its own token
  const Result<const StepEvents*> events = bench.core().complete_step(bench.plan(), bench.output());
  ASSERT_FALSE(events.ok());
  EXPECT_THAT(events.status().message(), HasSubstr("a prompt position"));
}

TEST(MaskFilling, AStepWithoutProgressIsAnError) {
  Bench bench(small_options());
  bench.add(4, tokens_of(20));
  bench.step({});
  EXPECT_EQ(bench.step({}).finish_reason, FinishReason::kError);
}

TEST(Verdicts, SkippedBlocksAreNotFrozen) {
  Bench bench(small_options());
  const int64_t id = bench.add(4, tokens_of(20));
  bench.step({});
  bench.schedule();
  for (int32_t position = 4; position < 8; ++position) {
    bench.write(position, position);
  }
  bench.output().flags()[0] = kSamplerCommittable | kSamplerSkipped;
  bench.complete();
  EXPECT_EQ(bench.request(id).buffer.block(0).status, BlockStatus::kActive);
}

TEST(Verdicts, TheRatioGatesTheNextBlock) {
  EngineOptions options = small_options();
  options.is_editing = true;
  options.buffer_size = 2;
  Bench bench(options);
  SamplingParams params = tokens_of(20);
  params.token_stability_threshold = 0.5F;
  const int64_t id = bench.add(4, params);
  bench.step({});
  bench.schedule();
  bench.write(4, 1);
  bench.output().same_token_ratio()[0] = 0.49F;
  bench.complete();
  bench.schedule();
  EXPECT_EQ(bench.plan().num_blocks(), 1);
  bench.output().same_token_ratio()[0] = 0.5F;
  bench.complete();
  bench.schedule();
  EXPECT_EQ(bench.plan().num_blocks(), 2);
  EXPECT_EQ(bench.request(id).buffer.rules().token_stability_threshold, 0.5F);
}

TEST(Thresholds, OfARequestAreItsOwn) {
  EngineOptions options = small_options();
  options.is_editing = true;
  options.buffer_size = 2;
  options.thresholds = {1.0F, 1.0F, 0.9F, 0.8F, 0.4F, 0.0F};
  options.max_post_edit_steps = 3;
  Bench bench(options);
  SamplingParams params = tokens_of(20);
  params.add_block_threshold = 0.0F;
  params.semi_complete_threshold = 0.0F;
  params.accept_threshold = 0.3F;
  params.edit_threshold = 0.2F;
  params.max_post_edit_steps = 5;
  params.penalty_lambda = 1.5F;
  bench.add(4, params);
  bench.add(4, tokens_of(20));
  bench.schedule();
  ASSERT_TRUE(bench.core().complete_step(bench.plan(), bench.output()).ok());
  bench.schedule();
  ASSERT_TRUE(bench.core().complete_step(bench.plan(), bench.output()).ok());
  bench.schedule();
  EXPECT_THAT(list(bench.plan().blk_req()), ElementsAre(0, 0, 1));
  EXPECT_THAT(list(bench.plan().blk_force_top1()), ElementsAre(1, 1, 1));
  EXPECT_THAT(list(bench.plan().blk_accept_threshold()), ElementsAre(0.3F, 0.3F, 0.9F));
  EXPECT_THAT(list(bench.plan().blk_edit_threshold()), ElementsAre(0.2F, 0.2F, 0.8F));
  EXPECT_THAT(list(bench.plan().blk_max_post_edit_steps()), ElementsAre(5, 5, 3));
  EXPECT_THAT(list(bench.plan().blk_penalty()), ElementsAre(1.5F, 1.5F, 0.0F));
  EXPECT_TRUE(bench.plan().any_penalised());
}

TEST(Thresholds, NothingIsTakenWhereNothingIsEdited) {
  EngineOptions options = small_options();
  Bench bench(options);
  SamplingParams params = tokens_of(20);
  params.penalty_lambda = 1.5F;
  bench.add(4, params);
  bench.schedule();
  EXPECT_TRUE(bench.plan().blk_penalty().empty());
  EXPECT_FALSE(bench.plan().any_penalised());
}

// --- merge descriptors --------------------------------------------------------------------------

class Merging : public testing::TestWithParam<bool> {
 protected:
  Merging() : bench_(make_options(GetParam())), id_(bench_.add(4, tokens_of(20))) {
    bench_.step({});
  }

  static EngineOptions make_options(bool stores_soft) {
    EngineOptions options = small_options();
    options.strategy = "dmax";
    options.token_merge_top_k = 2;
    options.dmax_store_soft_embeddings = stores_soft;
    return options;
  }

  void describe(size_t rel, int64_t id, float prob) {
    bench_.output().merge_valid()[rel] = 1;
    bench_.output().merge_topk_ids()[2 * rel] = id;
    bench_.output().merge_topk_ids()[2 * rel + 1] = id + 1;
    bench_.output().merge_topk_probs()[2 * rel] = prob;
    bench_.output().merge_topk_probs()[2 * rel + 1] = 0.0F;
    bench_.output().merge_residual()[rel] = 1.0F - prob;
  }

  Bench bench_;
  int64_t id_;
};

TEST_P(Merging, DescriptorsSurviveAPreemption) {
  bench_.schedule();
  bench_.write(4, 1);
  describe(0, 1, 0.75F);
  bench_.complete();
  ASSERT_TRUE(bench_.core().preempt(id_).ok());
  ASSERT_EQ(bench_.schedule(), PlanKind::kDecode);  // the prompt is still cached
  EXPECT_THAT(list(bench_.plan().merge_mask()), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(list(bench_.plan().merge_topk_ids()),
              ElementsAre(1, 2, kMask, kMask, kMask, kMask, kMask, kMask));
  EXPECT_EQ(bench_.plan().merge_topk_probs()[0], 0.75F);
  EXPECT_EQ(bench_.plan().merge_residual()[0], 0.25F);
}

TEST_P(Merging, TheStoreForwardIsHardUnlessToldOtherwise) {
  bench_.schedule();
  for (int32_t rel = 0; rel < 4; ++rel) {
    bench_.write(4 + rel, rel + 1);
    describe(static_cast<size_t>(rel), rel + 1, 0.5F);
  }
  bench_.commit(0);
  bench_.complete();
  bench_.schedule();
  ASSERT_TRUE(bench_.plan().need_kv_cache_store());
  EXPECT_THAT(list(bench_.plan().merge_mask()), testing::Each(GetParam() ? 1 : 0));
  bench_.complete();
  // Soft KV is a function of more than tokens: only the prompt's is shared.
  EXPECT_EQ(bench_.core().kv_cache().num_cached_units(), GetParam() ? 1 : 2);
}

TEST_P(Merging, BadDescriptorsAreRefusedAndNothingIsApplied) {
  bench_.schedule();
  const auto refuses = [this](const std::string& message) {
    const Result<const StepEvents*> events =
        bench_.core().complete_step(bench_.plan(), bench_.output());
    ASSERT_FALSE(events.ok());
    EXPECT_THAT(events.status().message(), HasSubstr(message));
    bench_.output().clear(bench_.plan().num_blocks());
  };
  describe(0, 1, 0.5F);  // the position stays open
  refuses("at a decided position, got one of id 1 with probability 0.5");
  bench_.write(4, 1);
  describe(0, 200, 0.5F);
  refuses("got one of id 200");
  bench_.write(4, 1);
  describe(0, 1, 2.0F);
  refuses("with probability 2");
  bench_.write(4, 1);
  describe(0, 1, 0.5F);
  bench_.complete();
  EXPECT_EQ(bench_.request(id_).new_tokens, 1);
}

INSTANTIATE_TEST_SUITE_P(Store, Merging, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "Soft" : "Hard"; });

}  // namespace
}  // namespace diffulex
