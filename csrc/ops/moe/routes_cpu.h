// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cpu {

/// Slot -> local expert of one step's routing.
class MoeRoutes final {
 public:
  MoeRoutes(const TensorRef& topk_ids, const TensorRef& expert_map, int64_t num_local_experts)
      : topk_ids_(topk_ids), expert_map_(expert_map), num_local_experts_(num_local_experts) {}

  /// Every id and map entry names an expert or none; kOutOfRange otherwise.
  [[nodiscard]] Status check(const char* op) const;

  /// Local expert of a slot, negative = none. Valid after check().
  [[nodiscard]] int32_t local(int64_t slot) const {
    const int32_t expert = id(slot);
    return expert < 0 || !expert_map_.present() ? expert : expert_map_.as<const int32_t>()[expert];
  }

 private:
  [[nodiscard]] int32_t id(int64_t slot) const {
    const int64_t top_k = topk_ids_.size[1];
    return topk_ids_.as<const int32_t>()[slot / top_k * topk_ids_.stride[0] + slot % top_k];
  }

  const TensorRef& topk_ids_;
  const TensorRef& expert_map_;
  int64_t num_local_experts_;
};

/// Writes the tiles of the positions [begins[e], ends[e]) of every expert; returns their number.
int32_t list_tiles(const int32_t* begins, const int32_t* ends, int32_t num_local_experts,
                   int32_t tile, int32_t* tile_expert, int32_t* tile_start);

/// The weighted sum of slot outputs; see MoeCombineParams.
struct CombineArgs {
  const MoeRoutes& routes;
  const TensorRef& slot_out;           // [T K, H]
  const TensorRef* weights = nullptr;  // [T, K]; null = 1
  const TensorRef& addend;
  const TensorRef& out;
  int64_t top_k = 1;
};
void combine_slots(const CombineArgs& args, const ExecContext& context);

}  // namespace diffulex::cpu
