// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>
#include <limits>
#include <string>

#include "ops/checks.h"
#include "ops/quant/expert_tiles.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// Slots are numbered with 32 bits.
Status check_num_slots(const ArgumentCheck& ids_check, const TensorRef& ids) {
  if (ids.size[1] < 1 || ids.size[0] > kMaxInt32 / ids.size[1]) {
    return ids_check.error(StatusCode::kInvalidArgument,
                           "at least one column and fewer than 2^31 slots", shape_text(ids));
  }
  return {};
}

Status check_expert_map(const char* op, const TensorRef& expert_map) {
  if (!expert_map.present()) {
    return {};
  }
  const ArgumentCheck check(op, "expert_map", expert_map);
  DIFFULEX_RETURN_IF_ERROR(check.dense({DType::kI32}, {kAnyExtent}));
  if (expert_map.size[0] < 1) {
    return check.error(StatusCode::kInvalidArgument, "at least one expert", shape_text(expert_map));
  }
  return {};
}

Status check_num_local_experts(const char* op, const char* argument, int64_t count) {
  if (count < 1 || count > kMoeMaxLocalExperts) {
    return scalar_error(op, argument,
                        ("1 to " + std::to_string(kMoeMaxLocalExperts) + " local experts").c_str(),
                        count);
  }
  return {};
}

/// The weights of the local experts, for rows of `hidden` elements of `dtype`.
struct ExpertWeights {
  const char* op;
  const TensorRef& w13;
  const TensorRef& w2;
  const TensorRef& w13_scale;
  const TensorRef& w2_scale;
  Activation act;
};

Status check_matrices(const ExpertWeights& weights, std::initializer_list<DType> dtypes,
                      int64_t hidden) {
  const char* op = weights.op;
  const int64_t per_element = weights.w13.dtype == DType::kU8 ? 2 : 1;
  const ArgumentCheck w13_check(op, "w13", weights.w13);
  DIFFULEX_RETURN_IF_ERROR(
      w13_check.matches(dtypes, {kAnyExtent, kAnyExtent, hidden / per_element}));
  DIFFULEX_RETURN_IF_ERROR(check_num_local_experts(op, "w13", weights.w13.size[0]));
  if (weights.w13.size[1] < 2 || weights.w13.size[1] % 4 != 0) {
    return w13_check.error(StatusCode::kInvalidArgument, "gate and up rows of an even expert width",
                           shape_text(weights.w13));
  }
  return ArgumentCheck(op, "w2", weights.w2)
      .matches({weights.w13.dtype},
               {weights.w13.size[0], hidden, weights.w13.size[1] / 2 / per_element});
}

Status check_experts(const ExpertWeights& weights, DType dtype, int64_t hidden) {
  const char* op = weights.op;
  constexpr const char* kQuantised = "quantised experts are not supported";
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "w13_scale", weights.w13_scale).absent(kQuantised));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "w2_scale", weights.w2_scale).absent(kQuantised));
  DIFFULEX_RETURN_IF_ERROR(check_matrices(weights, {dtype}, hidden));
  if (weights.act != Activation::kSilu && weights.act != Activation::kGeluTanh &&
      weights.act != Activation::kGeluErf) {
    return scalar_error(op, "act", "0 (silu), 1 (gelu tanh) or 2 (gelu erf)",
                        static_cast<int32_t>(weights.act));
  }
  return {};
}

int64_t blocks_of(int64_t count) {
  return (count + kQuantBlock - 1) / kQuantBlock;
}

/// Scales of experts [L, rows, depth]: one a row, or of e4m3 one a block, `parts` of rows apart; of
/// 4 bits one a group of columns and row.
Status check_expert_scales(const ArgumentCheck& check, const TensorRef& scale,
                           const TensorRef& weight, int64_t parts) {
  const int64_t rows = weight.size[1];
  if (weight.dtype == DType::kU8) {
    DIFFULEX_RETURN_IF_ERROR(
        check.matches({DType::kBF16, DType::kF32}, {weight.size[0], kAnyExtent, rows}));
    const int64_t depth = 2 * weight.size[2];
    return scale.size[1] > 0 && depth % scale.size[1] == 0
               ? Status{}
               : check.error(StatusCode::kInvalidArgument,
                             "groups that divide " + std::to_string(depth) + " columns",
                             shape_text(scale));
  }
  if (weight.dtype == DType::kF8E4M3 && scale.rank == 3) {
    return check.dense({DType::kF32}, {weight.size[0], parts * blocks_of(rows / parts),
                                       blocks_of(weight.size[2])});
  }
  return check.dense({DType::kF32}, {weight.size[0], rows});
}

