// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include "ops/cpu_ops.h"
#include "ops/moe/routes_cpu.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {

Status MoeRoutes::check(const char* op) const {
  const int64_t num_experts = expert_map_.present() ? expert_map_.size[0] : num_local_experts_;
  for (int64_t expert = 0; expert_map_.present() && expert < num_experts; ++expert) {
    const int32_t local = expert_map_.as<const int32_t>()[expert];
    if (local >= num_local_experts_) {
      return data_error(op, "expert_map", expert,
                        "a local expert below " + std::to_string(num_local_experts_), local);
    }
  }
  for (int64_t slot = 0; slot < topk_ids_.numel(); ++slot) {
    if (id(slot) >= num_experts) {
      return data_error(op, "topk_ids", slot, "an expert below " + std::to_string(num_experts),
                        id(slot));
    }
  }
  return {};
}

int32_t list_tiles(const int32_t* begins, const int32_t* ends, int32_t num_local_experts,
                   int32_t tile, int32_t* tile_expert, int32_t* tile_start) {
  int32_t num_tiles = 0;
  for (int32_t expert = 0; expert < num_local_experts; ++expert) {
    // 64 bits: a begin plus a tile may pass the largest int32.
    for (int64_t start = begins[expert]; start < ends[expert]; start += tile) {
      tile_expert[num_tiles] = expert;
      tile_start[num_tiles] = static_cast<int32_t>(start);
      ++num_tiles;
    }
  }
  return num_tiles;
}

Status moe_permute(const MoePermuteParams& params, const ExecContext& /*context*/) {
  const MoeRoutes routes(params.topk_ids, params.expert_map, params.num_local_experts);
  DIFFULEX_RETURN_IF_ERROR(routes.check("moe_permute"));
  const int64_t num_slots = params.topk_ids.numel();
  int32_t* offsets = params.expert_offsets.as<int32_t>();
  int32_t* sorted = params.sorted_slots.as<int32_t>();
  std::fill_n(offsets, params.num_local_experts + 1, 0);
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int32_t expert = routes.local(slot);
    if (expert >= 0) {
      ++offsets[expert + 1];
    }
  }
  for (int32_t expert = 0; expert < params.num_local_experts; ++expert) {
    offsets[expert + 1] += offsets[expert];
  }
  // Filling moves each begin to its end, which is the begin of the next expert: undone afterwards.
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int32_t expert = routes.local(slot);
    if (expert >= 0) {
      sorted[offsets[expert]++] = static_cast<int32_t>(slot);
    }
  }
  std::copy_backward(offsets, offsets + params.num_local_experts,
                     offsets + params.num_local_experts + 1);
  offsets[0] = 0;
  const int32_t num_active = offsets[params.num_local_experts];
  std::fill(sorted + num_active, sorted + num_slots, -1);
  int32_t* tile_expert = params.tile_expert.as<int32_t>();
  int32_t* tile_start = params.tile_start.as<int32_t>();
  const int32_t num_tiles = list_tiles(offsets, offsets + 1, params.num_local_experts, params.tile,
                                       tile_expert, tile_start);
  std::fill(tile_expert + num_tiles, tile_expert + params.tile_expert.size[0], -1);
  std::fill(tile_start + num_tiles, tile_start + params.tile_start.size[0], -1);
  int32_t* counters = params.counters.as<int32_t>();
  counters[0] = num_tiles;
  counters[1] = num_active;
  return {};
}

}  // namespace diffulex::cpu
