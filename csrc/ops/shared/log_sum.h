// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/export.h"

namespace diffulex {

/// The logarithm of a sum of exponentials, in two parts. They are subtracted one after the other:
/// next to a maximum of 3e38 (an infinite logit) their sum would lose the count of equal maxima.
struct LogSum {
  double max = 0.0;  // largest term
  double log = 0.0;  // log of the sum relative to exp(max)

  [[nodiscard]] DIFFULEX_HOST_DEVICE double value() const { return max + log; }
  /// log of exp(z) over the sum.
  [[nodiscard]] DIFFULEX_HOST_DEVICE double log_probability(double z) const {
    return (z - max) - log;
  }
};

}  // namespace diffulex
