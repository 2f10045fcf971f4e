// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include <gtest/gtest.h>

#include "diffulex/ops/sampling.h"
#include "ops/filter_case.h"
#include "ops/guarded_tensor.h"

namespace diffulex::test {
namespace {

FilterCase worked_rows(DType dtype = DType::kF32) {
  constexpr double kRows[4][8] = {{.02, .92, .01, .01, .01, .01, .01, .01},
                                  {.05, .10, .60, .05, .05, .05, .05, .05},
                                  {.005, .005, .005, .96, .005, .005, .005, .01},
                                  {.05, .05, .05, .05, .25, .10, .05, .40}};
  FilterCase result(dtype, 4, 8);
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t id = 0; id < 8; ++id) {
      result.logits.set({row, id}, std::log(kRows[row][id]));
    }
  }
  result.forbidden = {7};
  return result;
}

void run(FilterCase* rows) {
  rows->clear();
  const Status status =
      sample_filtered(rows->params([](const TensorRef& tensor) { return tensor; }), ExecContext{});
  ASSERT_TRUE(status.ok()) << status.message();
}

float stat(const FilterCase& rows, int64_t row, TokenStatsColumn column) {
  return rows.stats[static_cast<size_t>(row * kTokenStatsColumns + column)];
}

TEST(SampleFiltered, VectorB) {
  FilterCase rows = worked_rows();
  rows.row_index = {1, 1, 1, 1};
  rows.uniforms = {.10, .50, .10, .50};
  rows.top_p = {.65F, .65F, 1.0F, 1.0F};
  rows.top_k = {0, 0, 2, 2};
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{1, 2, 1, 2}));
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(stat(rows, row, kStatsConfidence), row % 2 == 0 ? .142857 : .857143, 1e-6);
    EXPECT_NEAR(stat(rows, row, kStatsRawConfidence), row % 2 == 0 ? .1 : .6, 1e-6);
    EXPECT_NEAR(stat(rows, row, kStatsMaxProb), .857143, 1e-6);
    EXPECT_NEAR(stat(rows, row, kStatsSecondProb), .142857, 1e-6);
  }
  // Six logits tie at the third value: all stay, the forbidden one is not drawn.
  rows.top_p.assign(4, 1.0F);
  rows.top_k.assign(4, 3);
  rows.uniforms = {.01, .99, .06, .9};
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{0, 6, 1, 5}));
  EXPECT_NEAR(stat(rows, 0, kStatsConfidence), .05, 1e-6);
}

TEST(SampleFiltered, OrderOfTheFilters) {
  FilterCase rows(DType::kF32, 2, 4);
  const double probabilities[] = {.4, .3, .2, .1};
  for (int64_t id = 0; id < 4; ++id) {
    rows.logits.set({0, id}, std::log(probabilities[id]));
    rows.logits.set({1, id}, std::log(probabilities[id]));
  }
  rows.top_k.assign(2, 2);
  rows.top_p.assign(2, .5F);
  rows.uniforms.assign(2, .99);
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{1, 1}));
  rows.order = FilterOrder::kTopKFirst;
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{0, 0}));
}

TEST(SampleFiltered, TiesAtTheTopPCutGoToLowerIds) {
  FilterCase rows(DType::kBF16, 5, 8);
  rows.logits.fill(1.0);
  rows.uniforms.assign(5, .999);
  rows.top_p = {.25F, .24F, 0.0F, -1.0F, .126F};
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{2, 1, 0, 0, 1}));
}

TEST(SampleFiltered, BoundariesAreExact) {
  // Masses 1 and 1 under different keys, and two equal logits.
  FilterCase rows(DType::kF32, 3, 3);
  rows.logits.fill(-INFINITY);
  rows.logits.set({0, 0}, 0.0);
  rows.logits.set({0, 1}, -1e-30);
  rows.logits.set({1, 0}, 2.0);
  rows.logits.set({1, 1}, 2.0);
  // Top-k leaves the forbidden id alone; the best candidates tie.
  rows.logits.set({2, 0}, 1.0);
  rows.logits.set({2, 1}, 1.0);
  rows.logits.set({2, 2}, 5.0);
  rows.top_p = {.5F, 1.0F, 1.0F};
  rows.top_k = {0, 2, 1};
  rows.forbidden = {2};
  rows.uniforms = {.75, .5, .75};
  run(&rows);
  // The mass before id 1 is the bound itself, so it stays; a running mass of exactly u does not
  // take its id; of equal logits the lowest id wins.
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{1, 1, 0}));
}

