// SPDX-License-Identifier: Apache-2.0
//
// fused_moe: sort the slots, gate-up product with activation, down product, weighted sum; four
// launches over scratch of the caller, three where Hopper's products sort few slots themselves,
// five where its large tiles want their rows together first. On Hopper each may start before the
// one in front of it has ended. fused_experts_packed:
// list the tiles of the given grouping, zero the rows outside it, the same two products.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/combine.h"
#include "ops/moe/config.h"
#include "ops/moe/gemm.h"
#include "ops/moe/sm90/launch.h"
#include "ops/moe/tiles.cuh"
#include "ops/prepare.h"
#include "ops/quant/expert_tiles.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kMoeWhere = "diffulex::fused_moe";

struct PackedTilesArgs {
  const int32_t* __restrict__ offsets;  // [L + 1], or counts [L]
  TileList tiles;
  int32_t num_local;
  int32_t num_rows;
  int32_t rows_per_expert;
};

__device__ __forceinline__ int clamp_to(int value, int limit) {
  return value < 0 ? 0 : (value < limit ? value : limit);
}

__global__ void __launch_bounds__(kMoeSortThreads)
    packed_tiles_kernel(const __grid_constant__ PackedTilesArgs args) {
  __shared__ int scratch[33];
  const auto begin = [&](int expert) {
    return args.rows_per_expert > 0 ? expert * args.rows_per_expert
                                    : clamp_to(args.offsets[expert], args.num_rows);
  };
  const auto end = [&](int expert) {
    return args.rows_per_expert > 0 ? expert * args.rows_per_expert +
                                          clamp_to(args.offsets[expert], args.rows_per_expert)
                                    : clamp_to(args.offsets[expert + 1], args.num_rows);
  };
  write_tiles(args.tiles, args.num_local, scratch, begin, end);
}

constexpr int kZeroThreads = 256;

struct ZeroArgs {
  const int32_t* __restrict__ offsets;  // [L + 1]
  uint16_t* out;                        // rows of `width` 16-bit words
  int64_t out_stride;                   // in words
  int64_t num_rows;
  int64_t width;
  int32_t num_local;
};

/// Rows that belong to no expert become zero.
__global__ void __launch_bounds__(kZeroThreads) zero_kernel(const __grid_constant__ ZeroArgs args) {
  const int64_t first = args.offsets[0];
  const int64_t last = args.offsets[args.num_local];
  for (int64_t row = blockIdx.x; row < args.num_rows; row += gridDim.x) {
    if (row >= first && row < last) {
      continue;
    }
    for (int64_t i = threadIdx.x; i < args.width; i += kZeroThreads) {
      args.out[row * args.out_stride + i] = 0;
    }
  }
}

/// `num_rows` are expected by the experts held here, `max_expert_rows` bounds those of one.
MoeKernels choose_kernels(const MoePathQuery& query, int64_t num_rows, int64_t max_expert_rows,
                          int32_t num_local, const ExecContext& context) {
  const MoePath path = choose_moe_path(query);
  if (path == MoePath::kGeneric) {
    return {path, kMoeGenericTile, false};
  }
  const int32_t tile =
      path == MoePath::kWgmma
          ? choose_moe_wgmma_tile(num_rows, max_expert_rows, num_local, context.batch_invariant)
          : choose_moe_tile(num_rows, num_local, context.batch_invariant);
  return {path, tile, is_streamed_once(tile, num_rows, max_expert_rows, num_local)};
}

Status launch_gemm(MoePath path, DType dtype, const ExpertGemm& gemm, const ExecContext& context) {
  if (path == MoePath::kGeneric) {
    return launch_moe_generic(gemm, dtype, context);
  }
  if (path == MoePath::kWgmma) {
    return launch_moe_wgmma(gemm, dtype, context);
  }
  return dtype == DType::kBF16 ? launch_moe_mma_bf16(gemm, context)
                               : launch_moe_mma_f16(gemm, context);
}

/// `scale`: of a weight of 4 bits, else absent.
void set_weight(ExpertGemm& gemm, const TensorRef& weight, const TensorRef& scale) {
  gemm.weight = weight.data;
  gemm.expert_stride = weight.stride[0];
  gemm.weight_stride = weight.stride[1];
  gemm.num_experts = static_cast<int32_t>(weight.size[0]);
  gemm.depth = static_cast<int32_t>(weight.size[2]);
  if (scale.present()) {
    gemm.depth *= 2;
    gemm.nibbles = {scale.data, scale.stride[0], scale.stride[1],
                    gemm.depth / static_cast<int32_t>(scale.size[1]), scale.dtype == DType::kF32};
  }
}

