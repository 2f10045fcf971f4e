// SPDX-License-Identifier: Apache-2.0

// Every instruction-set variant this machine can run against scalar references.

#include "ops/shared/cpu_isa/kernel_table.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "ops/quant/codec.h"
#include "ops/shared/half.h"
#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

using cpu::KernelTable;

/// Value of a 16-bit float pattern by its definition.
double decode(uint16_t bits, int32_t exponent_bits, int32_t mantissa_bits) {
  const int32_t bias = (1 << (exponent_bits - 1)) - 1;
  const int32_t exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int32_t mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? kNaN : sign * kInf;
  }
  const double fraction = static_cast<double>(mantissa) / (1 << mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

class KernelTableTest : public testing::TestWithParam<int32_t> {
 protected:
  [[nodiscard]] static const KernelTable& table() { return cpu::kernel_table_at(GetParam()); }
};

TEST_P(KernelTableTest, WidensEveryHalf) {
  std::vector<uint16_t> halves(65536);
  std::vector<float> floats(65536);
  for (size_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    table().load(cpu::GatherArgs{halves.data(), dtype, 65536, 65536, 65536}, floats.data());
    for (size_t i = 0; i < halves.size(); ++i) {
      const double want =
          dtype == DType::kBF16 ? decode(halves[i], 8, 7) : decode(halves[i], 5, 10);
      const float scalar =
          dtype == DType::kBF16 ? bf16_to_float(halves[i]) : f16_to_float(halves[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(floats[i]) && std::isnan(scalar));
      } else {
        ASSERT_EQ(static_cast<double>(floats[i]), want) << i;
        ASSERT_EQ(static_cast<double>(scalar), want) << i;
      }
    }
  }
}

TEST_P(KernelTableTest, NarrowsToTheNearestEven) {
  std::mt19937_64 random(1);
  std::vector<float> floats;
  for (uint32_t i = 0; i < 60000; ++i) {
    floats.push_back(bits_float(static_cast<uint32_t>(random())));
  }
  // Values halfway between neighbours, and just beside them, for both formats.
  for (uint32_t i = 0; i < 65536; i += 3) {
    for (const uint32_t low : {0x7FFFU, 0x8000U, 0x8001U}) {
      floats.push_back(bits_float(i << 16 | low));
    }
    const float here = f16_to_float(static_cast<uint16_t>(i));
    const float next = f16_to_float(static_cast<uint16_t>(i + 1));
    floats.push_back(here + (next - here) / 2.0F);
  }
  for (const float special : {65519.99F, 65520.0F, 65504.0F, 1e-8F, 2.98e-8F, 6e-8F, -65520.0F}) {
    floats.push_back(special);
  }
  std::vector<uint16_t> halves(floats.size());
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const bool is_bf16 = dtype == DType::kBF16;
    table().store(floats.data(), dtype, halves.data(), static_cast<int64_t>(floats.size()));
    const auto value = [&](int32_t bits) {
      return is_bf16 ? decode(static_cast<uint16_t>(bits), 8, 7)
                     : decode(static_cast<uint16_t>(bits), 5, 10);
    };
    for (size_t i = 0; i < floats.size(); ++i) {
      const double x = floats[i];
      const uint16_t got = halves[i];
      const uint16_t scalar = is_bf16 ? float_to_bf16(floats[i]) : float_to_f16(floats[i]);
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(value(got)) && std::isnan(value(scalar)));
        continue;
      }
      ASSERT_EQ(got, scalar) << x;
      ASSERT_EQ(std::signbit(value(got)), std::signbit(x));
      const int32_t infinity = is_bf16 ? 0x7F80 : 0x7C00;
      const int32_t magnitude = got & 0x7FFF;
      // Neighbours of the result; past the largest finite value the next step continues evenly.
      const double largest = value(infinity - 1);
      const double step = largest - value(infinity - 2);
      const auto position = [&](int32_t bits) {
        return bits >= infinity ? largest + step : value(bits);
      };
      const double low =
          magnitude == 0 ? 0.0 : (position(magnitude - 1) + position(magnitude)) / 2.0;
      const double high =
          magnitude == infinity ? kInf : (position(magnitude) + position(magnitude + 1)) / 2.0;
      const double absolute = std::abs(x);
      ASSERT_GE(absolute, low);
      ASSERT_LE(absolute, high);
      if ((absolute == low && magnitude != 0) || absolute == high) {
        ASSERT_EQ(magnitude % 2, 0) << "tie not to even: " << x;
      }
    }
  }
}

