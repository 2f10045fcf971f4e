// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "core/toy_model.h"
#include "diffulex/core/engine_core.h"

namespace diffulex::test {

/// Drives an EngineCore with a toy model: reads only the arrays of the plan, keeps the KV cache as
/// tags by slot, and checks on the way what every plan promises. What a request of the plan runs is
/// the subclass's.
class PlanSimulator {
 public:
  explicit PlanSimulator(const EngineOptions& options)
      : options_(options),
        core_(options),
        plans_{StepPlan(options), StepPlan(options)},
        output_(options),
        cache_(static_cast<size_t>(options.num_pages * options.page_size),
               ToyKey{kPoison, kPoison}) {}
  virtual ~PlanSimulator() = default;
  PlanSimulator(const PlanSimulator&) = delete;
  PlanSimulator& operator=(const PlanSimulator&) = delete;

  EngineCore& core() { return core_; }
  StepPlan& plan() { return plans_[num_steps_ % 2]; }
  SamplerOutput& output() { return output_; }
  const std::vector<int32_t>& streamed(int64_t req_id) { return streamed_[req_id]; }
  /// Decode plans whose requests had different row counts.
  int32_t num_mixed_plans() const { return num_mixed_plans_; }

  int64_t add(const std::vector<int32_t>& prompt, const SamplingParams& params) {
    Result<int64_t> id = core_.add_request(Span<const int32_t>(prompt), params);
    EXPECT_TRUE(id.ok()) << id.status().message();
    return id.ok() ? id.value() : -1;
  }

  /// Schedules and runs the forward and the sampler; the step is still to be completed.
  PlanKind forward() {
    ++num_steps_;
    before_schedule();
    const PlanKind kind = core_.schedule(plan());
    poison_fresh_pages();
    check_plan();
    after_schedule();
    output_.clear(plan().num_blocks());
    for (int32_t r = 0; r < plan().num_reqs(); ++r) {
      run_request(r);
    }
    return kind;
  }

  void complete() {
    const Result<const StepEvents*> events = core_.complete_step(plan(), output_);
    ASSERT_TRUE(events.ok()) << events.status().message();
    for (const RequestEvent& event : events.value()->requests) {
      for (const int32_t token : events.value()->appended(event)) {
        streamed_[event.req_id].push_back(token);
      }
    }
    note_events(*events.value());
    check_integrity();
  }

  void cancel() {
    // What a failed forward left in the cache must never be read.
    for (const int32_t slot : plan().slot_mapping()) {
      if (slot >= 0) {
        cache_[static_cast<size_t>(slot)] = ToyKey{kPoison, kPoison};
      }
    }
    const Status status = core_.cancel_step(plan());
    ASSERT_TRUE(status.ok()) << status.message();
    check_integrity();
  }

  /// Steps until nothing is left; fails after `max_steps`.
  void drain(int32_t max_steps = 20000) {
    while (core_.has_unfinished() && !testing::Test::HasFatalFailure()) {
      ASSERT_GT(max_steps--, 0) << "no termination";
      ASSERT_NE(forward(), PlanKind::kIdle);
      complete();
    }
  }

  void check_integrity() {
    const Status status = core_.check_integrity();
    ASSERT_TRUE(status.ok()) << status.message();
  }

 protected:
  /// Runs the rows of plan request `r` and fills its part of output().
  virtual void run_request(int32_t r) = 0;
  /// Around schedule(), and after complete_step().
  virtual void before_schedule() {}
  virtual void after_schedule() {}
  virtual void note_events(const StepEvents& /*events*/) {}

  /// Cached keys [0, len) of request `r`, none of them unwritten.
  std::vector<ToyKey> read_cache(int32_t r, int32_t len) {
    std::vector<ToyKey> keys;
    const size_t row = static_cast<size_t>(r) * static_cast<size_t>(plan().max_pages_per_req());
    for (int32_t p = 0; p < len; ++p) {
      const int32_t page = plan().page_tables()[row + static_cast<size_t>(p / options_.page_size)];
      EXPECT_GE(page, 0) << "no page at " << p;
      keys.push_back(
          page < 0
              ? ToyKey{kPoison, kPoison}
              : cache_[static_cast<size_t>(page * options_.page_size + p % options_.page_size)]);
      EXPECT_NE(keys.back().layer1, kPoison) << "read of an unwritten slot at " << p;
    }
    return keys;
  }

  /// Stores the keys of the rows of request `r` that have a slot.
  void store(int32_t r, const std::vector<ToyKey>& keys) {
    const auto row0 = static_cast<size_t>(plan().cu_seqlens_q()[static_cast<size_t>(r)]);
    for (size_t i = 0; i < keys.size(); ++i) {
      const int32_t slot = plan().slot_mapping()[row0 + i];
      if (slot >= 0) {
        cache_[static_cast<size_t>(slot)] = keys[i];
      }
    }
  }

  EngineOptions options_;

 private:
  struct KnownPages {
    uint64_t epoch = ~uint64_t{0};
    int32_t count = 0;  // pages of the table seen so far
  };

  // A page that a request just got, other than by a prefix hit, has no defined content: whoever
  // reads it must have written it first.
  void poison_fresh_pages() {
    for (const Request* request : core_.scheduler().running()) {
      const PageTable& table = request->page_table;
      KnownPages& known = known_pages_[request->req_id];
      if (known.epoch != table.epoch) {
        known = KnownPages{table.epoch, request->num_cached_tokens / options_.page_size};
      }
      for (; known.count < static_cast<int32_t>(table.pages.size()); ++known.count) {
        const int32_t page = table.pages[static_cast<size_t>(known.count)];
        std::fill_n(cache_.begin() + page * options_.page_size, options_.page_size,
                    ToyKey{kPoison, kPoison});
      }
    }
  }

  void check_plan() {
    EXPECT_LE(plan().num_rows(), options_.max_num_batched_tokens);
    EXPECT_LE(plan().num_reqs(), options_.max_num_reqs);
    std::set<int32_t> slots;
    for (const int32_t slot : plan().slot_mapping()) {
      if (slot >= 0) {
        EXPECT_TRUE(slots.insert(slot).second) << "slot " << slot << " twice";
        // I6: no write into a shared page.
        EXPECT_EQ(core_.kv_cache().pool().ref_count(slot / options_.page_size), 1);
      }
    }
    EXPECT_EQ(plan().need_kv_cache_store(), !slots.empty());
    if (plan().kind() != PlanKind::kDecode || plan().num_reqs() == 0) {
      return;
    }
    if (plan().uniform_q_len() == 0) {
      ++num_mixed_plans_;
      EXPECT_FALSE(options_.group_decode_by_rows);
    }
  }

  EngineCore core_;
  StepPlan plans_[2];
  SamplerOutput output_;
  std::vector<ToyKey> cache_;  // by slot
  std::map<int64_t, KnownPages> known_pages_;
  std::map<int64_t, std::vector<int32_t>> streamed_;
  size_t num_steps_ = 0;
  int32_t num_mixed_plans_ = 0;
};

}  // namespace diffulex::test