/// Experts of fused_moe in low precision.
Status check_scaled_experts(const ExpertWeights& weights, int64_t hidden) {
  const char* op = weights.op;
  DIFFULEX_RETURN_IF_ERROR(
      check_matrices(weights, {DType::kF8E4M3, DType::kI8, DType::kU8}, hidden));
  DIFFULEX_RETURN_IF_ERROR(check_expert_scales(ArgumentCheck(op, "w13_scale", weights.w13_scale),
                                               weights.w13_scale, weights.w13, 2));
  DIFFULEX_RETURN_IF_ERROR(check_expert_scales(ArgumentCheck(op, "w2_scale", weights.w2_scale),
                                               weights.w2_scale, weights.w2, 1));
  return check_act(op, weights.act);
}

Status check_hidden(const ArgumentCheck& x_check, const TensorRef& x) {
  if (x.last() < 2 || x.last() % 2 != 0) {
    return x_check.error(StatusCode::kInvalidArgument, "an even last dimension >= 2",
                         shape_text(x));
  }
  return {};
}

Status check_apart(const char* op, const TensorRef& out, const char* name, const TensorRef& other) {
  if (other.present() && out.numel() > 0 && out.data == other.data) {
    return ArgumentCheck(op, "out", out)
        .error(StatusCode::kInvalidArgument, "memory of its own",
               std::string("the memory of ") + name);
  }
  return {};
}

Status check_addend(const char* op, const TensorRef& addend, DType dtype, int64_t num_tokens,
                    int64_t hidden) {
  if (!addend.present()) {
    return {};
  }
  const ArgumentCheck check(op, "addend", addend);
  return dtype == DType::kF32 ? check.matches({DType::kF32}, {num_tokens, hidden})
                              : check.matches({dtype, DType::kF32}, {num_tokens, hidden});
}

}  // namespace

Status check_moe_permute(const MoePermuteParams& params) {
  constexpr const char* kOp = "moe_permute";
  const ArgumentCheck ids_check(kOp, "topk_ids", params.topk_ids);
  DIFFULEX_RETURN_IF_ERROR(ids_check.matches({DType::kI32}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_num_slots(ids_check, params.topk_ids));
  DIFFULEX_RETURN_IF_ERROR(check_expert_map(kOp, params.expert_map));
  DIFFULEX_RETURN_IF_ERROR(
      check_num_local_experts(kOp, "num_local_experts", params.num_local_experts));
  if (params.tile < 1) {
    return scalar_error(kOp, "tile", "a value >= 1", params.tile);
  }
  const int64_t num_slots = params.topk_ids.numel();
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "sorted_slots", params.sorted_slots).dense({DType::kI32}, {num_slots}));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "expert_offsets", params.expert_offsets)
                               .dense({DType::kI32}, {int64_t{params.num_local_experts} + 1}));
  const ArgumentCheck expert_check(kOp, "tile_expert", params.tile_expert);
  DIFFULEX_RETURN_IF_ERROR(expert_check.dense({DType::kI32}, {kAnyExtent}));
  const int64_t max_tiles = moe_max_tiles(num_slots, params.num_local_experts, params.tile);
  if (params.tile_expert.size[0] < max_tiles) {
    return expert_check.error(StatusCode::kInvalidArgument,
                              "at least " + std::to_string(max_tiles) + " entries",
                              shape_text(params.tile_expert));
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "tile_start", params.tile_start)
                               .dense({DType::kI32}, {params.tile_expert.size[0]}));
  const ArgumentCheck counters_check(kOp, "counters", params.counters);
  DIFFULEX_RETURN_IF_ERROR(counters_check.dense({DType::kI32}, {kAnyExtent}));
  if (params.counters.size[0] < 2) {
    return counters_check.error(StatusCode::kInvalidArgument, "at least 2 entries",
                                shape_text(params.counters));
  }
  return {};
}

