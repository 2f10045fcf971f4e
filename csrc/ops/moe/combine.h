// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cuda {

/// The weighted sum of slot outputs; shared by moe_combine and fused_moe.
struct SlotSum {
  const TensorRef& slot_out;    // [T K, H]
  const TensorRef* weights;     // [T, K]; null = 1
  const TensorRef& topk_ids;    // [T, K]
  const TensorRef& expert_map;  // [E], optional
  int64_t num_experts;          // ids from here on are none
  int64_t num_local_experts;    // map entries from here on are none
  const TensorRef& addend;      // [T, H], optional
  const TensorRef& out;         // [T, H]
  bool is_routed_before;        // all but slot_out; by a launch that waited, then triggered
};
[[nodiscard]] Status launch_slot_sum(const char* where, const SlotSum& sum,
                                     const ExecContext& context);

}  // namespace diffulex::cuda
