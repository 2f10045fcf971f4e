// SPDX-License-Identifier: Apache-2.0
#pragma once

// The entropy bound: positions in ascending order of entropy, ties by position, are accepted while
// the sum of the entropies before them stays within the bound.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace diffulex::cpu {

/// Positions 0..n-1 of one canvas with their entropies; reusable.
class EntropyOrder final {
 public:
  void clear() { entropies_.clear(); }
  /// Adds the next position. NaN orders last, like an infinite entropy.
  void add(float entropy) { entropies_.push_back(std::isnan(entropy) ? INFINITY : entropy); }
  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(entropies_.size()); }

  /// Mean entropy in fp64, 0 without positions.
  [[nodiscard]] double mean() const {
    double total = 0.0;
    for (const float entropy : entropies_) {
      total += static_cast<double>(entropy);
    }
    return entropies_.empty() ? 0.0 : total / static_cast<double>(entropies_.size());
  }

  /// Calls accept(position) for the first of the order and for every other whose exclusive prefix
  /// sum, in fp64, is at most `bound`.
  template <typename Accept>
  void for_each_within(float bound, const Accept& accept) {
    order_.resize(entropies_.size());
    for (size_t i = 0; i < order_.size(); ++i) {
      order_[i] = static_cast<int64_t>(i);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
      return entropies_[static_cast<size_t>(a)] < entropies_[static_cast<size_t>(b)];
    });
    double before = 0.0;
    for (size_t rank = 0; rank < order_.size(); ++rank) {
      if (rank == 0 || before <= static_cast<double>(bound)) {
        accept(order_[rank]);
      }
      before += static_cast<double>(entropies_[static_cast<size_t>(order_[rank])]);
    }
  }

 private:
  std::vector<float> entropies_;
  std::vector<int64_t> order_;
};

}  // namespace diffulex::cpu
