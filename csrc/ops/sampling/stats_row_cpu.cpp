// SPDX-License-Identifier: Apache-2.0
#include "ops/sampling/stats_row_cpu.h"

#include <algorithm>
#include <cmath>

#include "ops/shared/log_sum.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct ChunkTag;

/// fp64 maximum, sum and weighted sum in chunk order.
struct Normalizer {
  double max = -INFINITY;
  double sum = 0.0;
  double weighted = 0.0;

  [[nodiscard]] LogSum log_sum() const { return {max, std::log(sum)}; }
};

template <typename Read>
Normalizer combine(const StatsRecord* records, int64_t count, const Read& read) {
  Normalizer total;
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    total.max = std::max(total.max, read(records[chunk]).max);
  }
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const Normalizer part = read(records[chunk]);
    if (part.sum > 0.0) {
      const double shift = part.max - total.max;
      const double factor = shift == 0.0 ? 1.0 : std::exp(shift);
      if (factor > 0.0) {
        total.sum += factor * part.sum;
        total.weighted += factor * (part.weighted + part.sum * shift);
      }
    }
  }
  return total;
}

/// The two best candidates of a row.
struct TopTwo {
  int64_t best_column = -1;
  int64_t second_column = -1;
  float best_key = -INFINITY;
  float second_key = -INFINITY;
  float best_z = -INFINITY;
  float second_z = -INFINITY;

  /// Columns are offered in ascending order per key, so that ties keep the lowest.
  void offer(int64_t column, float key, float z) {
    if (column < 0) {
      return;
    }
    if (key > best_key || (key == best_key && column < best_column)) {
      second_column = best_column;
      second_key = best_key;
      second_z = best_z;
      best_column = column;
      best_key = key;
      best_z = z;
    } else if (key > second_key || (key == second_key && column < second_column)) {
      second_column = column;
      second_key = key;
      second_z = z;
    }
  }
};

TopTwo top_two(const StatsRecord* records, int64_t count) {
  TopTwo top;
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const StatsRecord& record = records[chunk];
    const int64_t start = chunk * kStatsChunkColumns;
    top.offer(record.best_column < 0 ? -1 : start + record.best_column, record.best_key,
              record.best_z);
    top.offer(record.second_column < 0 ? -1 : start + record.second_column, record.second_key,
              record.second_z);
  }
  return top;
}

/// z of one column times the inverse temperature, in the finite range like the chunk sums.
double tempered(float z, float inv_temperature) {
  constexpr float kMax = 3.402823466e+38F;
  const float factor = inv_temperature == 0.0F ? 1.0F : inv_temperature;
  return std::clamp(z * factor, -kMax, kMax);
}

struct Choice {
  int64_t column = -1;
  float z = -INFINITY;  // before temperature
};

/// Column inside one chunk where the cumulative mass passes `target`; the last column with mass
/// if rounding leaves none.
Choice draw_in_chunk(const StatsContext& stats, const StatsRow& row, const StatsRecord& record,
                     int64_t chunk, double target) {
  const KernelTable& kernels = kernel_table();
  const ChunkArgs values(stats, row, chunk);
  const StatsChunkArgs& args = values.args();
  kernels.stats_values(args);
  // key is no longer needed: it takes the probabilities.
  std::copy_n(args.z, args.n, args.key);
  kernels.exp_shifted(args.key, row.inv_temperature, record.candidate_max, args.n);
  double cumulative = 0.0;
  int32_t last = -1;
  for (int32_t column = 0; column < args.n; ++column) {
    if (args.key[column] > 0.0F) {
      last = column;
      cumulative += static_cast<double>(args.key[column]);
      if (cumulative > target) {
        break;
      }
    }
  }
  return Choice{chunk * kStatsChunkColumns + last, args.z[last]};
}

Choice draw(const StatsContext& stats, const StatsRow& row, const StatsRecord* records) {
  const Normalizer total = combine(records, stats.num_chunks, [](const StatsRecord& record) {
    return Normalizer{record.candidate_max, record.candidate_sum, 0.0};
  });
  const double target = row.uniform * total.sum;
  double cumulative = 0.0;
  int64_t last_chunk = -1;
  double last_scale = 1.0;
  double before_last = 0.0;
  for (int64_t chunk = 0; chunk < stats.num_chunks; ++chunk) {
    const StatsRecord& record = records[chunk];
    const double scale =
        record.candidate_sum > 0.0F ? std::exp(double{record.candidate_max} - total.max) : 0.0;
    if (scale <= 0.0) {
      continue;
    }
    last_chunk = chunk;
    last_scale = scale;
    before_last = cumulative;
    cumulative += scale * static_cast<double>(record.candidate_sum);
    if (cumulative > target) {
      break;
    }
  }
  return draw_in_chunk(stats, row, records[last_chunk], last_chunk,
                       (target - before_last) / last_scale);
}

