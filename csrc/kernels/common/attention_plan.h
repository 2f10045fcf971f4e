// SPDX-License-Identifier: Apache-2.0
#pragma once

// Layout of the attention work list. Element 0 is the number of items, 1 rows_per_tile (M), 2 the
// split bound, 3 is 0. Items follow, largest work first, ties in the order (request, tile, split);
// elements past the last item are -1. KV heads are not listed: every item stands for all of them.

#include <cstdint>

#include "diffulex/export.h"
#include "diffulex/kernels/attention.h"
#include "kernels/common/row_interval.h"

namespace diffulex {

inline constexpr int32_t kPlanHeaderElems = 4;
inline constexpr int32_t kPlanItemElems = 4;

/// One entry of the work list, as stored.
struct PlanItem {
  int32_t request = 0;
  int32_t tile = 0;    // tokens [tile * tokens_per_tile, ...) of the request
  int32_t split = 0;   // in [0, splits)
  int32_t splits = 1;  // splits of this request
};

/// Keys one row tile of a request reads at most; 0 for a request without real rows. Positions
/// are not known to the plan, so a window is taken to end at the last row.
DIFFULEX_HOST_DEVICE constexpr int32_t plan_keys(int32_t context_len, int32_t num_valid,
                                                 int32_t mask_kind_bits, int32_t sliding_window) {
  if (num_valid <= 0) {
    return 0;
  }
  const bool cache_only = (mask_kind_bits & 0xFF) == static_cast<int32_t>(MaskKind::kCacheOnly);
  const int32_t keys = context_len + (cache_only ? 0 : num_valid);
  return sliding_window > 0 && sliding_window < keys - num_valid ? sliding_window + num_valid
                                                                 : keys;
}

}  // namespace diffulex
