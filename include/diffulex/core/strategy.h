// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "diffulex/core/decode_rules.h"
#include "diffulex/core/kv_cache_manager.h"
#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/export.h"

namespace diffulex {

/// Circumstances under which a request would run its next forward.
struct StepQuery {
  int32_t context_len = 0;  // C: its own, or the prefix hit it would be admitted with
  int32_t row_budget = 0;   // rows still free in the batch
};

/// What the next forward of a request takes.
struct StepNeed {
  bool is_prefill = false;  // a prefill or resume forward; false: a decode forward
  bool is_final = true;     // the last forward of its prefill span (always for decode)
  int32_t num_rows = 0;     // most rows; 0 with is_prefill: nothing legal fits into the row budget
  int32_t page_len = 0;     // positions [0, page_len) must have pages
};

/// A checked write of the sampler.
struct BlockWrite {
  int32_t blk = 0;  // block of the plan
  int32_t rel = 0;  // relative position
  int32_t token = 0;
};

/// Outcome of finish_step.
struct StepOutcome {
  int32_t new_tokens = 0;  // masks that became tokens
  FinishReason finish_reason = FinishReason::kNone;
};

/// A decoding strategy: the state machine of one request. Stateless beyond its options; all
/// per-request state is in Request. The scheduler calls, per request:
///
///   init_request                                                   once, after validation
///   pages_needed -> begin_step -> write_rows -> write_sampler_inputs   in schedule()
///   finish_step                                                    in complete_step()
///   on_preempt                                                     instead of finish_step
///                                                                  (cancel), or between steps
class DIFFULEX_API Strategy {
 public:
  virtual ~Strategy();

  /// Builds blocks and limits of a validated request (status WAITING).
  virtual void init_request(Request& request) const = 0;
  /// What the next forward takes, for the phase the request will then be in. No side effect.
  [[nodiscard]] virtual StepNeed pages_needed(const Request& request,
                                              const StepQuery& query) const = 0;
  /// Enters the forward `need` describes: status, step counters, activation, request.step.
  virtual void begin_step(Request& request, const StepNeed& need) const = 0;
  /// Fills rows, slots and per-request arrays of plan request `req_idx`.
  virtual void write_rows(Request& request, const KVCacheManager& kv_cache, StepPlan& plan,
                          int32_t req_idx) const = 0;
  /// Appends the ACTIVE blocks that are run, and their logits rows.
  virtual void write_sampler_inputs(const Request& request, StepPlan& plan,
                                    int32_t req_idx) const = 0;
  /// Counts the forward and applies `writes` (in block order, checked), the verdicts of `output`,
  /// transitions and stop conditions. The request's blocks are those from
  /// plan.first_block(req_idx) to plan.first_block(req_idx + 1), in the plan and in `output`.
  [[nodiscard]] virtual StepOutcome finish_step(Request& request, StepPlan& plan, int32_t req_idx,
                                                const SamplerOutput& output,
                                                Span<const BlockWrite> writes) const = 0;
  /// Reverts a step in flight, then forgets all KV. The scheduler releases the pages.
  virtual void on_preempt(Request& request) const = 0;
  /// Whether the functions of decode_rules.h, with a dual cache those of dual_cache_rules.h or with
  /// a canvas those of canvas_rules.h, are all that a decode step does to `request`, so that a
  /// device may go on with it before the host has seen the step.
  [[nodiscard]] virtual bool decodes_by_rules(const Request& request) const;
  /// End of the positions that need pages before the next decode step begins: what that step may
  /// store, and what the step that the device plans at its end may store.
  [[nodiscard]] virtual int32_t page_len_ahead(const Request& request) const;
  /// Cached keys (plan.context_lens) of the next decode step, or a bound on them where only
  /// the device can know.
  [[nodiscard]] virtual int32_t context_len_ahead(const Request& request) const;
  /// Adds to `decode`, which has the buffer of `request` and the forward in flight, what else the
  /// rules need; default: nothing.
  virtual void complete_decode_request(const Request& request, DecodeRequest& decode) const;

 protected:
  Strategy() = default;
  Strategy(const Strategy&) = default;
  Strategy& operator=(const Strategy&) = default;
};

/// Builds the strategy `options.strategy` names; kUnsupported with the list of names otherwise.
[[nodiscard]] DIFFULEX_API Result<std::unique_ptr<Strategy>> make_strategy(
    const EngineOptions& options);

/// Names make_strategy accepts, sorted.
[[nodiscard]] DIFFULEX_API const std::vector<std::string>& strategy_names();

}  // namespace diffulex
