// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/linear.h"

#include <gtest/gtest.h>

#include "diffulex/core/thread_pool.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr int64_t kColumns = 32;

/// A weight [N, K] of values that bfloat16 can hold when `dtype` is bfloat16, and its panels.
class PackedWeight final {
 public:
  PackedWeight(DType dtype, int64_t out_features, int64_t in_features, std::mt19937_64* random)
      : in_features_(in_features),
        panels_(dtype, {(out_features + kColumns - 1) / kColumns, in_features, kColumns}) {
    panels_.fill(0.0);
    std::normal_distribution<double> normal;
    for (int64_t n = 0; n < out_features; ++n) {
      for (int64_t k = 0; k < in_features; ++k) {
        panels_.set({n / kColumns, k, n % kColumns}, normal(*random));
      }
    }
  }
  /// W[n][k] as the kernel sees it.
  [[nodiscard]] double get(int64_t n, int64_t k) const {
    return panels_.get({n / kColumns, k, n % kColumns});
  }
  [[nodiscard]] TestTensor as_float32() const {
    const int64_t num_panels = static_cast<int64_t>(panels_.elements()) / (in_features_ * kColumns);
    TestTensor copy(DType::kF32, {num_panels, in_features_, kColumns});
    for (int64_t i = 0; i < panels_.elements(); ++i) {
      copy.set_offset(i, panels_.get_offset(i));
    }
    return copy;
  }
  [[nodiscard]] TensorRef ref() { return panels_.ref(); }

 private:
  int64_t in_features_;
  TestTensor panels_;
};

/// Rows [first, first + rows) of a matrix.
TensorRef rows_of(TensorRef matrix, int64_t first, int64_t rows) {
  matrix.data = matrix.as<float>() + first * matrix.stride[0];
  matrix.size[0] = rows;
  return matrix;
}

LinearPackedParams params_of(const TensorRef& x, const TensorRef& weight, const TensorRef& out) {
  LinearPackedParams params;
  params.x = x;
  params.packed_weight = weight;
  params.out = out;
  params.out_features = static_cast<int32_t>(out.size[1]);
  return params;
}

void run(const LinearPackedParams& params, const ExecContext& context = {}) {
  const Status status = linear_packed(params, context);
  ASSERT_TRUE(status.ok()) << status.message();
}

TEST(LinearPacked, MatchesTheReference) {
  std::mt19937_64 random(31);
  for (int64_t trial = 0; trial < 120; ++trial) {
    const DType dtype = trial % 2 == 0 ? DType::kF32 : DType::kBF16;
    // Every row count up to 40, then some around the row blocks.
    const int64_t rows = trial < 80 ? trial / 2 + 1 : pick(&random, {47, 191, 192, 193, 250});
    const int64_t depth = pick(&random, {1, 2, 17, 64, 255, 256, 257, 515});
    const int64_t columns = pick(&random, {1, 5, 31, 32, 33, 64, 95, 130});
    SCOPED_TRACE(testing::Message() << rows << " x " << depth << " x " << columns);
    PackedWeight weight(dtype, columns, depth, &random);
    const int64_t gap = trial % 3;
    TestTensor x(DType::kF32, {rows, depth}, {rows, depth + 5 * gap});
    x.fill(kNaN);
    TestTensor out(DType::kF32, {rows, columns}, {rows, columns + 3 * gap});
    out.fill(kNaN);
    std::normal_distribution<double> normal;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < depth; ++k) {
        x.set({row, k}, normal(random));
      }
    }
    ASSERT_NO_FATAL_FAILURE(run(params_of(x.ref(), weight.ref(), out.ref())));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        double want = 0.0;
        double magnitude = 0.0;
        for (int64_t k = 0; k < depth; ++k) {
          const double product = x.get({row, k}) * weight.get(column, k);
          want += product;
          magnitude += std::abs(product);
        }
        // One sum of `depth` terms: at most depth roundings, each of a partial sum.
        ASSERT_LE(std::abs(out.get({row, column}) - want),
                  static_cast<double>(depth + 1) * 6e-8 * magnitude + 1e-12);
      }
      for (int64_t column = columns; column < columns + 3 * gap && row + 1 < rows; ++column) {
        ASSERT_TRUE(std::isnan(out.get_offset(out.offset({row, 0}) + column))) << "wrote a gap";
      }
    }
  }
}

TEST(LinearPacked, Bfloat16PanelsGiveTheBitsOfTheirFloat32Values) {
  std::mt19937_64 random(32);
  for (const int64_t rows : {1, 7, 12, 13, 40}) {
    PackedWeight weight(DType::kBF16, 70, 300, &random);
    TestTensor wide = weight.as_float32();
    TestTensor x(DType::kF32, {rows, 300});
    x.fill_normal(&random);
    TestTensor out(DType::kF32, {rows, 70});
    TestTensor wide_out(DType::kF32, {rows, 70});
    run(params_of(x.ref(), weight.ref(), out.ref()));
    run(params_of(x.ref(), wide.ref(), wide_out.ref()));
    ASSERT_EQ(out.bytes(), wide_out.bytes());
  }
}

