// SPDX-License-Identifier: Apache-2.0

// token_stats on the CPU: every (row, chunk) is an independent task writing one record; a second
// pass combines the records of a row in chunk order in fp64, draws, and lists the top k.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ops/cpu_ops.h"
#include "ops/sampling/stats_row_cpu.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/cpu_isa/kernel_table.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "token_stats";
// Rows whose records are held at a time: bounds the scratch for long prompts.
constexpr int64_t kRowBatch = 64;
// Chunks a thread should take at least (about 10 us of work).
constexpr int64_t kChunkGrain = 8;

float penalty_at(const TokenStatsParams& params, int64_t row) {
  return params.penalties.as<const float>()[row * params.penalties.stride[0]];
}

Status check_rows(const TokenStatsParams& params) {
  const int64_t stored = params.logits.size[0];
  const int64_t extra = params.extra_logits.present() ? params.extra_logits.size[0] : 0;
  for (int64_t row = 0; row < params.ids.size[0] && params.row_index.present(); ++row) {
    const int64_t source = index_at(params.row_index, row);
    if (source < -1 || source >= stored + extra) {
      return data_error(kOp, "row_index", row,
                        "-1 or a row below " + std::to_string(stored + extra), source);
    }
  }
  const int64_t vocab_end = params.vocab_start + params.logits.size[1];
  for (int64_t row = 0; row < params.ids.size[0] && params.penalty_ids.present(); ++row) {
    const int64_t id = index_at(params.penalty_ids, row);
    // A shard sees ids of other shards; a whole vocabulary does not.
    if (!params.partial && id >= vocab_end) {
      return data_error(kOp, "penalty_ids", row, "an id below " + std::to_string(vocab_end), id);
    }
    const float penalty = penalty_at(params, row);
    if (!std::isfinite(penalty)) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": penalties[", row,
                        "]: expected a finite value, got ", penalty);
    }
  }
  return {};
}

Status check_draws(const TokenStatsParams& params) {
  if (!params.inv_temperature.present()) {
    return {};
  }
  for (int64_t row = 0; row < params.ids.size[0]; ++row) {
    const float factor =
        params.inv_temperature.as<const float>()[row * params.inv_temperature.stride[0]];
    if (!(factor >= 0.0F) || std::isinf(factor)) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": inv_temperature[", row,
                        "]: expected a finite value >= 0, got ", factor);
    }
    const double u = params.uniforms.as<const double>()[row * params.uniforms.stride[0]];
    if (factor != 0.0F && !(u > 0.0 && u < 1.0)) {
      return make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": uniforms[", row,
                        "]: expected a value in (0, 1), got ", u);
    }
  }
  return {};
}

StatsRow make_row(const TokenStatsParams& params, int64_t row) {
  StatsRow result;
  const int64_t source = params.row_index.present() ? index_at(params.row_index, row) : row;
  const int64_t stored = params.logits.size[0];
  if (source >= stored) {
    const TensorRef& extra = params.extra_logits;
    result.logits = element_at(extra, (source - stored) * extra.stride[0]);
  } else if (source >= 0) {
    result.logits = element_at(params.logits, source * params.logits.stride[0]);
  }
  if (params.penalty_ids.present()) {
    const int64_t id = index_at(params.penalty_ids, row);
    result.penalty_column = id >= params.vocab_start ? id - params.vocab_start : -1;
    result.penalty = penalty_at(params, row);
  }
  if (params.inv_temperature.present()) {
    result.inv_temperature =
        params.inv_temperature.as<const float>()[row * params.inv_temperature.stride[0]];
    result.uniform = params.uniforms.as<const double>()[row * params.uniforms.stride[0]];
  }
  return result;
}

/// Statistics of all chunks of rows [first_row, first_row + count).
void fill_records(const StatsContext& stats, const ExecContext& context, int64_t first_row,
                  int64_t count, StatsRecord* records) {
  const int64_t chunks = stats.num_chunks;
  parallel_ranges(context, count * chunks, kChunkGrain, [&](int64_t begin, int64_t end) {
    int64_t row_index = -1;
    StatsRow row;
    for (int64_t task = begin; task < end; ++task) {
      if (task / chunks != row_index) {
        row_index = task / chunks;
        row = make_row(stats.params, first_row + row_index);
      }
      if (row.logits != nullptr) {
        ChunkArgs chunk(stats, row, task % chunks);
        kernel_table().stats_chunk(chunk.args(), &records[task]);
      }
    }
  });
}

}  // namespace

Status token_stats(const TokenStatsParams& params, const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(check_rows(params));
  DIFFULEX_RETURN_IF_ERROR(check_draws(params));
  thread_local std::vector<StatsRecord> storage;
  const StatsContext stats(params);
  const int64_t rows = params.ids.size[0];
  const size_t needed = static_cast<size_t>(std::min(rows, kRowBatch) * stats.num_chunks);
  if (storage.size() < needed) {
    storage.resize(needed);
  }
  StatsRecord* records = storage.data();
  for (int64_t first_row = 0; first_row < rows; first_row += kRowBatch) {
    const int64_t count = std::min(kRowBatch, rows - first_row);
    fill_records(stats, context, first_row, count, records);
    // Finishing a row costs about as much as two chunks.
    const int64_t grain = std::max<int64_t>(1, 4 * kChunkGrain / stats.num_chunks + 1);
    parallel_ranges(context, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        finish_row(stats, make_row(params, first_row + row), records + row * stats.num_chunks,
                   first_row + row);
      }
    });
  }
  return {};
}

}  // namespace diffulex::cpu
