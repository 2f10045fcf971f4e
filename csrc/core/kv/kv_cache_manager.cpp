// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/kv_cache_manager.h"

#include <algorithm>
#include <numeric>

namespace diffulex {
namespace {

/// Checks the options before the members are built from them.
[[nodiscard]] const EngineOptions& checked(const EngineOptions& options) {
  const Status status = options.validate();
  DIFFULEX_CHECK(status.ok(), "KVCacheManager: expected valid options, got ", status.message());
  return options;
}

/// The KV of a position depends on tokens up to the end of its block (of itself under causal
/// visibility), so whole multiples of both the page and the block are shared.
[[nodiscard]] int32_t unit_pages(const EngineOptions& options) {
  const int32_t granularity = options.has_canvas() ? 1 : options.att_block_size();
  return std::lcm(options.page_size, granularity) / options.page_size;
}

}  // namespace

KVCacheManager::KVCacheManager(const EngineOptions& options)
    : page_size_(checked(options).page_size),
      has_prefix_cache_(options.shares_prefixes()),
      pool_(options.num_pages),
      cache_(options.num_pages, options.page_size, unit_pages(options), options.cache_salt) {}

PrefixHit KVCacheManager::lookup_prefix(Span<const int32_t> tokens, int32_t limit) const {
  PrefixHit hit;
  if (!has_prefix_cache_) {
    return hit;
  }
  const int32_t unit_len = cache_.unit_len();
  uint64_t parent = cache_.root_hash();
  while (hit.len + unit_len <= limit) {
    const Span<const int32_t> unit =
        tokens.subspan(static_cast<size_t>(hit.len), static_cast<size_t>(unit_len));
    const uint64_t hash = cache_.chain_hash(parent, unit);
    const Span<const int32_t> pages = cache_.find(hash, parent, unit);
    if (pages.empty()) {
      break;
    }
    for (const int32_t page : pages) {
      hit.num_free_pages += pool_.ref_count(page) == 0 ? 1 : 0;
    }
    hit.num_pages += static_cast<int32_t>(pages.size());
    hit.len += unit_len;
    parent = hash;
  }
  return hit;
}

void KVCacheManager::claim_prefix(PageTable& table, Span<const int32_t> tokens, int32_t hit_len) {
  DIFFULEX_CHECK(table.pages.empty() && table.num_hashed_units == 0,
                 "KVCacheManager::claim_prefix: expected an empty table, got ", table.pages.size(),
                 " pages");
  const int32_t unit_len = cache_.unit_len();
  table.chain_hash = cache_.root_hash();
  for (int32_t begin = 0; begin + unit_len <= hit_len; begin += unit_len) {
    const Span<const int32_t> unit =
        tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(unit_len));
    const uint64_t hash = cache_.chain_hash(table.chain_hash, unit);
    const Span<const int32_t> pages = cache_.find(hash, table.chain_hash, unit);
    DIFFULEX_CHECK(!pages.empty(), "KVCacheManager::claim_prefix: expected a hit of ", hit_len,
                   " tokens, got ", begin);
    for (const int32_t page : pages) {
      pool_.acquire(page);
      table.pages.push_back(page);
    }
    table.chain_hash = hash;
    ++table.num_hashed_units;
  }
}

int32_t KVCacheManager::allocate_page() {
  const int32_t front = pool_.front();
  if (front >= 0) {
    cache_.erase_page(front);
  }
  return pool_.try_allocate();
}

bool KVCacheManager::try_grow(PageTable& table, int32_t len) {
  const int32_t missing = num_pages_for(len) - static_cast<int32_t>(table.pages.size());
  if (missing > pool_.num_free()) {
    return false;
  }
  for (int32_t i = 0; i < missing; ++i) {
    table.pages.push_back(allocate_page());
  }
  return true;
}

void KVCacheManager::release(PageTable& table) {
  for (auto page = table.pages.rbegin(); page != table.pages.rend(); ++page) {
    pool_.release(*page);
  }
  table.pages.clear();
  table.num_hashed_units = 0;
  table.chain_hash = 0;
  ++table.epoch;
}

void KVCacheManager::register_prefix(PageTable& table, Span<const int32_t> tokens,
                                     int32_t context_len) {
  if (!has_prefix_cache_) {
    return;
  }
  if (table.num_hashed_units == 0) {
    table.chain_hash = cache_.root_hash();
  }
  const int32_t unit_len = cache_.unit_len();
  const auto per_unit = static_cast<size_t>(cache_.pages_per_unit());
  while ((table.num_hashed_units + 1) * unit_len <= context_len) {
    const auto unit_idx = static_cast<size_t>(table.num_hashed_units);
    const Span<const int32_t> unit =
        tokens.subspan(unit_idx * static_cast<size_t>(unit_len), static_cast<size_t>(unit_len));
    const uint64_t hash = cache_.chain_hash(table.chain_hash, unit);
    cache_.insert(hash, table.chain_hash, unit,
                  Span<const int32_t>(table.pages.data() + unit_idx * per_unit, per_unit));
    table.chain_hash = hash;
    ++table.num_hashed_units;
  }
}

int32_t KVCacheManager::flush_prefixes() {
  const int32_t num_before = cache_.num_units();
  for (int32_t page = 0; page < pool_.num_pages(); ++page) {
    if (pool_.ref_count(page) == 0) {
      cache_.erase_page(page);
    }
  }
  return num_before - cache_.num_units();
}

void KVCacheManager::write_slots(const PageTable& table, int32_t begin, int32_t end,
                                 int32_t* slots) const noexcept {
  int32_t position = begin;
  while (position < end) {
    const int32_t page_end = std::min((position / page_size_ + 1) * page_size_, end);
    const int32_t first = slot(table, position);
    for (int32_t i = 0; i < page_end - position; ++i) {
      *slots++ = first + i;
    }
    position = page_end;
  }
}

bool KVCacheManager::is_writable(const PageTable& table, int32_t position) const {
  const auto index = static_cast<size_t>(position / page_size_);
  return position >= 0 && index < table.pages.size() && pool_.ref_count(table.pages[index]) == 1 &&
         !cache_.has_page(table.pages[index]);
}

Status KVCacheManager::check_integrity() const {
  DIFFULEX_RETURN_IF_ERROR(pool_.check_integrity());
  return cache_.check_integrity();
}

}  // namespace diffulex
