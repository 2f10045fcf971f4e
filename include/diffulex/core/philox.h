// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/export.h"

namespace diffulex {

/// What a draw is for; separates the counters of unrelated draws.
enum class RandomStream : uint32_t {
  kToken = 0,
  kCanvasInit = 1,
  kRenoise = 2,
  kPositionDraw = 3,
};

/// Four 32-bit words of a Philox4x32 counter or result.
struct PhiloxWords {
  uint32_t word[4];
};

/// Philox4x32-10: a pure function of (key, counter). Low key word first.
DIFFULEX_HOST_DEVICE inline PhiloxWords philox4x32(uint64_t key, PhiloxWords counter) noexcept {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53U} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57U} * counter.word[2];
    counter = PhiloxWords{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                           static_cast<uint32_t>(product1),
                           static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                           static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  return counter;
}

/// Uniform in (0, 1) of a draw: key = request seed, counter = (position, block sampler step,
/// stream, 0), value (r + 0.5) / 2^52 with r the top 52 bits of the first two result words.
DIFFULEX_HOST_DEVICE inline double philox_uniform(uint64_t seed, int32_t position, int32_t step,
                                                  RandomStream stream) noexcept {
  const PhiloxWords words =
      philox4x32(seed, PhiloxWords{{static_cast<uint32_t>(position), static_cast<uint32_t>(step),
                                    static_cast<uint32_t>(stream), 0U}});
  const uint64_t bits = (uint64_t{words.word[0]} << 32) | words.word[1];
  return (static_cast<double>(bits >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

/// Seed of a sampled request that names none.
DIFFULEX_HOST_DEVICE inline uint64_t derive_request_seed(uint64_t engine_seed,
                                                         int64_t req_id) noexcept {
  const uint64_t id = static_cast<uint64_t>(req_id);
  const PhiloxWords words = philox4x32(
      engine_seed,
      PhiloxWords{{static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), 0x73656564U, 0U}});
  return (uint64_t{words.word[0]} << 32) | words.word[1];
}

}  // namespace diffulex