TEST_P(KernelTableTest, ExponentialWithinTwoUlp) {
  double worst = 0.0;
  for (int32_t i = 0; i <= 400000; ++i) {
    const float x = -87.0F + static_cast<float>(i) * (87.0F / 400000.0F);
    float value = x;
    table().exp_shifted(&value, 1.0F, 0.0F, 1);
    const double want = std::exp(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(want) - 23);
    worst = std::max(worst, std::abs(value - want) / ulp);
  }
  EXPECT_LE(worst, 2.0);
  float edges[] = {-std::numeric_limits<float>::infinity(), -1000.0F, -120.0F, 0.0F};
  table().exp_shifted(edges, 1.0F, 0.0F, 4);
  EXPECT_EQ(edges[0], 0.0F);
  EXPECT_EQ(edges[1], 0.0F);
  EXPECT_EQ(edges[2], 0.0F);
  EXPECT_EQ(edges[3], 1.0F);
}

TEST_P(KernelTableTest, WidensEveryCode) {
  // Every code at every place of a vector and of what follows the last one, NaN there or not.
  for (int32_t first = 0; first < 256; ++first) {
    for (const int32_t count : {1, 15, 47, 129}) {
      std::vector<uint8_t> codes(static_cast<size_t>(count));
      for (int32_t i = 0; i < count; ++i) {
        codes[static_cast<size_t>(i)] = static_cast<uint8_t>(first + i);
      }
      std::vector<float> values(codes.size() + 1, -3.0F);
      table().widen_e4m3(codes.data(), values.data(), count);
      EXPECT_EQ(values.back(), -3.0F);
      for (size_t i = 0; i < codes.size(); ++i) {
        const float want = e4m3_to_float(codes[i]);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(values[i])
                                     : float_bits(values[i]) == float_bits(want))
            << int{codes[i]};
      }
    }
  }
}

/// All bit patterns, those near the range of the formats, and what lies at and beside their edges.
std::vector<float> values_to_code() {
  std::vector<float> values;
  for (const float edge :
       {0.0F, 0x1p-10F, 0x1p-9F, 0x1p-6F, 0.5F, 1.5F, 2.5F, 126.5F, 127.0F, 240.0F, 447.9F, 448.0F,
        464.0F, 480.0F, 1e-40F, 3e38F, bits_float(0x7F800000U), bits_float(0x7F800001U),
        bits_float(0x7FC00000U)}) {
    for (const int32_t step : {-1, 0, 1}) {
      const float beside = bits_float(float_bits(edge) + static_cast<uint32_t>(step));
      values.insert(values.end(), {beside, bits_float(float_bits(beside) ^ 0x80000000U)});
    }
  }
  std::mt19937 random(9);
  while (values.size() < (1U << 20) + 77) {
    const auto bits = static_cast<uint32_t>(random());
    values.insert(values.end(), {bits_float(bits), bits_float((bits & 0x87FFFFFFU) | 0x38000000U)});
  }
  return values;
}

TEST_P(KernelTableTest, CodesHaveTheBitsOfTheScalarCodec) {
  const std::vector<float> values = values_to_code();
  const auto count = static_cast<int64_t>(values.size());
  std::vector<uint8_t> codes(values.size() + 1, 0xA5);
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    for (const float factor : {1.0F, 0.7F, 1e-30F, 1e30F}) {
      table().to_codes(cpu::CodeArgs{values.data(), count, factor, dtype}, codes.data());
      ASSERT_EQ(codes.back(), 0xA5);
      for (size_t i = 0; i < values.size(); ++i) {
        const float scaled = values[i] * factor;
        const auto want = dtype == DType::kI8 ? static_cast<uint8_t>(float_to_int8(scaled))
                                              : float_to_e4m3(scaled);
        ASSERT_EQ(int{codes[i]}, int{want}) << values[i] << " times " << factor;
      }
    }
  }
}

