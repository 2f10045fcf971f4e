// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shapes of the dense product for few rows. A CTA computes up to 192 rows of W (the M of the
// warpgroup product, columns of the result) times kRows rows of x (its N) over a share of the
// depth. How many rows of W, stages and lines a stage, the plan says: see LinearPlan.

#include <cstdint>

#include "diffulex/ops/linear.h"
#include "ops/linear/config.h"

namespace diffulex::cuda::sm90 {

template <typename Element, int kRowCount>
struct LinearTraits final {
  using T = Element;
  static constexpr int kRows = kRowCount;    // of x
  static constexpr int kGroups = kRows / 8;  // accumulators of a thread, four floats each
  static constexpr int kLineBytes = static_cast<int>(kFewRowsDepth * sizeof(T));  // the swizzle

  static constexpr int kMaxGroups = kLinearTileWeightRows / 64;  // warpgroups of 64 rows of W
  static constexpr int kMaxThreads = 128 * kMaxGroups + 32;      // and the warp that copies

  static_assert(sizeof(T) == 2, "a line is 64 elements of 16 bits");
  static_assert(kLineBytes == 128, "a line is a row of the swizzle");
};

}  // namespace diffulex::cuda::sm90
