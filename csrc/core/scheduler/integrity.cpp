// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "core/scheduler/waiting_queue.h"
#include "diffulex/core/scheduler.h"

// The invariants of a scheduler.

namespace diffulex {

Status Scheduler::check_request(const Request& request) const {
  DIFFULEX_RETURN_IF_ERROR(request.buffer.check_integrity());
  const bool is_running = request.request_slot >= 0;
  const bool has_running_status = request.status == RequestStatus::kPending ||
                                  request.status == RequestStatus::kPrefilling ||
                                  request.status == RequestStatus::kDecoding;
  if (is_running != has_running_status || (!is_running && !request.page_table.pages.empty())) {
    return make_error(StatusCode::kInternal, "Scheduler: expected pages and a slot exactly while ",
                      "running, got ", to_string(request.status), " with slot ",
                      request.request_slot, " and ", request.page_table.pages.size(), " pages");
  }
  const auto covered =
      static_cast<int64_t>(request.page_table.pages.size()) * kv_cache_.page_size();
  if (is_running && covered < request.context_len()) {
    return make_error(StatusCode::kInternal, "Scheduler: expected pages for ",
                      request.context_len(), " positions of request ", request.req_id, ", got ",
                      covered);
  }
  // Everything from the context on may still be written, up to the last page.
  const int64_t first_open = request.context_len() / kv_cache_.page_size();
  for (int64_t position = first_open * kv_cache_.page_size(); is_running && position < covered;
       position += kv_cache_.page_size()) {
    if (!kv_cache_.is_writable(request.page_table, static_cast<int32_t>(position))) {
      return make_error(StatusCode::kInternal, "Scheduler: expected private pages from position ",
                        request.context_len(), " of request ", request.req_id,
                        " on, got a shared one at ", position);
    }
  }
  const int32_t output_len = request.settled_end() - request.prompt_len;
  if (output_len > request.params.max_tokens || request.settled_end() > options_.max_model_len) {
    return make_error(StatusCode::kInternal, "Scheduler: expected at most ",
                      request.params.max_tokens, " output tokens, got ", output_len);
  }
  return {};
}

Status Scheduler::check_integrity() const {
  DIFFULEX_RETURN_IF_ERROR(kv_cache_.check_integrity());
  std::vector<int32_t> ref_counts(static_cast<size_t>(kv_cache_.num_pages()), 0);
  std::vector<bool> is_slot_used(static_cast<size_t>(options_.max_num_reqs), false);
  int32_t num_waiting = 0;
  size_t num_running = 0;
  for (const auto& entry : requests_) {
    const Request& request = *entry.second;
    if (request.status == RequestStatus::kFinished) {
      continue;
    }
    DIFFULEX_RETURN_IF_ERROR(check_request(request));
    num_waiting += request.status == RequestStatus::kWaiting ? 1 : 0;
    if (request.request_slot >= 0) {
      ++num_running;
      if (is_slot_used[static_cast<size_t>(request.request_slot)]) {
        return make_error(StatusCode::kInternal, "Scheduler: expected one owner per request slot, ",
                          "got two of slot ", request.request_slot);
      }
      is_slot_used[static_cast<size_t>(request.request_slot)] = true;
    }
    for (const int32_t page : request.page_table.pages) {
      ++ref_counts[static_cast<size_t>(page)];
    }
  }
  for (int32_t page = 0; page < kv_cache_.num_pages(); ++page) {
    if (ref_counts[static_cast<size_t>(page)] != kv_cache_.pool().ref_count(page)) {
      return make_error(StatusCode::kInternal, "Scheduler: expected ",
                        ref_counts[static_cast<size_t>(page)], " references to page ", page,
                        ", got ", kv_cache_.pool().ref_count(page));
    }
  }
  if (num_waiting != waiting_->size() || num_running != running_.size() ||
      num_running + free_slots_.size() != static_cast<size_t>(options_.max_num_reqs)) {
    return make_error(StatusCode::kInternal, "Scheduler: expected ", num_waiting, " waiting and ",
                      num_running, " running requests, got ", waiting_->size(), " and ",
                      running_.size(), " with ", free_slots_.size(), " free slots");
  }
  return {};
}

}  // namespace diffulex
