// SPDX-License-Identifier: Apache-2.0

// sample_filtered on the CPU: rows in parallel. All filters keep leading parts of one order (logit
// descending, id ascending), so each becomes a cut in that order, found with three-level histograms
// of order-preserving 32-bit keys. Sums are fp64 in id order.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "ops/cpu_ops.h"
#include "ops/sampling/token_stats_config.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/half.h"
#include "ops/shared/log_sum.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

constexpr const char* kOp = "sample_filtered";
constexpr float kLargest = 3.402823466e+38F;

/// One level of the descent to a key: bits [shift, shift + 11).
struct KeyLevel {
  int shift = 0;
  uint32_t bins = 0;
};
// Bins of one level fit the first cache.
constexpr KeyLevel kKeyLevels[] = {{21, 2048}, {10, 2048}, {0, 1024}};
constexpr size_t kBins = 2048;

/// The filters of one row.
struct RowFilters {
  int64_t top_k = 0;   // 0 = off
  float top_p = 1.0F;  // >= 1 = off
  float min_p = 0.0F;  // 0 = off
  float inv_temperature = 0.0F;

  [[nodiscard]] bool active() const {
    return inv_temperature != 0.0F && (top_k > 0 || top_p < 1.0F || min_p > 0.0F);
  }
};

float float_at(const TensorRef& tensor, int64_t row, float absent) {
  return tensor.present() ? tensor.as<const float>()[row * tensor.stride[0]] : absent;
}

RowFilters row_filters(const SampleFilteredParams& params, int64_t row) {
  RowFilters filters;
  filters.inv_temperature = float_at(params.inv_temperature, row, 0.0F);
  filters.top_k = params.top_k.present() ? std::max<int64_t>(0, index_at(params.top_k, row)) : 0;
  filters.top_p = float_at(params.top_p, row, 1.0F);
  filters.min_p = std::max(0.0F, float_at(params.min_p, row, 0.0F));
  return filters;
}

Status check_value(bool is_valid, const char* name, int64_t row, const char* expected,
                   double value) {
  return is_valid ? Status::ok_status()
                  : make_error(StatusCode::kOutOfRange, "diffulex::", kOp, ": ", name, "[", row,
                               "]: expected ", expected, ", got ", value);
}

Status check_row(const SampleFilteredParams& params, int64_t row) {
  const int64_t stored = params.logits.size[0];
  const int64_t extra = params.extra_logits.present() ? params.extra_logits.size[0] : 0;
  if (params.row_index.present()) {
    const int64_t source = index_at(params.row_index, row);
    if (source < -1 || source >= stored + extra) {
      return data_error(kOp, "row_index", row,
                        "-1 or a row below " + std::to_string(stored + extra), source);
    }
  }
  const float factor = float_at(params.inv_temperature, row, 0.0F);
  DIFFULEX_RETURN_IF_ERROR(check_value(factor >= 0.0F && !std::isinf(factor), "inv_temperature",
                                       row, "a finite value >= 0", factor));
  const float top_p = float_at(params.top_p, row, 1.0F);
  DIFFULEX_RETURN_IF_ERROR(check_value(!std::isnan(top_p), "top_p", row, "a number", top_p));
  const float min_p = float_at(params.min_p, row, 0.0F);
  DIFFULEX_RETURN_IF_ERROR(check_value(min_p <= 1.0F, "min_p", row, "a value <= 1", min_p));
  if (row_filters(params, row).active()) {
    const double u = params.uniforms.as<const double>()[row * params.uniforms.stride[0]];
    DIFFULEX_RETURN_IF_ERROR(
        check_value(u > 0.0 && u < 1.0, "uniforms", row, "a value in (0, 1)", u));
  }
  return {};
}

