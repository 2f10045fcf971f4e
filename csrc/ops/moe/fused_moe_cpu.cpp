// SPDX-License-Identifier: Apache-2.0

// fused_moe and fused_experts_packed: sort or read the grouping, two products per expert tile, sum.

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "ops/cpu_ops.h"
#include "ops/moe/config.h"
#include "ops/moe/experts_cpu.h"
#include "ops/moe/routes_cpu.h"
#include "ops/shared/data_checks_cpu.h"
#include "ops/shared/parallel.h"

namespace diffulex::cpu {
namespace {

struct MoeWorkspace;

/// Scratch of the calling thread; the workers of the call share it.
char* thread_bytes(size_t bytes) {
  void* floats = thread_floats<MoeWorkspace>(static_cast<int64_t>(bytes / sizeof(float)) + 1);
  return static_cast<char*>(floats);
}

/// One-dimensional int32 tensor inside the scratch.
TensorRef scratch_ints(char* workspace, size_t offset, int64_t count) {
  TensorRef ref;
  ref.data = workspace + offset;
  ref.dtype = DType::kI32;
  ref.rank = 1;
  ref.size[0] = count;
  ref.stride[0] = 1;
  return ref;
}

TensorRef slot_rows(const FusedMoeParams& params, void* data) {
  TensorRef ref;
  ref.data = data;
  ref.dtype = params.x.dtype;
  ref.rank = 2;
  ref.size[0] = params.topk_ids.numel();
  ref.size[1] = params.x.size[1];
  ref.stride[0] = ref.size[1];
  ref.stride[1] = 1;
  return ref;
}

Status check_counts(const FusedExpertsPackedParams& params) {
  const int32_t* counts = params.expert_offsets.as<const int32_t>();
  for (int64_t expert = 0; expert < params.w13.size[0]; ++expert) {
    if (counts[expert] < 0 || counts[expert] > params.rows_per_expert) {
      return data_error("fused_experts_packed", "expert_offsets", expert,
                        "a count in [0, " + std::to_string(params.rows_per_expert) + "]",
                        counts[expert]);
    }
  }
  return {};
}

/// Tiles of the rows of every expert.
MoeTiles packed_tiles(const FusedExpertsPackedParams& params, char* workspace,
                      const MoeScratch& scratch, int32_t* begins, int32_t* ends) {
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const int32_t* offsets = params.expert_offsets.as<const int32_t>();
  for (int32_t expert = 0; expert < num_local; ++expert) {
    const bool is_batched = params.rows_per_expert > 0;
    begins[expert] = is_batched ? expert * params.rows_per_expert : offsets[expert];
    ends[expert] = is_batched ? begins[expert] + offsets[expert] : offsets[expert + 1];
  }
  void* tile_expert = workspace + scratch.tile_expert;
  void* tile_start = workspace + scratch.tile_start;
  MoeTiles tiles;
  tiles.expert = static_cast<int32_t*>(tile_expert);
  tiles.start = static_cast<int32_t*>(tile_start);
  tiles.ends = ends;
  tiles.num_tiles = list_tiles(begins, ends, num_local, kMoeCpuTile, tiles.expert, tiles.start);
  return tiles;
}

}  // namespace

Status fused_moe(const FusedMoeParams& params, const ExecContext& context) {
  if (params.w13_scale.present()) {
    return make_error(
        StatusCode::kUnsupported,
        "diffulex::fused_moe: w13_scale: expected none on the CPU, whose experts in low"
        " precision are products of their own, got a tensor");
  }
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const MoeRoutes routes(params.topk_ids, params.expert_map, num_local);
  DIFFULEX_RETURN_IF_ERROR(routes.check("fused_moe"));
  const auto top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  const int64_t num_slots = params.topk_ids.numel();
  const MoeScratch scratch = fused_moe_scratch(
      {params.x.size[0], top_k, num_local, params.x.size[1], params.w2.size[2], params.x.dtype},
      Device::kCpu);
  const int64_t max_tiles = moe_max_tiles(num_slots, num_local, kMoeCpuTile);
  char* workspace = thread_bytes(scratch.total);
  MoePermuteParams permute;
  permute.topk_ids = params.topk_ids;
  permute.expert_map = params.expert_map;
  permute.sorted_slots = scratch_ints(workspace, scratch.sorted_slots, num_slots);
  permute.expert_offsets = scratch_ints(workspace, scratch.expert_offsets, int64_t{num_local} + 1);
  permute.tile_expert = scratch_ints(workspace, scratch.tile_expert, max_tiles);
  permute.tile_start = scratch_ints(workspace, scratch.tile_start, max_tiles);
  permute.counters = scratch_ints(workspace, scratch.counters, 2);
  permute.num_local_experts = num_local;
  permute.tile = kMoeCpuTile;
  DIFFULEX_RETURN_IF_ERROR(cpu::moe_permute(permute, context));

  void* activated = workspace + scratch.activated;
  const TensorRef slot_out = slot_rows(params, workspace + scratch.slot_out);
  MoeExperts experts{params.x, params.w13, params.w2};
  experts.act = params.act;
  experts.tiles = {permute.tile_expert.as<int32_t>(), permute.tile_start.as<int32_t>(),
                   permute.expert_offsets.as<const int32_t>() + 1,
                   permute.counters.as<const int32_t>()[0]};
  experts.sorted_slots = permute.sorted_slots.as<const int32_t>();
  experts.top_k = top_k;
  if (params.weight_on_input) {
    experts.input_weights = params.topk_weights.as<const float>();
    experts.input_weight_stride = params.topk_weights.stride[0];
  }
  experts.activated = static_cast<float*>(activated);
  experts.out = slot_out.data;
  experts.out_rows = RowPlaces::of(slot_out);
  run_experts(experts, context);
  combine_slots(
      CombineArgs{routes, slot_out, params.weight_on_input ? nullptr : &params.topk_weights,
                  params.addend, params.out, top_k},
      context);
  return {};
}

Status fused_experts_packed(const FusedExpertsPackedParams& params, const ExecContext& context) {
  const bool is_batched = params.rows_per_expert > 0;
  const int64_t num_rows = is_batched ? params.x.size[0] * params.x.size[1] : params.x.size[0];
  DIFFULEX_RETURN_IF_ERROR(is_batched ? check_counts(params)
                                      : check_offsets("fused_experts_packed", "expert_offsets",
                                                      params.expert_offsets, num_rows));
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const MoeScratch scratch =
      packed_scratch({num_rows, num_local, params.w2.size[2], params.x.dtype}, Device::kCpu);
  std::vector<int32_t> begins(static_cast<size_t>(num_local));
  std::vector<int32_t> ends(static_cast<size_t>(num_local));
  char* workspace = thread_bytes(scratch.total);
  void* activated = workspace + scratch.activated;
  MoeExperts experts{params.x, params.w13, params.w2};
  experts.act = params.act;
  experts.tiles = packed_tiles(params, workspace, scratch, begins.data(), ends.data());
  experts.activated = static_cast<float*>(activated);
  experts.output_weights =
      params.row_weights.present() ? params.row_weights.as<const float>() : nullptr;
  experts.out = params.out.data;
  experts.out_rows = RowPlaces::of(params.out);
  run_experts(experts, context);
  if (!is_batched) {
    const auto bytes = static_cast<size_t>(params.out.size[1] * dtype_bytes(params.out.dtype));
    for (int64_t row = ends.back(); row < num_rows; ++row) {
      std::memset(element_at(params.out, row * params.out.stride[0]), 0, bytes);
    }
  }
  return {};
}

}  // namespace diffulex::cpu
