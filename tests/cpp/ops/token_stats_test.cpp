// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

#include "diffulex/core/thread_pool.h"
#include "diffulex/ops/sampling.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/stats_reference.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr int64_t kMask = 7;

/// The rows R0..R3 of the specification's test vectors, as logits ln P.
TestTensor vector_rows() {
  const double rows[4][8] = {{.02, .92, .01, .01, .01, .01, .01, .01},
                             {.05, .10, .60, .05, .05, .05, .05, .05},
                             {.005, .005, .005, .96, .005, .005, .005, .01},
                             {.05, .05, .05, .05, .25, .10, .05, .40}};
  TestTensor logits(DType::kF32, {4, 8});
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t id = 0; id < 8; ++id) {
      logits.set({row, id}, std::log(rows[row][id]));
    }
  }
  return logits;
}

/// A call with its outputs.
struct Call {
  explicit Call(TestTensor input, int64_t num_rows = -1, int64_t top_k = 0)
      : logits(std::move(input)) {
    params.logits = logits.ref();
    rows = num_rows >= 0 ? num_rows : params.logits.size[0];
    ids.assign(static_cast<size_t>(rows), -77);
    stats.assign(static_cast<size_t>(rows * kTokenStatsColumns), std::nanf(""));
    params.ids = ref_of(ids);
    params.stats = ref_of(stats, {rows, kTokenStatsColumns});
    if (top_k > 0) {
      topk_ids.assign(static_cast<size_t>(rows * top_k), -77);
      topk_probs.assign(static_cast<size_t>(rows * top_k), std::nanf(""));
      params.topk_ids = ref_of(topk_ids, {rows, top_k});
      params.topk_probs = ref_of(topk_probs, {rows, top_k});
    }
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void forbid(std::vector<int64_t> values) {
    forbidden = std::move(values);
    params.forbidden_ids = ref_of(forbidden);
  }
  void draw(double temperature, std::vector<double> values) {
    uniforms = std::move(values);
    inverse.assign(static_cast<size_t>(rows), static_cast<float>(1.0 / temperature));
    params.inv_temperature = ref_of(inverse);
    params.uniforms = ref_of(uniforms);
  }
  void run(const ExecContext& context = ExecContext{}) {
    const Status status = token_stats(params, context);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  [[nodiscard]] double stat(int64_t row, TokenStatsColumn column) const {
    return stats[static_cast<size_t>(row * kTokenStatsColumns + column)];
  }

  TestTensor logits;
  int64_t rows = 0;
  std::vector<int64_t> ids, topk_ids, forbidden, penalty_ids;
  std::vector<float> penalties;
  std::vector<float> stats, topk_probs, inverse;
  std::vector<double> uniforms;
  TokenStatsParams params;
};

TEST(TokenStats, VectorAGreedy) {
  struct Expected {
    ExclusionMode mode;
    int64_t ids[4];
    double p[4];
    double margin[4];
  };
  const Expected cases[] = {
      {ExclusionMode::kExclude, {1, 2, 3, 4}, {.92, .6, .96, .25}, {.9, .5, .955, .15}},
      {ExclusionMode::kRenormalize,
       {1, 2, 3, 4},
       {.929293, .631579, .969697, .416667},
       {.909091, .526316, .964646, .25}},
      {ExclusionMode::kOff, {1, 2, 3, 7}, {.92, .6, .96, .4}, {.9, .5, .95, .15}}};
  const double entropy[4] = {.431262, 1.435474, .244190, 1.692281};
  for (const Expected& expected : cases) {
    Call call(vector_rows());
    call.forbid({kMask});
    call.params.exclusion = expected.mode;
    call.run();
    for (int64_t row = 0; row < 4; ++row) {
      SCOPED_TRACE(testing::Message()
                   << "mode " << static_cast<int>(expected.mode) << " row " << row);
      EXPECT_EQ(call.ids[static_cast<size_t>(row)], expected.ids[row]);
      EXPECT_NEAR(call.stat(row, kStatsConfidence), expected.p[row], 1e-6);
      EXPECT_NEAR(call.stat(row, kStatsMaxProb), expected.p[row], 1e-6);
      EXPECT_NEAR(call.stat(row, kStatsRawConfidence), expected.p[row], 1e-6);
      EXPECT_NEAR(call.stat(row, kStatsMaxProb) - call.stat(row, kStatsSecondProb),
                  expected.margin[row], 1e-6);
      if (expected.mode != ExclusionMode::kRenormalize) {
        EXPECT_NEAR(call.stat(row, kStatsEntropy), entropy[row], 1e-6);
        EXPECT_NEAR(call.stat(row, kStatsLogSumExp), 0.0, 1e-6);
      }
      EXPECT_EQ(call.stat(row, kStatsBadCount), 0.0);
    }
  }
}

TEST(TokenStats, VectorATempered) {
  Call call(vector_rows());
  call.forbid({kMask});
  call.draw(0.5, {.5, .5, .5, .5});
  call.run();
  const double p[4] = {.998820, .935065, .999729, .255102};
  const double entropy[4] = {.011199, .353847, .002972, .991237};
  const double log_sum[4] = {-.165582, -.954512, -.081373, -1.406497};
  const double raw[4] = {.92, .6, .96, .25};
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(call.stat(row, kStatsMaxProb), p[row], 1e-6);
    EXPECT_NEAR(call.stat(row, kStatsEntropy), entropy[row], 1e-6);
    EXPECT_NEAR(call.stat(row, kStatsLogSumExp), log_sum[row], 1e-6);
    EXPECT_EQ(call.ids[static_cast<size_t>(row)], row + 1);
    EXPECT_NEAR(call.stat(row, kStatsRawConfidence), raw[row], 1e-6);
  }
}

TEST(TokenStats, VectorBDraws) {
  Call half(vector_rows());
  half.forbid({kMask});
  half.draw(1.0, {.5, .5, .5, .5});
  half.run();
  EXPECT_EQ(half.ids, (std::vector<int64_t>{1, 2, 3, 4}));
  half.params.exclusion = ExclusionMode::kOff;
  half.run();
  EXPECT_EQ(half.ids, (std::vector<int64_t>{1, 2, 3, 5}));
  Call tails(vector_rows());
  tails.forbid({kMask});
  tails.draw(1.0, {.01, .97, .99, .95});
  tails.run();
  EXPECT_EQ(tails.ids, (std::vector<int64_t>{0, 6, 5, 6}));
  const double p[4] = {.02, .05, .005, .05};
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_NEAR(tails.stat(row, kStatsConfidence), p[row], 1e-6);
    EXPECT_NEAR(tails.stat(row, kStatsRawConfidence), p[row], 1e-6);
  }
}

