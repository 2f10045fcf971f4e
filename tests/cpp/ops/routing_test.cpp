// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/routing.h"

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

using testing::HasSubstr;

/// One call on logits [T, E].
struct Routed {
  Routed(TestTensor& logits, MoeTopkParams params) {
    const int64_t num_tokens = logits.ref().size[0];
    const auto count = static_cast<size_t>(num_tokens * params.top_k);
    weights.assign(count, std::nanf(""));
    ids.assign(count, -77);
    params.logits = logits.ref();
    params.weights = ref_of(weights, {num_tokens, params.top_k});
    params.ids = ref_of(ids, {num_tokens, params.top_k});
    status = moe_topk(params, ExecContext{});
  }
  std::vector<float> weights;
  std::vector<int32_t> ids;
  Status status;
};

MoeTopkParams sigmoid(int32_t top_k) {
  MoeTopkParams params;
  params.top_k = top_k;
  params.scoring = RouterScoring::kSigmoid;
  return params;
}

/// The definition in fp64 for one row without special values.
std::vector<int32_t> choose(const MoeTopkParams& params, std::vector<double> choices) {
  const auto num_experts = static_cast<int32_t>(choices.size());
  if (params.n_group > 1 && params.topk_group > 0 && params.topk_group < params.n_group) {
    const int32_t size = num_experts / params.n_group;
    std::vector<double> values;
    for (int32_t group = 0; group < params.n_group; ++group) {
      std::vector<double> members(choices.begin() + group * size,
                                  choices.begin() + (group + 1) * size);
      std::sort(members.rbegin(), members.rend());
      const bool is_one = params.group_score == GroupScore::kMax || size == 1;
      values.push_back(is_one ? members[0] : members[0] + members[1]);
    }
    std::vector<int32_t> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)];
    });
    for (auto group = static_cast<size_t>(params.topk_group); group < order.size(); ++group) {
      std::fill_n(choices.begin() + order[group] * size, size, -kInf);
    }
  }
  std::vector<int32_t> ids(choices.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
    return choices[static_cast<size_t>(a)] > choices[static_cast<size_t>(b)];
  });
  ids.resize(static_cast<size_t>(params.top_k));
  return ids;
}

TEST(MoeTopk, MatchesTheDefinition) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t size = pick(&random, {1, 2, 4, 16});
    const int64_t groups = pick(&random, {1, 2, 8, 16});
    const int64_t num_experts = size * groups;
    MoeTopkParams params;
    params.n_group = static_cast<int32_t>(groups);
    params.topk_group = static_cast<int32_t>(uniform(&random, 0, groups));
    const bool is_grouped = groups > 1 && params.topk_group > 0 && params.topk_group < groups;
    const int64_t available = is_grouped ? params.topk_group * size : num_experts;
    params.top_k = static_cast<int32_t>(uniform(&random, 1, std::min<int64_t>(available, 8)));
    params.scoring = static_cast<RouterScoring>(trial % 2);
    params.group_score = static_cast<GroupScore>(trial / 2 % 2);
    params.renormalize = trial % 3 != 0;
    params.routed_scaling = 2.5F;
    // Values that fp32 and fp64 order alike: multiples of 1/64, ties included.
    TestTensor logits(DType::kF32, {1, num_experts});
    std::vector<float> bias(static_cast<size_t>(num_experts));
    std::vector<double> scores;
    double sum = 0;
    for (int64_t i = 0; i < num_experts; ++i) {
      logits.set({0, i}, static_cast<double>(uniform(&random, -128, 128)) / 64);
      bias[static_cast<size_t>(i)] = -0.9F + static_cast<float>(uniform(&random, -8, 8)) / 16.0F;
      const double x = logits.get({0, i});
      scores.push_back(params.scoring == RouterScoring::kSigmoid ? 1 / (1 + std::exp(-x))
                                                                 : std::exp(x));
      sum += scores.back();
    }
    std::vector<double> choices;
    const bool has_bias = trial % 5 == 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      scores[i] /= params.scoring == RouterScoring::kSoftmax ? sum : 1.0;
      choices.push_back(scores[i] + (has_bias ? static_cast<double>(bias[i]) : 0.0));
    }
    if (has_bias) {
      params.bias = ref_of(bias);
    }
    const Routed routed(logits, params);
    ASSERT_TRUE(routed.status.ok()) << routed.status.message();
    const std::vector<int32_t> ids = choose(params, choices);
    double total = 0;
    for (const int32_t id : ids) {
      total += scores[static_cast<size_t>(id)];
    }
    const double divisor = params.renormalize && params.top_k > 1 ? total + 1e-20 : 1.0;
    for (size_t k = 0; k < ids.size(); ++k) {
      const auto chosen = static_cast<size_t>(routed.ids[k]);
      // Groups of equal rounded sums may go either way; a choice must be as good as the best.
      if (!has_bias && !is_grouped) {
        ASSERT_EQ(routed.ids[k], ids[k]) << "trial " << trial;
      }
      ASSERT_NEAR(choices[chosen], choices[static_cast<size_t>(ids[k])], 1e-5) << "trial " << trial;
      ASSERT_NEAR(routed.weights[k], scores[chosen] / divisor * 2.5, 2e-5) << "trial " << trial;
    }
  }
}

