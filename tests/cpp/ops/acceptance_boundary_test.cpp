// SPDX-License-Identifier: Apache-2.0

// The acceptance ops at equality, behind closed gates and at their step bounds: what the worked
// vectors leave open.

#include <cmath>

#include <gtest/gtest.h>

#include "diffulex/ops/accept.h"
#include "ops/acceptance_case.h"

namespace diffulex::test {
namespace {

constexpr int64_t kM = kAcceptMask;

void run_edit(AcceptanceCase* block) {
  const Status status = accept_edit(block->edit(kOnHost), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

void run_dmax(AcceptanceCase* block) {
  const Status status = accept_dmax(block->dmax(kOnHost), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

void run_gemma(AcceptanceCase* canvas) {
  const Status status = accept_gemma(canvas->gemma(kOnHost), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

void set_stat(AcceptanceCase* block, TokenStatsColumn column, float value) {
  for (size_t row = 0; row < 4; ++row) {
    block->stats[row * kTokenStatsColumns + static_cast<size_t>(column)] = value;
  }
}

TEST(AcceptEditBoundary, BothThresholdsAreStrict) {
  AcceptanceCase edited({1, 2, 5, 4});
  edited.edit_threshold = {.96F};
  run_edit(&edited);
  EXPECT_EQ(edited.writes(), (Writes{}));
  edited.edit_threshold = {std::nextafter(.96F, 0.0F)};
  run_edit(&edited);
  EXPECT_EQ(edited.writes(), (Writes{{2, 3}}));

  AcceptanceCase filled({kM, 2, 3, 4});
  filled.gate = {0};
  filled.threshold = {.92F};
  run_edit(&filled);
  EXPECT_EQ(filled.writes(), (Writes{}));
  filled.threshold = {std::nextafter(.92F, 0.0F)};
  run_edit(&filled);
  EXPECT_EQ(filled.writes(), (Writes{{0, 1}}));
}

TEST(AcceptEditBoundary, AClosedGateForcesNothingAndDoesNotCount) {
  for (const int32_t earlier : {19, 20}) {
    AcceptanceCase block({1, kM, 5, kM});
    block.gate = {0};
    block.threshold = {.97F};
    block.open_steps = {earlier};
    run_edit(&block);
    const bool timed_out = earlier >= 20;
    EXPECT_EQ(block.writes(), timed_out ? (Writes{{1, 2}, {2, 3}, {3, 4}}) : (Writes{{2, 3}}));
    EXPECT_EQ((block.flags[0] & kAcceptTimedOut) != 0, timed_out);
  }
}

TEST(AcceptEditBoundary, WithoutPostEditStepsAFullBlockIsCommittedAtOnce) {
  for (const int32_t limit : {0, 1, 2}) {
    AcceptanceCase full({1, 2, 5, 4});
    full.post_limits = {limit};
    run_edit(&full);
    // The first step over a full block is the only one that a limit of 1 allows; past a limit of 0
    // its edits are dropped.
    EXPECT_EQ(full.writes(), limit == 0 ? Writes{} : (Writes{{2, 3}})) << limit;
    EXPECT_EQ((full.flags[0] & kAcceptCommittable) != 0, limit < 2) << limit;
    AcceptanceCase open({1, 2, 3, kM});
    open.post_limits = {limit};
    run_edit(&open);
    EXPECT_EQ(open.writes(), (Writes{{3, 4}}));
    EXPECT_EQ((open.flags[0] & kAcceptCommittable) != 0, limit == 0) << limit;
  }
}

TEST(AcceptDmaxBoundary, ThePrefixThresholdIsNotStrict) {
  AcceptanceCase block({kM, 2, 3, 4});
  block.gate = {0};
  block.threshold = {.92F};
  run_dmax(&block);
  EXPECT_EQ(block.writes(), (Writes{{0, 1}}));
  block.threshold = {std::nextafter(.92F, 1.0F)};
  run_dmax(&block);
  EXPECT_EQ(block.writes(), (Writes{}));
}

TEST(AcceptDmaxBoundary, AClosedGateForcesNothingAndDoesNotCount) {
  for (const int32_t earlier : {3, 4}) {
    AcceptanceCase block({kM, kM, kM, kM});
    block.gate = {0};
    block.threshold = {.95F};
    block.open_steps = {earlier};
    run_dmax(&block);
    const bool timed_out = earlier >= 4;
    EXPECT_EQ(block.writes(), timed_out ? (Writes{{0, 1}, {1, 2}, {2, 3}, {3, 4}}) : (Writes{}));
    EXPECT_EQ((block.flags[0] & kAcceptTimedOut) != 0, timed_out);
  }
}

TEST(AcceptDmaxBoundary, ConfidenceOfTheArgmaxEndsABlockNotThatOfTheDraw) {
  AcceptanceCase sure({5, 2, 3, 4});
  set_stat(&sure, kStatsRawConfidence, .1F);
  set_stat(&sure, kStatsMaxProb, .9F);
  run_dmax(&sure);
  EXPECT_EQ(sure.writes(), (Writes{{0, 1}}));  // refreshed whatever its confidence
  EXPECT_EQ(sure.flags[0], kAcceptCommittable | kAcceptAllConfident);
  AcceptanceCase unsure({5, 2, 3, 4});
  set_stat(&unsure, kStatsRawConfidence, 1.0F);
  set_stat(&unsure, kStatsMaxProb, std::nextafter(.9F, 0.0F));
  run_dmax(&unsure);
  EXPECT_EQ(unsure.flags[0], 0);
}

TEST(AcceptDmaxBoundary, TheResidualIsNeverNegative) {
  AcceptanceCase block({1, 2, 3, 4});
  block.with_lists = true;
  block.merge_k = 2;
  block.topk_probs = {.9F, .2F, .5F, .5F, .5F, .25F, .25F, .25F};
  block.allocate();
  run_dmax(&block);
  EXPECT_EQ(block.residual, (std::vector<float>{0.0F, 0.0F, .25F, .5F}));
}

TEST(AcceptGemmaBoundary, APrefixSumOfExactlyTheBoundIsAccepted) {
  AcceptanceCase block({0, 0, 0, 0});
  set_stat(&block, kStatsEntropy, .25F);
  for (const auto& [bound, canvas] :
       {std::pair{.25F, std::vector<int64_t>{1, 2, 2, 5}},
        std::pair{std::nextafter(.25F, 0.0F), std::vector<int64_t>{1, 0, 2, 5}},
        std::pair{.75F, std::vector<int64_t>{1, 2, 3, 4}}}) {
    block.entropy_bound = bound;
    run_gemma(&block);
    EXPECT_EQ(block.write_ids, canvas) << bound;
  }
}

TEST(AcceptGemmaBoundary, TheRunOfEqualCanvasesNeedsAPreviousOne) {
  for (const int32_t run : {-1, 0, 1}) {
    for (const bool is_equal : {true, false}) {
      AcceptanceCase block({0, 0, 0, 0});
      set_stat(&block, kStatsEntropy, .001F);
      block.stability = 2;
      block.stable_run = {run};
      block.previous = {1, 2, 3, is_equal ? 4 : 5};
      block.topk_ids = {1, 0, 2, 1, 3, 0, 4, 5};
      run_gemma(&block);
      const bool wanted = run == 1 && is_equal;
      EXPECT_EQ((block.flags[0] & kAcceptConverged) != 0, wanted) << run << is_equal;
      block.stability = 1;
      run_gemma(&block);
      const bool is_stable = run >= 0 && is_equal;
      EXPECT_EQ((block.flags[0] & kAcceptConverged) != 0, is_stable) << run << is_equal;
    }
  }
}

}  // namespace
}  // namespace diffulex::test