TEST(TokenStats, TiesGoToTheLowestId) {
  TestTensor logits(DType::kF32, {1, 8});
  const double p[8] = {.1, .3, .3, .05, .05, .05, .05, .1};
  for (int64_t id = 0; id < 8; ++id) {
    logits.set({0, id}, std::log(p[id]));
  }
  Call call(logits, -1, 8);
  call.run();
  EXPECT_EQ(call.ids[0], 1);
  EXPECT_EQ(call.topk_ids, (std::vector<int64_t>{1, 2, 0, 7, 3, 4, 5, 6}));
  EXPECT_NEAR(call.stat(0, kStatsSecondProb), .3, 1e-6);
}

TEST(TokenStats, TwoEqualFiniteLogitsHaveProbabilityOneHalfExactly) {
  TestTensor logits(DType::kBF16, {1, 3000});
  logits.fill(-kInf);
  logits.set({0, 0}, 0.0);
  logits.set({0, 2900}, 0.0);
  Call call(logits, -1, 3);
  call.run();
  EXPECT_EQ(call.ids[0], 0);
  EXPECT_EQ(call.stat(0, kStatsConfidence), 0.5);
  EXPECT_EQ(call.stat(0, kStatsSecondProb), 0.5);
  EXPECT_EQ(call.stat(0, kStatsBadCount), 2998.0);
  EXPECT_EQ(call.topk_ids, (std::vector<int64_t>{0, 2900, -1}));
  EXPECT_EQ(call.topk_probs, (std::vector<float>{0.5F, 0.5F, 0.0F}));
}

