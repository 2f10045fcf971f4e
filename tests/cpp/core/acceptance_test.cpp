// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/acceptance.h"

#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
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

std::vector<int64_t> accept(const Case& given, int32_t expected_left) {
  MaskFillBlock block;
  block.tokens = given.tokens.data();
  block.proposals = given.proposals.data();
  block.confidence = given.confidence.data();
  block.block_size = 4;
  block.editable_start = given.editable_start;
  block.mask_token_id = kMask;
  block.threshold = given.threshold;
  block.gate = given.gate;
  std::vector<int64_t> write_ids(4, 99);
  EXPECT_EQ(accept_by_threshold(block, write_ids.data()), expected_left);
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

TEST(Acceptance, CompleteBlockWritesNothing) {
  Case given;
  given.tokens = {1, 2, 3, 4};
  EXPECT_EQ(accept(given, 0), (Writes{-1, -1, -1, -1}));
}

}  // namespace
}  // namespace diffulex
