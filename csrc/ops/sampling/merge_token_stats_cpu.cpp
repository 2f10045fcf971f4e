// SPDX-License-Identifier: Apache-2.0

// merge_token_stats: partial records of vocabulary shards (common/token_stats_config.h), combined
// in rank order in fp64. P parts, R rows.

#include <algorithm>
#include <cmath>

#include "ops/cpu_ops.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/log_sum.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

// Columns of a partial record.
enum PartialColumn : int32_t {
  kPartMax = 0,
  kPartSum = 1,
  kPartWeighted = 2,
  kPartBest = 3,
  kPartSecond = 4,
  kPartBestLogit = 5,
  kPartBadCount = 7,
};

struct Merged {
  double max = -INFINITY;
  double sum = 0.0;
  double weighted = 0.0;
  int64_t best_id = -1;
  float best = -INFINITY;
  float best_logit = -INFINITY;
  float second = -INFINITY;
  float bad_count = 0.0F;
};

const float* part_record(const MergeTokenStatsParams& params, int64_t part, int64_t row) {
  return params.part_stats.as<const float>() + part * params.part_stats.stride[0] +
         row * params.part_stats.stride[1];
}

void merge_best(Merged* merged, int64_t id, const float* record) {
  if (id < 0) {
    return;
  }
  const float best = record[kPartBest];
  const bool wins =
      merged->best_id < 0 || best > merged->best || (best == merged->best && id < merged->best_id);
  const float loser = wins ? merged->best : best;
  if (wins) {
    merged->best_id = id;
    merged->best = best;
    merged->best_logit = record[kPartBestLogit];
  }
  merged->second = std::max({merged->second, loser, record[kPartSecond]});
}

Merged merge_row(const MergeTokenStatsParams& params, int64_t row) {
  Merged merged;
  const int64_t parts = params.part_ids.size[0];
  for (int64_t part = 0; part < parts; ++part) {
    const float* record = part_record(params, part, row);
    merged.max = std::max(merged.max, static_cast<double>(record[kPartMax]));
    merged.bad_count += record[kPartBadCount];
    merge_best(&merged,
               params.part_ids.as<const int64_t>()[part * params.part_ids.stride[0] +
                                                   row * params.part_ids.stride[1]],
               record);
  }
  for (int64_t part = 0; part < parts; ++part) {
    const float* record = part_record(params, part, row);
    const double sum = record[kPartSum];
    const double shift = static_cast<double>(record[kPartMax]) - merged.max;
    const double factor = sum > 0.0 ? std::exp(shift) : 0.0;
    if (factor > 0.0) {
      merged.sum += factor * sum;
      merged.weighted += factor * (static_cast<double>(record[kPartWeighted]) + sum * shift);
    }
  }
  return merged;
}

void write_row(const MergeTokenStatsParams& params, int64_t row, const Merged& merged) {
  float* stats = params.stats.as<float>() + row * params.stats.stride[0];
  std::fill_n(stats, static_cast<int32_t>(kTokenStatsColumns), 0.0F);
  params.ids.as<int64_t>()[row * params.ids.stride[0]] = merged.best_id;
  stats[kStatsBadCount] = merged.bad_count;
  if (merged.best_id < 0) {
    return;
  }
  const LogSum log_sum{merged.max, std::log(merged.sum)};
  const auto probability = [&](float z) {
    return static_cast<float>(std::exp(log_sum.log_probability(static_cast<double>(z))));
  };
  stats[kStatsConfidence] = probability(merged.best);
  stats[kStatsMaxProb] = stats[kStatsConfidence];
  stats[kStatsSecondProb] = probability(merged.second);
  stats[kStatsEntropy] =
      static_cast<float>(std::max(0.0, std::log(merged.sum) - merged.weighted / merged.sum));
  stats[kStatsLogSumExp] = static_cast<float>(log_sum.value());
  stats[kStatsMaxLogit] = merged.best_logit;
  stats[kStatsRawConfidence] = stats[kStatsConfidence];
}

/// P-way merge of lists that are descending with ties by ascending id.
void merge_lists(const MergeTokenStatsParams& params, int64_t row, const LogSum& log_sum) {
  const int64_t parts = params.part_ids.size[0];
  const int64_t top_k = params.topk_ids.size[1];
  const TensorRef& part_ids = params.part_topk_ids;
  const TensorRef& part_values = params.part_topk_vals;
  const auto id_at = [&](int64_t part, int64_t i) {
    return part_ids.as<const int64_t>()[part * part_ids.stride[0] + row * part_ids.stride[1] + i];
  };
  const auto value_at = [&](int64_t part, int64_t i) {
    return part_values
        .as<const float>()[part * part_values.stride[0] + row * part_values.stride[1] + i];
  };
  int64_t* ids = params.topk_ids.as<int64_t>() + row * params.topk_ids.stride[0];
  float* probs = params.topk_probs.as<float>() + row * params.topk_probs.stride[0];
  thread_local std::vector<int64_t> heads;
  heads.assign(static_cast<size_t>(parts), 0);
  for (int64_t i = 0; i < top_k; ++i) {
    int64_t winner = -1;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t head = heads[static_cast<size_t>(part)];
      if (head >= top_k || id_at(part, head) < 0) {
        continue;
      }
      const int64_t best = winner < 0 ? 0 : heads[static_cast<size_t>(winner)];
      if (winner < 0 || value_at(part, head) > value_at(winner, best) ||
          (value_at(part, head) == value_at(winner, best) &&
           id_at(part, head) < id_at(winner, best))) {
        winner = part;
      }
    }
    if (winner < 0) {
      ids[i] = -1;
      probs[i] = 0.0F;
      continue;
    }
    const int64_t head = heads[static_cast<size_t>(winner)]++;
    ids[i] = id_at(winner, head);
    probs[i] = static_cast<float>(
        std::exp(log_sum.log_probability(static_cast<double>(value_at(winner, head)))));
  }
}

}  // namespace

Status merge_token_stats(const MergeTokenStatsParams& params, const ExecContext& context) {
  constexpr int64_t kMergeGrain = 256;
  parallel_ranges(context, params.ids.size[0], kMergeGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Merged merged = merge_row(params, row);
      write_row(params, row, merged);
      if (params.topk_ids.present()) {
        merge_lists(params, row, LogSum{merged.max, std::log(merged.sum)});
      }
    }
  });
  return {};
}

}  // namespace diffulex::cpu
