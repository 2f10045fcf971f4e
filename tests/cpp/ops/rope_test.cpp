// SPDX-License-Identifier: Apache-2.0
#include "diffulex/ops/rope.h"

#include <gtest/gtest.h>

#include "ops/test_tensor.h"

namespace diffulex::test {
namespace {

constexpr int64_t kMaxPositions = 50;

TestTensor make_angles(std::mt19937_64* random, int64_t rotary_dim) {
  TestTensor cache(DType::kF32, {kMaxPositions, rotary_dim});
  for (int64_t position = 0; position < kMaxPositions; ++position) {
    for (int64_t i = 0; i < rotary_dim / 2; ++i) {
      const double angle = static_cast<double>(uniform(random, 0, 6283)) / 1000.0;
      cache.set({position, i}, std::cos(angle));
      cache.set({position, i + rotary_dim / 2}, std::sin(angle));
    }
  }
  return cache;
}

std::vector<double> rotated(std::vector<double> x, const TestTensor& cache, int64_t position,
                            int64_t rotary_dim, bool neox) {
  const std::vector<double> before = x;
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const auto a = static_cast<size_t>(neox ? i : 2 * i);
    const auto b = static_cast<size_t>(neox ? i + half : 2 * i + 1);
    const double cosine = cache.get({position, i});
    const double sine = cache.get({position, i + half});
    x[a] = before[a] * cosine - before[b] * sine;
    x[b] = before[b] * cosine + before[a] * sine;
  }
  return x;
}

std::vector<double> normed(std::vector<double> x, const TestTensor* weight, double offset) {
  double square = 0.0;
  for (const double value : x) {
    square += value * value;
  }
  const double factor =
      1.0 / std::sqrt(square / static_cast<double>(x.size()) + static_cast<double>(1e-6F));
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = weight == nullptr ? 1.0 : weight->get({static_cast<int64_t>(i)}) + offset;
    x[i] *= factor * w;
  }
  return x;
}

void expect_vector(const TestTensor& tensor, int64_t start, DType dtype,
                   const std::vector<double>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_LE(std::abs(tensor.get_offset(start + static_cast<int64_t>(i)) - want[i]),
              rounding_error(dtype, want[i]) + 3e-6);
  }
}

std::vector<double> read(const TestTensor& tensor, int64_t start, int64_t count) {
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(tensor.get_offset(start + i));
  }
  return values;
}

TEST(RotaryEmbedding, MatchesTheReferenceInBothPairings) {
  std::mt19937_64 random(31);
  for (int64_t trial = 0; trial < 80; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType dtype = static_cast<DType>(trial % 3);
    const bool neox = trial % 2 == 0;
    const int64_t dim = pick(&random, {8, 16, 20, 64, 128});
    const int64_t rotary_dim = uniform(&random, 0, 1) == 0 ? dim : dim / 2 / 2 * 2;
    const int64_t rows = uniform(&random, 1, 6);
    const TestTensor angles = make_angles(&random, rotary_dim);
    TestTensor angles_arg = angles;
    TestTensor q(dtype, {rows, 3 * dim}, {rows, 3 * dim + 5});
    TestTensor k(dtype, {rows, 2, dim}, {rows, 3, dim + 1});
    q.fill_normal(&random);
    k.fill_normal(&random);
    const TestTensor q_before = q;
    const TestTensor k_before = k;
    std::vector<int64_t> positions;
    for (int64_t row = 0; row < rows; ++row) {
      positions.push_back(uniform(&random, 0, kMaxPositions - 1));
    }
    RotaryParams params;
    params.positions = ref_of(positions);
    params.q = q.ref();
    params.k = k.ref();
    params.cos_sin_cache = angles_arg.ref();
    params.head_dim = static_cast<int32_t>(dim);
    params.neox = neox;
    const Status status = rotary_embedding(params, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = positions[static_cast<size_t>(row)];
      for (int64_t head = 0; head < 3; ++head) {
        const int64_t at = q.offset({row, head * dim});
        expect_vector(q, at, dtype,
                      rotated(read(q_before, at, dim), angles, position, rotary_dim, neox));
      }
      for (int64_t head = 0; head < 2; ++head) {
        const int64_t at = k.offset({row, head, 0});
        expect_vector(k, at, dtype,
                      rotated(read(k_before, at, dim), angles, position, rotary_dim, neox));
      }
    }
  }
}

