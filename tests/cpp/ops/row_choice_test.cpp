// SPDX-License-Identifier: Apache-2.0

// token_stats in the roles of the worked vectors D, E and G: carried rows, the repetition penalty,
// a denoise step.

#include <cmath>

#include <gtest/gtest.h>

#include "diffulex/ops/sampling.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

TensorRef log_rows(TestTensor* tensor, const std::vector<std::vector<double>>& rows) {
  *tensor = TestTensor(DType::kF32, {static_cast<int64_t>(rows.size()), 8});
  for (size_t row = 0; row < rows.size(); ++row) {
    for (size_t id = 0; id < 8; ++id) {
      tensor->set({static_cast<int64_t>(row), static_cast<int64_t>(id)}, std::log(rows[row][id]));
    }
  }
  return tensor->ref();
}

const std::vector<std::vector<double>> kRows = {{.02, .92, .01, .01, .01, .01, .01, .01},
                                                {.05, .10, .60, .05, .05, .05, .05, .05},
                                                {.005, .005, .005, .96, .005, .005, .005, .01},
                                                {.05, .05, .05, .05, .25, .10, .05, .40}};

struct Choice {
  explicit Choice(size_t rows) : ids(rows, -77), stats(rows * kTokenStatsColumns, -77.0F) {
    params.logits = log_rows(&logits, kRows);
    params.ids = ref_of(ids);
    params.stats = ref_of(stats, {static_cast<int64_t>(rows), kTokenStatsColumns});
  }
  void run() {
    const Status status = token_stats(params, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
  }
  /// Writes of the gated threshold rule over these four rows; -1 = unchanged.
  [[nodiscard]] std::vector<int64_t> accept(std::vector<int64_t> tokens, float threshold) {
    std::vector<int32_t> row_index = {0, 1, 2, 3}, start = {0}, steps = {0}, left = {0},
                         flags = {0};
    std::vector<uint8_t> gate = {1};
    std::vector<float> thresholds = {threshold}, confidence(4);
    std::vector<int64_t> write_ids(4, -77);
    AcceptMaskFillParams accept;
    accept.tokens = ref_of(tokens, {1, 4});
    accept.row_index = ref_of(row_index, {1, 4});
    accept.editable_start = ref_of(start);
    accept.gate = ref_of(gate);
    accept.accept_threshold = ref_of(thresholds);
    accept.open_steps = ref_of(steps);
    accept.ids = params.ids;
    accept.stats = params.stats;
    accept.write_ids = ref_of(write_ids, {1, 4});
    accept.confidence = ref_of(confidence, {1, 4});
    accept.masks_left = ref_of(left);
    accept.flags = ref_of(flags);
    accept.mask_token_id = 7;
    const Status status = accept_mask_fill(accept, ExecContext{});
    EXPECT_TRUE(status.ok()) << status.message();
    return write_ids;
  }
  [[nodiscard]] float stat(size_t row, TokenStatsColumn column) const {
    return stats[row * kTokenStatsColumns + static_cast<size_t>(column)];
  }

  TestTensor logits;
  std::vector<int64_t> ids;
  std::vector<float> stats;
  TokenStatsParams params;
};

TEST(RowChoice, VectorDCarry) {
  TestTensor carry;
  std::vector<int64_t> forbidden = {7};
  std::vector<int32_t> rows = {4, 0, 1, 2};
  Choice choice(4);
  choice.params.extra_logits = log_rows(&carry, {{.9, .02, .02, .02, .01, .01, .01, .01}});
  choice.params.row_index = ref_of(rows);
  choice.params.forbidden_ids = ref_of(forbidden);
  choice.run();
  EXPECT_EQ(choice.ids, (std::vector<int64_t>{0, 1, 2, 3}));
  const float wanted[] = {.90F, .92F, .60F, .96F};
  for (size_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(choice.stat(row, kStatsConfidence), wanted[row], 1e-6);
  }
  EXPECT_EQ(choice.accept({7, 7, 7, 7}, .91F), (std::vector<int64_t>{-1, 1, -1, 3}));
  EXPECT_EQ(choice.accept({7, 7, 7, 7}, .97F), (std::vector<int64_t>{-1, -1, -1, 3}));
  // Local shift: the first two positions share a row, and the first one is known.
  rows = {0, 0, 1, 2};
  choice.run();
  EXPECT_EQ(choice.accept({5, 7, 7, 7}, .91F), (std::vector<int64_t>{-1, 1, -1, 3}));
  EXPECT_EQ(choice.accept({5, 7, 7, 7}, .97F), (std::vector<int64_t>{-1, -1, -1, 3}));
  // The seed is the greedy choice of R3.
  rows = {3, 3, 3, 3};
  choice.run();
  EXPECT_EQ(choice.ids[0], 4);
}

TEST(RowChoice, VectorDTheCarryProposesWhatTheRowDid) {
  TestTensor window;
  TestTensor carry;
  const std::vector<double> last = {.9, .02, .02, .02, .01, .01, .01, .01};
  std::vector<int32_t> rows = {3, 0, 1, 2};
  Choice direct(4);
  direct.params.logits = log_rows(&window, {kRows[0], kRows[1], kRows[2], last});
  direct.params.row_index = ref_of(rows);
  direct.run();
  Choice saved(4);
  saved.params.extra_logits = log_rows(&carry, {last});
  std::vector<int32_t> saved_rows = {4, 0, 1, 2};
  saved.params.row_index = ref_of(saved_rows);
  saved.run();
  EXPECT_EQ(direct.ids, saved.ids);
  EXPECT_EQ(direct.stats, saved.stats);
}

TEST(RowChoice, VectorEPenalty) {
  std::vector<int64_t> forbidden = {7};
  std::vector<int64_t> penalty = {-1, 2, -1, -1};
  Choice choice(4);
  choice.params.forbidden_ids = ref_of(forbidden);
  choice.params.penalty_ids = ref_of(penalty);
  std::vector<float> penalties = {9.0F, 2.0F, 9.0F, 0.0F};
  choice.params.penalties = ref_of(penalties);
  choice.run();
  EXPECT_EQ(choice.ids, (std::vector<int64_t>{1, 1, 3, 4}));
  EXPECT_NEAR(choice.stat(1, kStatsConfidence), .207813, 1e-6);
}

TEST(RowChoice, VectorGDenoiseStep) {
  std::vector<float> inverse(4, 1.25F);
  std::vector<double> uniforms = {.5, .05, .5, .5};
  std::vector<int64_t> argmax(4);
  std::vector<float> argmax_probs(4);
  Choice choice(4);
  choice.params.inv_temperature = ref_of(inverse);
  choice.params.uniforms = ref_of(uniforms);
  choice.params.topk_ids = ref_of(argmax, {4, 1});
  choice.params.topk_probs = ref_of(argmax_probs, {4, 1});
  choice.run();
  EXPECT_EQ(choice.ids, (std::vector<int64_t>{1, 1, 3, 6}));
  EXPECT_EQ(argmax, (std::vector<int64_t>{1, 2, 3, 7}));
  const float wanted[] = {.183414F, 1.098799F, .084954F, 1.503733F};
  for (size_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(choice.stat(row, kStatsEntropy), wanted[row], 2e-6);
  }
}

TEST(RowChoice, VectorGSoftCap) {
  TestTensor logits(DType::kF32, {1, 2});
  logits.set({0, 0}, 60.0);
  logits.set({0, 1}, -3.0);
  Choice choice(1);
  choice.params.logits = logits.ref();
  choice.params.softcap = 30.0F;
  choice.run();
  EXPECT_NEAR(choice.stat(0, kStatsMaxLogit), 28.920827, 3e-6);
}

}  // namespace
}  // namespace diffulex::test