TEST(TokenStats, NonFiniteLogits) {
  TestTensor logits(DType::kF32, {4, 10});
  logits.fill(0.0);
  logits.set({0, 3}, kNaN);
  logits.set({0, 4}, -kInf);
  for (int64_t id = 0; id < 10; ++id) {
    logits.set({1, id}, id % 2 == 0 ? kNaN : -kInf);
  }
  logits.set({2, 5}, kInf);
  logits.set({2, 6}, kNaN);
  Call call(logits);
  call.draw(0.5, {.999, .5, .5, .5});
  call.inverse[0] = 0.0F;
  call.run();
  EXPECT_EQ(call.ids, (std::vector<int64_t>{0, -1, 5, 5}));
  EXPECT_NEAR(call.stat(0, kStatsConfidence), 1.0 / 8.0, 1e-6);
  EXPECT_EQ(call.stat(0, kStatsBadCount), 2.0);
  for (int32_t column = 0; column < kStatsBadCount; ++column) {
    EXPECT_EQ(call.stat(1, static_cast<TokenStatsColumn>(column)), 0.0);
  }
  EXPECT_EQ(call.stat(1, kStatsBadCount), 10.0);
  EXPECT_EQ(call.stat(2, kStatsBadCount), 2.0);
  EXPECT_EQ(call.stat(2, kStatsConfidence), 1.0);
  EXPECT_EQ(call.stat(2, kStatsEntropy), 0.0);
  EXPECT_EQ(call.stat(2, kStatsMaxLogit), static_cast<double>(std::numeric_limits<float>::max()));
}

TEST(TokenStats, AllCandidatesForbidden) {
  Call call(vector_rows());
  call.params.vocab_limit = 0;
  call.run();
  for (int64_t row = 0; row < 4; ++row) {
    EXPECT_EQ(call.ids[static_cast<size_t>(row)], -1);
    EXPECT_EQ(call.stat(row, kStatsConfidence), 0.0);
    EXPECT_EQ(call.stat(row, kStatsLogSumExp), 0.0);
  }
}

TEST(TokenStats, DrawUnderADominatingForbiddenId) {
  TestTensor logits(DType::kF32, {1, 4});
  logits.fill(0.0);
  logits.set({0, 3}, 1000.0);
  Call call(logits);
  call.forbid({3});
  call.draw(1.0, {0.5});
  call.run();
  EXPECT_EQ(call.ids[0], 1);
  EXPECT_EQ(call.stat(0, kStatsConfidence), 0.0);
}