TEST_P(KernelTableTest, TheLargestMagnitudeIsNoNaN) {
  const std::vector<float> values = values_to_code();
  EXPECT_EQ(table().largest_of(values.data(), 0), 0.0F);
  for (size_t start = 0; start < 3000; ++start) {
    const size_t count = 1 + start % 67;
    uint32_t want = 0;
    for (size_t i = start; i < start + count; ++i) {
      const uint32_t magnitude = float_bits(values[i]) & 0x7FFFFFFFU;
      want = magnitude > 0x7F800000U ? want : std::max(want, magnitude);
    }
    const float largest = table().largest_of(&values[start], static_cast<int64_t>(count));
    ASSERT_EQ(float_bits(largest), want) << start;
  }
}

#ifdef __SSE__
TEST_P(KernelTableTest, WidensEveryCodeWhereSubnormalsAreFlushed) {
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040U);
  std::array<uint8_t, 127> codes = {};
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  std::array<float, 127> values = {};
  table().widen_e4m3(codes.data(), values.data(), 127);
  _mm_setcsr(before);
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(values[i], e4m3_to_float(codes[i])) << i;
  }
}
#endif

TEST_P(KernelTableTest, WidensNibblesToBfloat16) {
  std::mt19937 random(2);
  constexpr size_t kColumns = kLinearPanelColumns;
  constexpr float kLarge = std::numeric_limits<float>::infinity();
  const std::array<float, 8> odd = {
      1e-40F, 3e38F, -2e-38F, kLarge, -kLarge, bits_float(0x7FC00000U), 0.0F, -1.0F};
  for (int32_t trial = 0; trial < 400; ++trial) {
    const auto first = static_cast<size_t>(trial % 5);
    const size_t last = first + 1 + static_cast<size_t>(trial % 7);
    std::vector<uint8_t> codes((last + 1) / 2 * kColumns);
    std::vector<float> scale(kColumns);
    std::vector<float> zero(kColumns, 8.0F);
    std::vector<float> out((last - first) * kColumns);
    for (auto& code : codes) {
      code = static_cast<uint8_t>(random());
    }
    for (size_t c = 0; c < kColumns; ++c) {
      // bfloat16, whose products have ties, or float32.
      const auto bits = static_cast<uint32_t>(random());
      scale[c] = bits_float((bits & (trial % 2 == 0 ? 0x83FF0000U : 0x83FFFFFFU)) | 0x3C000000U);
      scale[c] = trial % 8 == 0 && c < odd.size() ? odd[c] : scale[c];
      zero[c] = trial % 3 == 0 ? static_cast<float>(random() % 256) : zero[c];
    }
    table().widen_nibbles(cpu::NibbleArgs{codes.data(), scale.data(), zero.data(), out.data(),
                                          static_cast<int32_t>(first), static_cast<int32_t>(last)});
    for (size_t k = first; k < last; ++k) {
      for (size_t c = 0; c < kColumns; ++c) {
        const uint8_t byte = codes[k / 2 * kColumns + c];
        const auto nibble = static_cast<float>(k % 2 == 0 ? byte & 15 : byte >> 4);
        const float want = bf16_to_float(float_to_bf16((nibble - zero[c]) * scale[c]));
        const float found = out[(k - first) * kColumns + c];
        ASSERT_TRUE(std::isnan(want) ? std::isnan(found) : float_bits(found) == float_bits(want))
            << found << ", expected " << want << ", scale " << scale[c];
      }
    }
  }
}

