// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "diffulex/core/block_rules.h"
#include "diffulex/core/options.h"
#include "diffulex/core/request.h"
#include "diffulex/core/sampler_output.h"
#include "diffulex/core/span.h"
#include "diffulex/core/status.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// What the sampler wrote in the step that is being completed: checked as a whole before any of it
/// is applied, then handed out request by request.
class StepWrites final {
 public:
  /// `options` are valid and outlive the object.
  explicit StepWrites(const EngineOptions& options);

  /// Checks `output` and lists its writes; kInvalidArgument for an output of other options or an
  /// illegal write. `requests` are those of the plan, in plan order.
  [[nodiscard]] Status collect(StepPlan& plan, const SamplerOutput& output,
                               Span<Request* const> requests);
  /// The writes to blocks below `end_blk` that were not taken yet, in block order. Valid until
  /// collect.
  [[nodiscard]] Span<const BlockWrite> take_below(int32_t end_blk);

 private:
  [[nodiscard]] Status check(StepPlan& plan, const SamplerOutput& output, size_t num_reqs) const;
  [[nodiscard]] Status collect_block(const Request& request, int32_t blk, int32_t block_id,
                                     const int64_t* block_writes);

  const EngineOptions& options_;
  BlockRules rules_;
  PlanLayout layout_;
  std::vector<BlockWrite> writes_;
  size_t next_ = 0;  // first one that was not taken
};

}  // namespace diffulex
