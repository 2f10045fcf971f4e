// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/prefix_cache.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

std::vector<int32_t> iota(int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    tokens[static_cast<size_t>(i)] = first + i;
  }
  return tokens;
}

TEST(PrefixCache, HitNeedsHashParentAndTokens) {
  PrefixCache cache(8, 4, 1, 5);
  const std::vector<int32_t> tokens = {1, 2, 3, 4};
  const std::vector<int32_t> other = {1, 2, 3, 5};
  const std::vector<int32_t> page = {3};
  const uint64_t root = cache.root_hash();
  const uint64_t hash = cache.chain_hash(root, Span<const int32_t>(tokens));
  EXPECT_NE(hash, cache.chain_hash(root, Span<const int32_t>(other)));
  EXPECT_NE(hash, cache.chain_hash(root + 1, Span<const int32_t>(tokens)));
  EXPECT_NE(root, PrefixCache(8, 4, 1, 6).root_hash());
  EXPECT_TRUE(cache.insert(hash, root, tokens, page));
  EXPECT_EQ(cache.find(hash, root, tokens).size(), 1U);
  // A collision of the hash alone gives no hit.
  EXPECT_TRUE(cache.find(hash, root, other).empty());
  EXPECT_TRUE(cache.find(hash, root + 1, tokens).empty());
  EXPECT_TRUE(cache.find(hash + 1, root, tokens).empty());
  EXPECT_TRUE(cache.check_integrity().ok());
}

TEST(PrefixCache, KeepsTheFirstEntryAndErases) {
  PrefixCache cache(8, 4, 2, 0);
  const std::vector<int32_t> tokens = iota(1, 8);
  const std::vector<int32_t> first = {0, 5};
  const std::vector<int32_t> second = {1, 2};
  const uint64_t hash = cache.chain_hash(cache.root_hash(), Span<const int32_t>(tokens));
  EXPECT_TRUE(cache.insert(hash, cache.root_hash(), tokens, first));
  EXPECT_FALSE(cache.insert(hash, cache.root_hash(), tokens, second));
  EXPECT_TRUE(cache.has_page(0));
  EXPECT_TRUE(cache.has_page(5));
  EXPECT_FALSE(cache.has_page(1));
  EXPECT_EQ(cache.find(hash, cache.root_hash(), tokens)[1], 5);
  cache.erase_page(5);  // any page of a unit takes the unit out
  EXPECT_FALSE(cache.has_page(0));
  EXPECT_EQ(cache.num_units(), 0);
  EXPECT_TRUE(cache.find(hash, cache.root_hash(), tokens).empty());
  EXPECT_TRUE(cache.check_integrity().ok());
}

TEST(PrefixCache, RandomInsertionsAndErasuresMatchAMap) {
  constexpr int32_t kPages = 40;
  PrefixCache cache(kPages, 4, 1, 0);
  std::map<int32_t, std::pair<uint64_t, std::vector<int32_t>>> model;  // page -> content
  std::mt19937 rng(1);
  for (int32_t round = 0; round < 5000; ++round) {
    const auto page = static_cast<int32_t>(rng() % kPages);
    if (model.count(page) > 0) {
      cache.erase_page(page);
      model.erase(page);
    } else {
      const std::vector<int32_t> tokens = iota(static_cast<int32_t>(rng() % 60), 4);
      const std::vector<int32_t> pages = {page};
      const uint64_t hash = cache.chain_hash(cache.root_hash(), Span<const int32_t>(tokens));
      const bool is_new = std::none_of(model.begin(), model.end(), [&](const auto& entry) {
        return entry.second.second == tokens;
      });
      EXPECT_EQ(cache.insert(hash, cache.root_hash(), tokens, pages), is_new);
      if (is_new) {
        model[page] = {hash, tokens};
      }
    }
    for (const auto& [known, content] : model) {
      const Span<const int32_t> found =
          cache.find(content.first, cache.root_hash(), content.second);
      ASSERT_EQ(found.size(), 1U);
      ASSERT_EQ(found[0], known);
    }
    ASSERT_TRUE(cache.check_integrity().ok()) << cache.check_integrity().message();
  }
}

}  // namespace
}  // namespace diffulex