/// Whether tensor cores take a weight, of 4 bits in runs of 16 bytes and 16 columns with one scale.
bool is_regular(const TensorRef& weight, const TensorRef& scale) {
  constexpr int64_t kGroup = 16;
  return is_row_aligned(weight) &&
         (!scale.present() || (weight.size[2] % kGroup == 0 && scale.dtype == DType::kBF16 &&
                               2 * weight.size[2] / scale.size[1] % kGroup == 0));
}

/// Copies the rows of the gate-up product into the order of its positions. They live where the slot
/// outputs will be: the down product writes those after it was finished.
Status bring_rows_together(const TensorRef& x, const TensorRef& slot_out,
                           const MoePermuteParams& permute, ExpertGemm* gate_up,
                           const ExecContext& context) {
  GatherRows gather{};
  gather.rows = x.data;
  gather.slots = gate_up->gather;
  gather.counters = permute.counters.as<const int32_t>();
  gather.out = slot_out.data;
  gather.stride_bytes = x.stride[0] * dtype_bytes(x.dtype);
  gather.row_bytes = x.size[1] * dtype_bytes(x.dtype);
  gather.num_positions = gate_up->num_positions;
  gather.top_k = gate_up->top_k;
  gate_up->rows = slot_out.data;
  gate_up->row_map = RowMap::of(slot_out);
  gate_up->gather = nullptr;
  gate_up->top_k = 1;
  return launch_gather_rows(gather, context);
}

/// `gemm` as the product of rows with gate and up, through the activation.
ExpertGemm gate_up_gemm(ExpertGemm gemm, const TensorRef& x, const TensorRef& w13,
                        const TensorRef& scale, const TensorRef& activated) {
  gemm.is_gate_up = true;
  gemm.rows = x.data;
  gemm.row_map = RowMap::of(x);
  set_weight(gemm, w13, scale);
  gemm.width = static_cast<int32_t>(activated.last());
  gemm.out = activated.data;
  gemm.out_map = RowMap::of(activated);
  return gemm;
}

/// `gemm` as the product that comes back to the hidden size.
ExpertGemm down_gemm(ExpertGemm gemm, const TensorRef& activated, const TensorRef& w2,
                     const TensorRef& scale, const TensorRef& out) {
  gemm.rows = activated.data;
  gemm.row_map = RowMap::of(activated);
  gemm.top_k = 1;
  set_weight(gemm, w2, scale);
  gemm.width = static_cast<int32_t>(out.last());
  gemm.out = out.data;
  gemm.out_map = RowMap::of(out);
  return gemm;
}

/// Zeroes the rows of `out` that belong to no expert.
Status zero_other_rows(const char* where, const FusedExpertsPackedParams& params, int64_t num_rows,
                       const ExecContext& context) {
  const int64_t words = dtype_bytes(params.x.dtype) / 2;
  ZeroArgs zero{};
  zero.offsets = params.expert_offsets.as<const int32_t>();
  zero.out = params.out.as<uint16_t>();
  zero.out_stride = params.out.stride[0] * words;
  zero.num_rows = num_rows;
  zero.width = params.x.last() * words;
  zero.num_local = static_cast<int32_t>(params.w13.size[0]);
  const auto grid = static_cast<unsigned>(num_rows < 4096 ? num_rows : 4096);
  zero_kernel<<<grid, kZeroThreads, 0, stream_of(context)>>>(zero);
  return check_launch(where);
}

/// The kernels of a call of fused_moe.
MoeKernels kernels_of(const FusedMoeParams& params, int64_t num_rows, const ExecContext& context) {
  const DType dtype = params.x.dtype;
  const bool is_aligned = is_row_aligned(params.x) && is_regular(params.w13, params.w13_scale) &&
                          is_regular(params.w2, params.w2_scale);
  const bool has_wgmma = params.w13.dtype == dtype && has_moe_wgmma(dtype, context.device_index);
  return choose_kernels({dtype, params.x.size[1], params.w13.size[1] / 2, is_aligned, has_wgmma},
                        num_rows, params.x.size[0], static_cast<int32_t>(params.w13.size[0]),
                        context);
}

}  // namespace

TensorRef scratch_tensor(const ExecContext& context, size_t offset, DType dtype, int64_t rows,
                         int64_t width) {
  TensorRef ref;
  ref.data = static_cast<uint8_t*>(context.workspace) + offset;
  ref.dtype = dtype;
  ref.rank = width == 0 ? 1 : 2;
  ref.size[0] = rows;
  ref.size[1] = width;
  ref.stride[0] = width == 0 ? 1 : width;
  ref.stride[1] = 1;
  return ref;
}

