// SPDX-License-Identifier: Apache-2.0
#pragma once

// One row of token_stats: chunk arguments, and combining chunk records to results.

#include <cstdint>

#include "diffulex/ops/sampling.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {

/// What all rows of one call share.
struct StatsContext {
  explicit StatsContext(const TokenStatsParams& call);

  const TokenStatsParams& params;
  int64_t vocab_size = 0;
  int64_t num_chunks = 0;
  int64_t candidate_end = 0;                   // columns from here on are forbidden
  int64_t forbidden[kStatsMaxForbidden] = {};  // columns below candidate_end
  int32_t num_forbidden = 0;
};

/// One result row.
struct StatsRow {
  const char* logits = nullptr;  // null = empty row
  int64_t penalty_column = -1;
  float penalty = 0.0F;
  float inv_temperature = 0.0F;
  double uniform = 0.0;
};

/// Arguments of one chunk with this thread's scratch; valid until the next one on the thread.
class ChunkArgs final {
 public:
  ChunkArgs(const StatsContext& stats, const StatsRow& row, int64_t chunk);
  [[nodiscard]] const StatsChunkArgs& args() const noexcept { return args_; }

 private:
  StatsChunkArgs args_;
  int32_t excluded_[kStatsMaxForbidden] = {};
};

/// Writes the results of one row from its chunk records.
void finish_row(const StatsContext& stats, const StatsRow& row, const StatsRecord* records,
                int64_t result_row);

}  // namespace diffulex::cpu
