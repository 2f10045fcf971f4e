// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/acceptance.h"

#include <array>
#include <vector>

#include <gtest/gtest.h>

#include "core/threshold_block.h"

namespace diffulex::test {
namespace {

constexpr int64_t kMask = 7;

struct Case {
  std::vector<int64_t> tokens = {kMask, kMask, kMask, kMask};
  std::vector<int64_t> proposals = {1, 2, 3, 4};
  std::vector<float> confidence = {0.92F, 0.60F, 0.96F, 0.25F};
  int32_t editable_start = 0;
  float threshold = 0.9F;
  bool gate = true;
};

/// Writes of the rule of the core, which are those of the oracle of the property tests.
std::vector<int64_t> accept(const Case& given, int32_t expected_left) {
  ThresholdBlock block;
  block.tokens = given.tokens.data();
  block.proposals = given.proposals.data();
  block.confidence = given.confidence.data();
  block.block_size = 4;
  block.editable_start = given.editable_start;
  block.mask_token_id = kMask;
  block.threshold = given.threshold;
  block.gate = given.gate;
  std::vector<int64_t> expected(4, 99);
  EXPECT_EQ(accept_by_threshold(block, expected.data()), expected_left);

  std::vector<float> stats(4 * kTokenStatsColumns);
  for (size_t row = 0; row < 4; ++row) {
    stats[row * kTokenStatsColumns + kStatsConfidence] = given.confidence[row];
  }
  const std::vector<int32_t> rows = {0, 1, 2, 3};
  std::vector<int64_t> write_ids(4, 99);
  std::vector<float> confidence(4);
  AcceptBlock view;
  view.tokens = given.tokens.data();
  view.row_index = rows.data();
  view.ids = given.proposals.data();
  view.stats = stats.data();
  view.block_size = 4;
  view.editable_start = given.editable_start;
  view.editable_end = 4;
  view.write_ids = write_ids.data();
  view.confidence = confidence.data();
  const MaskFillStep step{given.threshold, given.gate, 0};
  EXPECT_EQ(accept_mask_fill_block(MaskFillRules{kMask}, step, view).masks_left, expected_left);
  EXPECT_EQ(write_ids, expected);
  return write_ids;
}

using Writes = std::vector<int64_t>;

TEST(Acceptance, ThresholdVectors) {
  Case given;
  EXPECT_EQ(accept(given, 2), (Writes{1, -1, 3, -1}));
  given.gate = false;
  EXPECT_EQ(accept(given, 2), (Writes{1, -1, 3, -1}));
  given.threshold = 0.97F;
  EXPECT_EQ(accept(given, 4), (Writes{-1, -1, -1, -1}));
  given.gate = true;
  EXPECT_EQ(accept(given, 3), (Writes{-1, -1, 3, -1}));
  given.threshold = 0.9F;
  given.tokens = {5, kMask, 5, kMask};
  EXPECT_EQ(accept(given, 1), (Writes{-1, 2, -1, -1}));
}

TEST(Acceptance, ComparisonIsStrictAndTiesGoToTheLowestPosition) {
  Case given;
  given.confidence = {0.5F, 0.5F, 0.5F, 0.5F};
  given.threshold = 0.5F;
  EXPECT_EQ(accept(given, 3), (Writes{1, -1, -1, -1}));
}

TEST(Acceptance, PromptPartIsNeverOpenAndMasksInItDoNotCount) {
  Case given;
  given.editable_start = 3;
  EXPECT_EQ(accept(given, 0), (Writes{-1, -1, -1, 4}));
}

TEST(Acceptance, RowsWithoutCandidateAreNeverAccepted) {
  Case given;
  given.proposals = {-1, -1, -1, -1};
  given.confidence = {0.0F, 0.0F, 0.0F, 0.0F};
  given.threshold = 0.0F;
  EXPECT_EQ(accept(given, 4), (Writes{-1, -1, -1, -1}));
}

TEST(Acceptance, MasksAreProposedButNotWritten) {
  Case given;
  given.proposals = {kMask, 2, kMask, 4};
  EXPECT_EQ(accept(given, 4), (Writes{-1, -1, -1, -1}));
  given.threshold = 0.97F;
  EXPECT_EQ(accept(given, 4), (Writes{-1, -1, -1, -1}));
  given.threshold = 0.5F;
  EXPECT_EQ(accept(given, 3), (Writes{-1, 2, -1, -1}));
}

TEST(Acceptance, CompleteBlockWritesNothing) {
  Case given;
  given.tokens = {1, 2, 3, 4};
  EXPECT_EQ(accept(given, 0), (Writes{-1, -1, -1, -1}));
}

/// One block of four positions over the proposals 1 to 4, one row a position.
struct FourRows {
  explicit FourRows(std::vector<int64_t> content) : tokens(std::move(content)) {
    const float columns[4][3] = {{.92F, .02F, .431262F},
                                 {.60F, .10F, 1.435474F},
                                 {.96F, .005F, .244190F},
                                 {.25F, .10F, 1.692281F}};
    for (size_t row = 0; row < 4; ++row) {
      float* stats_row = stats.data() + row * kTokenStatsColumns;
      stats_row[kStatsConfidence] = columns[row][0];
      stats_row[kStatsMaxProb] = columns[row][0];
      stats_row[kStatsSecondProb] = columns[row][1];
      stats_row[kStatsEntropy] = columns[row][2];
      stats_row[kStatsRawConfidence] = columns[row][0];
    }
  }