MoePermuteParams permute_into_scratch(const FusedMoeParams& params, const MoeScratch& scratch,
                                      int64_t max_tiles, int32_t tile, const ExecContext& context) {
  const int64_t num_slots = params.topk_ids.numel();
  MoePermuteParams permute;
  permute.num_local_experts = static_cast<int32_t>(params.w13.size[0]);
  permute.tile = tile;
  permute.topk_ids = params.topk_ids;
  permute.expert_map = params.expert_map;
  permute.sorted_slots = scratch_tensor(context, scratch.sorted_slots, DType::kI32, num_slots, 0);
  permute.expert_offsets = scratch_tensor(context, scratch.expert_offsets, DType::kI32,
                                          int64_t{permute.num_local_experts} + 1, 0);
  permute.tile_expert = scratch_tensor(context, scratch.tile_expert, DType::kI32, max_tiles, 0);
  permute.tile_start = scratch_tensor(context, scratch.tile_start, DType::kI32, max_tiles, 0);
  permute.counters = scratch_tensor(context, scratch.counters, DType::kI32, 2, 0);
  return permute;
}

Status sort_for_products(const FusedMoeParams& params, const MoePermuteParams& permute,
                         const MoeKernels& kernels, int64_t max_tiles, ExpertGemm* gemm,
                         const ExecContext& context) {
  const int64_t num_slots = params.topk_ids.numel();
  const int32_t num_local = permute.num_local_experts;
  *gemm = {};
  gemm->tile_expert = permute.tile_expert.as<const int32_t>();
  gemm->tile_start = permute.tile_start.as<const int32_t>();
  gemm->counters = permute.counters.as<const int32_t>();
  gemm->ends = permute.expert_offsets.as<const int32_t>() + 1;
  gemm->num_positions = num_slots;
  gemm->max_tiles = static_cast<int32_t>(max_tiles);
  gemm->tile = kernels.tile;
  gemm->act = params.act;
  gemm->is_streamed = kernels.is_streamed;
  const bool is_sorted_inside =
      kernels.path == MoePath::kWgmma && kernels.tile <= kMoeMaxSortingTile &&
      num_slots <= kMoeMaxSortedSlots && num_local <= kMoeMaxSortedExperts;
  if (!is_sorted_inside) {
    return cuda::moe_permute(permute, context);
  }
  gemm->routes = slot_routes(params.topk_ids, params.expert_map, num_local);
  return check_routes(kMoeWhere, params.topk_ids, params.expert_map, num_local, context);
}

Status fused_moe(const FusedMoeParams& params, const ExecContext& context) {
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kMoeWhere));
  if (params.w13_scale.present() && (params.w13.dtype != DType::kU8 || has_expert_tiles(params))) {
    return fused_moe_scaled(params, context);
  }
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const auto top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  const int64_t num_slots = params.topk_ids.numel();
  const int64_t num_experts = params.expert_map.present() ? params.expert_map.size[0] : num_local;
  const int64_t hidden = params.x.size[1];
  const int64_t width = params.w13.size[1] / 2;
  const DType dtype = params.x.dtype;
  const MoeKernels kernels =
      kernels_of(params, expected_local_slots(num_slots, num_experts, num_local), context);
  const MoeScratch scratch =
      fused_moe_scratch({params.x.size[0], top_k, num_local, hidden, width, dtype}, Device::kCuda);
  const int64_t max_tiles = moe_max_tiles(num_slots, num_local, kernels.tile);

  const MoePermuteParams permute =
      permute_into_scratch(params, scratch, max_tiles, kernels.tile, context);
  ExpertGemm gemm{};
  DIFFULEX_RETURN_IF_ERROR(sort_for_products(params, permute, kernels, max_tiles, &gemm, context));

  const TensorRef activated = scratch_tensor(context, scratch.activated, dtype, num_slots, width);
  const TensorRef slot_out = scratch_tensor(context, scratch.slot_out, dtype, num_slots, hidden);

  ExpertGemm gate_up = gate_up_gemm(gemm, params.x, params.w13, params.w13_scale, activated);
  gate_up.gather = permute.sorted_slots.as<const int32_t>();
  gate_up.top_k = top_k;
  if (params.weight_on_input) {
    gate_up.row_weights = params.topk_weights.as<const float>();
    gate_up.weight_slots = gate_up.gather;
    gate_up.row_weight_stride = params.topk_weights.stride[0];
  }
  if (kernels.path == MoePath::kWgmma && kernels.tile > kMoeMaxGatherTile) {
    DIFFULEX_RETURN_IF_ERROR(bring_rows_together(params.x, slot_out, permute, &gate_up, context));
  }
  DIFFULEX_RETURN_IF_ERROR(launch_gemm(kernels.path, dtype, gate_up, context));

  ExpertGemm down = down_gemm(gemm, activated, params.w2, params.w2_scale, slot_out);
  down.scatter = permute.sorted_slots.as<const int32_t>();
  DIFFULEX_RETURN_IF_ERROR(launch_gemm(kernels.path, dtype, down, context));

  return launch_slot_sum(
      kMoeWhere,
      {slot_out, params.weight_on_input ? nullptr : &params.topk_weights, params.topk_ids,
       params.expert_map, num_experts, num_local, params.addend, params.out, true},
      context);
}