TEST(TokenStats, RandomRowsMatchTheReference) {
  ThreadPool pool(3);
  for (uint64_t seed = 0; seed < 150; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const DType dtype = static_cast<DType>(pick(&random, {0, 1, 2}));
    const int64_t vocab = pick(&random, {1, 5, 17, 300, 2047, 2048, 2049, 5000, 9001});
    const int64_t stored = uniform(&random, 1, 6);
    const int64_t extra = 2;
    TestTensor logits(dtype, {stored, vocab}, {stored, vocab + 3});
    TestTensor extra_logits(dtype, {extra, vocab});
    logits.fill_normal(&random, 3.0);
    extra_logits.fill_normal(&random, 3.0);
    if (uniform(&random, 0, 3) == 0) {
      logits.set({0, uniform(&random, 0, vocab - 1)}, kNaN);
      logits.set({0, uniform(&random, 0, vocab - 1)}, -kInf);
    }
    const int64_t rows = uniform(&random, 1, 8);
    const int64_t top_k = pick(&random, {0, 1, 4, 8, 64});
    Call call(logits, rows, top_k);
    std::vector<int64_t> row_index;
    for (int64_t row = 0; row < rows; ++row) {
      row_index.push_back(uniform(&random, -1, stored + extra - 1));
    }
    call.params.row_index = ref_of(row_index);
    call.params.extra_logits = extra_logits.ref();
    StatsRules rules;
    rules.forbidden = {uniform(&random, 0, vocab - 1), -1, uniform(&random, 0, vocab - 1)};
    call.forbid(rules.forbidden);
    rules.limit = uniform(&random, 0, 2) == 0 ? uniform(&random, vocab / 2, vocab + 2) : -1;
    call.params.vocab_limit = rules.limit;
    rules.mode = static_cast<ExclusionMode>(uniform(&random, 0, 2));
    call.params.exclusion = rules.mode;
    rules.softcap = uniform(&random, 0, 2) == 0 ? 30.0 : 0.0;
    call.params.softcap = static_cast<float>(rules.softcap);
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_penalised = rules.softcap == 0.0 && row % 3 != 2;
      call.penalties.push_back(is_penalised ? 1.5F + static_cast<float>(row) : 0.0F);
      call.penalty_ids.push_back(uniform(&random, -1, vocab - 1));
    }
    call.params.penalty_ids = ref_of(call.penalty_ids);
    call.params.penalties = ref_of(call.penalties);
    if (uniform(&random, 0, 1) == 0) {
      std::vector<double> uniforms;
      for (int64_t row = 0; row < rows; ++row) {
        uniforms.push_back((static_cast<double>(uniform(&random, 0, 999999)) + .5) / 1e6);
      }
      call.draw(1.0, uniforms);
      for (float& inverse : call.inverse) {
        inverse = static_cast<float>(pick(&random, {0, 1, 2, 3})) * 0.7F;
      }
    }
    ExecContext context;
    if (seed % 2 == 0) {
      context.parallel_for = ThreadPool::parallel_for;
      context.parallel_pool = &pool;
    }
    call.run(context);
    for (int64_t row = 0; row < rows; ++row) {
      SCOPED_TRACE(testing::Message() << "row " << row);
      const auto at = static_cast<size_t>(row);
      const int64_t source = row_index[at];
      std::vector<double> values;
      for (int64_t id = 0; source >= 0 && id < vocab; ++id) {
        values.push_back(source < stored ? call.logits.get({source, id})
                                         : extra_logits.get({source - stored, id}));
      }
      rules.penalty_id = call.penalty_ids[at];
      rules.penalty = call.penalties[at];
      rules.inverse = call.inverse.empty() ? 0.0 : call.inverse[at];
      rules.uniform = call.uniforms.empty() ? 0.0 : call.uniforms[at];
      const StatsReference want = reference_row(values, rules);
      if (want.boundary_distance > 1e-6) {
        ASSERT_EQ(call.ids[at], want.id);
        ASSERT_NEAR(call.stat(row, kStatsConfidence), want.confidence,
                    1e-5 * want.confidence + 1e-12);
        ASSERT_NEAR(call.stat(row, kStatsRawConfidence), want.raw_confidence,
                    1e-5 * want.raw_confidence + 1e-12);
      }
      ASSERT_NEAR(call.stat(row, kStatsMaxProb), want.max_prob, 1e-5 * want.max_prob);
      ASSERT_NEAR(call.stat(row, kStatsSecondProb), want.second_prob, 1e-5 * want.second_prob);
      ASSERT_NEAR(call.stat(row, kStatsEntropy), want.entropy, 3e-5);
      ASSERT_NEAR(call.stat(row, kStatsLogSumExp), want.log_sum, 1e-5);
      ASSERT_NEAR(call.stat(row, kStatsMaxLogit), want.max_logit, 1e-5);
      ASSERT_EQ(call.stat(row, kStatsBadCount), want.bad);
      for (int64_t i = 0; i < top_k; ++i) {
        const auto slot = static_cast<size_t>(row * top_k + i);
        const bool filled = i < static_cast<int64_t>(want.order.size());
        ASSERT_EQ(call.topk_ids[slot], filled ? want.order[static_cast<size_t>(i)] : -1);
        const double p =
            filled ? want.prob[static_cast<size_t>(want.order[static_cast<size_t>(i)])] : 0.0;
        ASSERT_NEAR(call.topk_probs[slot], p, 1e-5 * p);
      }
    }
  }
}

