// SPDX-License-Identifier: Apache-2.0
#pragma once

// Arguments of sample_filtered and the sorted-list oracle of its filters.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "diffulex/ops/sampling.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

/// Rows that are all tempered by 1 and not filtered until a test says so.
struct FilterCase {
  FilterCase(DType dtype, int64_t rows, int64_t vocab_size)
      : num_rows(rows), vocab(vocab_size), logits(dtype, {rows, vocab_size}) {
    const auto count = static_cast<size_t>(rows);
    for (int32_t row = 0; row < rows; ++row) {
      row_index.push_back(row);
    }
    inv_temperature.assign(count, 1.0F);
    uniforms.assign(count, .5);
    top_k.assign(count, 0);
    top_p.assign(count, 1.0F);
    min_p.assign(count, 0.0F);
    forbidden = {-1};
    clear();
  }

  void clear() {
    ids.assign(static_cast<size_t>(num_rows), -77);
    stats.assign(static_cast<size_t>(num_rows * kTokenStatsColumns), -77.0F);
  }

  template <typename Place>
  SampleFilteredParams params(const Place& place) {
    SampleFilteredParams result;
    result.logits = place(logits.ref());
    result.row_index = place(ref_of(row_index));
    result.inv_temperature = place(ref_of(inv_temperature));
    result.uniforms = place(ref_of(uniforms));
    result.top_k = place(ref_of(top_k));
    result.top_p = place(ref_of(top_p));
    result.min_p = place(ref_of(min_p));
    result.forbidden_ids = place(ref_of(forbidden));
    result.ids = place(ref_of(ids));
    result.stats = place(ref_of(stats, {num_rows, kTokenStatsColumns}));
    result.exclusion = exclusion;
    result.filter_order = order;
    result.confidence_space = space;
    result.vocab_limit = vocab_limit;
    return result;
  }

  int64_t num_rows, vocab;
  TestTensor logits;
  std::vector<int32_t> row_index, top_k;
  std::vector<float> inv_temperature, top_p, min_p, stats;
  std::vector<double> uniforms;
  std::vector<int64_t> forbidden, ids;
  ExclusionMode exclusion = ExclusionMode::kExclude;
  FilterOrder order = FilterOrder::kTopPFirst;
  ConfidenceSpace space = ConfidenceSpace::kProcessed;
  int64_t vocab_limit = -1;
};

/// Random rows, many with ties.
[[nodiscard]] inline FilterCase random_filter_case(std::mt19937_64* random, int64_t num_rows) {
  const DType dtypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  const int64_t vocab = pick(random, {2, 8, 50, 3001});
  FilterCase rows(dtypes[uniform(random, 0, 2)], num_rows, vocab);
  rows.logits.fill_normal(random, pick(random, {1, 3}) == 1 ? 1.0 : 4.0);
  const bool is_coarse = uniform(random, 0, 1) == 0;
  for (int64_t i = 0; is_coarse && i < rows.logits.elements(); ++i) {
    rows.logits.set_offset(i, std::round(rows.logits.get_offset(i) * 2.0) / 2.0);
  }
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    rows.inv_temperature[row] = static_cast<float>(pick(random, {0, 2, 3, 5})) / 3.0F;
    rows.uniforms[row] = (static_cast<double>((*random)() >> 12) + 0.5) / 4503599627370496.0;
    rows.top_k[row] = static_cast<int32_t>(pick(random, {0, 0, 1, 3, 40, 100000}));
    rows.top_p[row] = static_cast<float>(pick(random, {0, 313, 717, 953, 1000})) / 1000.0F;
    rows.min_p[row] = static_cast<float>(pick(random, {0, 0, 21, 513})) / 1000.0F;
  }
  rows.forbidden = {0, -1, vocab - 1};
  rows.exclusion = static_cast<ExclusionMode>(uniform(random, 0, 2));
  rows.order = static_cast<FilterOrder>(uniform(random, 0, 1));
  rows.vocab_limit = uniform(random, 0, 1) == 0 ? -1 : std::max<int64_t>(1, vocab - 2);
  return rows;
}