Status fused_experts_packed(const FusedExpertsPackedParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::fused_experts_packed";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const int64_t hidden = params.x.last();
  const int64_t width = params.w2.size[2];
  const int64_t num_rows = params.x.numel() / hidden;
  const bool is_batched = params.rows_per_expert > 0;
  const DType dtype = params.x.dtype;
  DIFFULEX_RETURN_IF_ERROR(is_batched ? check_range(kWhere, "expert_offsets", params.expert_offsets,
                                                    0, int64_t{params.rows_per_expert} + 1, context)
                                      : check_offsets(kWhere, "expert_offsets",
                                                      params.expert_offsets, num_rows, context));
  const MoeKernels kernels =
      choose_kernels({dtype, hidden, width,
                      is_row_aligned(params.x) && is_row_aligned(params.w13) &&
                          is_row_aligned(params.w2) && is_row_aligned(params.out),
                      has_moe_wgmma(dtype, context.device_index)},
                     num_rows, is_batched ? params.rows_per_expert : num_rows, num_local, context);
  const MoeScratch scratch = packed_scratch({num_rows, num_local, width, dtype}, Device::kCuda);
  const int64_t max_tiles = moe_max_tiles(num_rows, num_local, kernels.tile);

  auto* workspace = static_cast<uint8_t*>(context.workspace);
  PackedTilesArgs tiles{};
  tiles.offsets = params.expert_offsets.as<const int32_t>();
  tiles.tiles = {reinterpret_cast<int32_t*>(workspace + scratch.tile_expert),
                 reinterpret_cast<int32_t*>(workspace + scratch.tile_start),
                 reinterpret_cast<int32_t*>(workspace + scratch.counters),
                 static_cast<int32_t>(max_tiles), kernels.tile};
  tiles.num_local = num_local;
  tiles.num_rows = static_cast<int32_t>(num_rows);
  tiles.rows_per_expert = params.rows_per_expert;
  packed_tiles_kernel<<<1, kMoeSortThreads, 0, stream_of(context)>>>(tiles);
  DIFFULEX_RETURN_IF_ERROR(check_launch(kWhere));
  if (!is_batched) {
    DIFFULEX_RETURN_IF_ERROR(zero_other_rows(kWhere, params, num_rows, context));
  }

  const TensorRef activated = scratch_tensor(context, scratch.activated, dtype, num_rows, width);
  ExpertGemm gemm{};
  gemm.tile_expert = tiles.tiles.expert;
  gemm.tile_start = tiles.tiles.start;
  gemm.counters = tiles.tiles.counters;
  gemm.ends = tiles.offsets + (is_batched ? 0 : 1);
  gemm.num_positions = num_rows;
  gemm.rows_per_expert = params.rows_per_expert;
  gemm.top_k = 1;
  gemm.max_tiles = static_cast<int32_t>(max_tiles);
  gemm.tile = kernels.tile;
  gemm.act = params.act;
  gemm.is_streamed = kernels.is_streamed;

  DIFFULEX_RETURN_IF_ERROR(launch_gemm(
      kernels.path, dtype, gate_up_gemm(gemm, params.x, params.w13, {}, activated), context));
  ExpertGemm down = down_gemm(gemm, activated, params.w2, {}, params.out);
  down.row_weights = params.row_weights.as<const float>();
  down.row_weight_stride = 1;
  return launch_gemm(kernels.path, dtype, down, context);
}

Status prepare_fused_moe(const ExecContext& context) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kMoeWhere, packed_tiles_kernel));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kMoeWhere, zero_kernel));
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_generic());
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_wgmma(context.device_index));
  DIFFULEX_RETURN_IF_ERROR(prepare_moe_mma_bf16(context.device_index));
  return prepare_moe_mma_f16(context.device_index);
}

}  // namespace diffulex::cuda