TEST(TokenStats, ThreadsDoNotChangeTheResult) {
  std::mt19937_64 random(9);
  TestTensor logits(DType::kBF16, {70, 9000});
  logits.fill_normal(&random, 2.0);
  Call serial(logits, -1, 8);
  std::vector<double> uniforms(70, 0.37);
  serial.draw(0.8, uniforms);
  serial.run();
  for (int32_t threads = 2; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    ExecContext context;
    context.parallel_for = ThreadPool::parallel_for;
    context.parallel_pool = &pool;
    Call threaded(logits, -1, 8);
    threaded.draw(0.8, uniforms);
    threaded.run(context);
    EXPECT_EQ(threaded.ids, serial.ids);
    EXPECT_EQ(threaded.stats, serial.stats);
    EXPECT_EQ(threaded.topk_probs, serial.topk_probs);
  }
}

TEST(TokenStats, DrawsFollowTheDistribution) {
  // 1e5 draws over 50 ids, chi-square with 49 degrees of freedom: 1e-6 quantile is 111.
  constexpr int64_t kVocab = 50;
  constexpr int64_t kDraws = 100000;
  std::mt19937_64 random(4242);
  TestTensor logits(DType::kF32, {1, kVocab});
  logits.fill_normal(&random, 1.0);
  Call call(logits, kDraws);
  std::vector<int32_t> row_index(kDraws, 0);
  call.params.row_index = ref_of(row_index);
  std::vector<double> uniforms;
  std::uniform_real_distribution<double> unit(1e-12, 1.0 - 1e-12);
  for (int64_t i = 0; i < kDraws; ++i) {
    uniforms.push_back(unit(random));
  }
  call.draw(0.9, uniforms);
  call.run();
  StatsRules rules;
  rules.inverse = static_cast<double>(call.inverse[0]);
  rules.uniform = 0.5;
  std::vector<double> values;
  for (int64_t id = 0; id < kVocab; ++id) {
    values.push_back(logits.get({0, id}));
  }
  const StatsReference want = reference_row(values, rules);
  std::vector<double> counts(kVocab, 0.0);
  for (const int64_t id : call.ids) {
    ASSERT_GE(id, 0);
    ASSERT_LT(id, kVocab);
    counts[static_cast<size_t>(id)] += 1.0;
  }
  double chi_square = 0.0;
  for (size_t id = 0; id < kVocab; ++id) {
    const double expected = want.prob[id] * kDraws;
    chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
  }
  EXPECT_LT(chi_square, 111.0);
}

TEST(TokenStats, PartialRecordOfTheVector) {
  // R0 split into ids 0-3 and 4-7.
  const TestTensor rows = vector_rows();
  std::vector<int64_t> part_ids;
  std::vector<float> part_stats;
  for (int64_t part = 0; part < 2; ++part) {
    TestTensor half(DType::kF32, {1, 4});
    for (int64_t id = 0; id < 4; ++id) {
      half.set({0, id}, rows.get({0, part * 4 + id}));
    }
    Call call(half);
    call.params.vocab_start = part * 4;
    call.params.partial = true;
    call.run();
    part_ids.push_back(call.ids[0]);
    part_stats.insert(part_stats.end(), call.stats.begin(), call.stats.end());
  }
  EXPECT_EQ(part_ids, (std::vector<int64_t>{1, 4}));
  const double first[3] = {-.083382, 1.043478, -.181531};
  const double second[3] = {-4.605170, 4.0, 0.0};
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(part_stats[i], first[i], 2e-6);
    EXPECT_NEAR(part_stats[8 + i], second[i], 2e-6);
  }
  std::vector<int64_t> ids(1);
  std::vector<float> stats(8);
  MergeTokenStatsParams merge;
  merge.part_ids = ref_of(part_ids, {2, 1});
  merge.part_stats = ref_of(part_stats, {2, 1, 8});
  merge.ids = ref_of(ids);
  merge.stats = ref_of(stats, {1, 8});
  ASSERT_TRUE(merge_token_stats(merge, ExecContext{}).ok());
  EXPECT_EQ(ids[0], 1);
  EXPECT_NEAR(stats[kStatsConfidence], .92, 1e-6);
  EXPECT_NEAR(stats[kStatsEntropy], .431262, 1e-6);
}

