// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/routing.h"

namespace diffulex {

/// Whether the choice is restricted to the best groups of experts.
[[nodiscard]] constexpr bool is_grouped(const MoeTopkParams& params) noexcept {
  return params.n_group > 1 && params.topk_group > 0 && params.topk_group < params.n_group;
}

}  // namespace diffulex
