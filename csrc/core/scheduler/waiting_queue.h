// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/request.h"

namespace diffulex {

/// Requests without pages in the order in which they are admitted. They are linked by themselves,
/// so that any of them leaves in constant time. Owns none.
class WaitingQueue final {
 public:
  /// The request that is admitted next, or nullptr.
  [[nodiscard]] Request* head() const noexcept { return head_; }
  [[nodiscard]] int32_t size() const noexcept { return size_; }

  void push_front(Request& request) {
    request.prev_waiting = nullptr;
    request.next_waiting = head_;
    (head_ == nullptr ? tail_ : head_->prev_waiting) = &request;
    head_ = &request;
    ++size_;
  }

  void push_back(Request& request) {
    request.next_waiting = nullptr;
    request.prev_waiting = tail_;
    (tail_ == nullptr ? head_ : tail_->next_waiting) = &request;
    tail_ = &request;
    ++size_;
  }

  void remove(Request& request) {
    (request.prev_waiting == nullptr ? head_ : request.prev_waiting->next_waiting) =
        request.next_waiting;
    (request.next_waiting == nullptr ? tail_ : request.next_waiting->prev_waiting) =
        request.prev_waiting;
    request.next_waiting = nullptr;
    request.prev_waiting = nullptr;
    --size_;
  }

 private:
  Request* head_ = nullptr;
  Request* tail_ = nullptr;
  int32_t size_ = 0;
};

}  // namespace diffulex