TEST(TokenStats, ShardsMergeToTheWholeVocabulary) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed + 500);
    const int64_t vocab = pick(&random, {8, 40, 4100});
    const int64_t parts = pick(&random, {1, 2, 4});
    const int64_t rows = 3;
    const int64_t top_k = 5;
    TestTensor logits(DType::kBF16, {rows, vocab});
    logits.fill_normal(&random, 2.0);
    if (seed % 5 == 0) {
      logits.set({0, 3}, kNaN);
      for (int64_t id = 0; id < vocab; ++id) {
        logits.set({2, id}, -kInf);
      }
    }
    const std::vector<int64_t> forbidden = {uniform(&random, 0, vocab - 1)};
    Call whole(logits, -1, top_k);
    whole.forbid(forbidden);
    whole.run();
    std::vector<int64_t> part_ids, part_topk_ids;
    std::vector<float> part_stats, part_topk_vals;
    for (int64_t part = 0; part < parts; ++part) {
      Call call(logits, -1, top_k);
      const int64_t width = vocab / parts;
      call.params.logits.data = call.params.logits.as<uint16_t>() + part * width;
      call.params.logits.size[1] = width;
      call.params.vocab_start = part * width;
      call.params.partial = true;
      call.forbid(forbidden);
      call.run();
      part_ids.insert(part_ids.end(), call.ids.begin(), call.ids.end());
      part_stats.insert(part_stats.end(), call.stats.begin(), call.stats.end());
      part_topk_ids.insert(part_topk_ids.end(), call.topk_ids.begin(), call.topk_ids.end());
      part_topk_vals.insert(part_topk_vals.end(), call.topk_probs.begin(), call.topk_probs.end());
    }
    std::vector<int64_t> ids(rows), topk_ids(rows * top_k);
    std::vector<float> stats(rows * 8), topk_probs(rows * top_k);
    MergeTokenStatsParams merge;
    merge.part_ids = ref_of(part_ids, {parts, rows});
    merge.part_stats = ref_of(part_stats, {parts, rows, 8});
    merge.part_topk_ids = ref_of(part_topk_ids, {parts, rows, top_k});
    merge.part_topk_vals = ref_of(part_topk_vals, {parts, rows, top_k});
    merge.ids = ref_of(ids);
    merge.stats = ref_of(stats, {rows, 8});
    merge.topk_ids = ref_of(topk_ids, {rows, top_k});
    merge.topk_probs = ref_of(topk_probs, {rows, top_k});
    const Status status = merge_token_stats(merge, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(ids, whole.ids);
    EXPECT_EQ(topk_ids, whole.topk_ids);
    for (size_t i = 0; i < stats.size(); ++i) {
      ASSERT_NEAR(stats[i], whole.stats[i], 2e-5) << "element " << i;
    }
    for (size_t i = 0; i < topk_probs.size(); ++i) {
      ASSERT_NEAR(topk_probs[i], whole.topk_probs[i], 1e-5);
    }
  }
}

