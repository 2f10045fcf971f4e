// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/philox.h"

#include <cmath>
#include <set>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

void expect_words(const PhiloxWords& actual, const PhiloxWords& expected) {
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(actual.word[i], expected.word[i]) << "word " << i;
  }
}

// The published known-answer vectors of philox4x32, ten rounds.
TEST(Philox, KnownAnswers) {
  expect_words(philox4x32(0, PhiloxWords{{0, 0, 0, 0}}),
               PhiloxWords{{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}});
  expect_words(philox4x32(~uint64_t{0}, PhiloxWords{{~0U, ~0U, ~0U, ~0U}}),
               PhiloxWords{{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}});
  expect_words(philox4x32(0x299f31d0a4093822ULL,
                          PhiloxWords{{0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}}),
               PhiloxWords{{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}});
}

TEST(Philox, UniformUsesTheTop52BitsOfTwoWords) {
  const uint64_t bits = (uint64_t{0x6627e8d5U} << 32) | 0xe169c58dU;
  const double expected = std::ldexp(static_cast<double>(bits >> 12) + 0.5, -52);
  EXPECT_EQ(philox_uniform(0, 0, 0, RandomStream::kToken), expected);
  const PhiloxWords words = philox4x32(7, PhiloxWords{{11, 3, 2, 0}});
  const uint64_t renoise = (uint64_t{words.word[0]} << 32) | words.word[1];
  EXPECT_EQ(philox_uniform(7, 11, 3, RandomStream::kRenoise),
            std::ldexp(static_cast<double>(renoise >> 12) + 0.5, -52));
}

TEST(Philox, UniformsAreInsideTheOpenIntervalAndDistinct) {
  std::set<double> seen;
  double sum = 0.0;
  for (int32_t position = 0; position < 100; ++position) {
    for (int32_t step = 0; step < 100; ++step) {
      const double value = philox_uniform(42, position, step, RandomStream::kToken);
      EXPECT_GT(value, 0.0);
      EXPECT_LT(value, 1.0);
      sum += value;
      seen.insert(value);
    }
  }
  EXPECT_EQ(seen.size(), 10000U);
  EXPECT_NEAR(sum / 10000.0, 0.5, 0.02);
}

TEST(Philox, RequestSeedsDependOnEngineSeedAndId) {
  std::set<uint64_t> seeds;
  for (uint64_t engine_seed = 0; engine_seed < 10; ++engine_seed) {
    for (int64_t req_id = 0; req_id < 10; ++req_id) {
      seeds.insert(derive_request_seed(engine_seed, req_id));
    }
  }
  seeds.insert(derive_request_seed(0, int64_t{1} << 40));
  EXPECT_EQ(seeds.size(), 101U);
}

}  // namespace
}  // namespace diffulex