TEST(MoeTopk, SpecialRows) {
  TestTensor logits(DType::kBF16, {4, 6});
  for (int64_t i = 0; i < 6; ++i) {
    logits.set({0, i}, kNaN);
    logits.set({1, i}, i < 3 ? -kInf : kNaN);
    logits.set({2, i}, i == 4 ? 1.0 : -kInf);
    logits.set({3, i}, 0.0);
  }
  for (const MoeTopkParams& base : {sigmoid(3), [] {
                                      MoeTopkParams params;
                                      params.top_k = 3;
                                      return params;
                                    }()}) {
    MoeTopkParams params = base;
    params.renormalize = true;
    std::vector<uint8_t> valid = {1, 1, 1, 0};
    params.token_valid = ref_of(valid);
    const Routed routed(logits, params);
    ASSERT_TRUE(routed.status.ok()) << routed.status.message();
    EXPECT_EQ(routed.ids, (std::vector<int32_t>{0, 1, 2, 0, 1, 2, 4, 0, 1, -1, -1, -1}));
    for (size_t i = 0; i < routed.weights.size(); ++i) {
      EXPECT_FLOAT_EQ(routed.weights[i], i == 6 ? 1.0F : 0.0F);
    }
  }
}

TEST(MoeTopk, Errors) {
  TestTensor logits(DType::kF32, {1, 8});
  MoeTopkParams params = sigmoid(3);
  params.n_group = 4;
  params.topk_group = 1;
  EXPECT_THAT(Routed(logits, params).status.message(),
              HasSubstr("top_k: expected at most the 2 experts of topk_group groups, got 3"));
  params.n_group = 3;
  EXPECT_THAT(Routed(logits, params).status.message(),
              HasSubstr("n_group: expected a divisor of 8 experts, got 3"));
  EXPECT_THAT(Routed(logits, sigmoid(9)).status.message(),
              HasSubstr("top_k: expected a value in [1, 8], got 9"));
}

TEST(RouterGemm, MatchesTheDefinition) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 60; ++trial) {
    const DType x_dtype = std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16}[trial % 3];
    const DType w_dtype = trial % 2 == 0 ? DType::kF32 : DType::kBF16;
    const int64_t rows = pick(&random, {1, 3, 31, 33, 70});
    const int64_t depth = pick(&random, {1, 7, 16, 100, 513});
    const int64_t experts = pick(&random, {1, 2, 5, 64, 65, 130});
    TestTensor x(x_dtype, {rows, depth}, {rows, depth + trial % 4});
    TestTensor w(w_dtype, {experts, depth}, {experts, depth + trial % 5});
    x.fill_normal(&random);
    w.fill_normal(&random);
    TestTensor logits(DType::kF32, {rows, experts}, {rows, experts + 2});
    logits.fill(kNaN);
    RouterGemmParams params;
    params.x = x.ref();
    params.w = w.ref();
    params.logits = logits.ref();
    const Status status = router_gemm(params, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t expert = 0; expert < experts; ++expert) {
        double want = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < depth; ++k) {
          want += x.get({row, k}) * w.get({expert, k});
          magnitude += std::abs(x.get({row, k}) * w.get({expert, k}));
        }
        ASSERT_NEAR(logits.get({row, expert}), want,
                    static_cast<double>(depth + 4) * 6e-8 * magnitude + 1e-12);
      }
      ASSERT_TRUE(row + 1 == rows ||
                  std::isnan(logits.get_offset(logits.offset({row, 0}) + experts)));
    }
  }
}

/// Every variant, every height and width of a tile, against fp64.
TEST(DotRows, EveryVariant) {
  std::mt19937_64 random(5);
  for (int32_t index = 0; index < cpu::num_kernel_tables(); ++index) {
    const cpu::KernelTable& table = cpu::kernel_table_at(index);
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (int64_t rows = 1; rows <= 9; ++rows) {
        const int64_t columns = uniform(&random, 1, 11);
        const int64_t depth = uniform(&random, 1, 70);
        TestTensor x(DType::kF32, {rows, depth});
        TestTensor weight(dtype, {columns, depth});
        x.fill_normal(&random);
        weight.fill_normal(&random);
        std::vector<const float*> pointers;
        for (int64_t row = 0; row < rows; ++row) {
          pointers.push_back(x.ref().as<const float>() + row * depth);
        }
        std::vector<float> out(static_cast<size_t>(rows * 16), 7.0F);
        cpu::DotRowsArgs args;
        args.x = pointers.data();
        args.weight = weight.ref().data;
        args.weight_dtype = dtype;
        args.weight_stride = depth;
        args.out = out.data();
        args.out_stride = 16;
        args.rows = rows;
        args.columns = columns;
        args.depth = depth;
        table.dot_rows(args);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t column = 0; column < 16; ++column) {
            double want = column < columns ? 0.0 : 7.0;
            for (int64_t k = 0; column < columns && k < depth; ++k) {
              want += x.get({row, k}) * weight.get({column, k});
            }
            ASSERT_NEAR(out[static_cast<size_t>(row * 16 + column)], want, 2e-5) << table.name;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