TEST_P(KernelTableTest, PromotesByOneRounding) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  constexpr size_t kColumns = kLinearPanelColumns;
  constexpr size_t kRows = 3;
  std::array<float, kRows> row_scale = {};
  std::array<float, kColumns> column_scale = {};
  std::array<float, kColumns> bias = {};
  std::array<float, kRows * kColumns> products = {};
  std::array<float, kRows * kColumns> sums = {};
  for (int32_t trial = 0; trial < 40; ++trial) {
    const auto fill = [&](auto& values) {
      std::generate(values.begin(), values.end(), [&] { return normal(random); });
    };
    fill(row_scale);
    fill(column_scale);
    fill(bias);
    fill(products);
    fill(sums);
    cpu::PromoteArgs args;
    args.products = products.data();
    args.row_scale = row_scale.data();
    args.column_scale = trial % 2 == 0 ? column_scale.data() : nullptr;
    args.bias = bias.data();
    args.sums = sums.data();
    args.factor = trial % 3 == 0 ? 1.0F : normal(random);
    args.rows = kRows;
    args.accumulate = trial % 4 < 2;
    auto want = sums;
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t c = i % kColumns;
      want[i] = std::fma(row_scale[i / kColumns] * args.factor, products[i],
                         args.accumulate ? sums[i] : 0.0F);
      want[i] = trial % 2 == 0 ? std::fma(want[i], column_scale[c], bias[c]) : want[i];
    }
    table().promote(args);
    ASSERT_EQ(sums, want);
  }
}

TEST_P(KernelTableTest, PackTransposes) {
  for (const int64_t dim : {16, 48, 128}) {
    for (int64_t count = 1; count <= cpu::kKeyBlock; count += 7) {
      std::vector<float> rows(static_cast<size_t>(cpu::kKeyBlock * dim));
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = static_cast<float>(i);
      }
      std::vector<float> packed(rows.size(), -1.0F);
      table().pack_keys(rows.data(), count, dim, packed.data());
      for (int64_t key = 0; key < count; ++key) {
        for (int64_t d = 0; d < dim; ++d) {
          ASSERT_EQ(packed[static_cast<size_t>(d * cpu::kKeyBlock + key)],
                    rows[static_cast<size_t>(key * dim + d)]);
        }
      }
    }
  }
}

/// One key range of an attention row with every key and value outside it NaN.
TEST_P(KernelTableTest, AttendIgnoresKeysOutsideTheRange) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  for (int64_t trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const int32_t dim = static_cast<int32_t>(pick(&random, {8, 16, 40, 64}));
    const int32_t padded = (dim + 15) / 16 * 16;
    const auto rows = static_cast<int32_t>(uniform(&random, 1, 21));
    const auto begin = static_cast<int32_t>(uniform(&random, 0, 63));
    const auto end = static_cast<int32_t>(uniform(&random, begin + 1, 64));
    const float nan = std::nanf("");
    const auto size = static_cast<size_t>(64 * padded);
    std::vector<float> keys(size, nan), values(size, nan), key_rows(size, nan);
    std::vector<float> q(static_cast<size_t>(rows * padded), 0.0F), out(q.size(), 0.0F);
    std::vector<float> scores(static_cast<size_t>(rows * 64), nan);
    std::vector<float> row_max(static_cast<size_t>(rows), -std::numeric_limits<float>::infinity());
    std::vector<float> row_sum(static_cast<size_t>(rows), 0.0F);
    for (int32_t key = begin; key < end; ++key) {
      for (int32_t d = 0; d < padded; ++d) {
        const auto at = static_cast<size_t>(key * padded + d);
        key_rows[at] = d < dim ? normal(random) : 0.0F;
        values[at] = d < dim ? normal(random) : 0.0F;
      }
    }
    for (int32_t row = 0; row < rows; ++row) {
      for (int32_t d = 0; d < dim; ++d) {
        q[static_cast<size_t>(row * padded + d)] = normal(random);
      }
    }
    table().pack_keys(key_rows.data(), 64, padded, keys.data());
    // Asked for, not read: there need not be memory.
    cpu::LinesAhead ahead;
    ahead.piece_bytes = 512;
    ahead.count = 2;
    table().attend(cpu::AttendArgs{q.data(), keys.data(), values.data(), scores.data(), out.data(),
                                   row_max.data(), row_sum.data(), rows, begin, end, dim, padded,
                                   trial % 2 == 0 ? 0.0F : 5.0F,
                                   trial % 3 == 0 ? nullptr : &ahead});
    ASSERT_EQ(ahead.next, trial % 3 == 0 ? 0 : 2);
    for (int32_t row = 0; row < rows; ++row) {
      double sum = 0.0;
      std::vector<double> want(static_cast<size_t>(dim), 0.0);
      for (int32_t key = begin; key < end; ++key) {
        double s = 0.0;
        for (int32_t d = 0; d < dim; ++d) {
          s += static_cast<double>(q[static_cast<size_t>(row * padded + d)]) *
               static_cast<double>(key_rows[static_cast<size_t>(key * padded + d)]);
        }
        s = trial % 2 == 0 ? s : 5.0 * std::tanh(s / 5.0);
        const double weight = std::exp(s);
        sum += weight;
        for (int32_t d = 0; d < dim; ++d) {
          want[static_cast<size_t>(d)] +=
              weight * static_cast<double>(values[static_cast<size_t>(key * padded + d)]);
        }
      }
      const auto at = static_cast<size_t>(row);
      ASSERT_NEAR(row_max[at] + std::log(row_sum[at]), std::log(sum), 2e-5);
      for (int32_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(out[static_cast<size_t>(row * padded + d)] / row_sum[at],
                    want[static_cast<size_t>(d)] / sum, 2e-5);
      }
    }
  }
}

