// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "diffulex/core/decode_batch.h"
#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/status.h"
#include "diffulex/core/step_events.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/core/strategy.h"
#include "diffulex/export.h"

namespace diffulex {

class DeviceBatch;
class Mailbox;
class StepWrites;
class WaitingQueue;

/// Counters of a scheduler since its construction, and gauges of the last step boundary.
struct SchedulerStats {
  int32_t num_waiting = 0;  // gauges; requests added since the boundary count as waiting
  int32_t num_running = 0;
  int32_t num_pages = 0;
  int32_t num_free_pages = 0;
  int32_t num_cached_units = 0;
  int64_t num_requests = 0;  // accepted by add_request
  int64_t num_rejected = 0;
  int64_t num_finished = 0;  // aborted and failed ones included
  int64_t num_aborted = 0;
  int64_t num_failed = 0;         // finish reason error
  int64_t num_prefill_steps = 0;  // completed steps: of prompts alone,
  int64_t num_mixed_steps = 0;    // of prompts beside decoding requests,
  int64_t num_decode_steps = 0;   // without prompts
  int64_t num_rows = 0;           // rows of all completed forwards, without padding requests
  int64_t num_new_tokens = 0;     // masks filled
  int64_t num_preemptions = 0;
  int64_t num_cancelled_steps = 0;
  int64_t num_prefix_query_tokens = 0;  // tokens that prefix lookups could have hit
  int64_t num_prefix_hit_tokens = 0;
};

/// Answer of Scheduler::reserve_ahead.
enum class RunAhead : int32_t {
  kStop = 0,        // the next step is to be scheduled the usual way
  kGo = 1,          // the device may run the next step
  kGoNewPages = 2,  // as kGo, once it has the page tables of the batch
};

/// Queues, budgets, preemption and abort: decides which requests run in each forward.
///
/// Thread rule: add_request, abort and stats may be called from any thread at any time; they go
/// through a mailbox that is read at step boundaries. Everything else belongs to one thread.
/// One plan is in flight at a time: schedule() fills it, complete_step() or cancel_step() ends it.
/// Several StepPlan objects may be used in turn.
///
/// Running ahead: a device that knows the rules may start step k + 1 before the host has completed
/// step k. The order of calls is
///
///   schedule(k)                 a decode plan
///   start_run_ahead             the device gets the requests of the plan
///   reserve_ahead               kGo: the device may run step k + 1 by itself. It must have the
///                               pages before the end of step k, where it plans step k + 1
///   collect_output, complete_step(k)
///   schedule_ahead(k + 1)       makes the plan that the device ran; no page, no admission
///   reserve_ahead               for step k + 2, and so on
///
/// Requests that ended are dummy rows on the device until a step is scheduled the usual way.
/// Aborted or preempted requests lose their pages at once, as ever; no page is handed out before
/// the device's step has been completed, since schedule_ahead and a refusing reserve_ahead take
/// none.
class DIFFULEX_API Scheduler final {
 public:
  /// Precondition: options.validate() is ok. `kv_cache` outlives the scheduler.
  Scheduler(const EngineOptions& options, KVCacheManager& kv_cache);
  /// As above, with a custom strategy.
  Scheduler(const EngineOptions& options, KVCacheManager& kv_cache,
            std::unique_ptr<Strategy> strategy);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  /// Validates and enqueues; the id is unique and ascending. Thread-safe. Fails with
  /// kInvalidArgument (empty prompt, bad ids or parameters), kOutOfRange (prompt of max_model_len
  /// tokens or more) or kOutOfPages (the pool could never hold the request).
  [[nodiscard]] Result<int64_t> add_request(std::unique_ptr<Request> request);
  /// Asks for the end of a request at the next step boundary. Idempotent; false for ids that are
  /// unknown or finished. Thread-safe.
  bool abort(int64_t req_id);
  /// Counters; the gauges are those of the last step boundary. Thread-safe.
  [[nodiscard]] SchedulerStats stats() const;

