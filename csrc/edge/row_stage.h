// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "diffulex/core/sampler_output.h"
#include "diffulex/core/step_plan.h"
#include "diffulex/edge/options.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex {

/// From the logits of a step to the decisions of the sampler. Keeps the row that shifted logits
/// need in the next step.
class EdgeRowStage final {
 public:
  EdgeRowStage(const EdgeOptions& options, const StepPlan& plan);

  /// Fills `output` for the plan; `logits` [n, V] are those of its logits rows.
  [[nodiscard]] Status run(StepPlan& plan, const float* logits, SamplerOutput& output);

 private:
  struct alignas(256) WorkspaceLine {  // as ops want their workspace
    char bytes[256];
  };
  [[nodiscard]] Status record(StepPlan& plan, const float* logits);
  [[nodiscard]] Status filter(StepPlan& plan, const TokenStatsParams& rows);
  void demote(int64_t num_rows);
  void save(StepPlan& plan, const float* logits);
  [[nodiscard]] Status accept(StepPlan& plan, SamplerOutput& output);

  const EdgeOptions& options_;
  int64_t vocab_size_;
  std::vector<int64_t> ids_;     // of the rows, then of the saved row
  std::vector<float> stats_;     // [.., kTokenStatsColumns], as ids_
  std::vector<float> saved_;     // [V] logits of the saved row; empty without shifted logits
  std::vector<int32_t> source_;  // row of each entry where some are the saved one
  std::vector<uint8_t> gate_;
  std::vector<int32_t> open_steps_;
  std::vector<WorkspaceLine> workspace_;
  ExecContext context_;
};

}  // namespace diffulex