/// The statistics of one chunk agree between this variant and the plain one.
TEST_P(KernelTableTest, ChunkStatisticsAgreeWithTheBaseline) {
  std::mt19937_64 random(6);
  for (int64_t trial = 0; trial < 60; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const auto dtype = static_cast<DType>(trial % 3);
    const int64_t n = uniform(&random, 1, 2048);
    TestTensor logits(dtype, {n});
    logits.fill_normal(&random, 3.0);
    logits.set({uniform(&random, 0, n - 1)}, kNaN);
    const int32_t excluded[] = {static_cast<int32_t>(uniform(&random, 0, n - 1))};
    cpu::StatsRecord records[2];
    for (int32_t variant = 0; variant < 2; ++variant) {
      std::vector<float> scratch(4096);
      cpu::StatsChunkArgs args;
      const TensorRef ref = logits.ref();
      args.logits = ref.data;
      args.key = scratch.data();
      args.z = scratch.data() + 2048;
      args.excluded = excluded;
      args.num_excluded = 1;
      args.n = static_cast<int32_t>(n);
      args.candidate_end = args.n;
      args.dtype = dtype;
      args.softcap = trial % 4 == 0 ? 30.0F : 0.0F;
      args.inv_temperature = trial % 5 == 0 ? 1.7F : 0.0F;
      (variant == 0 ? cpu::kernel_table_at(0) : table()).stats_chunk(args, &records[variant]);
    }
    EXPECT_EQ(records[0].best_column, records[1].best_column);
    EXPECT_EQ(records[0].second_column, records[1].second_column);
    EXPECT_EQ(records[0].bad_count, records[1].bad_count);
    EXPECT_NEAR(records[0].sum, records[1].sum, 1e-5F * records[0].sum);
    EXPECT_NEAR(records[0].candidate_sum, records[1].candidate_sum,
                1e-5F * records[0].candidate_sum);
    EXPECT_NEAR(records[0].weighted, records[1].weighted,
                1e-5F * std::abs(records[0].weighted) + 1e-5F);
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, KernelTableTest, testing::Range(0, cpu::num_kernel_tables()),
                         [](const testing::TestParamInfo<int32_t>& variant) {
                           return std::string(cpu::kernel_table_at(variant.param).name);
                         });

TEST(KernelTable, TheBestVariantIsUsed) {
  EXPECT_STREQ(cpu::kernel_table().name, cpu::kernel_table_at(cpu::num_kernel_tables() - 1).name);
}

}  // namespace
}  // namespace diffulex::test