TEST(SampleFiltered, MaskTakesPartAndMayTakeAll) {
  FilterCase rows = worked_rows();
  rows.row_index.assign(4, 3);
  rows.uniforms = {.9, .9, .9, .1};
  rows.top_k = {2, 1, 0, 2};
  rows.min_p = {0.0F, 0.0F, 1.0F, 0.0F};
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{4, 4, 4, 4}));
  EXPECT_NEAR(stat(rows, 0, kStatsConfidence), .25 / .65, 1e-6);
  EXPECT_NEAR(stat(rows, 1, kStatsConfidence), .25, 1e-6);
  EXPECT_NEAR(stat(rows, 2, kStatsConfidence), .25, 1e-6);
  rows.exclusion = ExclusionMode::kOff;
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{7, 7, 7, 4}));
  rows.exclusion = ExclusionMode::kRenormalize;
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{5, 4, 4, 4}));
  EXPECT_NEAR(stat(rows, 0, kStatsConfidence), .10 / .35, 1e-6);
}

TEST(SampleFiltered, InactiveRowsAreLeftAlone) {
  FilterCase rows = worked_rows();
  rows.inv_temperature = {0.0F, 1.0F, 1.0F, 1.0F};
  rows.top_k = {3, 0, -2, 3};
  rows.top_p = {.5F, 1.0F, 1.5F, 1.0F};
  run(&rows);
  for (int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(rows.ids[static_cast<size_t>(row)], -77);
    EXPECT_EQ(stat(rows, row, kStatsEntropy), -77.0F);
  }
  EXPECT_GE(rows.ids[3], 0);
}

TEST(SampleFiltered, NonFiniteRows) {
  FilterCase rows(DType::kF16, 3, 5);
  for (int64_t id = 0; id < 5; ++id) {
    rows.logits.set({0, id}, kNaN);
    rows.logits.set({1, id}, id == 3 ? kInf : 1.0);
    rows.logits.set({2, id}, id == 3 ? 1.0 : -kInf);
  }
  rows.top_k.assign(3, 2);
  run(&rows);
  EXPECT_EQ(rows.ids, (std::vector<int64_t>{-1, 3, 3}));
  EXPECT_EQ(stat(rows, 0, kStatsBadCount), 5.0F);
  EXPECT_EQ(stat(rows, 0, kStatsConfidence), 0.0F);
  EXPECT_EQ(stat(rows, 1, kStatsBadCount), 1.0F);
  EXPECT_EQ(stat(rows, 1, kStatsConfidence), 1.0F);
  EXPECT_EQ(stat(rows, 2, kStatsBadCount), 4.0F);
}

/// Sorted-list oracle in fp64: the draw, and the probability of the drawn id.
TEST(SampleFiltered, MatchesASortedList) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    FilterCase rows = random_filter_case(&random, 4);
    run(&rows);
    for (int64_t row = 0; row < 4; ++row) {
      const FilterOracle wanted = filter_oracle(rows, row);
      if (!wanted.active) {
        ASSERT_EQ(rows.ids[static_cast<size_t>(row)], -77);
        continue;
      }
      ASSERT_EQ(rows.ids[static_cast<size_t>(row)], wanted.id) << "seed " << seed << " row " << row;
      ASSERT_NEAR(stat(rows, row, kStatsConfidence), wanted.probability, 1e-5) << "seed " << seed;
    }
  }
}

TEST(SampleFiltered, StaysInBounds) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const int64_t vocab : {1, 7, 33, 2049}) {
      std::mt19937_64 random(static_cast<uint64_t>(vocab));
      FilterCase rows(dtype, 2, vocab);
      rows.logits.fill_normal(&random);
      rows.top_k.assign(2, 5);
      rows.top_p.assign(2, .7F);
      std::vector<std::unique_ptr<GuardedTensor>> guards;
      const SampleFilteredParams params = rows.params([&](const TensorRef& tensor) {
        guards.push_back(std::make_unique<GuardedTensor>(tensor));
        return guards.back()->ref();
      });
      const Status status = sample_filtered(params, ExecContext{});
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
}

TEST(SampleFiltered, Errors) {
  FilterCase rows = worked_rows();
  const auto message = [&](const SampleFilteredParams& params) {
    return std::string(sample_filtered(params, ExecContext{}).message());
  };
  const auto host = [](const TensorRef& tensor) { return tensor; };
  SampleFilteredParams params = rows.params(host);
  params.inv_temperature = TensorRef{};
  EXPECT_EQ(message(params),
            "diffulex::sample_filtered: inv_temperature: expected a tensor, got none");
  params = rows.params(host);
  params.filter_order = static_cast<FilterOrder>(2);
  EXPECT_EQ(message(params),
            "diffulex::sample_filtered: filter_order: expected 0 (top_p, min_p, top_k) or 1 "
            "(top_k, min_p, top_p), got 2");
  params = rows.params(host);
  params.vocab_limit = -2;
  EXPECT_EQ(message(params),
            "diffulex::sample_filtered: vocab_limit: expected a value >= -1, got -2");
  rows.min_p[2] = 2.0F;
  EXPECT_EQ(message(rows.params(host)),
            "diffulex::sample_filtered: min_p[2]: expected a value <= 1, got 2");
}

}  // namespace
}  // namespace diffulex::test
