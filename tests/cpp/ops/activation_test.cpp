// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/activation.h"

#include <gtest/gtest.h>

#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

double reference(Activation act, double gate) {
  switch (act) {
    case Activation::kSilu:
      return gate / (1.0 + std::exp(-gate));
    case Activation::kGeluTanh:
      return 0.5 * gate *
             (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
    case Activation::kGeluErf:
      break;
  }
  return 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
}

TEST(ActAndMul, MatchesTheReference) {
  std::mt19937_64 random(21);
  for (int64_t trial = 0; trial < 90; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType dtype = static_cast<DType>(trial % 3);
    const auto act = static_cast<Activation>(trial / 3 % 3);
    const int64_t width = pick(&random, {1, 5, 16, 31, 64, 129});
    const int64_t rows = uniform(&random, 1, 5);
    TestTensor x(dtype, {rows, 2, 2 * width}, {rows, 2, 2 * width + 3});
    x.fill_normal(&random, 4.0);
    TestTensor out(dtype, {rows, 2, width});
    out.fill(kNaN);
    ActAndMulParams params;
    params.x = x.ref();
    params.out = out.ref();
    params.act = act;
    ASSERT_TRUE(act_and_mul(params, ExecContext{}).ok());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t half = 0; half < 2; ++half) {
        for (int64_t i = 0; i < width; ++i) {
          const double want = reference(act, x.get({row, half, i})) * x.get({row, half, i + width});
          ASSERT_LE(std::abs(out.get({row, half, i}) - want),
                    rounding_error(dtype, want) + 3e-6 * std::abs(want) + 1e-7);
        }
      }
    }
  }
}

TEST(ActAndMul, FiniteInputsNeverGiveNaN) {
  const std::vector<double> gates = {-100.0, -1e4, -3e38, -3e19, -0.0, 0.0, 1e-40, 88.8,
                                     1e4,    3e19, 3e38,  -87.4, -5.0, 5.0, 1.0,   -1.0};
  for (const Activation act : {Activation::kSilu, Activation::kGeluTanh, Activation::kGeluErf}) {
    const auto count = static_cast<int64_t>(gates.size());
    TestTensor x(DType::kF32, {1, 2 * count});
    for (int64_t i = 0; i < count; ++i) {
      x.set({0, i}, gates[static_cast<size_t>(i)]);
      x.set({0, i + count}, 1.0);
    }
    TestTensor out(DType::kF32, {1, count});
    ActAndMulParams params;
    params.x = x.ref();
    params.out = out.ref();
    params.act = act;
    ASSERT_TRUE(act_and_mul(params, ExecContext{}).ok());
    for (int64_t i = 0; i < count; ++i) {
      EXPECT_TRUE(std::isfinite(out.get({0, i}))) << gates[static_cast<size_t>(i)];
    }
    EXPECT_EQ(out.get({0, 0}), 0.0);
    EXPECT_TRUE(std::signbit(out.get({0, 0})));
  }
}

}  // namespace
}  // namespace diffulex::test