/// Descending list of the best candidates, ties by ascending column.
struct TopList {
  int32_t capacity = 0;
  int32_t count = 0;
  int64_t columns[kStatsMaxTopK] = {};
  float keys[kStatsMaxTopK] = {};
  float z[kStatsMaxTopK] = {};

  [[nodiscard]] bool full() const { return count == capacity; }

  /// Columns come in ascending order: an equal key goes after the ones that are there.
  void insert(int64_t column, float key, float value) {
    if (full() && key <= keys[count - 1]) {
      return;
    }
    int32_t position = full() ? count - 1 : count++;
    while (position > 0 && keys[position - 1] < key) {
      columns[position] = columns[position - 1];
      keys[position] = keys[position - 1];
      z[position] = z[position - 1];
      --position;
    }
    columns[position] = column;
    keys[position] = key;
    z[position] = value;
  }
};

/// A key at least `capacity` candidates reach: the capacity-th best of the chunk maxima.
float list_threshold(const StatsRecord* records, int64_t count, int32_t capacity) {
  constexpr float kLowest = -3.402823466e+38F;
  float best[kStatsMaxTopK];
  int32_t kept = 0;
  for (int64_t chunk = 0; chunk < count; ++chunk) {
    const float key = records[chunk].best_key;
    if (records[chunk].best_column < 0 || (kept == capacity && key <= best[kept - 1])) {
      continue;
    }
    int32_t position = kept == capacity ? kept - 1 : kept++;
    while (position > 0 && best[position - 1] < key) {
      best[position] = best[position - 1];
      --position;
    }
    best[position] = key;
  }
  return kept == capacity ? best[kept - 1] : kLowest;
}

void list_top(const StatsContext& stats, const StatsRow& row, const StatsRecord* records,
              TopList* list) {
  const KernelTable& kernels = kernel_table();
  const float threshold = list_threshold(records, stats.num_chunks, list->capacity);
  for (int64_t chunk = 0; chunk < stats.num_chunks; ++chunk) {
    const float needed =
        list->full() ? std::max(threshold, list->keys[list->count - 1]) : threshold;
    if (records[chunk].best_column < 0 || records[chunk].best_key < needed) {
      continue;
    }
    const ChunkArgs values(stats, row, chunk);
    const StatsChunkArgs& args = values.args();
    kernels.stats_values(args);
    float bound = needed;
    for (int64_t column = kernels.find_at_least(args.key, 0, args.n, bound); column < args.n;
         column = kernels.find_at_least(args.key, column + 1, args.n, bound)) {
      list->insert(chunk * kStatsChunkColumns + column, args.key[column], args.z[column]);
      bound = list->full() ? std::max(bound, list->keys[list->count - 1]) : bound;
    }
  }
}

void write_top(const StatsContext& stats, const TopList& list, float inv_temperature,
               const LogSum& log_sum, int64_t result_row) {
  const TokenStatsParams& params = stats.params;
  int64_t* ids = params.topk_ids.as<int64_t>() + result_row * params.topk_ids.stride[0];
  float* probs = params.topk_probs.as<float>() + result_row * params.topk_probs.stride[0];
  for (int32_t i = 0; i < list.capacity; ++i) {
    const bool filled = i < list.count;
    ids[i] = filled ? params.vocab_start + list.columns[i] : -1;
    if (params.partial) {
      probs[i] = filled ? list.z[i] : -INFINITY;
    } else {
      probs[i] = filled ? static_cast<float>(std::exp(
                              log_sum.log_probability(tempered(list.z[i], inv_temperature))))
                        : 0.0F;
    }
  }
}

struct RowResult {
  Normalizer all;
  TopTwo top;
  Choice choice;
  LogSum raw_log_sum;
  int64_t bad_count = 0;
};

void write_stats(const RowResult& result, float inv_temperature, float* stats) {
  std::fill_n(stats, static_cast<int32_t>(kTokenStatsColumns), 0.0F);
  stats[kStatsBadCount] = static_cast<float>(result.bad_count);
  if (result.top.best_column < 0) {
    return;
  }
  const LogSum log_sum = result.all.log_sum();
  const auto probability = [&](float z) {
    return static_cast<float>(std::exp(log_sum.log_probability(tempered(z, inv_temperature))));
  };
  stats[kStatsConfidence] = probability(result.choice.z);
  stats[kStatsMaxProb] = probability(result.top.best_z);
  stats[kStatsSecondProb] = result.top.second_column < 0 ? 0.0F : probability(result.top.second_z);
  stats[kStatsEntropy] = static_cast<float>(
      std::max(0.0, std::log(result.all.sum) - result.all.weighted / result.all.sum));
  stats[kStatsLogSumExp] = static_cast<float>(log_sum.value());
  stats[kStatsMaxLogit] = result.top.best_z;
  stats[kStatsRawConfidence] =
      static_cast<float>(std::exp(result.raw_log_sum.log_probability(double{result.choice.z})));
}

