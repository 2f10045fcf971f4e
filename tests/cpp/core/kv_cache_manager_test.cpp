// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/kv_cache_manager.h"

#include <vector>

#include <gtest/gtest.h>

namespace diffulex {
namespace {

EngineOptions pool_options(int32_t block_size, int32_t page_size, int32_t num_pages) {
  EngineOptions options;
  options.block_size = block_size;
  options.page_size = page_size;
  options.num_pages = num_pages;
  options.max_model_len = 256;
  options.max_num_batched_tokens = 512;
  return options;
}

std::vector<int32_t> iota(int32_t first, int32_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    tokens[static_cast<size_t>(i)] = first + i;
  }
  return tokens;
}

TEST(KVCacheManager, UnitsAreTheLeastCommonMultipleOfPageAndBlock) {
  EXPECT_EQ(KVCacheManager(pool_options(4, 4, 8)).prefix_unit_len(), 4);
  EXPECT_EQ(KVCacheManager(pool_options(4, 16, 8)).prefix_unit_len(), 16);
  EXPECT_EQ(KVCacheManager(pool_options(32, 8, 8)).prefix_unit_len(), 32);
}

TEST(KVCacheManager, GrowsAllOrNothing) {
  KVCacheManager manager(pool_options(4, 4, 3));
  PageTable table;
  EXPECT_TRUE(manager.try_grow(table, 5));
  EXPECT_EQ(table.pages, (std::vector<int32_t>{0, 1}));
  EXPECT_TRUE(manager.try_grow(table, 8));
  EXPECT_EQ(manager.num_free_pages(), 1);
  EXPECT_FALSE(manager.try_grow(table, 17));
  EXPECT_EQ(table.pages.size(), 2U);
  EXPECT_EQ(manager.num_free_pages(), 1);
  EXPECT_EQ(manager.slot(table, 6), 6);
  const uint64_t epoch = table.epoch;
  manager.release(table);
  EXPECT_NE(table.epoch, epoch);
  EXPECT_EQ(manager.num_free_pages(), 3);
  EXPECT_TRUE(manager.try_grow(table, 12));
  EXPECT_EQ(table.pages, (std::vector<int32_t>{2, 1, 0}));  // freed in reverse order
}

TEST(KVCacheManager, WritesSlotsAcrossPages) {
  KVCacheManager manager(pool_options(4, 4, 4));
  PageTable other;
  PageTable table;
  EXPECT_TRUE(manager.try_grow(table, 4));
  EXPECT_TRUE(manager.try_grow(other, 4));
  EXPECT_TRUE(manager.try_grow(table, 12));
  std::vector<int32_t> slots(8, -7);
  manager.write_slots(table, 2, 9, slots.data());
  EXPECT_EQ(slots, (std::vector<int32_t>{2, 3, 8, 9, 10, 11, 12, -7}));
}

TEST(KVCacheManager, RegistersWholeUnitsAndSharesThem) {
  KVCacheManager manager(pool_options(4, 8, 6));
  const std::vector<int32_t> tokens = iota(1, 24);
  PageTable owner;
  EXPECT_TRUE(manager.try_grow(owner, 20));
  manager.register_prefix(owner, tokens, 4);  // half a page
  EXPECT_EQ(manager.num_cached_units(), 0);
  EXPECT_TRUE(manager.is_writable(owner, 7));
  manager.register_prefix(owner, tokens, 20);
  EXPECT_EQ(manager.num_cached_units(), 2);
  EXPECT_FALSE(manager.is_writable(owner, 7));  // shareable, hence immutable
  EXPECT_TRUE(manager.is_writable(owner, 16));
  EXPECT_FALSE(manager.is_writable(owner, 24));  // no page there

  EXPECT_EQ(manager.lookup_prefix(tokens, 24).len, 16);
  EXPECT_EQ(manager.lookup_prefix(tokens, 15).len, 8);
  EXPECT_EQ(manager.lookup_prefix(iota(2, 24), 24).len, 0);
  PageTable sharer;
  manager.claim_prefix(sharer, tokens, 16);
  EXPECT_EQ(sharer.pages, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(manager.pool().ref_count(0), 2);
  manager.release(owner);
  EXPECT_EQ(manager.pool().ref_count(0), 1);
  EXPECT_EQ(manager.num_free_pages(), 4);
  manager.release(sharer);
  const PrefixHit hit = manager.lookup_prefix(tokens, 24);
  EXPECT_EQ(hit.len, 16);
  EXPECT_EQ(hit.num_pages, 2);
  EXPECT_EQ(hit.num_free_pages, 2);
}

TEST(KVCacheManager, EvictsTheDeepestPageOfAChainFirst) {
  KVCacheManager manager(pool_options(4, 4, 4));
  const std::vector<int32_t> tokens = iota(1, 16);
  PageTable table;
  EXPECT_TRUE(manager.try_grow(table, 16));
  manager.register_prefix(table, tokens, 16);
  manager.release(table);
  EXPECT_EQ(manager.lookup_prefix(tokens, 16).len, 16);
  PageTable other;
  EXPECT_TRUE(manager.try_grow(other, 8));
  EXPECT_EQ(manager.lookup_prefix(tokens, 16).len, 8);
  EXPECT_TRUE(manager.check_integrity().ok());
}

TEST(KVCacheManager, DisabledPrefixCacheNeverHits) {
  EngineOptions options = pool_options(4, 4, 4);
  options.enable_prefix_caching = false;
  KVCacheManager manager(options);
  const std::vector<int32_t> tokens = iota(1, 8);
  PageTable table;
  EXPECT_TRUE(manager.try_grow(table, 8));
  manager.register_prefix(table, tokens, 8);
  EXPECT_EQ(manager.lookup_prefix(tokens, 8).len, 0);
  EXPECT_EQ(manager.num_cached_units(), 0);
}

TEST(KVCacheManager, InvalidOptionsAndMisuseAreInternalErrors) {
  EXPECT_THROW(KVCacheManager(pool_options(4, 4, 0)), InternalError);
  KVCacheManager manager(pool_options(4, 4, 4));
  PageTable table;
  EXPECT_THROW(manager.claim_prefix(table, iota(1, 8), 4), InternalError);  // not cached
  EXPECT_TRUE(manager.try_grow(table, 4));
  EXPECT_THROW(manager.claim_prefix(table, iota(1, 8), 0), InternalError);  // not empty
}

}  // namespace
}  // namespace diffulex
