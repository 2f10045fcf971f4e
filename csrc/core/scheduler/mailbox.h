// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "diffulex/core/scheduler.h"

namespace diffulex {

/// What other threads hand to the scheduler, and what they may read from it. Every field is guarded
/// by `mutex`.
struct Scheduler::Mailbox {
  mutable std::mutex mutex;
  int64_t next_req_id = 0;
  int64_t num_rejected = 0;
  std::unordered_set<int64_t> live_ids;            // accepted and not finished
  std::vector<std::unique_ptr<Request>> arrivals;  // in order of their ids
  std::vector<int64_t> aborts;
  SchedulerStats stats;  // of the last step boundary
};

}  // namespace diffulex