void write_partial(const RowResult& result, float* stats) {
  stats[0] = static_cast<float>(result.all.max);
  stats[1] = static_cast<float>(result.all.sum);
  stats[2] = static_cast<float>(result.all.weighted);
  stats[3] = result.top.best_z;
  stats[4] = result.top.second_z;
  stats[5] = result.top.best_z;
  stats[6] = 0.0F;
  stats[7] = static_cast<float>(result.bad_count);
}

}  // namespace

StatsContext::StatsContext(const TokenStatsParams& call)
    : params(call), vocab_size(call.logits.size[1]), num_chunks(stats_chunks(vocab_size)) {
  candidate_end = vocab_size;
  if (params.vocab_limit >= 0) {
    candidate_end = std::clamp<int64_t>(params.vocab_limit - params.vocab_start, 0, vocab_size);
  }
  for (int64_t i = 0; params.forbidden_ids.present() && i < params.forbidden_ids.size[0]; ++i) {
    const int64_t id = index_at(params.forbidden_ids, i);
    const int64_t column = id - params.vocab_start;
    if (id >= 0 && column >= 0 && column < candidate_end) {
      forbidden[num_forbidden++] = column;
    }
  }
}

ChunkArgs::ChunkArgs(const StatsContext& stats, const StatsRow& row, int64_t chunk) {
  const TokenStatsParams& params = stats.params;
  const int64_t start = chunk * kStatsChunkColumns;
  const int64_t n = std::min(kStatsChunkColumns, stats.vocab_size - start);
  float* scratch = thread_floats<ChunkTag>(2 * kStatsChunkColumns);
  args_.logits = row.logits + start * dtype_bytes(params.logits.dtype);
  args_.key = scratch;
  args_.z = scratch + kStatsChunkColumns;
  args_.n = static_cast<int32_t>(n);
  args_.candidate_end =
      static_cast<int32_t>(std::clamp<int64_t>(stats.candidate_end - start, 0, n));
  for (int32_t i = 0; i < stats.num_forbidden; ++i) {
    const int64_t column = stats.forbidden[i] - start;
    if (column >= 0 && column < n) {
      excluded_[args_.num_excluded++] = static_cast<int32_t>(column);
    }
  }
  args_.excluded = excluded_;
  const int64_t penalty_column = row.penalty_column - start;
  if (row.penalty_column >= 0 && penalty_column >= 0 && penalty_column < n) {
    args_.penalty_column = static_cast<int32_t>(penalty_column);
  }
  args_.dtype = params.logits.dtype;
  args_.exclusion = params.exclusion;
  args_.penalty = row.penalty;
  args_.softcap = params.softcap;
  args_.inv_temperature = row.inv_temperature;
}

void finish_row(const StatsContext& stats, const StatsRow& row, const StatsRecord* records,
                int64_t result_row) {
  const TokenStatsParams& params = stats.params;
  const int64_t chunks = row.logits == nullptr ? 0 : stats.num_chunks;
  RowResult result;
  result.all = combine(records, chunks, [](const StatsRecord& record) {
    return Normalizer{record.max, record.sum, record.weighted};
  });
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    result.bad_count += records[chunk].bad_count;
  }
  result.top = top_two(records, chunks);
  result.choice = Choice{result.top.best_column, result.top.best_z};
  if (result.top.best_column >= 0 && row.inv_temperature != 0.0F) {
    result.choice = draw(stats, row, records);
    const Normalizer raw = combine(records, chunks, [](const StatsRecord& record) {
      return Normalizer{record.raw_max, record.raw_sum, 0.0};
    });
    result.raw_log_sum = raw.log_sum();
  } else {
    result.raw_log_sum = result.all.log_sum();
  }
  params.ids.as<int64_t>()[result_row * params.ids.stride[0]] =
      result.choice.column < 0 ? -1 : params.vocab_start + result.choice.column;
  float* out = params.stats.as<float>() + result_row * params.stats.stride[0];
  if (params.partial) {
    write_partial(result, out);
  } else {
    write_stats(result, row.inv_temperature, out);
  }
  if (params.topk_ids.present()) {
    TopList list;
    list.capacity = static_cast<int32_t>(params.topk_ids.size[1]);
    if (chunks > 0) {
      list_top(stats, row, records, &list);
    }
    write_top(stats, list, row.inv_temperature, result.all.log_sum(), result_row);
  }
}

}  // namespace diffulex::cpu