  /// Picks requests, reserves pages and fills `plan`. kIdle: nothing to run; the plan is empty and
  /// not in flight. Precondition: no plan in flight, and a plan whose layout is that of the
  /// options. O(rows + running * N) except for prompts seen for the first time.
  PlanKind schedule(StepPlan& plan);
  /// Applies the sampler's decisions for the plan in flight. An idle plan is accepted too and gives
  /// the events of its boundary. On kInvalidArgument (a plan not in flight, an output of other
  /// options, or an illegal write) nothing was applied and the plan is still in flight. The events
  /// are valid until the next call.
  [[nodiscard]] Result<const StepEvents*> complete_step(StepPlan& plan,
                                                        const SamplerOutput& output);
  /// Ends the plan in flight whose forward failed: its requests lose their KV and wait again, in
  /// order; nothing it did remains. kInvalidArgument when the plan is not in flight.
  [[nodiscard]] Status cancel_step(StepPlan& plan);

  /// Whether the plan in flight can be handed to a device: a decode step of requests that decode by
  /// the rules alone.
  [[nodiscard]] bool can_run_ahead(const StepPlan& plan) const;
  /// Fills `batch` with the requests of the plan in flight, in plan order. kInvalidArgument unless
  /// can_run_ahead(plan).
  [[nodiscard]] Status start_run_ahead(const StepPlan& plan, DecodeBatch& batch);
  /// Whether the device may run the next step by itself: every running request takes part, no
  /// waiting request could be admitted, no abort was requested, and there are pages for everything
  /// that the next step and the one after it might store. Gives the requests those pages, in
  /// `batch` too.
  [[nodiscard]] RunAhead reserve_ahead(DecodeBatch& batch);
  /// Longest context of the step after the plan in flight, by Strategy::context_len_ahead.
  /// Requests that the plan ends count as if they went on. Of a plan that can_run_ahead.
  [[nodiscard]] int32_t context_len_ahead() const;
  /// Schedules the step that the device runs already: its requests that still run, in its order.
  /// kIdle when none does; then the device's step is void.
  PlanKind schedule_ahead(StepPlan& plan);
  /// Copies what concerns the plan in flight from `by_row` to `output`: the device has a place for
  /// each of the N buffer blocks of each of its rows, the plan only lists ACTIVE blocks.
  void collect_output(StepPlan& plan, const SamplerOutput& by_row, SamplerOutput& output) const;

  /// Whether any request waits, runs or is in the mailbox. Thread-safe.
  [[nodiscard]] bool has_unfinished() const;
  /// Forgets the cached prefixes that no request uses; returns the number of prefix-cache units.
  int32_t flush_prefix_cache();
  /// Denoising state of a request, finished ones included until their result is taken.
  [[nodiscard]] Result<RequestSnapshot> snapshot(int64_t req_id) const;
  /// Record of a finished request, handed out once: kNotFound for unknown ids and ids taken before,
  /// kInvalidArgument while the request is unfinished.
  [[nodiscard]] Result<RequestResult> take_result(int64_t req_id);
  /// Takes pages and request slot from a running request and puts it at the head of the queue.
  /// kNotFound for unknown ids, kInvalidArgument when it is not running or a plan is in flight.
  [[nodiscard]] Status preempt(int64_t req_id);
  /// Ends every request with reason aborted, a plan in flight included. The events of the next
  /// complete_step list them.
  void release_all();

  /// The request, or nullptr. Valid until the next call that is not const.
  [[nodiscard]] const Request* find_request(int64_t req_id) const;
  /// Requests that hold pages, oldest admission first.
  [[nodiscard]] Span<Request* const> running() const noexcept {
    return Span<Request* const>(running_.data(), running_.size());
  }
  [[nodiscard]] const EngineOptions& options() const noexcept { return options_; }

