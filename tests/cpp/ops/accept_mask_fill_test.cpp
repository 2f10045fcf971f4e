// SPDX-License-Identifier: Apache-2.0
#include <map>

#include <gtest/gtest.h>

#include "diffulex/ops/sampling.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr int64_t kMask = 7;
using Writes = std::map<int64_t, int64_t>;

/// One block over the rows R0..R3 of the specification's test vectors.
struct Block {
  explicit Block(std::vector<int64_t> content = {7, 7, 7, 7}) : tokens(std::move(content)) {
    const auto size = static_cast<int64_t>(tokens.size());
    for (int64_t i = 0; i < size; ++i) {
      row_index.push_back(static_cast<int32_t>(i % 4));
    }
    // confidence, max, second, entropy, -, -, raw confidence, -
    const float rows[4][8] = {{.92F, .92F, .02F, .431262F, 0, 0, .92F, 0},
                              {.60F, .60F, .10F, 1.435474F, 0, 0, .60F, 0},
                              {.96F, .96F, .005F, .244190F, 0, 0, .96F, 0},
                              {.25F, .25F, .10F, 1.692281F, 0, 0, .25F, 0}};
    for (const auto& row : rows) {
      stats.insert(stats.end(), row, row + 8);
    }
    ids = {1, 2, 3, 4};
    write_ids.assign(tokens.size(), -77);
    confidence.assign(tokens.size(), std::nanf(""));
    const std::vector<int64_t> shape = {1, size};
    params.tokens = ref_of(tokens, shape);
    params.row_index = ref_of(row_index, shape);
    params.editable_start = ref_of(editable_start);
    params.gate = ref_of(gate);
    params.accept_threshold = ref_of(threshold);
    params.open_steps = ref_of(open_steps);
    params.ids = ref_of(ids);
    params.stats = ref_of(stats, {4, 8});
    params.write_ids = ref_of(write_ids, shape);
    params.confidence = ref_of(confidence, shape);
    params.masks_left = ref_of(masks_left);
    params.flags = ref_of(flags);
    params.mask_token_id = kMask;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  Writes run() {
    const Status status = accept_mask_fill(params, ExecContext{});
    EXPECT_TRUE(status.ok()) << status.message();
    Writes result;
    for (size_t i = 0; i < write_ids.size(); ++i) {
      if (write_ids[i] >= 0) {
        result[static_cast<int64_t>(i)] = write_ids[i];
      }
    }
    return result;
  }
  Writes run(AcceptRule rule, float tau, bool is_open = true) {
    params.rule = rule;
    threshold[0] = tau;
    gate[0] = is_open ? 1 : 0;
    return run();
  }
  /// A schedule whose first step takes k of 4.
  Writes run_count(AcceptRule rule, float tau, int32_t k) {
    params.denoising_steps = k == 1 ? 4 : (k == 2 ? 2 : 1);
    open_steps[0] = 0;
    if (k == 3) {
      // B = 8, S = 3 gives 3, 3, 2.
      params.denoising_steps = 3;
    }
    return run(rule, tau);
  }

  std::vector<int64_t> tokens, ids, write_ids;
  std::vector<int32_t> row_index, editable_start = {0}, valid_len = {4}, open_steps = {0},
                                  masks_left = {-77}, flags = {-77};
  std::vector<uint8_t> gate = {1};
  std::vector<float> threshold = {0.9F}, stats, confidence;
  AcceptMaskFillParams params;
};

TEST(AcceptMaskFill, VectorCThreshold) {
  Block block;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .90F, true), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .90F, false), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .97F, true), (Writes{{2, 3}}));
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .97F, false), (Writes{}));
  for (const ConfidenceKind kind :
       {ConfidenceKind::kMaxProb, ConfidenceKind::kMargin, ConfidenceKind::kNegEntropy}) {
    Block partly({0, 7, 0, 7});
    partly.params.confidence_kind = kind;
    EXPECT_EQ(partly.run(AcceptRule::kThreshold, .90F), (Writes{{1, 2}}));
  }
}

TEST(AcceptMaskFill, StrictAndNonStrictDifferAtEquality) {
  Block block({7, 0, 0, 0});
  block.stats[0] = 0.5F;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .5F, false), (Writes{}));
  EXPECT_EQ(block.run(AcceptRule::kThresholdNonStrict, .5F, false), (Writes{{0, 1}}));
  EXPECT_EQ(block.run(AcceptRule::kThresholdNonStrict, .51F, true), (Writes{{0, 1}}));
}

