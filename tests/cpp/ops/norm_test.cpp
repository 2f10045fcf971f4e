// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/norm.h"

#include <gtest/gtest.h>

#include "diffulex/core/thread_pool.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr double kSlack = 2e-6;

struct NormCase {
  explicit NormCase(uint64_t seed) : random(seed) {
    dtype = static_cast<DType>(pick(&random, {0, 1, 2}));
    hidden = pick(&random, {1, 7, 16, 33, 64, 100, 257, 1024});
    rows = uniform(&random, 1, 12);
    const int64_t heads = uniform(&random, 1, 3);
    x = TestTensor(dtype, {rows, heads, hidden}, {rows, heads + 2, hidden + 3});
    residual = TestTensor(dtype, {rows, heads, hidden}, {rows, heads, hidden + 1});
    out = TestTensor(dtype, {rows, heads, hidden});
    num_heads = heads;
    x.fill_normal(&random, 3.0);
    residual.fill_normal(&random);
    out.fill(kNaN);
    weight = TestTensor(uniform(&random, 0, 1) == 0 ? dtype : DType::kF32, {hidden});
    weight.fill_normal(&random);
    has_weight = uniform(&random, 0, 3) != 0;
    offset = pick(&random, {0, 1}) == 1 ? 1.0 : 0.0;
  }

  RmsNormParams params() {
    RmsNormParams result;
    result.x = x.ref();
    if (has_weight) {
      result.weight = weight.ref();
    }
    result.eps = 1e-5F;
    result.weight_offset = has_weight ? static_cast<float>(offset) : 0.0F;
    return result;
  }

  /// fp64 norm of one row given as doubles.
  [[nodiscard]] std::vector<double> norm(const std::vector<double>& row) const {
    double square = 0.0;
    for (const double value : row) {
      square += value * value;
    }
    const double factor =
        1.0 / std::sqrt(square / static_cast<double>(hidden) + static_cast<double>(1e-5F));
    std::vector<double> result;
    for (int64_t i = 0; i < hidden; ++i) {
      const double w = has_weight ? weight.get({i}) + offset : 1.0;
      result.push_back(row[static_cast<size_t>(i)] * factor * w);
    }
    return result;
  }

  void expect_near(double got, double want) const {
    ASSERT_LE(std::abs(got - want), rounding_error(dtype, want) + kSlack * (std::abs(want) + 1e-3));
  }

  std::mt19937_64 random;
  DType dtype = DType::kF32;
  int64_t hidden = 0;
  int64_t rows = 0;
  int64_t num_heads = 0;
  TestTensor x, residual, out, weight;
  bool has_weight = true;
  double offset = 0.0;
};

TEST(RmsNorm, MatchesTheReference) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    NormCase norm_case(seed);
    const TestTensor before = norm_case.x;
    RmsNormParams params = norm_case.params();
    const bool in_place = seed % 3 == 0;
    params.out = in_place ? params.x : norm_case.out.ref();
    ASSERT_TRUE(rms_norm(params, ExecContext{}).ok());
    for (int64_t row = 0; row < norm_case.rows; ++row) {
      for (int64_t head = 0; head < norm_case.num_heads; ++head) {
        std::vector<double> values;
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          values.push_back(before.get({row, head, i}));
        }
        const std::vector<double> want = norm_case.norm(values);
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          norm_case.expect_near((in_place ? norm_case.x : norm_case.out).get({row, head, i}),
                                want[static_cast<size_t>(i)]);
        }
      }
    }
  }
}

TEST(RmsNorm, AddNormalisesTheUnroundedSum) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    NormCase norm_case(seed);
    const TestTensor x = norm_case.x;
    const TestTensor residual = norm_case.residual;
    RmsNormParams params = norm_case.params();
    params.residual = norm_case.residual.ref();
    ASSERT_TRUE(add_rms_norm(params, ExecContext{}).ok());
    for (int64_t row = 0; row < norm_case.rows; ++row) {
      for (int64_t head = 0; head < norm_case.num_heads; ++head) {
        std::vector<double> sum;
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          // fp32 sum: the op's arithmetic type.
          sum.push_back(static_cast<float>(x.get({row, head, i})) +
                        static_cast<float>(residual.get({row, head, i})));
          TestTensor rounded(norm_case.dtype, {1});
          rounded.set({0}, sum.back());
          ASSERT_EQ(norm_case.residual.get({row, head, i}), rounded.get({0}));
        }
        const std::vector<double> want = norm_case.norm(sum);
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          norm_case.expect_near(norm_case.x.get({row, head, i}), want[static_cast<size_t>(i)]);
        }
      }
    }
  }
}

TEST(RmsNorm, NormAddScales) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    NormCase norm_case(seed);
    TestTensor scale(seed % 2 == 0 ? DType::kF32 : norm_case.dtype, {1});
    scale.set({0}, 0.375);
    RmsNormParams params = norm_case.params();
    params.residual = norm_case.residual.ref();
    params.out = norm_case.out.ref();
    const bool scaled = seed % 4 != 0;
    if (scaled) {
      params.out_scale = scale.ref();
    }
    ASSERT_TRUE(rms_norm_add(params, ExecContext{}).ok());
    for (int64_t row = 0; row < norm_case.rows; ++row) {
      for (int64_t head = 0; head < norm_case.num_heads; ++head) {
        std::vector<double> values;
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          values.push_back(norm_case.x.get({row, head, i}));
        }
        const std::vector<double> want = norm_case.norm(values);
        for (int64_t i = 0; i < norm_case.hidden; ++i) {
          const double sum = want[static_cast<size_t>(i)] + norm_case.residual.get({row, head, i});
          const double final_value = sum * (scaled ? 0.375 : 1.0);
          ASSERT_LE(std::abs(norm_case.out.get({row, head, i}) - final_value),
                    rounding_error(norm_case.dtype, final_value) + 1e-5);
        }
      }
    }
  }
}

TEST(RmsNorm, ThreadsDoNotChangeTheResult) {
  std::mt19937_64 random(3);
  TestTensor x(DType::kF32, {300, 512});
  x.fill_normal(&random);
  TestTensor serial(DType::kF32, {300, 512});
  TestTensor threaded(DType::kF32, {300, 512});
  RmsNormParams params;
  params.x = x.ref();
  params.out = serial.ref();
  ASSERT_TRUE(rms_norm(params, ExecContext{}).ok());
  ThreadPool pool(4);
  ExecContext context;
  context.parallel_for = ThreadPool::parallel_for;
  context.parallel_pool = &pool;
  params.out = threaded.ref();
  ASSERT_TRUE(rms_norm(params, context).ok());
  EXPECT_EQ(serial.bytes(), threaded.bytes());
}

TEST(RmsNorm, NoRowsIsANoOp) {
  TestTensor x(DType::kF32, {0, 8});
  RmsNormParams params;
  params.x = x.ref();
  params.out = x.ref();
  EXPECT_TRUE(rms_norm(params, ExecContext{}).ok());
}

}  // namespace
}  // namespace diffulex::test