TEST(QkNormRope, MatchesTheReferenceAndStoresWhatItWrote) {
  std::mt19937_64 random(32);
  for (int64_t trial = 0; trial < 120; ++trial) {
    SCOPED_TRACE(testing::Message() << "trial " << trial);
    const DType dtype = static_cast<DType>(trial % 3);
    const int64_t dim = pick(&random, {16, 32, 40, 64});
    const int64_t rotary_dim = uniform(&random, 0, 1) == 0 ? dim : 8;
    const int64_t hq = 4;
    const int64_t hkv = 2;
    const int64_t rows = 5;
    const bool raw_k = uniform(&random, 0, 2) == 0;
    const bool norm_v = uniform(&random, 0, 1) == 0;
    const bool with_q = uniform(&random, 0, 3) != 0;
    const bool with_k = uniform(&random, 0, 3) != 0;
    const double offset = uniform(&random, 0, 1) == 0 ? 1.0 : 0.0;
    const int64_t heads = hq + hkv * (raw_k ? 1 : 2);
    TestTensor qkv(dtype, {rows, heads * dim}, {rows, heads * dim + 4});
    qkv.fill_normal(&random, 2.0);
    const TestTensor before = qkv;
    TestTensor q_weight(dtype, {dim});
    TestTensor k_weight(DType::kF32, {dim});
    q_weight.fill_normal(&random);
    k_weight.fill_normal(&random);
    const TestTensor angles = make_angles(&random, rotary_dim);
    TestTensor angles_arg = angles;
    TestTensor v_out(dtype, {rows, hkv, dim}, {rows, hkv + 1, dim + trial % 2});
    v_out.fill(kNaN);
    std::vector<int32_t> positions = {3, 0, 49, 3, 17};
    std::vector<int32_t> slots = {5, -1, 0, 9, -1};
    TestTensor k_cache(dtype, {3, 4, hkv, dim});
    TestTensor v_cache(dtype, {3, 4, hkv, dim});
    k_cache.fill(kNaN);
    v_cache.fill(kNaN);
    QkNormRopeParams params;
    params.qkv = qkv.ref();
    params.positions = ref_of(positions);
    params.cos_sin_cache = angles_arg.ref();
    if (with_q) {
      params.q_weight = q_weight.ref();
    }
    if (with_k) {
      params.k_weight = k_weight.ref();
    }
    if (raw_k) {
      params.v_out = v_out.ref();
    }
    params.num_q_heads = static_cast<int32_t>(hq);
    params.num_kv_heads = static_cast<int32_t>(hkv);
    params.head_dim = static_cast<int32_t>(dim);
    params.weight_offset = static_cast<float>(offset);
    params.norm_v = norm_v;
    params.v_from_raw_k = raw_k;
    params.neox = trial % 4 != 0;
    const bool stores = trial % 2 == 0;
    if (stores) {
      params.k_cache = k_cache.ref();
      params.v_cache = v_cache.ref();
      params.slot_mapping = ref_of(slots);
    }
    const Status status =
        stores ? qk_norm_rope_store(params, ExecContext{}) : qk_norm_rope(params, ExecContext{});
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = positions[static_cast<size_t>(row)];
      const int64_t slot = slots[static_cast<size_t>(row)];
      for (int64_t head = 0; head < hq + hkv; ++head) {
        const int64_t at = qkv.offset({row, head * dim});
        const bool is_q = head < hq;
        std::vector<double> want = read(before, at, dim);
        if (is_q ? with_q : with_k) {
          want = normed(want, is_q ? &q_weight : &k_weight, offset);
        }
        expect_vector(qkv, at, dtype, rotated(want, angles, position, rotary_dim, params.neox));
      }
      for (int64_t head = 0; head < hkv; ++head) {
        const int64_t k_at = qkv.offset({row, (hq + head) * dim});
        const int64_t v_at =
            raw_k ? v_out.offset({row, head, 0}) : qkv.offset({row, (hq + hkv + head) * dim});
        const TestTensor& v = raw_k ? v_out : qkv;
        std::vector<double> want = read(before, raw_k ? k_at : v_at, dim);
        if (raw_k || norm_v) {
          want = normed(want, nullptr, 0.0);
        }
        expect_vector(v, v_at, dtype, want);
        for (int64_t d = 0; stores && slot >= 0 && d < dim; ++d) {
          ASSERT_EQ(k_cache.get({slot / 4, slot % 4, head, d}), qkv.get_offset(k_at + d));
          ASSERT_EQ(v_cache.get({slot / 4, slot % 4, head, d}), v.get_offset(v_at + d));
        }
      }
    }
    for (int64_t slot = 0; stores && slot < 12; ++slot) {
      const bool used = slot == 5 || slot == 0 || slot == 9;
      ASSERT_EQ(std::isnan(k_cache.get({slot / 4, slot % 4, 0, 0})), !used);
      ASSERT_EQ(std::isnan(v_cache.get({slot / 4, slot % 4, hkv - 1, dim - 1})), !used);
    }
  }
}

TEST(QkNormRope, DataViolationsAreReportedBeforeAnyWrite) {
  std::mt19937_64 random(33);
  TestTensor qkv(DType::kF32, {2, 3 * 8});
  qkv.fill_normal(&random);
  const std::vector<uint8_t> before = qkv.bytes();
  TestTensor angles = make_angles(&random, 8);
  TestTensor cache(DType::kF32, {1, 4, 1, 8});
  std::vector<int32_t> positions = {0, 50};
  std::vector<int32_t> slots = {0, 4};
  QkNormRopeParams params;
  params.qkv = qkv.ref();
  params.positions = ref_of(positions);
  params.cos_sin_cache = angles.ref();
  params.num_q_heads = 1;
  params.num_kv_heads = 1;
  params.head_dim = 8;
  params.k_cache = cache.ref();
  params.v_cache = cache.ref();
  params.slot_mapping = ref_of(slots);
  Status status = qk_norm_rope(params, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::qk_norm_rope: positions[1]: expected a position in [0, 50), got 50");
  positions[1] = -1;
  EXPECT_EQ(qk_norm_rope_store(params, ExecContext{}).message(),
            "diffulex::qk_norm_rope_store: positions[1]: expected a position in [0, 50), got -1");
  positions[1] = 1;
  status = qk_norm_rope_store(params, ExecContext{});
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(status.message(),
            "diffulex::qk_norm_rope_store: slot_mapping[1]: expected a slot below 4, got 4");
  EXPECT_EQ(qkv.bytes(), before);
}

}  // namespace
}  // namespace diffulex::test