TEST(AcceptMaskFill, VectorCLeftmostPrefix) {
  Block block;
  constexpr AcceptRule kRule = AcceptRule::kLeftmostPrefix;
  EXPECT_EQ(block.run(kRule, .5F), (Writes{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(block.run(kRule, .7F), (Writes{{0, 1}}));
  EXPECT_EQ(block.run(kRule, .95F), (Writes{{0, 1}}));
  EXPECT_EQ(block.run(kRule, .95F, false), (Writes{}));
  EXPECT_EQ(block.run(kRule, 0.0F), (Writes{{0, 1}, {1, 2}, {2, 3}, {3, 4}}));
  // A forced position ends the prefix, however confident the next one is.
  block.row_index = {1, 0, 2, 3};
  EXPECT_EQ(block.run(kRule, .9F), (Writes{{0, 2}}));
  block.row_index = {0, 1, 2, 3};
  // A row without proposal ends the prefix; in front of it nothing can be forced.
  block.ids[1] = -1;
  EXPECT_EQ(block.run(kRule, 0.0F), (Writes{{0, 1}}));
  block.ids[0] = -1;
  EXPECT_EQ(block.run(kRule, 0.0F), (Writes{}));
}

TEST(AcceptMaskFill, VectorCHierarchy) {
  Block block({7, 7, 0, 7});
  constexpr AcceptRule kRule = AcceptRule::kHierarchy;
  block.params.low_threshold = .4F;
  EXPECT_EQ(block.run(kRule, .97F), (Writes{{0, 1}}));
  block.params.low_threshold = .2F;
  EXPECT_EQ(block.run(kRule, .97F), (Writes{{0, 1}, {3, 4}}));
  EXPECT_EQ(block.run(kRule, .97F, false), (Writes{}));
  EXPECT_EQ(block.run(kRule, .5F), (Writes{{0, 1}, {1, 2}, {3, 4}}));
  // The low threshold is strict; the best position of all is taken whatever it says.
  block.params.low_threshold = .25F;
  EXPECT_EQ(block.run(kRule, .97F), (Writes{{0, 1}}));
  block.params.low_threshold = .99F;
  EXPECT_EQ(block.run(kRule, .97F), (Writes{{0, 1}}));
}

TEST(AcceptMaskFill, MaskOverMaskIsNoProgress) {
  Block block;
  block.ids[3] = kMask;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .1F), (Writes{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(block.masks_left[0], 1);
  EXPECT_EQ(block.flags[0] & kAcceptCommittable, 0);
}

TEST(AcceptMaskFill, VectorCStaticDynamicSequential) {
  Block block;
  EXPECT_EQ(block.run_count(AcceptRule::kStatic, .9F, 2), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(block.run_count(AcceptRule::kDynamic, .85F, 1), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(block.run_count(AcceptRule::kDynamic, .97F, 1), (Writes{{2, 3}}));
  EXPECT_EQ(block.run_count(AcceptRule::kSequential, .9F, 2), (Writes{{0, 1}, {1, 2}}));
  // k = 3 needs a longer block: the last four positions are not open.
  Block longer({7, 7, 7, 7, 0, 0, 0, 0});
  EXPECT_EQ(longer.run_count(AcceptRule::kStatic, .9F, 3), (Writes{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(longer.run_count(AcceptRule::kDynamic, .85F, 3), (Writes{{0, 1}, {1, 2}, {2, 3}}));
}

TEST(AcceptMaskFill, VectorCFactorAndEntropyBound) {
  Block block;
  const auto factor = [&](float f) {
    block.params.factor = f;
    return block.run(AcceptRule::kFactor, .9F);
  };
  EXPECT_EQ(factor(2.0F), (Writes{{0, 1}, {1, 2}, {2, 3}}));
  EXPECT_EQ(factor(1.0F), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(factor(.2F), (Writes{{2, 3}}));
  EXPECT_EQ(factor(.05F), (Writes{{2, 3}}));
  EXPECT_EQ(factor(4.0F).size(), 4U);
  const auto entropy = [&](float bound) {
    block.params.entropy_bound = bound;
    return block.run(AcceptRule::kEntropyBound, .9F);
  };
  EXPECT_EQ(entropy(.1F), (Writes{{2, 3}}));
  EXPECT_EQ(entropy(.5F), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(entropy(3.0F), (Writes{{0, 1}, {1, 2}, {2, 3}, {3, 4}}));
}

TEST(AcceptMaskFill, VectorCSamplesAtTemperatureOne) {
  Block block;
  block.ids = {0, 6, 5, 5};
  const float p[4] = {.02F, .05F, .005F, .10F};
  for (size_t row = 0; row < 4; ++row) {
    block.stats[row * 8] = p[row];
    block.stats[row * 8 + kStatsRawConfidence] = p[row];
  }
  EXPECT_EQ(block.run_count(AcceptRule::kDynamic, .85F, 1), (Writes{{3, 5}}));
}

TEST(AcceptMaskFill, RankingTypesCanDisagree) {
  Block block({7, 7, 0, 0});
  const float rows[2][4] = {{.46F, .46F, .44F, 1.1235F}, {.40F, .40F, .10F, 1.8272F}};
  for (size_t row = 0; row < 2; ++row) {
    std::copy_n(rows[row], 4, block.stats.begin() + static_cast<int64_t>(row) * 8);
  }
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .9F), (Writes{{0, 1}}));
  block.params.confidence_kind = ConfidenceKind::kMargin;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .9F), (Writes{{1, 2}}));
  block.params.confidence_kind = ConfidenceKind::kNegEntropy;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .9F), (Writes{{0, 1}}));
}

TEST(AcceptMaskFill, Schedules) {
  const auto counts = [](int64_t size, int32_t steps, int32_t taken) {
    std::vector<size_t> result;
    for (int32_t step = 0; step < taken; ++step) {
      Block block(std::vector<int64_t>(static_cast<size_t>(size), kMask));
      block.params.denoising_steps = steps;
      block.open_steps[0] = step;
      result.push_back(block.run(AcceptRule::kSequential, .9F).size());
    }
    return result;
  };
  EXPECT_EQ(counts(4, 3, 3), (std::vector<size_t>{2, 1, 1}));
  EXPECT_EQ(counts(32, 5, 7), (std::vector<size_t>{7, 7, 6, 6, 6, 6, 6}));
  EXPECT_EQ(counts(4, 0, 5), (std::vector<size_t>{1, 1, 1, 1, 1}));
  // More steps than positions: no token in the late steps, one again past the schedule.
  EXPECT_EQ(counts(4, 6, 8), (std::vector<size_t>{1, 1, 1, 1, 0, 0, 1, 1}));
}

TEST(AcceptMaskFill, ForcedLastStepTakesEverythingOpen) {
  Block block({7, 0, 7, 7});
  block.params.force_accept_last_step = true;
  block.params.denoising_steps = 2;
  block.open_steps[0] = 1;
  EXPECT_EQ(block.run(AcceptRule::kStatic, .99F), (Writes{{0, 1}, {2, 3}, {3, 4}}));
  EXPECT_NE(block.flags[0] & kAcceptCommittable, 0);
  block.open_steps[0] = 0;
  EXPECT_EQ(block.run(AcceptRule::kStatic, .99F).size(), 2U);
  block.open_steps[0] = 1;
  EXPECT_EQ(block.run(AcceptRule::kStatic, .95F, false), (Writes{{2, 3}}));
}

TEST(AcceptMaskFill, CountIsClampedToTheOpenSet) {
  Block block({0, 7, 1, 2});
  block.params.denoising_steps = 1;
  EXPECT_EQ(block.run(AcceptRule::kStatic, .9F), (Writes{{1, 2}}));
  EXPECT_EQ(block.masks_left[0], 0);
}

TEST(AcceptMaskFill, ClosedGateKeepsOnlyConfidentPositions) {
  Block block;
  block.params.denoising_steps = 1;
  block.params.factor = 100.0F;
  block.params.entropy_bound = 100.0F;
  for (const AcceptRule rule : {AcceptRule::kThreshold, AcceptRule::kThresholdNonStrict,
                                AcceptRule::kStatic, AcceptRule::kDynamic, AcceptRule::kSequential,
                                AcceptRule::kFactor, AcceptRule::kEntropyBound}) {
    EXPECT_EQ(block.run(rule, .90F, false), (Writes{{0, 1}, {2, 3}})) << static_cast<int>(rule);
    EXPECT_EQ(block.run(rule, .97F, false), (Writes{})) << static_cast<int>(rule);
  }
}

TEST(AcceptMaskFill, PromptMasksAreNeitherOpenNorBlocking) {
  Block block({7, 7, 3, 3});
  block.editable_start[0] = 1;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .5F), (Writes{{1, 2}}));
  EXPECT_EQ(block.masks_left[0], 0);
  EXPECT_EQ(block.flags[0], kAcceptCommittable | kAcceptProgressed | kAcceptAllConfident);
  EXPECT_EQ(block.confidence, (std::vector<float>{0.0F, .60F, 0.0F, 0.0F}));
}

TEST(AcceptMaskFill, ValidLenEndsTheBlock) {
  Block block;
  block.params.valid_len = ref_of(block.valid_len);
  block.valid_len[0] = 2;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .5F), (Writes{{0, 1}, {1, 2}}));
  EXPECT_NE(block.flags[0] & kAcceptCommittable, 0);
  block.valid_len[0] = 0;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .5F), (Writes{}));
  EXPECT_EQ(block.masks_left[0], 0);
  EXPECT_EQ(block.flags[0], kAcceptCommittable | kAcceptSameAsPrevious | kAcceptAllConfident);
}