TEST(LinearPacked, ARowDoesNotDependOnTheOthersNorOnThreads) {
  std::mt19937_64 random(33);
  constexpr int64_t kRows = 400;
  constexpr int64_t kDepth = 520;
  constexpr int64_t kOut = 200;
  ThreadPool pool(2);
  ExecContext threaded;
  threaded.parallel_for = ThreadPool::parallel_for;
  threaded.parallel_pool = &pool;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    PackedWeight weight(dtype, kOut, kDepth, &random);
    TestTensor x(DType::kF32, {kRows, kDepth});
    x.fill_normal(&random);
    TestTensor alone(DType::kF32, {kRows, kOut});
    for (int64_t row = 0; row < kRows; ++row) {
      run(params_of(rows_of(x.ref(), row, 1), weight.ref(), rows_of(alone.ref(), row, 1)));
    }
    std::vector<int64_t> counts = {191, 192, 193, kRows};
    for (int64_t rows = 1; rows <= 40; ++rows) {
      counts.push_back(rows);
    }
    for (const int64_t rows : counts) {
      for (const ExecContext& context : {ExecContext{}, threaded}) {
        TestTensor out(DType::kF32, {rows, kOut});
        out.fill(kNaN);
        run(params_of(rows_of(x.ref(), 0, rows), weight.ref(), out.ref()), context);
        const std::vector<uint8_t>& got = out.bytes();
        const auto count = static_cast<size_t>(rows * kOut) * sizeof(float);
        ASSERT_EQ(std::memcmp(got.data(), alone.bytes().data(), count), 0) << rows << " rows";
      }
    }
  }
}

TEST(LinearPacked, SpecialValuesStayInTheirRowAndColumn) {
  std::mt19937_64 random(34);
  PackedWeight weight(DType::kF32, 40, 20, &random);
  const TensorRef panels = weight.ref();
  // W[35][3] = inf.
  panels.as<float>()[(20 + 3) * kColumns + 3] = std::numeric_limits<float>::infinity();
  TestTensor x(DType::kF32, {14, 20});
  x.fill_normal(&random);
  x.set({13, 0}, kNaN);
  TestTensor out(DType::kF32, {14, 40});
  run(params_of(x.ref(), panels, out.ref()));
  for (int64_t row = 0; row < 14; ++row) {
    for (int64_t column = 0; column < 40; ++column) {
      const double value = out.get({row, column});
      ASSERT_EQ(std::isnan(value), row == 13);
      ASSERT_EQ(std::isinf(value), row != 13 && column == 35);
    }
  }
}

/// Every variant against the plain one; the others round each product-sum once instead of twice.
TEST(LinearPacked, EveryVariantMultipliesATile) {
  std::mt19937_64 random(35);
  std::normal_distribution<float> normal;
  for (int32_t index = 0; index < cpu::num_kernel_tables(); ++index) {
    const cpu::KernelTable& table = cpu::kernel_table_at(index);
    for (int32_t rows = 1; rows <= table.linear_tile_rows; ++rows) {
      SCOPED_TRACE(testing::Message() << table.name << ", " << rows << " rows");
      constexpr int32_t kDepth = 37;
      PackedWeight weight(rows % 2 == 0 ? DType::kF32 : DType::kBF16, kColumns, kDepth, &random);
      std::vector<float> x(static_cast<size_t>(rows * cpu::kLinearRowStride), std::nanf(""));
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t k = 0; k < kDepth; ++k) {
          x[static_cast<size_t>(row * cpu::kLinearRowStride + k)] = normal(random);
        }
      }
      std::vector<float> out(static_cast<size_t>(rows * 40), 2.0F);
      cpu::LinearTileArgs args;
      args.x = x.data();
      args.panel = weight.ref().data;
      args.out = out.data();
      args.out_stride = 40;
      args.rows = rows;
      args.depth = kDepth;
      args.is_bf16 = rows % 2 != 0;
      args.accumulate = true;
      table.linear_tile(args);
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t column = 0; column < 40; ++column) {
          double want = 2.0;
          for (int32_t k = 0; column < kColumns && k < kDepth; ++k) {
            want += static_cast<double>(x[static_cast<size_t>(row * cpu::kLinearRowStride + k)]) *
                    weight.get(column, k);
          }
          ASSERT_NEAR(out[static_cast<size_t>(row * 40 + column)], want, 1e-4);
        }
      }
    }
  }
}

}  // namespace
}  // namespace diffulex::test