  /// Invariants I1-I3, I5, I6 and I8 over all requests: I6 for every page from the context on, the
  /// only ones a forward may write. O(all tokens). Called after every step in builds without
  /// NDEBUG.
  [[nodiscard]] Status check_integrity() const;

 private:
  [[nodiscard]] Status validate_request(const Request& request) const;
  void drain_mailbox();
  void apply_aborts();
  [[nodiscard]] bool must_decode() const;

  // Phase A and B of schedule(), in admission.cpp and scheduler.cpp.
  void plan_prefill(StepPlan& plan, int32_t max_rows);
  /// Whether every chunked prompt that is under way got what it needs.
  [[nodiscard]] bool plan_continuing(StepPlan& plan, int32_t max_rows);
  [[nodiscard]] bool try_admit(StepPlan& plan, Request& request, int32_t max_rows);
  [[nodiscard]] int32_t headroom_pages() const noexcept;
  void plan_decode(StepPlan& plan);
  /// All that decode, and prompts beside them as far as options().mixed_step_rows goes.
  void plan_mixed(StepPlan& plan);
  /// Whether the next step has room for prompts beside all that decode.
  [[nodiscard]] bool can_mix() const;
  /// Row count of the next decode batch when batches have one: that put off last time, else that of
  /// the oldest request. Two row counts exist at most, so taking turns is round-robin.
  [[nodiscard]] int32_t pick_decode_group() const;
  /// Requests that give up their pages when too few are free, the newest first; never those of the
  /// plan that is being made.
  enum class Yields {
    kAll,    // for a decoding request: all others, and without them the request itself
    kNewer,  // for a chunk of a prompt, which else waits: were older ones to yield, two requests
             // could take turns in starting over
  };
  /// Whether `request` has pages for `page_len` tokens, those of requests that yield included.
  [[nodiscard]] bool take_pages(Request& request, int32_t page_len, Yields yields);
  void enter_plan(StepPlan& plan, Request& request, const StepNeed& need);

  [[nodiscard]] bool could_admit() const;

  void preempt_request(Request& request);
  void finish_request(Request& request, FinishReason reason);
  void finish_plan_request(StepPlan& plan, int32_t req_idx, const SamplerOutput& output);
  void publish_stats();
  void open_events();
  void remove_running(const Request& request);
  [[nodiscard]] Status check_request(const Request& request) const;

  EngineOptions options_;
  KVCacheManager& kv_cache_;
  std::unique_ptr<Strategy> strategy_;
  BlockRules rules_;
  PlanLayout layout_;
  std::unique_ptr<Mailbox> mailbox_;
  std::unique_ptr<WaitingQueue> waiting_;
  std::unique_ptr<StepWrites> writes_;         // of the step being completed
  std::unique_ptr<DeviceBatch> device_batch_;  // of a device that runs ahead
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;
  std::vector<std::unique_ptr<Request>> arrived_;  // scratch of drain_mailbox
  std::vector<int64_t> abort_ids_;                 // scratch of drain_mailbox
  std::vector<Request*> running_;                  // oldest admission first
  std::vector<int32_t> free_slots_;                // descending: the lowest is taken first
  std::vector<Request*> plan_requests_;            // of the plan in flight, in plan order
  std::vector<Request*> decode_order_;             // scratch of plan_decode
  // Request that the last decode batch did not reach: of full rows (or any), of sub-block rows.
  int64_t decode_first_ids_[2] = {-1, -1};
  int32_t put_off_rows_ = 0;  // row count that the last decode batch put off, 0 = none
  uint64_t in_flight_ = 0;    // identity of the plan in flight, 0 = none
  int64_t next_step_id_ = 0;
  int32_t prefill_streak_ = 0;  // consecutive prefill batches
  bool is_prompt_due_ = false;  // the last mixed step had no place for one that waits
  StepEvents events_;
  bool events_delivered_ = true;  // the next boundary starts fresh lists
  SchedulerStats counters_;
};

}  // namespace diffulex
