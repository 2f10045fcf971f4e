// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Index from token prefixes to the pages that hold their KV. The unit of sharing is
/// `pages_per_unit` consecutive pages: G = lcm(page size, KV granularity) tokens, because the KV of
/// a position depends on tokens up to the end of its block. A unit is found by a 64-bit hash that
/// chains over all units before it, and accepted only if its tokens and its parent hash agree.
/// Knows nothing of reference counts. All calls O(unit); no allocation after construction.
class DIFFULEX_API PrefixCache final {
 public:
  /// Precondition: all arguments positive except `salt`.
  PrefixCache(int32_t num_pages, int32_t page_size, int32_t pages_per_unit, uint64_t salt);

  /// Hash before the first unit.
  [[nodiscard]] uint64_t root_hash() const noexcept { return root_hash_; }
  /// Tokens per unit (G).
  [[nodiscard]] int32_t unit_len() const noexcept { return page_size_ * pages_per_unit_; }
  [[nodiscard]] int32_t pages_per_unit() const noexcept { return pages_per_unit_; }
  [[nodiscard]] int32_t num_units() const noexcept { return num_units_; }

  /// Hash of a unit after `parent`; `tokens` has unit_len() entries.
  [[nodiscard]] uint64_t chain_hash(uint64_t parent, Span<const int32_t> tokens) const;
  /// Pages of the unit with this content, or an empty span.
  [[nodiscard]] Span<const int32_t> find(uint64_t hash, uint64_t parent,
                                         Span<const int32_t> tokens) const;
  /// Indexes `pages` under the content unless an entry with this hash exists, which is kept.
  /// Returns whether the pages were indexed. Precondition: none of them is indexed.
  bool insert(uint64_t hash, uint64_t parent, Span<const int32_t> tokens,
              Span<const int32_t> pages);
  /// Drops the unit that contains `page`, if any.
  void erase_page(int32_t page);
  /// Whether `page` belongs to an indexed unit: its content must not change.
  [[nodiscard]] bool has_page(int32_t page) const;

  /// Table, units and page links agree. O(num_pages).
  [[nodiscard]] Status check_integrity() const;

 private:
  struct Unit {
    uint64_t hash = 0;
    uint64_t parent = 0;
  };
  [[nodiscard]] size_t home(uint64_t hash) const noexcept { return hash & mask_; }
  [[nodiscard]] size_t find_cell(uint64_t hash) const;

  int32_t page_size_;
  int32_t pages_per_unit_;
  uint64_t root_hash_;
  size_t mask_ = 0;  // table size - 1, a power of two
  int32_t num_units_ = 0;
  std::vector<int32_t> table_;        // open addressing: leading page of a unit, or -1
  std::vector<Unit> units_;           // [num_pages], by leading page
  std::vector<int32_t> lead_;         // [num_pages] leading page of the page's unit, or -1
  std::vector<int32_t> unit_pages_;   // [num_pages * pages_per_unit], by leading page
  std::vector<int32_t> unit_tokens_;  // [num_pages * page_size], by page
};

}  // namespace diffulex