  [[nodiscard]] AcceptBlock view() {
    AcceptBlock block;
    block.tokens = tokens.data();
    block.row_index = rows.data();
    block.ids = ids.data();
    block.stats = stats.data();
    block.block_size = 4;
    block.editable_end = 4;
    block.write_ids = writes.data();
    block.confidence = confidence.data();
    return block;
  }

  std::vector<int64_t> tokens;
  std::vector<int32_t> rows = {0, 1, 2, 3};
  std::vector<int64_t> ids = {1, 2, 3, 4};
  std::vector<float> stats = std::vector<float>(4 * kTokenStatsColumns);
  Writes writes = Writes(4, 99);
  std::vector<float> confidence = std::vector<float>(4, 99.0F);
};

Writes fill(MaskFillRules rules, const MaskFillStep& step, std::vector<int64_t> tokens) {
  FourRows rows(std::move(tokens));
  rules.mask_token_id = kMask;
  (void)accept_mask_fill_block(rules, step, rows.view());
  return rows.writes;
}

TEST(Acceptance, EveryMaskFillingRule) {
  const std::vector<int64_t> masks(4, kMask);
  const MaskFillStep step{.9F, true, 0};
  MaskFillRules rules;
  rules.denoising_steps = 3;
  rules.factor = 1.2F;
  rules.entropy_bound = 1.0F;
  rules.low_threshold = .3F;
  const std::vector<std::pair<AcceptRule, Writes>> expected = {
      {AcceptRule::kThreshold, {1, -1, 3, -1}},   {AcceptRule::kThresholdNonStrict, {1, -1, 3, -1}},
      {AcceptRule::kStatic, {1, -1, 3, -1}},      {AcceptRule::kDynamic, {1, -1, 3, -1}},
      {AcceptRule::kSequential, {1, 2, -1, -1}},  {AcceptRule::kFactor, {1, -1, 3, -1}},
      {AcceptRule::kEntropyBound, {1, 2, 3, -1}}, {AcceptRule::kLeftmostPrefix, {1, -1, -1, -1}},
      {AcceptRule::kHierarchy, {1, -1, 3, -1}}};
  for (const auto& [rule, writes] : expected) {
    rules.rule = rule;
    EXPECT_EQ(fill(rules, step, masks), writes) << static_cast<int>(rule);
  }
  rules.rule = AcceptRule::kHierarchy;
  EXPECT_EQ(fill(rules, step, {kMask, kMask, 5, kMask}), (Writes{1, -1, -1, -1}));
  EXPECT_EQ(fill(rules, step, {5, kMask, 5, kMask}), (Writes{-1, 2, -1, -1}));
  rules.rule = AcceptRule::kStatic;
  rules.force_accept_last_step = true;
  EXPECT_EQ(fill(rules, {.9F, true, 2}, masks), (Writes{1, 2, 3, 4}));
  EXPECT_EQ(fill(rules, {.9F, false, 2}, masks), (Writes{1, -1, 3, -1}));
}

TEST(Acceptance, MissingAndBadRows) {
  const MaskFillRules rules{kMask};
  FourRows missing(std::vector<int64_t>(4, kMask));
  missing.rows[1] = -1;
  AcceptOutcome outcome = accept_mask_fill_block(rules, {.5F, true, 0}, missing.view());
  EXPECT_EQ(missing.writes, Writes(4, -1));
  EXPECT_EQ(outcome.flags, kSamplerSkipped | kSamplerSameAsPrevious);
  EXPECT_EQ(outcome.masks_left, 4);
  FourRows bad(std::vector<int64_t>(4, kMask));
  bad.ids[1] = -1;
  outcome = accept_mask_fill_block(rules, {.5F, true, 0}, bad.view());
  EXPECT_EQ(bad.writes, (Writes{1, -1, 3, -1}));
  EXPECT_EQ(outcome.flags, kSamplerBadLogits | kSamplerProgressed);
  EXPECT_EQ(bad.confidence, (std::vector<float>{.92F, 0.0F, .96F, .25F}));
}

TEST(Acceptance, EditsAndTheEndOfAnEditedBlock) {
  EditRules rules;
  rules.mask_token_id = kMask;
  FourRows first({3, kMask, 5, kMask});
  AcceptBlock block = first.view();
  block.editable_start = 1;
  AcceptOutcome outcome = accept_edit_block(rules, EditStep{.7F, .5F, true, 0, 0, 16}, block);
  EXPECT_EQ(first.writes, (Writes{-1, 2, 3, -1}));
  EXPECT_EQ(outcome.flags, kSamplerProgressed);
  EXPECT_EQ(outcome.masks_left, 1);
  EXPECT_EQ(outcome.same_token_ratio, 0.0F);

  FourRows last({3, 2, 3, 4});
  block = last.view();
  block.editable_start = 1;
  outcome = accept_edit_block(rules, EditStep{.7F, .5F, true, 2, 0, 16}, block);
  EXPECT_EQ(last.writes, Writes(4, -1));
  EXPECT_EQ(outcome.flags, kSamplerCommittable | kSamplerSameAsPrevious | kSamplerAllConfident);

  FourRows late({3, kMask, 5, kMask});
  outcome = accept_edit_block(rules, EditStep{.7F, .5F, true, 19, 0, 16}, late.view());
  EXPECT_EQ(outcome.flags, kSamplerCommittable | kSamplerProgressed | kSamplerTimedOut);
}

TEST(Acceptance, WhatTheDeviceKernelsShareWithTheHost) {
  EXPECT_TRUE(passes_edit_mask(.75F, .5F));
  EXPECT_FALSE(passes_edit_mask(.5F, .5F));
  std::array<float, kTokenStatsColumns> stats{};
  stats[kStatsRawConfidence] = .25F;
  stats[kStatsMaxProb] = .5F;
  const float listed = .75F;
  const DmaxProbabilities alone = dmax_probabilities(stats.data(), nullptr, false);
  EXPECT_EQ(alone.proposal, .25F);
  EXPECT_EQ(alone.argmax, .5F);
  EXPECT_EQ(dmax_probabilities(stats.data(), &listed, false).argmax, .75F);
  const DmaxProbabilities certain = dmax_probabilities(stats.data(), &listed, true);
  EXPECT_EQ(certain.proposal, 1.0F);
  EXPECT_EQ(certain.argmax, 1.0F);
  EXPECT_FALSE(is_dmax_settled(false, true, false));
  EXPECT_TRUE(is_dmax_settled(true, true, false));
  EXPECT_TRUE(is_dmax_settled(false, false, false));
  EXPECT_TRUE(is_dmax_settled(false, true, true));
}

TEST(Acceptance, LeftmostPrefixAndItsDescriptors) {
  FourRows rows(std::vector<int64_t>(4, kMask));
  std::array<uint8_t, 4> valid{};
  std::array<int64_t, 4> merge_ids{};
  std::array<float, 4> merge_probs{};
  std::array<float, 4> residual{};
  DmaxStep step;
  step.threshold = .5F;
  step.gate = true;
  step.merge_valid = valid.data();
  step.merge_ids = merge_ids.data();
  step.merge_probs = merge_probs.data();
  step.merge_residual = residual.data();
  step.merge_ids_stride = 1;
  step.merge_probs_stride = 1;
  step.merge_count = 1;
  const AcceptOutcome outcome = accept_dmax_block(DmaxRules{kMask, false}, step, rows.view());
  EXPECT_EQ(rows.writes, (Writes{1, 2, 3, -1}));
  EXPECT_EQ(outcome.flags, kSamplerProgressed);
  EXPECT_EQ(valid, (std::array<uint8_t, 4>{1, 1, 1, 0}));
  EXPECT_EQ(merge_ids, (std::array<int64_t, 4>{1, 2, 3, kMask}));
  EXPECT_EQ(merge_probs, (std::array<float, 4>{.92F, .60F, .96F, 0.0F}));
  EXPECT_NEAR(residual[1], .40, 1e-6);
  EXPECT_EQ(residual[3], 0.0F);
}

TEST(Acceptance, CanvasStepsAndItsEnd) {
  const std::vector<int64_t> argmax_ids = {1, 2, 3, 6};
  const std::vector<int64_t> previous = {0, 0, 0, 0};
  const std::vector<int64_t> random = {6, 0, 2, 5};
  std::vector<int64_t> argmax(4);
  CanvasStep step;
  step.prev_argmax = previous.data();
  step.renoise_ids = random.data();
  step.argmax_ids = argmax_ids.data();
  step.steps_left = 2;
  step.argmax = argmax.data();
  const GemmaRules rules{.5F, 1, .005F};
  FourRows rows({0, 0, 0, 0});
  AcceptOutcome outcome = accept_canvas_block(rules, step, rows.view());
  // In order of entropy: position 2, then 0 after .244; position 1 would follow .675.
  EXPECT_EQ(rows.writes, (Writes{1, 0, 3, 5}));
  EXPECT_EQ(argmax, argmax_ids);
  EXPECT_EQ(outcome.flags, 0);
  step.steps_left = 1;
  outcome = accept_canvas_block(rules, step, rows.view());
  EXPECT_EQ(rows.writes, argmax_ids);
  EXPECT_EQ(outcome.flags, kSamplerConverged);
}

}  // namespace
}  // namespace diffulex::test
