// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/export.h"

namespace diffulex {

/// Division by a number known on the host: a high product and a shift instead of some twenty
/// dependent instructions.
struct FastDiv final {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  /// For a divisor in [1, 2^31].
  static constexpr FastDiv of(uint32_t divisor) {
    FastDiv result;
    result.divisor = divisor;
    while ((uint64_t{1} << result.shift) < divisor) {
      ++result.shift;
    }
    const uint64_t excess = (uint64_t{1} << result.shift) - divisor;
    result.multiplier = static_cast<uint32_t>((excess << 32) / divisor + 1);
    return result;
  }

  /// value / divisor for a value in [0, 2^31).
  DIFFULEX_HOST_DEVICE constexpr int32_t divide(int32_t value) const {
    const uint32_t n = static_cast<uint32_t>(value);
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(multiplier) * n) >> 32);
    return static_cast<int32_t>((high + n) >> shift);
  }
};

}  // namespace diffulex
