// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/request.h"
#include "diffulex/core/span.h"

namespace diffulex {

/// The requests that a device decodes by itself, by its rows, and which of them the plan in flight
/// has. Owns none.
class DeviceBatch final {
 public:
  /// Whether the device knows of every request that left; false without a device.
  [[nodiscard]] bool is_intact() const noexcept { return is_intact_; }
  /// By row of the device; null = ended or taken away.
  [[nodiscard]] Span<Request* const> requests() const noexcept {
    return Span<Request* const>(requests_.data(), requests_.size());
  }
  /// Row on the device of each request of the plan in flight.
  [[nodiscard]] Span<const int32_t> plan_rows() const noexcept {
    return Span<const int32_t>(plan_rows_);
  }

  /// No device runs ahead.
  void clear() {
    requests_.clear();
    is_intact_ = false;
  }
  /// The device takes the requests of the plan in flight, in its order.
  void start(const std::vector<Request*>& plan_requests) {
    requests_ = plan_requests;
    plan_rows_.clear();
    for (size_t row = 0; row < plan_requests.size(); ++row) {
      plan_rows_.push_back(static_cast<int32_t>(row));
    }
    is_intact_ = true;
  }
  /// The next plan, of which add_plan_row tells the requests in order.
  void begin_plan() { plan_rows_.clear(); }
  void add_plan_row(size_t row) { plan_rows_.push_back(static_cast<int32_t>(row)); }
  /// The request ended or lost its pages; `is_known` says whether the device ended it too.
  void leave(const Request& request, bool is_known) {
    for (Request*& place : requests_) {
      if (place == &request) {
        place = nullptr;
        is_intact_ = is_intact_ && is_known;
        return;
      }
    }
  }

 private:
  std::vector<Request*> requests_;
  std::vector<int32_t> plan_rows_;
  bool is_intact_ = false;
};

}  // namespace diffulex
