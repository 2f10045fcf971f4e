// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

// A deterministic stand-in for a block-diffusion transformer with two attention layers. Every value
// is a hash, so any stale, missing or foreign key changes the tokens that come out.
//
//   layer 1 key of position p = hash(token, p)
//   layer 2 key of position p = hash(layer 1 key of p, layer 1 keys visible to p)
//   output at position p      = hash(layer 2 key of p, layer 2 keys visible to p)

namespace diffulex::test {

/// Keys of one position in both layers, as they stand in the KV cache.
struct ToyKey {
  uint64_t layer1 = 0;
  uint64_t layer2 = 0;
};

/// What an unwritten slot holds.
inline constexpr uint64_t kPoison = 0xDEADDEADDEADDEADULL;

[[nodiscard]] inline uint64_t toy_hash(uint64_t left, uint64_t right) {
  uint64_t value = left * 0x9E3779B97F4A7C15ULL + right + 0x632BE59BD9B4E019ULL;
  value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

/// One forward of consecutive rows at positions [first, first + tokens.size()) over `context`, the
/// keys of positions [0, first). `visible_len[i]` keys, counted from position 0, are visible to row
/// i. Returns the outputs; fills the keys of the rows.
inline std::vector<uint64_t> toy_forward(const std::vector<ToyKey>& context,
                                         const std::vector<int64_t>& tokens,
                                         const std::vector<int32_t>& visible_len,
                                         std::vector<ToyKey>& keys) {
  const size_t first = context.size();
  const size_t count = tokens.size();
  keys.assign(count, ToyKey{});
  std::vector<uint64_t> prefix(first + count + 1, 0);
  const auto fold = [&](auto member) {
    for (size_t k = 0; k < first + count; ++k) {
      prefix[k + 1] = toy_hash(prefix[k], k < first ? context[k].*member : keys[k - first].*member);
    }
  };
  for (size_t i = 0; i < count; ++i) {
    keys[i].layer1 = toy_hash(static_cast<uint64_t>(tokens[i]), first + i);
  }
  fold(&ToyKey::layer1);
  for (size_t i = 0; i < count; ++i) {
    keys[i].layer2 = toy_hash(keys[i].layer1, prefix[static_cast<size_t>(visible_len[i])]);
  }
  fold(&ToyKey::layer2);
  std::vector<uint64_t> outputs(count);
  for (size_t i = 0; i < count; ++i) {
    outputs[i] = toy_hash(keys[i].layer2, prefix[static_cast<size_t>(visible_len[i])]);
  }
  return outputs;
}

/// Proposed token of an output: never the mask id (0), sometimes the stop id (1). `uniform` is the
/// draw of the row; greedy rows pass 0.5.
[[nodiscard]] inline int64_t toy_token(uint64_t output, double uniform, int32_t vocab_size) {
  uint64_t bits = 0;
  std::memcpy(&bits, &uniform, sizeof(bits));
  return 1 + static_cast<int64_t>(toy_hash(output, bits) % static_cast<uint64_t>(vocab_size - 1));
}

/// Confidence of an output, in [0, 1).
[[nodiscard]] inline float toy_confidence(uint64_t output) {
  return static_cast<float>(toy_hash(output, 77) >> 44) / 1048576.0F;
}

}  // namespace diffulex::test