/// Order-preserving bits of a float; -0 and +0 are equal.
uint32_t ordered_bits(float value) {
  value += 0.0F;
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// One column of a row.
struct Column {
  float x = -INFINITY;      // sanitised stored value, what the greedy choice compares
  float logit = -INFINITY;  // after the soft cap; -inf = not in the normaliser
  float z = -INFINITY;      // after the temperature
  uint32_t key = 0;         // order of logit; 0 = not in the normaliser
  bool is_candidate = false;
  bool is_kept = false;
  double mass = 0.0;  // exp(z - largest z)
};

struct Bin {
  int64_t count = 0;
  double mass = 0.0;
};

/// A cut in the order: everything above `key`, and `ties` of the columns at it, lowest ids first.
struct Cut {
  uint32_t key = 0;
  int64_t ties = INT64_MAX;
};

/// One row on its way through the filters; reused, so that steady state does not allocate.
class FilteredRow final {
 public:
  /// False if no candidate is finite.
  bool load(const SampleFilteredParams& params, const char* source, const RowFilters& filters);
  void filter(const RowFilters& filters, FilterOrder order);
  /// Column drawn by `uniform`; the best candidate if no candidate is kept.
  void draw(double uniform);
  void write(ConfidenceSpace space, float* stats) const;

  [[nodiscard]] int64_t chosen() const { return chosen_; }
  [[nodiscard]] int64_t bad_count() const { return bad_count_; }

 private:
  void keep(uint32_t lowest_key, const Cut& cut);
  uint32_t fill_bins(const KeyLevel& level, uint32_t prefix, uint32_t lowest_key);
  [[nodiscard]] uint32_t top_k_key(int64_t top_k);
  [[nodiscard]] Cut top_p_cut(double limit, uint32_t lowest_key);
  [[nodiscard]] double tie_mass(uint32_t key) const;

  std::vector<Column> columns_;
  std::vector<Bin> bins_;
  double largest_z_ = -INFINITY;
  double largest_logit_ = -INFINITY;
  int64_t bad_count_ = 0;
  int64_t num_counted_ = 0;
  int64_t chosen_ = -1;
  bool is_empty_ = false;  // no candidate survived the filters
};

float stored_value(const SampleFilteredParams& params, const char* source, int64_t column) {
  uint16_t bits = 0;
  float value = 0.0F;
  switch (params.logits.dtype) {
    case DType::kBF16:
      std::memcpy(&bits, source + column * 2, sizeof(bits));
      return bf16_to_float(bits);
    case DType::kF16:
      std::memcpy(&bits, source + column * 2, sizeof(bits));
      return f16_to_float(bits);
    default:
      std::memcpy(&value, source + column * 4, sizeof(value));
      return value;
  }
}

bool FilteredRow::load(const SampleFilteredParams& params, const char* source,
                       const RowFilters& filters) {
  const int64_t num_columns = params.logits.size[1];
  columns_.assign(static_cast<size_t>(num_columns), Column{});
  largest_z_ = -INFINITY;
  largest_logit_ = -INFINITY;
  bad_count_ = 0;
  num_counted_ = 0;
  const bool is_off = params.exclusion == ExclusionMode::kOff;
  const int64_t limit = is_off || params.vocab_limit < 0 ? num_columns : params.vocab_limit;
  for (int64_t id = 0; id < num_columns; ++id) {
    columns_[static_cast<size_t>(id)].is_candidate = id < limit;
  }
  for (int64_t i = 0; !is_off && params.forbidden_ids.present() && i < params.forbidden_ids.size[0];
       ++i) {
    const int64_t id = index_at(params.forbidden_ids, i);
    if (id >= 0 && id < num_columns) {
      columns_[static_cast<size_t>(id)].is_candidate = false;
    }
  }
  bool any_candidate = false;
  for (int64_t id = 0; id < num_columns; ++id) {
    Column& column = columns_[static_cast<size_t>(id)];
    const float value = stored_value(params, source, id);
    bad_count_ += std::isfinite(value) ? 0 : 1;
    column.x = std::isnan(value) ? -INFINITY : std::min(value, kLargest);
    column.is_candidate = column.is_candidate && column.x != -INFINITY;
    any_candidate = any_candidate || column.is_candidate;
    const bool is_counted =
        column.x != -INFINITY &&
        (column.is_candidate || params.exclusion != ExclusionMode::kRenormalize);
    if (!is_counted) {
      continue;
    }
    column.logit =
        params.softcap > 0.0F ? params.softcap * std::tanh(column.x / params.softcap) : column.x;
    column.z = std::clamp(column.logit * filters.inv_temperature, -kLargest, kLargest);
    column.key = ordered_bits(column.logit);
    ++num_counted_;
    largest_z_ = std::max(largest_z_, static_cast<double>(column.z));
    largest_logit_ = std::max(largest_logit_, static_cast<double>(column.logit));
  }
  for (Column& column : columns_) {
    column.mass = column.key == 0 ? 0.0 : std::exp(static_cast<double>(column.z) - largest_z_);
  }
  return any_candidate;
}

/// Sums the columns from `lowest_key` up whose key begins with `prefix` by their bits of `level`;
/// returns the highest bin filled.
uint32_t FilteredRow::fill_bins(const KeyLevel& level, uint32_t prefix, uint32_t lowest_key) {
  bins_.assign(kBins, Bin{});
  uint32_t highest = 0;
  for (const Column& column : columns_) {
    // Shifted in 64 bits: the prefix of the first level is empty.
    const auto above = static_cast<uint32_t>(uint64_t{column.key} >> level.shift);
    if (column.key >= lowest_key && above / level.bins == prefix) {
      const uint32_t place = above % level.bins;
      ++bins_[place].count;
      bins_[place].mass += column.mass;
      highest = std::max(highest, place);
    }
  }
  return highest;
}

/// Key of the k-th largest logit; 0 if there are no more than k.
uint32_t FilteredRow::top_k_key(int64_t top_k) {
  if (num_counted_ <= top_k) {
    return 0;
  }
  int64_t remaining = top_k;
  uint32_t prefix = 0;
  for (const KeyLevel& level : kKeyLevels) {
    uint32_t place = fill_bins(level, prefix, 1);
    while (bins_[place].count < remaining) {
      remaining -= bins_[place].count;
      --place;
    }
    prefix = prefix * level.bins + place;
  }
  return prefix;
}

double FilteredRow::tie_mass(uint32_t key) const {
  for (const Column& column : columns_) {
    if (column.key == key) {
      return column.mass;
    }
  }
  return 0.0;
}

/// Keeps a column of the order while the mass before it, from `lowest_key` up, is at most `limit`.
Cut FilteredRow::top_p_cut(double limit, uint32_t lowest_key) {
  Cut cut;
  double above = 0.0;
  int64_t count = 0;
  for (const KeyLevel& level : kKeyLevels) {
    // The lowest filled bin whose mass above is within the limit; the highest in any case.
    const uint32_t highest = fill_bins(level, cut.key, lowest_key);
    uint32_t chosen = highest;
    double sum = above;
    for (uint32_t place = highest + 1; place-- > 0;) {
      if (bins_[place].count == 0) {
        continue;
      }
      if (place < highest && sum > limit) {
        break;
      }
      chosen = place;
      above = sum;
      sum += bins_[place].mass;
    }
    cut.key = cut.key * level.bins + chosen;
    count = bins_[chosen].count;
  }
  const double mass = tie_mass(cut.key);
  cut.ties = count;
  if (mass > 0.0) {
    const double kept = std::floor((limit - above) / mass) + 1.0;
    cut.ties = static_cast<int64_t>(std::clamp(kept, 1.0, static_cast<double>(count)));
  }
  return cut;
}

void FilteredRow::keep(uint32_t lowest_key, const Cut& cut) {
  int64_t ties = 0;
  for (Column& column : columns_) {
    const bool is_tie = column.key == cut.key;
    column.is_kept = column.key != 0 && column.key >= lowest_key &&
                     (column.key > cut.key || (is_tie && ties < cut.ties));
    ties += is_tie ? 1 : 0;
  }
}

void FilteredRow::filter(const RowFilters& filters, FilterOrder order) {
  uint32_t lowest_key = 1;
  if (filters.top_k > 0) {
    lowest_key = std::max(lowest_key, top_k_key(filters.top_k));
  }
  if (filters.min_p > 0.0F) {
    // The largest probability survives every other filter, so this cut does not depend on the
    // order.
    const double lowest_z = largest_z_ + std::log(static_cast<double>(filters.min_p));
    uint32_t key = UINT32_MAX;
    for (const Column& column : columns_) {
      if (column.key != 0 && static_cast<double>(column.z) >= lowest_z) {
        key = std::min(key, column.key);
      }
    }
    lowest_key = std::max(lowest_key, key);
  }
  Cut cut;
  if (filters.top_p < 1.0F) {
    // Top-p sees the whole distribution or what the other two left.
    const uint32_t first_key = order == FilterOrder::kTopKFirst ? lowest_key : 1;
    double total = 0.0;
    for (const Column& column : columns_) {
      total += column.key >= first_key ? column.mass : 0.0;
    }
    cut = top_p_cut(std::max(0.0, static_cast<double>(filters.top_p)) * total, first_key);
  }
  keep(lowest_key, cut);
}

void FilteredRow::draw(double uniform) {
  double total = 0.0;
  int64_t last = -1;
  int64_t best = -1;
  for (size_t id = 0; id < columns_.size(); ++id) {
    const Column& column = columns_[id];
    if (!column.is_candidate) {
      continue;
    }
    if (best < 0 || column.x > columns_[static_cast<size_t>(best)].x) {
      best = static_cast<int64_t>(id);
    }
    if (column.is_kept) {
      total += column.mass;
      last = static_cast<int64_t>(id);
    }
  }
  is_empty_ = last < 0;
  chosen_ = is_empty_ ? best : last;
  double cumulative = 0.0;
  for (size_t id = 0; !is_empty_ && id < columns_.size(); ++id) {
    const Column& column = columns_[id];
    if (column.is_candidate && column.is_kept) {
      cumulative += column.mass;
      if (cumulative > uniform * total) {
        chosen_ = static_cast<int64_t>(id);
        break;
      }
    }
  }
}

void FilteredRow::write(ConfidenceSpace space, float* stats) const {
  const bool is_whole = is_empty_ || space == ConfidenceSpace::kTempered;
  double sum = 0.0;
  double weighted = 0.0;
  double raw_sum = 0.0;
  const Column* best = nullptr;
  const Column* second = nullptr;
  for (const Column& column : columns_) {
    if (column.key == 0) {
      continue;
    }
    raw_sum += std::exp(static_cast<double>(column.logit) - largest_logit_);
    if (!is_whole && !column.is_kept) {
      continue;
    }
    sum += column.mass;
    if (column.mass > 0.0) {
      weighted += column.mass * (static_cast<double>(column.z) - largest_z_);
    }
    if (column.is_candidate) {
      if (best == nullptr || column.x > best->x) {
        second = best;
        best = &column;
      } else if (second == nullptr || column.x > second->x) {
        second = &column;
      }
    }
  }
  const Column& chosen = columns_[static_cast<size_t>(chosen_)];
  const LogSum log_sum{largest_z_, std::log(sum)};
  const LogSum raw_log_sum{largest_logit_, std::log(raw_sum)};
  const auto probability = [&](const Column* column) {
    return column == nullptr
               ? 0.0F
               : static_cast<float>(std::exp(log_sum.log_probability(double{column->z})));
  };
  stats[kStatsConfidence] = probability(&chosen);
  stats[kStatsMaxProb] = probability(best);
  stats[kStatsSecondProb] = probability(second);
  stats[kStatsEntropy] = static_cast<float>(std::max(0.0, std::log(sum) - weighted / sum));
  stats[kStatsLogSumExp] = static_cast<float>(log_sum.value());
  stats[kStatsMaxLogit] = best->logit;
  stats[kStatsRawConfidence] =
      static_cast<float>(std::exp(raw_log_sum.log_probability(double{chosen.logit})));
}

const char* source_row(const SampleFilteredParams& params, int64_t row) {
  const int64_t source = params.row_index.present() ? index_at(params.row_index, row) : row;
  const int64_t stored = params.logits.size[0];
  if (source < 0) {
    return nullptr;
  }
  return source < stored
             ? element_at(params.logits, source * params.logits.stride[0])
             : element_at(params.extra_logits, (source - stored) * params.extra_logits.stride[0]);
}

void run_row(const SampleFilteredParams& params, int64_t row, FilteredRow* work) {
  const RowFilters filters = row_filters(params, row);
  if (!filters.active()) {
    return;
  }
  float* stats = params.stats.as<float>() + row * params.stats.stride[0];
  int64_t* id = params.ids.as<int64_t>() + row * params.ids.stride[0];
  std::fill_n(stats, static_cast<int32_t>(kTokenStatsColumns), 0.0F);
  *id = -1;
  const char* source = source_row(params, row);
  if (source == nullptr) {
    return;
  }
  const bool has_candidate = work->load(params, source, filters);
  stats[kStatsBadCount] = static_cast<float>(work->bad_count());
  if (!has_candidate) {
    return;
  }
  work->filter(filters, params.filter_order);
  work->draw(params.uniforms.as<const double>()[row * params.uniforms.stride[0]]);
  work->write(params.confidence_space, stats);
  *id = work->chosen();
}

}  // namespace

Status sample_filtered(const SampleFilteredParams& params, const ExecContext& context) {
  const int64_t num_rows = params.ids.size[0];
  for (int64_t row = 0; row < num_rows; ++row) {
    DIFFULEX_RETURN_IF_ERROR(check_row(params, row));
  }
  parallel_ranges(context, num_rows, row_grain(params.logits.size[1]),
                  [&](int64_t begin, int64_t end) {
                    thread_local FilteredRow work;
                    for (int64_t row = begin; row < end; ++row) {
                      run_row(params, row, &work);
                    }
                  });
  return {};
}

}  // namespace diffulex::cpu
