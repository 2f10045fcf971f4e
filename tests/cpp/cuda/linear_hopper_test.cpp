// SPDX-License-Identifier: Apache-2.0

// linear_few_rows on the device against sums in float64 of the rounded operands.

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "cuda/op_parity.h"
#include "diffulex/ops/linear.h"
#include "ops/shared/cuda/hopper.h"

#define DIFFULEX_REQUIRE_HOPPER()                                     \
  do {                                                                \
    DIFFULEX_REQUIRE_DEVICE();                                        \
    if (!cuda::is_hopper_device(0)) {                                 \
      GTEST_SKIP() << "linear_few_rows needs compute capability 9.0"; \
    }                                                                 \
  } while (false)

namespace diffulex::test {
namespace {

ExecContext device_context() {
  ExecContext context;
  context.device = Device::kCuda;
  return context;
}

double activated(Activation act, double gate) {
  constexpr double kSqrt2OverPi = 0.79788456080286535588;
  switch (act) {
    case Activation::kGeluTanh:
      return 0.5 * gate * (1.0 + std::tanh(kSqrt2OverPi * (gate + 0.044715 * gate * gate * gate)));
    case Activation::kGeluErf:
      return 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
    default:
      return gate / (1.0 + std::exp(-gate));
  }
}

/// One product: x [M, K] and W [N, K] with gaps behind their rows, NaN where nobody may read or
/// write.
struct Product final {
  Product(std::mt19937_64* random, DType dtype, int64_t num_rows, int64_t weight_rows,
          int64_t depth, std::optional<Activation> activation, bool has_bias)
      : act(activation),
        columns(act.has_value() ? weight_rows / 2 : weight_rows),
        x(dtype, {num_rows, depth}, {num_rows + 1, depth + 8}),
        weight(dtype, {weight_rows, depth}, {weight_rows, depth + 16}),
        bias(dtype, {weight_rows}),
        out(dtype, {num_rows, columns}, {num_rows + 1, columns + 2}) {
    x.fill(kNaN);
    weight.fill(kNaN);
    std::normal_distribution<double> normal;
    const double scale = 1.0 / std::sqrt(static_cast<double>(depth));
    for (int64_t k = 0; k < depth; ++k) {
      for (int64_t row = 0; row < num_rows; ++row) {
        x.set({row, k}, normal(*random));
      }
      for (int64_t row = 0; row < weight_rows; ++row) {
        weight.set({row, k}, scale * normal(*random));
      }
    }
    bias.fill_normal(random);
    if (has_bias) {
      bias_ref = bias.ref();
    }
  }

  /// Runs on the device, `times` times into one buffer that starts as NaN.
  void run(int times = 1) {
    out.fill(kNaN);
    DeviceMirror mirror;
    LinearFewRowsParams params;
    params.x = mirror.upload(x.ref());
    params.weight = mirror.upload(weight.ref());
    params.bias = mirror.upload(bias_ref);
    params.out = mirror.upload(out.ref());
    params.act = act;
    for (int time = 0; time < times; ++time) {
      const Status status = linear_few_rows(params, device_context());
      ASSERT_TRUE(status.ok()) << status.message();
    }
    mirror.download();
  }

  void expect_right() {
    const std::vector<double> wide_x = widened(&x);
    const std::vector<double> wide_weight = widened(&weight);
    const int64_t depth = x.ref().size[1];
    // Row `row` of x times row `weight_row` of W and bias, and the sum of the terms' sizes.
    const auto sum_of = [&](int64_t row, int64_t weight_row) {
      double sum = bias_ref.present() ? bias.get({weight_row}) : 0.0;
      double size = std::abs(sum);
      for (int64_t k = 0; k < depth; ++k) {
        const double term = wide_x[row * depth + k] * wide_weight[weight_row * depth + k];
        sum += term;
        size += std::abs(term);
      }
      return std::make_pair(sum, size);
    };
    const double rounding = x.ref().dtype == DType::kBF16 ? 1.0 / 256 : 1.0 / 2048;
    constexpr double kSums = 2e-6;
    for (int64_t row = 0; row < out.ref().size[0]; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        auto [want, bound] = sum_of(row, column);
        bound *= kSums;
        if (act.has_value()) {
          const auto [up, size] = sum_of(row, columns + column);
          const double gate = activated(*act, want);
          bound = 1.2 * bound * std::abs(up) + kSums * std::abs(gate) * size;
          want = gate * up;
        }
        ASSERT_NEAR(out.get({row, column}), want, rounding * std::abs(want) + bound + 1e-7)
            << "row " << row << " column " << column;
      }
    }
    // The row behind and the gaps belong to nobody.
    int64_t untouched = 0;
    for (int64_t i = 0; i < out.elements(); ++i) {
      untouched += std::isnan(out.get_offset(i)) ? 1 : 0;
    }
    ASSERT_EQ(untouched, out.elements() - out.ref().size[0] * columns);
  }