TEST(AcceptMaskFill, MissingRowsSkipTheBlock) {
  Block block;
  block.row_index[1] = -1;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .5F), (Writes{}));
  EXPECT_EQ(block.flags[0], kAcceptSkipped | kAcceptSameAsPrevious);
  EXPECT_EQ(block.masks_left[0], 4);
  Block irrelevant({7, 0, 7, 7});
  irrelevant.row_index[1] = -1;
  EXPECT_EQ(irrelevant.run(AcceptRule::kThreshold, .9F), (Writes{{0, 1}, {2, 3}}));
  EXPECT_EQ(irrelevant.flags[0] & kAcceptSkipped, 0);
}

TEST(AcceptMaskFill, BadLogitsAreNeverAccepted) {
  Block block({7, 7, 0, 0});
  block.ids[0] = -1;
  block.stats[0] = 0.0F;
  block.params.denoising_steps = 1;
  for (const AcceptRule rule :
       {AcceptRule::kThreshold, AcceptRule::kStatic, AcceptRule::kDynamic, AcceptRule::kSequential,
        AcceptRule::kFactor, AcceptRule::kEntropyBound}) {
    EXPECT_EQ(block.run(rule, -1.0F), (Writes{{1, 2}})) << static_cast<int>(rule);
    EXPECT_EQ(block.flags[0], kAcceptBadLogits | kAcceptProgressed);
    EXPECT_EQ(block.masks_left[0], 1);
  }
  Block alone({7, 0, 0, 0});
  alone.ids[0] = -1;
  EXPECT_EQ(alone.run(AcceptRule::kThreshold, .0F), (Writes{}));
  EXPECT_EQ(alone.flags[0], kAcceptBadLogits | kAcceptSameAsPrevious);
}

