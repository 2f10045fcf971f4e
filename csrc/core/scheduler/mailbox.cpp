// SPDX-License-Identifier: Apache-2.0
#include "core/scheduler/mailbox.h"

#include <utility>

#include "diffulex/core/philox.h"

namespace diffulex {
namespace {

/// Seed of a request. At temperature 0 an answer must be the same every time, also under a strategy
/// that draws all the same; above it, requests without a seed differ by their id.
uint64_t effective_seed(const SamplingParams& params, const EngineOptions& options,
                        int64_t req_id) {
  if (params.seed.has_value()) {
    return *params.seed;
  }
  return params.is_sampled() ? derive_request_seed(options.seed, req_id) : options.seed;
}

}  // namespace

int64_t Mailbox::deliver(std::unique_ptr<Request> request, const EngineOptions& options) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t req_id = next_req_id_++;
  request->req_id = req_id;
  request->seed = effective_seed(request->params, options, req_id);
  live_ids_.insert(req_id);
  arrivals_.push_back(std::move(request));
  return req_id;
}

void Mailbox::reject() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++num_rejected_;
}

bool Mailbox::ask_abort(int64_t req_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (live_ids_.count(req_id) == 0) {
    return false;
  }
  aborts_.push_back(req_id);
  return true;
}

SchedulerStats Mailbox::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  SchedulerStats stats = stats_;
  stats.num_waiting += static_cast<int32_t>(arrivals_.size());
  stats.num_requests = next_req_id_;
  stats.num_rejected = num_rejected_;
  return stats;
}

bool Mailbox::has_live() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !live_ids_.empty();
}

bool Mailbox::has_mail() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return !arrivals_.empty() || !aborts_.empty();
}

void Mailbox::take(std::vector<std::unique_ptr<Request>>& arrivals, std::vector<int64_t>& aborts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  arrivals.swap(arrivals_);
  aborts.swap(aborts_);
}

void Mailbox::forget(int64_t req_id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_ids_.erase(req_id);
}

void Mailbox::publish(const SchedulerStats& stats) {
  const std::lock_guard<std::mutex> lock(mutex_);
  stats_ = stats;
}

}  // namespace diffulex