struct FilterOracle {
  bool active = false;
  int64_t id = -1;
  double probability = 0.0;
};

/// What one row draws, by sorting it.
[[nodiscard]] inline FilterOracle filter_oracle(const FilterCase& rows, int64_t row) {
  const auto index = static_cast<size_t>(row);
  const double beta = rows.inv_temperature[index];
  const int64_t top_k = rows.top_k[index];
  const double top_p = rows.top_p[index];
  const double min_p = rows.min_p[index];
  FilterOracle result;
  result.active = beta != 0.0 && (top_k > 0 || top_p < 1.0 || min_p > 0.0);
  if (!result.active) {
    return result;
  }
  std::vector<double> logit;
  std::vector<bool> is_candidate;
  for (int64_t id = 0; id < rows.vocab; ++id) {
    logit.push_back(rows.logits.get({rows.row_index[index], id}));
    const bool is_forbidden = std::count(rows.forbidden.begin(), rows.forbidden.end(), id) > 0 ||
                              (rows.vocab_limit >= 0 && id >= rows.vocab_limit);
    is_candidate.push_back(rows.exclusion == ExclusionMode::kOff || !is_forbidden);
  }
  std::vector<size_t> all;
  for (size_t id = 0; id < logit.size(); ++id) {
    if (is_candidate[id] || rows.exclusion == ExclusionMode::kExclude) {
      all.push_back(id);
    }
  }
  if (all.empty()) {
    return result;
  }
  std::stable_sort(all.begin(), all.end(), [&](size_t a, size_t b) { return logit[a] > logit[b]; });
  std::vector<size_t> kept = all;
  const auto mass = [&](const std::vector<size_t>& set) {
    double total = 0.0;
    for (const size_t id : set) {
      total += std::exp(beta * (logit[id] - logit[all[0]]));
    }
    return total;
  };
  const auto by_top_k = [&] {
    while (top_k > 0 && static_cast<int64_t>(kept.size()) > top_k &&
           logit[kept.back()] < logit[kept[static_cast<size_t>(top_k - 1)]]) {
      kept.pop_back();
    }
  };
  const auto by_min_p = [&] {
    while (min_p > 0.0 && std::exp(beta * (logit[kept.back()] - logit[kept[0]])) < min_p) {
      kept.pop_back();
    }
  };
  const auto by_top_p = [&] {
    if (top_p >= 1.0) {
      return;
    }
    const double limit = std::max(0.0, top_p) * mass(kept);
    double before = 0.0;
    size_t count = 0;
    for (; count < kept.size() && (count == 0 || before <= limit); ++count) {
      before += std::exp(beta * (logit[kept[count]] - logit[all[0]]));
    }
    kept.resize(count);
  };
  if (rows.order == FilterOrder::kTopPFirst) {
    by_top_p();
    by_min_p();
    by_top_k();
  } else {
    by_top_k();
    by_min_p();
    by_top_p();
  }
  std::vector<size_t> drawable;
  std::copy_if(kept.begin(), kept.end(), std::back_inserter(drawable),
               [&](size_t id) { return is_candidate[id]; });
  const auto probability = [&](size_t id, const std::vector<size_t>& set) {
    return std::exp(beta * (logit[id] - logit[all[0]])) / mass(set);
  };
  if (drawable.empty()) {
    const auto best =
        std::find_if(all.begin(), all.end(), [&](size_t id) { return is_candidate[id]; });
    result.id = best == all.end() ? -1 : static_cast<int64_t>(*best);
    result.probability = best == all.end() ? 0.0 : probability(*best, all);
    return result;
  }
  std::sort(drawable.begin(), drawable.end());
  const double target = rows.uniforms[index] * mass(drawable);
  double cumulative = 0.0;
  size_t chosen = drawable.back();
  for (const size_t id : drawable) {
    cumulative += std::exp(beta * (logit[id] - logit[all[0]]));
    if (cumulative > target) {
      chosen = id;
      break;
    }
  }
  result.id = static_cast<int64_t>(chosen);
  result.probability = probability(chosen, kept);
  return result;
}

}  // namespace diffulex::test
