// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/quantize.h"

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "ops/kv/scaled_code.h"
#include "ops/quant/codec.h"
#include "ops/quant/isa/int8_kernels.h"

namespace diffulex::test {
namespace {

/// The value of a code as the format defines it: bias 7, three bits of mantissa, no infinities.
double e4m3_value(int32_t code) {
  const int32_t exponent = code >> 3 & 15;
  const int32_t mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) {
    return std::nan("");
  }
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

#ifdef __SSE__
/// Lets this thread take subnormal numbers for zero, operands and results alike, as long as it
/// lives.
class FlushedSubnormals {
 public:
  FlushedSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040U); }
  ~FlushedSubnormals() { _mm_setcsr(before_); }
  FlushedSubnormals(const FlushedSubnormals&) = delete;
  FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;

 private:
  uint32_t before_;
};

TEST(QuantizeCodec, KnowsEveryCodeWhereSubnormalsAreFlushed) {
  const FlushedSubnormals flushed;
  volatile float tiny = 1e-39F;
  ASSERT_EQ(tiny * 2.0F, 0.0F);
  for (int32_t i = 0; i < 256; ++i) {
    const volatile int32_t code = i;
    const double want = e4m3_value(code);
    if (std::isnan(want)) {
      continue;
    }
    EXPECT_EQ(e4m3_to_float(static_cast<uint8_t>(code)), want) << i;
    for (const int32_t exponent : {kMinKvExponent, 0, kMaxKvExponent}) {
      const volatile int32_t scale = exponent + 127;
      const float value = kv_value(static_cast<uint8_t>(code), static_cast<uint8_t>(scale));
      EXPECT_EQ(value, std::ldexp(want, exponent)) << i << " below 2^" << exponent;
    }
  }
  EXPECT_TRUE(std::isnan(kv_value(0, kNanKvScale)));
}
#endif

TEST(QuantizeCodec, KnowsEveryCode) {
  for (int32_t code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    const double want = e4m3_value(code);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(float_to_e4m3(value), 0x7F);
      continue;
    }
    EXPECT_EQ(value, want);
    EXPECT_EQ(std::signbit(value), (code & 0x80) != 0);
    EXPECT_EQ(float_to_e4m3(value), code);
  }
}

