// SPDX-License-Identifier: Apache-2.0
#include "diffulex/core/page_pool.h"

namespace diffulex {

PagePool::PagePool(int32_t num_pages) : num_free_(num_pages) {
  DIFFULEX_CHECK(num_pages >= 1, "PagePool: expected >= 1 pages, got ", num_pages);
  const auto count = static_cast<size_t>(num_pages);
  ref_counts_.assign(count, 0);
  next_.resize(count + 1);
  prev_.resize(count + 1);
  for (int32_t node = 0; node <= num_pages; ++node) {
    next_[static_cast<size_t>(node)] = node == num_pages ? 0 : node + 1;
    prev_[static_cast<size_t>(node)] = node == 0 ? num_pages : node - 1;
  }
}

int32_t PagePool::ref_count(int32_t page) const {
  DIFFULEX_CHECK(page >= 0 && page < num_pages(), "PagePool: expected a page in [0, ", num_pages(),
                 "), got ", page);
  return ref_counts_[static_cast<size_t>(page)];
}

void PagePool::unlink(int32_t page) {
  const auto node = static_cast<size_t>(page) + 1;
  next_[static_cast<size_t>(prev_[node])] = next_[node];
  prev_[static_cast<size_t>(next_[node])] = prev_[node];
  --num_free_;
}

int32_t PagePool::try_allocate() {
  const int32_t page = front();
  if (page < 0) {
    return -1;
  }
  unlink(page);
  ref_counts_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::acquire(int32_t page) {
  if (ref_count(page) == 0) {
    unlink(page);
  }
  ++ref_counts_[static_cast<size_t>(page)];
}

void PagePool::release(int32_t page) {
  DIFFULEX_CHECK(ref_count(page) > 0, "PagePool::release: expected an owned page, got page ", page);
  if (--ref_counts_[static_cast<size_t>(page)] > 0) {
    return;
  }
  const auto node = static_cast<size_t>(page) + 1;
  const int32_t tail = prev_[0];
  next_[node] = 0;
  prev_[node] = tail;
  next_[static_cast<size_t>(tail)] = page + 1;
  prev_[0] = page + 1;
  ++num_free_;
}

Status PagePool::check_integrity() const {
  int32_t linked = 0;
  int32_t node = 0;
  do {
    const int32_t next = next_[static_cast<size_t>(node)];
    if (prev_[static_cast<size_t>(next)] != node) {
      return make_error(StatusCode::kInternal, "PagePool: expected matching links at node ", node,
                        ", got ", prev_[static_cast<size_t>(next)]);
    }
    if (next != 0) {
      if (ref_counts_[static_cast<size_t>(next - 1)] != 0) {
        return make_error(StatusCode::kInternal, "PagePool: expected no references to free page ",
                          next - 1, ", got ", ref_counts_[static_cast<size_t>(next - 1)]);
      }
      ++linked;
    }
    node = next;
  } while (node != 0 && linked <= num_pages());
  int32_t unowned = 0;
  for (const int32_t count : ref_counts_) {
    if (count < 0) {
      return make_error(StatusCode::kInternal, "PagePool: expected counts >= 0, got ", count);
    }
    unowned += count == 0 ? 1 : 0;
  }
  if (linked != unowned || linked != num_free_) {
    return make_error(StatusCode::kInternal, "PagePool: expected ", unowned, " free pages, got ",
                      linked, " linked and ", num_free_, " counted");
  }
  return {};
}

}  // namespace diffulex
