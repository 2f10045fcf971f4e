// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/options.h"
#include "diffulex/core/page_pool.h"
#include "diffulex/core/prefix_cache.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Pages of one request, in position order. Filled and emptied by KVCacheManager only.
struct PageTable {
  std::vector<int32_t> pages;    // entry j covers positions [j * page_size, (j + 1) * page_size)
  int32_t num_hashed_units = 0;  // leading prefix units whose chain hash is known
  uint64_t chain_hash = 0;       // hash after those units
  uint64_t epoch = 0;            // changes whenever pages are dropped
};

/// Outcome of a prefix lookup; valid until the next call that changes the manager.
struct PrefixHit {
  int32_t len = 0;             // tokens found, a multiple of the unit length
  int32_t num_pages = 0;       // pages that hold them
  int32_t num_free_pages = 0;  // of those, pages that now stand in the free queue
};

/// Pages of the KV cache: allocation, growth, release, and the prefix cache over them. Decides
/// which page holds what; holds no KV data itself.
class DIFFULEX_API KVCacheManager final {
 public:
  /// Precondition: options.validate() is ok.
  explicit KVCacheManager(const EngineOptions& options);

  [[nodiscard]] int32_t num_pages() const noexcept { return pool_.num_pages(); }
  /// Pages without an owner, cached ones included.
  [[nodiscard]] int32_t num_free_pages() const noexcept { return pool_.num_free(); }
  [[nodiscard]] int32_t num_used_pages() const noexcept { return num_pages() - num_free_pages(); }
  [[nodiscard]] int32_t page_size() const noexcept { return page_size_; }
  /// Units now in the prefix cache.
  [[nodiscard]] int32_t num_cached_units() const noexcept { return cache_.num_units(); }
  /// Tokens per prefix-cache unit.
  [[nodiscard]] int32_t prefix_unit_len() const noexcept { return cache_.unit_len(); }
  [[nodiscard]] const PagePool& pool() const noexcept { return pool_; }

  /// Pages that cover positions [0, len).
  [[nodiscard]] int32_t num_pages_for(int32_t len) const noexcept {
    return (len + page_size_ - 1) / page_size_;
  }
  /// Longest cached prefix of `tokens` within `limit` tokens. No side effect. O(prefix).
  [[nodiscard]] PrefixHit lookup_prefix(Span<const int32_t> tokens, int32_t limit) const;
  /// Takes `hit_len` cached tokens (from lookup_prefix, unchanged since) into the empty `table`.
  void claim_prefix(PageTable& table, Span<const int32_t> tokens, int32_t hit_len);
  /// Extends `table` to cover [0, len). All or nothing: false when too few pages are free.
  [[nodiscard]] bool try_grow(PageTable& table, int32_t len);
  /// Returns all pages, the last first, so that prefixes outlive what hangs on them.
  void release(PageTable& table);
  /// Makes the whole units in positions [0, context_len) shareable. Their tokens are final and
  /// their KV stored. Amortised O(1) per token.
  void register_prefix(PageTable& table, Span<const int32_t> tokens, int32_t context_len);
  /// Forgets the cached units that no request uses; returns how many. O(num_pages).
  int32_t flush_prefixes();

  /// Slot of a position that has a page.
  [[nodiscard]] int32_t slot(const PageTable& table, int32_t position) const noexcept {
    return table.pages[static_cast<size_t>(position / page_size_)] * page_size_ +
           position % page_size_;
  }
  /// Slots of positions [begin, end), which have pages, into `slots`.
  void write_slots(const PageTable& table, int32_t begin, int32_t end,
                   int32_t* slots) const noexcept;
  /// Whether the page of `position` is private to its owner: one reference, not shareable.
  [[nodiscard]] bool is_writable(const PageTable& table, int32_t position) const;

  /// I8 without owners: queue, counts and index agree. O(num_pages).
  [[nodiscard]] Status check_integrity() const;

 private:
  [[nodiscard]] int32_t allocate_page();

  int32_t page_size_;
  bool has_prefix_cache_;
  PagePool pool_;
  PrefixCache cache_;
};

}  // namespace diffulex