TEST(TokenStats, DataViolations) {
  Call call(vector_rows());
  std::vector<int32_t> row_index = {0, 4, 0, 0};
  call.params.row_index = ref_of(row_index);
  Status status = token_stats(call.params, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::token_stats: row_index[1]: expected -1 or a row below 4, got 4");
  row_index[1] = -2;
  EXPECT_FALSE(token_stats(call.params, ExecContext{}).ok());
  row_index[1] = 0;
  call.penalty_ids = {-1, 0, 8, 0};
  call.params.penalty_ids = ref_of(call.penalty_ids);
  call.penalties.assign(4, 1.0F);
  call.params.penalties = ref_of(call.penalties);
  EXPECT_EQ(token_stats(call.params, ExecContext{}).message(),
            "diffulex::token_stats: penalty_ids[2]: expected an id below 8, got 8");
  call.penalty_ids[2] = 1;
  call.penalties[3] = std::nanf("");
  EXPECT_EQ(token_stats(call.params, ExecContext{}).message(),
            "diffulex::token_stats: penalties[3]: expected a finite value, got nan");
  call.penalties[3] = 0.0F;
  call.draw(1.0, {.5, 1.0, .5, .5});
  EXPECT_EQ(token_stats(call.params, ExecContext{}).message(),
            "diffulex::token_stats: uniforms[1]: expected a value in (0, 1), got 1");
  call.inverse[0] = -1.0F;
  EXPECT_EQ(token_stats(call.params, ExecContext{}).message(),
            "diffulex::token_stats: inv_temperature[0]: expected a finite value >= 0, got -1");
  EXPECT_EQ(call.ids[0], -77);
}

/// Lists of the top-k live inside the CTAs and take no scratch.
TEST(TokenStatsConfig, ScratchIsARecordPerChunk) {
  for (const int32_t top_k : {0, 1, kStatsMaxTopK}) {
    EXPECT_EQ(token_stats_workspace_bytes(3, 5000, top_k, Device::kCuda),
              static_cast<size_t>(3 * 3 * kStatsRecordBytes));
  }
  EXPECT_EQ(token_stats_workspace_bytes(3, 5000, 8, Device::kCpu), 0U);
}

/// Shares on the device that was measured, and on smaller ones: an H100 PCIe has 114
/// multiprocessors, an H20 78.
TEST(TokenStatsConfig, SharesFollowTheMultiprocessors) {
  constexpr int64_t kMaxWarps = 16;
  constexpr int64_t kChunkBytes = kStatsChunkColumns * 2;
  constexpr int64_t kChunks = 75;
  const auto ctas = [&](int64_t rows, bool has_top_k, int64_t processors) {
    return stats_cluster(rows, kChunks, has_top_k, kMaxWarps, kChunkBytes, processors).ctas;
  };
  EXPECT_EQ(ctas(33, false, 132), 8);
  EXPECT_EQ(ctas(33, true, 132), 7);
  EXPECT_EQ(ctas(34, false, 132), 5);
  EXPECT_EQ(ctas(48, false, 132), 5);
  EXPECT_EQ(ctas(49, false, 132), 2);
  EXPECT_EQ(ctas(66, false, 132), 2);
  EXPECT_EQ(ctas(67, false, 132), 1);
  EXPECT_EQ(ctas(33, false, 114), 5);
  EXPECT_EQ(ctas(33, false, 78), 2);
  EXPECT_EQ(ctas(40, false, 78), 1);
  for (const int64_t processors : {78, 114, 132}) {
    for (int64_t rows = 1; rows <= 5000; rows += rows < 200 ? 1 : 97) {
      for (const int64_t chunks : {1, 2, 16, 75, 128, 256}) {
        for (const bool has_top_k : {false, true}) {
          const StatsCluster shape =
              stats_cluster(rows, chunks, has_top_k, kMaxWarps, kChunkBytes, processors);
          ASSERT_GE(shape.ctas, 1);
          ASSERT_LE(shape.ctas, 8);
          ASSERT_GE(shape.warps, 1);
          ASSERT_LE(shape.warps, kMaxWarps);
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