  /// The elements of a matrix, without the gaps.
  static std::vector<double> widened(TestTensor* matrix) {
    std::vector<double> values;
    for (int64_t row = 0; row < matrix->ref().size[0]; ++row) {
      for (int64_t k = 0; k < matrix->ref().size[1]; ++k) {
        values.push_back(matrix->get({row, k}));
      }
    }
    return values;
  }

  std::optional<Activation> act;
  int64_t columns;
  TestTensor x;
  TestTensor weight;
  TestTensor bias;
  TestTensor out;
  TensorRef bias_ref;
};

TEST(CudaLinearTest, ProductsMatchFloat64) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(1);
  for (uint64_t seed = 0; seed < num_seeds(40); ++seed) {
    const DType dtype = seed % 2 == 0 ? DType::kBF16 : DType::kF16;
    const int64_t num_rows = uniform(&random, 1, kMaxFewRows);
    // One tile, tiles of every height and a last one that is not whole, several to a CTA.
    const int64_t weight_rows = 16 * uniform(&random, 1, seed % 4 == 0 ? 300 : 40);
    const int64_t depth = 64 * uniform(&random, 1, 9);
    std::optional<Activation> act;
    if (seed % 3 == 2 && weight_rows % 32 == 0) {
      act = static_cast<Activation>(seed / 3 % 3);
    }
    const bool has_bias = !act.has_value() && seed % 3 == 1;
    Product product(&random, dtype, num_rows, weight_rows, depth, act, has_bias);
    product.run();
    product.expect_right();
    if (HasFatalFailure()) {
      FAIL() << num_rows << " rows, W " << weight_rows << " x " << depth << ", seed " << seed;
    }
  }
}

/// Both sides of every tile height of x; W of one tile, of one to a processor with and without
/// shares of the depth, and with a last tile that is not whole.
TEST(CudaLinearTest, EveryTileOfRowsMatchesFloat64) {
  DIFFULEX_REQUIRE_HOPPER();
  struct Weight final {
    int64_t rows;
    int64_t depth;
    std::optional<Activation> act;
  };
  const Weight weights[] = {{1'040, 512, std::nullopt},
                            {1'344, 64, std::nullopt},
                            {800, 320, Activation::kSilu},
                            {4'160, 128, std::nullopt}};
  std::mt19937_64 random(6);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t num_rows : {1, 16, 17, 33, 63, 64, 65, 96, 97, 127, 128}) {
      for (const Weight& weight : weights) {
        Product product(&random, dtype, num_rows, weight.rows, weight.depth, weight.act,
                        !weight.act.has_value());
        product.run(2);
        product.expect_right();
        if (HasFatalFailure()) {
          FAIL() << num_rows << " rows, W " << weight.rows << " x " << weight.depth;
        }
      }
    }
  }
}

TEST(CudaLinearTest, ACtaTakesTilesInTurn) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(2);
  for (const int64_t num_rows : {19, 100}) {
    Product product(&random, DType::kBF16, num_rows, 27'056, 192, std::nullopt, true);
    product.run();
    product.expect_right();
    if (HasFatalFailure()) {
      FAIL() << num_rows;
    }
  }
}

TEST(CudaLinearTest, SharesOfTheDepthExchangeTheirSums) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(5);
  // 33 lines of 64 elements: with two lines to a stage the last one is half empty.
  for (const int64_t num_rows : {33, 128}) {
    for (const int64_t weight_rows : {1'040, 4'176}) {
      Product product(&random, DType::kF16, num_rows, weight_rows, 2'112, std::nullopt, false);
      product.run();
      product.expect_right();
      if (HasFatalFailure()) {
        FAIL() << num_rows << " rows, W of " << weight_rows;
      }
    }
  }
}

TEST(CudaLinearTest, LaunchesInARowGiveTheSameBits) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(3);
  for (const int64_t num_rows : {32, 128}) {
    Product product(&random, DType::kBF16, num_rows, 1'024, 2'048, std::nullopt, false);
    product.run();
    const TestTensor first = product.out;
    for (int i = 0; i < 10; ++i) {
      product.run(8);  // overlapping
      ASSERT_EQ(first.bytes(), product.out.bytes()) << num_rows;
    }
  }
}

TEST(CudaLinearTest, ARowDoesNotDependOnTheOthers) {
  DIFFULEX_REQUIRE_HOPPER();
  std::mt19937_64 random(4);
  Product all(&random, DType::kBF16, kMaxFewRows, 1'024, 2'048, std::nullopt, false);
  all.run();
  for (const int64_t num_rows : {1, 20, 64, 65}) {
    for (const int64_t first : {int64_t{0}, int64_t{17}, kMaxFewRows - num_rows}) {
      Product few(&random, DType::kBF16, num_rows, 1'024, 2'048, std::nullopt, false);
      few.weight = all.weight;
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t k = 0; k < 2'048; ++k) {
          few.x.set({row, k}, all.x.get({first + row, k}));
        }
      }
      few.run();
      for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t column = 0; column < all.columns; ++column) {
          ASSERT_EQ(few.out.get({row, column}), all.out.get({first + row, column}))
              << num_rows << " rows from " << first << " on";
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