TEST(AcceptMaskFill, FlagsOfAnOrdinaryStep) {
  Block block;
  block.run(AcceptRule::kThreshold, .9F);
  EXPECT_EQ(block.flags[0], kAcceptProgressed);
  EXPECT_EQ(block.masks_left[0], 2);
  EXPECT_EQ(block.confidence, (std::vector<float>{.92F, .60F, .96F, .25F}));
  block.run(AcceptRule::kThreshold, .2F);
  EXPECT_EQ(block.flags[0], kAcceptProgressed | kAcceptCommittable | kAcceptAllConfident);
  block.run(AcceptRule::kThreshold, .97F, false);
  EXPECT_EQ(block.flags[0], kAcceptSameAsPrevious);
}

TEST(AcceptMaskFill, RawConfidenceIsCompared) {
  Block block({7, 7, 0, 0});
  block.stats[kStatsRawConfidence] = .3F;
  block.stats[8 + kStatsRawConfidence] = .95F;
  block.params.raw_confidence = true;
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .9F), (Writes{{1, 2}}));
  EXPECT_EQ(block.confidence[0], .3F);
}

TEST(AcceptMaskFill, RankingTiesGoToTheLowestPosition) {
  Block block;
  for (size_t row = 0; row < 4; ++row) {
    block.stats[row * 8] = .5F;
    block.stats[row * 8 + kStatsEntropy] = 1.0F;
  }
  EXPECT_EQ(block.run(AcceptRule::kThreshold, .9F), (Writes{{0, 1}}));
  EXPECT_EQ(block.run_count(AcceptRule::kStatic, .9F, 2), (Writes{{0, 1}, {1, 2}}));
  block.params.entropy_bound = 1.5F;
  EXPECT_EQ(block.run(AcceptRule::kEntropyBound, .9F), (Writes{{0, 1}, {1, 2}}));
}

TEST(AcceptMaskFill, DataViolations) {
  Block block;
  const auto expect = [&](const char* text) {
    const Status status = accept_mask_fill(block.params, ExecContext{});
    EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
    EXPECT_EQ(status.message(), text);
    EXPECT_EQ(block.write_ids[0], -77);
  };
  block.row_index[2] = 4;
  expect("diffulex::accept_mask_fill: row_index[0][2]: expected -1 or a row below 4, got 4");
  block.row_index[2] = 2;
  block.editable_start[0] = 5;
  expect("diffulex::accept_mask_fill: editable_start[0]: expected 0 to 4, got 5");
  block.editable_start[0] = 0;
  block.params.valid_len = ref_of(block.valid_len);
  block.valid_len[0] = -1;
  expect("diffulex::accept_mask_fill: valid_len[0]: expected 0 to 4, got -1");
  block.valid_len[0] = 4;
  block.open_steps[0] = -1;
  expect("diffulex::accept_mask_fill: open_steps[0]: expected a value >= 0, got -1");
}

}  // namespace
}  // namespace diffulex::test
