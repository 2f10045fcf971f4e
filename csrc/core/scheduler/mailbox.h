// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/scheduler.h"

namespace diffulex {

/// What other threads hand to a scheduler, and what they may read from it. Thread-safe.
class Mailbox final {
 public:
  /// Accepts a validated request: it gets its id, and a seed where it has none. Returns the id.
  int64_t deliver(std::unique_ptr<Request> request, const EngineOptions& options);
  /// Counts a request that was refused.
  void reject();
  /// Asks for the end of a request; false for ids that are unknown or finished.
  bool ask_abort(int64_t req_id);
  /// Counters of the last step boundary, with what has arrived since.
  [[nodiscard]] SchedulerStats stats() const;
  /// Whether a request was accepted that is not finished.
  [[nodiscard]] bool has_live() const;

  // For the scheduler.

  /// Whether there is something to take.
  [[nodiscard]] bool has_mail() const;
  /// Moves arrivals, in order of their ids, and aborts to two empty lists.
  void take(std::vector<std::unique_ptr<Request>>& arrivals, std::vector<int64_t>& aborts);
  /// The request has finished.
  void forget(int64_t req_id);
  /// Counters of this step boundary.
  void publish(const SchedulerStats& stats);

 private:
  mutable std::mutex mutex_;
  int64_t next_req_id_ = 0;
  int64_t num_rejected_ = 0;
  std::unordered_set<int64_t> live_ids_;            // accepted and not finished
  std::vector<std::unique_ptr<Request>> arrivals_;  // in order of their ids
  std::vector<int64_t> aborts_;
  SchedulerStats stats_;  // of the last step boundary
};

}  // namespace diffulex
