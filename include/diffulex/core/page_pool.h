// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/status.h"
#include "diffulex/export.h"

namespace diffulex {

/// Reference counts of the KV pages and the ordered queue of free ones. Pages are handed out from
/// the head and come back at the tail; a free page can be revived where it stands. All calls O(1).
class DIFFULEX_API PagePool final {
 public:
  /// All pages free, in ascending order. Precondition: num_pages >= 1.
  explicit PagePool(int32_t num_pages);

  [[nodiscard]] int32_t num_pages() const noexcept {
    return static_cast<int32_t>(ref_counts_.size());
  }
  [[nodiscard]] int32_t num_free() const noexcept { return num_free_; }
  [[nodiscard]] int32_t ref_count(int32_t page) const;
  /// Page at the head of the free queue, the next to be handed out; -1 when none is free.
  [[nodiscard]] int32_t front() const noexcept { return next_[0] - 1; }

  /// Takes the head of the free queue with one reference; -1 when none is free.
  [[nodiscard]] int32_t try_allocate();
  /// Adds a reference, taking the page out of the free queue if it was there.
  void acquire(int32_t page);
  /// Drops a reference; the last one appends the page to the free queue.
  void release(int32_t page);

  /// The queue links exactly the pages without references. O(num_pages).
  [[nodiscard]] Status check_integrity() const;

 private:
  void unlink(int32_t page);

  std::vector<int32_t> ref_counts_;
  // Circular doubly linked list; node 0 is the sentinel, node p + 1 is page p.
  std::vector<int32_t> next_;
  std::vector<int32_t> prev_;
  int32_t num_free_ = 0;
};

}  // namespace diffulex
