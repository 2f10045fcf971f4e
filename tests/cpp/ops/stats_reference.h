// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "diffulex/ops/sampling.h"
#include "ops/test_tensor.h"

namespace diffulex::test {

/// fp64 reference of one row.
struct StatsReference {
  int64_t id = -1;
  double confidence = 0, max_prob = 0, second_prob = 0, entropy = 0, log_sum = 0, max_logit = 0,
         raw_confidence = 0, bad = 0;
  std::vector<int64_t> order;    // candidates, best first
  std::vector<double> prob;      // tempered, per id
  double boundary_distance = 1;  // of the draw
  double top_gap = kInf;
};

struct StatsRules {
  std::vector<int64_t> forbidden;
  int64_t limit = -1;
  ExclusionMode mode = ExclusionMode::kExclude;
  double softcap = 0, penalty = 0;
  int64_t penalty_id = -1;
  double inverse = 0, uniform = 0;
};

[[nodiscard]] inline double log_sum_exp(const std::vector<double>& z, const std::vector<bool>& in) {
  double top = -kInf;
  for (size_t i = 0; i < z.size(); ++i) {
    top = in[i] ? std::max(top, z[i]) : top;
  }
  double sum = 0;
  for (size_t i = 0; i < z.size(); ++i) {
    sum += in[i] && z[i] > -kInf ? std::exp(z[i] - top) : 0.0;
  }
  return top + std::log(sum);
}

[[nodiscard]] inline StatsReference reference_row(const std::vector<double>& row,
                                                  const StatsRules& rules) {
  StatsReference result;
  const size_t n = row.size();
  std::vector<double> z(n), key(n);
  std::vector<bool> candidate(n), normal(n);
  for (size_t i = 0; i < n; ++i) {
    double l = row[i];
    result.bad += std::isfinite(l) ? 0 : 1;
    l = std::isnan(l) ? -kInf : l;
    key[i] = l;
    z[i] = rules.softcap > 0 && l > -kInf ? rules.softcap * std::tanh(l / rules.softcap) : l;
    if (static_cast<int64_t>(i) == rules.penalty_id) {
      key[i] -= rules.penalty;
      z[i] -= rules.penalty;
    }
    const bool forbidden =
        rules.mode != ExclusionMode::kOff &&
        (std::count(rules.forbidden.begin(), rules.forbidden.end(), static_cast<int64_t>(i)) > 0 ||
         (rules.limit >= 0 && static_cast<int64_t>(i) >= rules.limit));
    candidate[i] = !forbidden && l > -kInf;
    normal[i] = (!forbidden || rules.mode == ExclusionMode::kExclude) && l > -kInf;
  }
  for (size_t i = 0; i < n; ++i) {
    if (candidate[i]) {
      result.order.push_back(static_cast<int64_t>(i));
    }
  }
  std::stable_sort(result.order.begin(), result.order.end(), [&](int64_t a, int64_t b) {
    return key[static_cast<size_t>(a)] > key[static_cast<size_t>(b)];
  });
  if (result.order.empty()) {
    return result;
  }
  std::vector<double> tempered(z);
  const double factor = rules.inverse == 0 ? 1.0 : rules.inverse;
  for (double& value : tempered) {
    value *= factor;
  }
  result.log_sum = log_sum_exp(tempered, normal);
  const double raw_log_sum = log_sum_exp(z, normal);
  for (size_t i = 0; i < n; ++i) {
    const double p = normal[i] ? std::exp(tempered[i] - result.log_sum) : 0.0;
    result.prob.push_back(candidate[i] ? p : 0.0);
    result.entropy -= p > 0 ? p * std::log(p) : 0.0;
  }
  const auto best = static_cast<size_t>(result.order[0]);
  result.id = result.order[0];
  result.max_prob = result.prob[best];
  result.second_prob =
      result.order.size() > 1 ? result.prob[static_cast<size_t>(result.order[1])] : 0.0;
  result.max_logit = z[best];
  if (rules.inverse != 0) {
    const double total = std::accumulate(result.prob.begin(), result.prob.end(), 0.0);
    double cumulative = 0;
    bool found = false;
    for (size_t i = 0; i < n; ++i) {
      cumulative += result.prob[i];
      result.boundary_distance =
          std::min(result.boundary_distance, std::abs(cumulative / total - rules.uniform));
      if (!found && candidate[i] && cumulative > rules.uniform * total) {
        result.id = static_cast<int64_t>(i);
        found = true;
      }
    }
  }
  result.confidence = result.prob[static_cast<size_t>(result.id)];
  result.raw_confidence = std::exp(z[static_cast<size_t>(result.id)] - raw_log_sum);
  return result;
}

}  // namespace diffulex::test