Status check_fused_moe(const FusedMoeParams& given) {
  constexpr const char* kOp = "fused_moe";
  DIFFULEX_RETURN_IF_ERROR(check_expert_tiles(kOp, given));
  const FusedMoeParams params = in_shape_of_rows(given);
  const ArgumentCheck x_check(kOp, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(
      x_check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_hidden(x_check, params.x));
  const int64_t num_tokens = params.x.size[0];
  const int64_t hidden = params.x.size[1];
  const ExpertWeights experts{kOp,       params.w13, params.w2, params.w13_scale, params.w2_scale,
                              params.act};
  if (params.w13_scale.present() && params.w2_scale.present()) {
    DIFFULEX_RETURN_IF_ERROR(check_scaled_experts(experts, hidden));
    if (params.weight_on_input) {
      return scalar_error(kOp, "weight_on_input", "false with scales of experts", "true");
    }
  } else {
    DIFFULEX_RETURN_IF_ERROR(check_experts(experts, params.x.dtype, hidden));
  }
  const ArgumentCheck ids_check(kOp, "topk_ids", params.topk_ids);
  DIFFULEX_RETURN_IF_ERROR(ids_check.matches({DType::kI32}, {num_tokens, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_num_slots(ids_check, params.topk_ids));
  const int64_t top_k = params.topk_ids.size[1];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "topk_weights", params.topk_weights)
                               .matches({DType::kF32}, {num_tokens, top_k}));
  if (params.weight_on_input && top_k != 1) {
    return scalar_error(kOp, "weight_on_input", "false unless K is 1",
                        "K = " + std::to_string(top_k));
  }
  DIFFULEX_RETURN_IF_ERROR(check_expert_map(kOp, params.expert_map));
  DIFFULEX_RETURN_IF_ERROR(check_addend(kOp, params.addend, params.x.dtype, num_tokens, hidden));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "out", params.out).matches({params.x.dtype}, {num_tokens, hidden}));
  DIFFULEX_RETURN_IF_ERROR(check_apart(kOp, params.out, "x", params.x));
  return check_apart(kOp, params.out, "addend", params.addend);
}

Status check_fused_experts_packed(const FusedExpertsPackedParams& params) {
  constexpr const char* kOp = "fused_experts_packed";
  if (params.rows_per_expert < 0) {
    return scalar_error(kOp, "rows_per_expert", "a value >= 0", params.rows_per_expert);
  }
  const bool is_batched = params.rows_per_expert > 0;
  const ArgumentCheck x_check(kOp, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(
      is_batched
          ? x_check.matches({DType::kF32, DType::kF16, DType::kBF16},
                            {kAnyExtent, params.rows_per_expert, kAnyExtent})
          : x_check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_hidden(x_check, params.x));
  DIFFULEX_RETURN_IF_ERROR(
      check_experts({kOp, params.w13, params.w2, params.w13_scale, params.w2_scale, params.act},
                    params.x.dtype, params.x.last()));
  const int64_t num_local = params.w13.size[0];
  const int64_t num_rows = is_batched ? params.x.size[0] * params.x.size[1] : params.x.size[0];
  if ((is_batched && params.x.size[0] != num_local) || num_rows > kMaxInt32) {
    return x_check.error(StatusCode::kInvalidArgument,
                         is_batched ? "one slice for each of " + std::to_string(num_local) +
                                          " experts and fewer than 2^31 rows"
                                    : "fewer than 2^31 rows",
                         shape_text(params.x));
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "expert_offsets", params.expert_offsets)
                               .dense({DType::kI32}, {num_local + (is_batched ? 0 : 1)}));
  if (params.row_weights.present()) {
    const ArgumentCheck check(kOp, "row_weights", params.row_weights);
    DIFFULEX_RETURN_IF_ERROR(is_batched ? check.dense({DType::kF32}, {num_local, params.x.size[1]})
                                        : check.dense({DType::kF32}, {num_rows}));
  }
  const ArgumentCheck out_check(kOp, "out", params.out);
  DIFFULEX_RETURN_IF_ERROR(out_check.dtype({params.x.dtype}));
  DIFFULEX_RETURN_IF_ERROR(out_check.same_shape("x", params.x));
  DIFFULEX_RETURN_IF_ERROR(out_check.last_contiguous());
  return check_apart(kOp, params.out, "x", params.x);
}

Status check_moe_combine(const MoeCombineParams& params) {
  constexpr const char* kOp = "moe_combine";
  const ArgumentCheck ids_check(kOp, "topk_ids", params.topk_ids);
  DIFFULEX_RETURN_IF_ERROR(ids_check.matches({DType::kI32}, {kAnyExtent, kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(check_num_slots(ids_check, params.topk_ids));
  const int64_t num_tokens = params.topk_ids.size[0];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "topk_weights", params.topk_weights)
                               .matches({DType::kF32}, {num_tokens, params.topk_ids.size[1]}));
  const ArgumentCheck slot_check(kOp, "slot_out", params.slot_out);
  DIFFULEX_RETURN_IF_ERROR(slot_check.matches({DType::kF32, DType::kF16, DType::kBF16},
                                              {params.topk_ids.numel(), kAnyExtent}));
  const int64_t hidden = params.slot_out.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      check_addend(kOp, params.addend, params.slot_out.dtype, num_tokens, hidden));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "out", params.out).matches({params.slot_out.dtype}, {num_tokens, hidden}));
  DIFFULEX_RETURN_IF_ERROR(check_apart(kOp, params.out, "slot_out", params.slot_out));
  return check_apart(kOp, params.out, "addend", params.addend);
}

}  // namespace diffulex
