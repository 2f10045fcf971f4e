// SPDX-License-Identifier: Apache-2.0
//
// fused_moe of experts in low precision: sort the slots, quantise the rows once, gate-up product
// with activation in float32, quantise the slots, down product, weighted sum. On Hopper products of
// e4m3 codes sort few slots themselves, and each launch may start before the one in front of it has
// ended; so do those of nibbles in tiles, whose rows stay as they are.
#include <algorithm>
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/combine.h"
#include "ops/moe/config.h"
#include "ops/moe/gemm.h"
#include "ops/moe/sm90/launch.h"
#include "ops/quant/expert_tiles.h"
#include "ops/quant/scaled_experts.h"
#include "ops/shared/cuda/launch.cuh"

namespace diffulex::cuda {
namespace {

constexpr const char* kWhere = "diffulex::fused_moe";
constexpr int32_t kShortTile = 16;
constexpr int32_t kTallTile = 64;

/// Rows as codes with scales of 128 columns, in the scratch of the call.
struct CodedRows {
  TensorRef codes;
  TensorRef scale;
};

CodedRows coded_rows(const ExecContext& context, size_t codes, size_t scale, DType dtype,
                     int64_t rows, int64_t depth) {
  return {scratch_tensor(context, codes, dtype, rows, depth),
          scratch_tensor(context, scale, DType::kF32, ceil_div(depth, kQuantGroup),
                         ceil_div(rows, 4) * 4)};
}

Status quantize(const TensorRef& x, const CodedRows& rows, const ExecContext& context) {
  QuantizeRowsParams params;
  params.x = x;
  params.out = rows.codes;
  params.scale = rows.scale;
  return cuda::quantize_rows(params, context);
}

/// The product of coded rows with experts [L, N, K].
ScaledArgs expert_args(const CodedRows& rows, const TensorRef& weight, const TensorRef& scale,
                       const TensorRef& out, const MoePermuteParams& permute, int32_t top_k) {
  ScaledArgs args{};
  args.x = rows.codes.as<const uint8_t>();
  args.x_scale = rows.scale.as<const float>();
  args.weight = weight.as<const uint8_t>();
  args.weight_scale = scale.as<const float>();
  args.out = out.data;
  args.x_stride = rows.codes.stride[0];
  args.x_scale_stride = rows.scale.stride[0];
  args.weight_stride = weight.stride[1];
  args.block_stride = scale.rank == 3 ? scale.stride[1] : 0;
  args.out_stride = out.stride[0];
  args.num_rows = static_cast<int32_t>(rows.codes.size[0]);
  args.depth = static_cast<int32_t>(weight.size[2]);
  args.width = static_cast<int32_t>(out.size[1]);
  args.up_blocks = static_cast<int32_t>(ceil_div(args.width, kQuantBlock));
  args.act = -1;
  args.experts.tile_expert = permute.tile_expert.as<const int32_t>();
  args.experts.tile_start = permute.tile_start.as<const int32_t>();
  args.experts.counters = permute.counters.as<const int32_t>();
  args.experts.ends = permute.expert_offsets.as<const int32_t>() + 1;
  args.experts.slots = permute.sorted_slots.as<const int32_t>();
  args.experts.weight_stride = weight.stride[0];
  args.experts.scale_stride = scale.stride[0];
  args.experts.top_k = top_k;
  return args;
}

/// The buffers of a call, in its scratch.
struct ScaledCall {
  const FusedMoeParams& params;
  MoePermuteParams permute;
  int64_t max_tiles;
  CodedRows x;
  TensorRef activated;  // float32
  CodedRows inner;
  TensorRef slot_out;
};

ScaledCall scaled_call(const FusedMoeParams& params, int32_t tile, const ExecContext& context) {
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const auto top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  const int64_t num_tokens = params.x.size[0];
  const int64_t num_slots = params.topk_ids.numel();
  const int64_t hidden = params.x.size[1];
  const int64_t width = params.w2.size[2];
  const DType codes = params.w13.dtype;
  const MoeScratch scratch = fused_moe_scratch(
      {num_tokens, top_k, num_local, hidden, width, params.x.dtype, true}, Device::kCuda);
  const int64_t max_tiles = moe_max_tiles(num_slots, num_local, tile);
  return {params,
          permute_into_scratch(params, scratch, max_tiles, tile, context),
          max_tiles,
          coded_rows(context, scratch.x_codes, scratch.x_scale, codes, num_tokens, hidden),
          scratch_tensor(context, scratch.activated, DType::kF32, num_slots, width),
          coded_rows(context, scratch.inner_codes, scratch.inner_scale, codes, num_slots, width),
          scratch_tensor(context, scratch.slot_out, params.x.dtype, num_slots, hidden)};
}

int64_t num_experts_of(const FusedMoeParams& params) {
  return params.expert_map.present() ? params.expert_map.size[0] : params.w13.size[0];
}

Status sum_slots(const FusedMoeParams& params, const TensorRef& slot_out, bool is_routed_before,
                 const ExecContext& context) {
  return launch_slot_sum(
      kWhere,
      {slot_out, &params.topk_weights, params.topk_ids, params.expert_map, num_experts_of(params),
       params.w13.size[0], params.addend, params.out, is_routed_before},
      context);
}

Status portable_experts(const ScaledCall& call, const ExecContext& context) {
  const FusedMoeParams& params = call.params;
  const DType codes = params.w13.dtype;
  const int32_t tile = call.permute.tile;
  const auto top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  DIFFULEX_RETURN_IF_ERROR(cuda::moe_permute(call.permute, context));
  DIFFULEX_RETURN_IF_ERROR(quantize(params.x, call.x, context));
  ScaledArgs gate_up =
      expert_args(call.x, params.w13, params.w13_scale, call.activated, call.permute, top_k);
  gate_up.act = static_cast<int32_t>(params.act);
  DIFFULEX_RETURN_IF_ERROR(
      launch_scaled_tiles(kWhere, gate_up, codes, DType::kF32, tile, call.max_tiles, context));
  DIFFULEX_RETURN_IF_ERROR(quantize(call.activated, call.inner, context));
  const ScaledArgs down =
      expert_args(call.inner, params.w2, params.w2_scale, call.slot_out, call.permute, 1);
  DIFFULEX_RETURN_IF_ERROR(
      launch_scaled_tiles(kWhere, down, codes, params.x.dtype, tile, call.max_tiles, context));
  return sum_slots(params, call.slot_out, false, context);
}

/// Whether Hopper's products of codes take the call.
bool has_wgmma_experts(const FusedMoeParams& params, const ExecContext& context) {
  constexpr int64_t kAligned = 16;
  return params.w13.dtype == DType::kF8E4M3 && params.x.dtype == DType::kBF16 &&
         params.x.size[1] % kAligned == 0 && params.w2.size[2] % kAligned == 0 &&
         is_row_aligned(params.w13) && is_row_aligned(params.w2) &&
         has_moe_wgmma(DType::kF8E4M3, context.device_index);
}

/// `gemm` as the product of rows with experts [L, N, K].
ExpertGemm gemm_of(ExpertGemm gemm, const TensorRef& rows, const TensorRef& weight,
                   const TensorRef& out) {
  gemm.rows = rows.data;
  gemm.row_map = RowMap::of(rows);
  gemm.weight = weight.data;
  gemm.expert_stride = weight.stride[0];
  gemm.weight_stride = weight.stride[1];
  gemm.num_experts = static_cast<int32_t>(weight.size[0]);
  gemm.depth = static_cast<int32_t>(rows.size[1]);
  gemm.width = static_cast<int32_t>(out.size[1]);
  gemm.out = out.data;
  gemm.out_map = RowMap::of(out);
  return gemm;
}

/// The same of coded rows.
ExpertGemm coded_gemm(const ExpertGemm& shared, const CodedRows& rows, const TensorRef& weight,
                      const TensorRef& scale, const TensorRef& out) {
  ExpertGemm gemm = gemm_of(shared, rows.codes, weight, out);
  gemm.scales.rows = rows.scale.as<const float>();
  gemm.scales.weight = scale.as<const float>();
  gemm.scales.row_stride = rows.scale.stride[0];
  gemm.scales.expert_stride = scale.stride[0];
  gemm.scales.block_stride = scale.rank == 3 ? scale.stride[1] : 0;
  gemm.scales.up_blocks = static_cast<int32_t>(ceil_div(gemm.width, kQuantBlock));
  return gemm;
}

/// The same of nibbles in tiles.
ExpertGemm nibble_gemm(const ExpertGemm& shared, const TensorRef& rows, const TensorRef& weight,
                       const TensorRef& scale, const TensorRef& out) {
  ExpertGemm gemm = gemm_of(shared, rows, weight, out);
  gemm.nibbles = {scale.data, scale.stride[0], scale.stride[1],
                  gemm.depth / static_cast<int32_t>(scale.size[1]), false};
  return gemm;
}

/// Positions in the order of the experts: activated rows are those of positions, not of slots.
Status wgmma_experts(const ScaledCall& call, int64_t num_rows, const ExecContext& context) {
  const FusedMoeParams& params = call.params;
  const MoePermuteParams& permute = call.permute;
  const bool is_streamed =
      is_streamed_once(permute.tile, num_rows, params.x.size[0], permute.num_local_experts);
  ExpertGemm gemm{};
  DIFFULEX_RETURN_IF_ERROR(sort_for_products(params, permute,
                                             {MoePath::kWgmma, permute.tile, is_streamed},
                                             call.max_tiles, &gemm, context));
  DIFFULEX_RETURN_IF_ERROR(quantize(params.x, call.x, context));
  ExpertGemm gate_up = coded_gemm(gemm, call.x, params.w13, params.w13_scale, call.activated);
  gate_up.is_gate_up = true;
  gate_up.gather = permute.sorted_slots.as<const int32_t>();
  gate_up.top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  DIFFULEX_RETURN_IF_ERROR(launch_moe_wgmma(gate_up, DType::kF8E4M3, context));
  DIFFULEX_RETURN_IF_ERROR(quantize(call.activated, call.inner, context));
  ExpertGemm down = coded_gemm(gemm, call.inner, params.w2, params.w2_scale, call.slot_out);
  down.scatter = permute.sorted_slots.as<const int32_t>();
  down.top_k = 1;
  DIFFULEX_RETURN_IF_ERROR(launch_moe_wgmma(down, DType::kF8E4M3, context));
  return sum_slots(params, call.slot_out, true, context);
}

/// What keeps the products of nibbles from a call; nullptr: nothing.
const char* unfit_part(const FusedMoeParams& params, const ExecContext& context) {
  if (!has_moe_wgmma(DType::kU8, context.device_index)) {
    return "w13: expected nibbles by row without kernels of compute capability 9.0, got tiles";
  }
  if (!is_row_aligned(params.x)) {
    return "x: expected rows at multiples of 16 bytes beside tiles, got others";
  }
  if (!is_row_aligned(params.w13) || !is_row_aligned(params.w2)) {
    return "w13 and w2: expected tiles at multiples of 16 bytes, got others";
  }
  return is_row_aligned(params.w13_scale) && is_row_aligned(params.w2_scale)
             ? nullptr
             : "w13_scale and w2_scale: expected groups at multiples of 16 bytes, got others";
}

/// Experts of 4 bits whose memory has the order of tiles.
Status tiled_experts(const FusedMoeParams& params, int64_t num_rows, const ExecContext& context) {
  if (const char* part = unfit_part(params, context)) {
    return make_error(StatusCode::kNoKernel, kWhere, ": ", part);
  }
  constexpr int32_t kTile = kMoeTiledTile;
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const auto top_k = static_cast<int32_t>(params.topk_ids.size[1]);
  const int64_t num_tokens = params.x.size[0];
  const int64_t num_slots = params.topk_ids.numel();
  const int64_t hidden = params.x.size[1];
  const int64_t width = params.w13.size[1] / 2;
  const MoeScratch scratch =
      fused_moe_scratch({num_tokens, top_k, num_local, hidden, width, DType::kBF16}, Device::kCuda);
  const int64_t max_tiles = moe_max_tiles(num_slots, num_local, kTile);
  const MoePermuteParams permute = permute_into_scratch(params, scratch, max_tiles, kTile, context);
  const bool is_streamed = is_streamed_once(kTile, num_rows, num_tokens, num_local);
  ExpertGemm gemm{};
  DIFFULEX_RETURN_IF_ERROR(sort_for_products(params, permute, {MoePath::kWgmma, kTile, is_streamed},
                                             max_tiles, &gemm, context));
  const TensorRef activated =
      scratch_tensor(context, scratch.activated, DType::kBF16, num_slots, width);
  const TensorRef slot_out =
      scratch_tensor(context, scratch.slot_out, DType::kBF16, num_slots, hidden);
  ExpertGemm gate_up = nibble_gemm(gemm, params.x, params.w13, params.w13_scale, activated);
  gate_up.is_gate_up = true;
  gate_up.gather = permute.sorted_slots.as<const int32_t>();
  gate_up.top_k = top_k;
  DIFFULEX_RETURN_IF_ERROR(launch_moe_wgmma(gate_up, DType::kU8, context));
  ExpertGemm down = nibble_gemm(gemm, activated, params.w2, params.w2_scale, slot_out);
  down.scatter = permute.sorted_slots.as<const int32_t>();
  down.top_k = 1;
  DIFFULEX_RETURN_IF_ERROR(launch_moe_wgmma(down, DType::kU8, context));
  return sum_slots(params, slot_out, true, context);
}

}  // namespace

Status fused_moe_scaled(const FusedMoeParams& params, const ExecContext& context) {
  const auto num_local = static_cast<int32_t>(params.w13.size[0]);
  const int64_t num_rows =
      expected_local_slots(params.topk_ids.numel(), num_experts_of(params), num_local);
  if (has_expert_tiles(params)) {
    return tiled_experts(in_shape_of_rows(params), num_rows, context);
  }
  if (has_wgmma_experts(params, context)) {
    const int32_t tile = std::min(
        kMoeMaxScaledTile,
        choose_moe_wgmma_tile(num_rows, params.x.size[0], num_local, context.batch_invariant));
    return wgmma_experts(scaled_call(params, tile, context), num_rows, context);
  }
  const int32_t tile = num_rows <= int64_t{kShortTile} * num_local ? kShortTile : kTallTile;
  return portable_experts(scaled_call(params, tile, context), context);
}

}  // namespace diffulex::cuda