/// The nearest code by trying all of them, ties to the even one.
int32_t nearest_e4m3(float value) {
  const double magnitude = std::min(std::abs(static_cast<double>(value)), 448.0);
  int32_t best = 0;
  for (int32_t code = 1; code < 0x7F; ++code) {
    const double gain =
        std::abs(e4m3_value(best) - magnitude) - std::abs(e4m3_value(code) - magnitude);
    if (gain > 0 || (gain == 0 && code % 2 == 0)) {
      best = code;
    }
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

TEST(QuantizeCodec, RoundsToTheNearestCode) {
  std::mt19937 random(5);
  for (int32_t code = 0; code < 0x7E; ++code) {
    // Halfway between two codes, and one unit in the last place to both sides of it.
    const auto middle = static_cast<float>((e4m3_value(code) + e4m3_value(code + 1)) / 2);
    for (const float value :
         {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 500.0F)}) {
      EXPECT_EQ(float_to_e4m3(value), nearest_e4m3(value)) << value;
      EXPECT_EQ(float_to_e4m3(-value), nearest_e4m3(-value)) << value;
    }
  }
  for (int32_t trial = 0; trial < 20'000; ++trial) {
    // All bit patterns, and those near the range of the format.
    const auto bits = static_cast<uint32_t>(random());
    const float value = bits_float(trial % 2 == 0 ? bits : (bits & 0x8FFFFFFFU) | 0x38000000U);
    if (!std::isnan(value)) {
      ASSERT_EQ(float_to_e4m3(value), nearest_e4m3(value)) << value;
    }
  }
}

TEST(QuantizeCodec, RoundsToIntegersThatTiesMakeEven) {
  std::mt19937 random(6);
  for (int32_t trial = 0; trial < 1 << 20; ++trial) {
    const auto bits = static_cast<uint32_t>(random());
    const float value =
        trial % 4 == 0 ? static_cast<float>(static_cast<int32_t>(bits % 1024) - 512) / 2
                       : bits_float(trial % 4 == 1 ? bits : (bits & 0x83FFFFFFU) | 0x40000000U);
    const double clamped = std::min(std::max(static_cast<double>(value), -127.0), 127.0);
    const int32_t want = std::isnan(value) ? 0 : static_cast<int32_t>(std::nearbyint(clamped));
    ASSERT_EQ(float_to_int8(value), want) << value;
  }
}

TEST(QuantizeCodec, TakesAFactorThatOverflowsForZeros) {
  EXPECT_EQ(code_scale(0.0F, 448.0F).factor, 0.0F);
  EXPECT_EQ(code_scale(1e-40F, 448.0F).factor, 0.0F);
  EXPECT_EQ(code_scale(1e-40F, 448.0F).scale, 1.0F);
  EXPECT_EQ(code_scale(std::numeric_limits<float>::infinity(), 127.0F).scale, 1.0F);
  EXPECT_EQ(code_scale(448.0F, 448.0F).factor, 1.0F);
}

/// The rows of a tile in the width that a variant reads.
std::vector<char> copy_of(const std::vector<int8_t>& x, int32_t x_bytes) {
  std::vector<char> copy(x.size() * static_cast<size_t>(x_bytes));
  for (size_t i = 0; i < x.size(); ++i) {
    const auto wide = static_cast<int16_t>(x[i]);
    std::memcpy(copy.data() + i * static_cast<size_t>(x_bytes),
                x_bytes == 1 ? static_cast<const void*>(&x[i]) : &wide,
                static_cast<size_t>(x_bytes));
  }
  return copy;
}

/// The variant of this name; null where this machine cannot run it.
const cpu::Int8Kernels* int8_kernels_named(const std::string& name) {
  for (int32_t index = 0; index < cpu::num_int8_kernels(); ++index) {
    if (cpu::int8_kernels_at(index).name == name) {
      return &cpu::int8_kernels_at(index);
    }
  }
  return nullptr;
}

class Int8Tiles : public testing::TestWithParam<const char*> {};

TEST_P(Int8Tiles, HaveTheBitsOfExactIntegers) {
  const cpu::Int8Kernels* found = int8_kernels_named(GetParam());
  if (found == nullptr) {
    GTEST_SKIP() << "this processor, or this build, has no " << GetParam();
  }
  const cpu::Int8Kernels& kernels = *found;
  constexpr int32_t kColumns = cpu::kInt8PanelWidth;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int32_t trial = 0; trial < 60; ++trial) {
    const int32_t steps = trial % 3 == 0 ? 32 : 1 + trial % 32;
    const int32_t depth = 4 * steps;
    const bool is_extreme = trial % 5 == 0;
    for (int32_t rows = 1; rows <= kernels.tile_rows; ++rows) {
      std::vector<int8_t> x(static_cast<size_t>(rows * cpu::kInt8RowStride));
      std::vector<uint8_t> panel(static_cast<size_t>(steps * kColumns * 4));
      for (auto& value : x) {
        value = static_cast<int8_t>(is_extreme ? 127 : static_cast<int32_t>(random() % 255) - 127);
      }
      for (auto& value : panel) {
        value = static_cast<uint8_t>(is_extreme ? (trial % 2 == 0 ? 255 : 0) : random());
      }
      std::vector<float> scales(static_cast<size_t>(rows));
      std::vector<int32_t> starts(static_cast<size_t>(rows));
      std::array<float, 2 * kColumns> columns = {};
      std::vector<float> out(static_cast<size_t>(rows * kColumns));
      for (float& value : scales) {
        value = normal(random);
      }
      for (float& value : columns) {
        value = normal(random);
      }
      for (float& value : out) {
        value = normal(random);
      }
      const bool is_last = trial % 2 == 0;
      const bool is_first = trial % 7 == 0;
      // The last block goes to rows of a longer result, whose other columns stay.
      constexpr int32_t kStride = kColumns + 5;
      std::vector<float> result(static_cast<size_t>(rows * kStride), -3.0F);
      std::vector<float> want_result = result;
      std::vector<float> want = out;
      for (int32_t row = 0; row < rows; ++row) {
        for (int32_t k = 0; k < depth; ++k) {
          starts[static_cast<size_t>(row)] -=
              128 * x[static_cast<size_t>(row * cpu::kInt8RowStride + k)];
        }
        for (int32_t c = 0; c < kColumns; ++c) {
          int32_t product = 0;
          for (int32_t k = 0; k < depth; ++k) {
            const size_t at = static_cast<size_t>((k / 4 * kColumns + c) * 4 + k % 4);
            product += x[static_cast<size_t>(row * cpu::kInt8RowStride + k)] * (panel[at] - 128);
          }
          float& value = want[static_cast<size_t>(row * kColumns + c)];
          value = std::fma(scales[static_cast<size_t>(row)], static_cast<float>(product),
                           is_first ? 0.0F : value);
          if (is_last) {
            want_result[static_cast<size_t>(row * kStride + c)] = std::fma(
                value, columns[static_cast<size_t>(c)], columns[static_cast<size_t>(kColumns + c)]);
          }
        }
      }
      const std::vector<char> copy = copy_of(x, kernels.x_bytes);
      cpu::Int8TileArgs args;
      args.x = copy.data();
      args.row_starts = starts.data();
      args.x_scale = scales.data();
      args.panel = panel.data();
      args.column_scale = is_last ? columns.data() : nullptr;
      args.bias = columns.data() + kColumns;
      args.out = out.data();
      args.result = result.data();
      args.result_stride = kStride;
      args.rows = rows;
      args.steps = steps;
      args.accumulate = !is_first;
      kernels.tile(args);
      ASSERT_EQ(out, want) << rows << " rows, depth " << depth;
      ASSERT_EQ(result, want_result) << rows << " rows, depth " << depth;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Int8Tiles,
                         testing::Values("base", "dot", "v3", "v3n", "v4", "v4n"),
                         [](const auto& variant) { return std::string(variant.param); });

}  // namespace
}  // namespace diffulex::test
