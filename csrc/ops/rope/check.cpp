// SPDX-License-Identifier: Apache-2.0
#include "ops/kv/check.h"

#include <string>

#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

Status check_angles(const char* op, const TensorRef& positions, int64_t num_rows,
                    const TensorRef& cos_sin_cache, int64_t head_dim) {
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "positions", positions).matches({DType::kI64, DType::kI32}, {num_rows}));
  const ArgumentCheck check(op, "cos_sin_cache", cos_sin_cache);
  DIFFULEX_RETURN_IF_ERROR(check.matches({DType::kF32}, {kAnyExtent, kAnyExtent}));
  const int64_t rotary_dim = cos_sin_cache.size[1];
  if (rotary_dim % 2 != 0 || rotary_dim > head_dim) {
    return check.error(StatusCode::kInvalidArgument,
                       "an even rotary dim of at most head_dim " + std::to_string(head_dim),
                       std::to_string(rotary_dim));
  }
  return {};
}

/// [T, heads * D] or [T, heads, D].
Status check_heads(const char* op, const char* name, const TensorRef& tensor, int64_t head_dim) {
  const ArgumentCheck check(op, name, tensor);
  DIFFULEX_RETURN_IF_ERROR(check.activation());
  const bool flat = tensor.rank == 2 && tensor.size[1] % head_dim == 0;
  const bool split = tensor.rank == 3 && tensor.size[2] == head_dim;
  if (!flat && !split) {
    return check.error(StatusCode::kInvalidArgument,
                       "shape [T, heads * " + std::to_string(head_dim) + "] or [T, heads, " +
                           std::to_string(head_dim) + "]",
                       shape_text(tensor));
  }
  return {};
}

Status check_weight(const char* op, const char* name, const TensorRef& weight, DType dtype,
                    int64_t head_dim) {
  if (!weight.present()) {
    return {};
  }
  const ArgumentCheck check(op, name, weight);
  return dtype == DType::kF32 ? check.matches({DType::kF32}, {head_dim})
                              : check.matches({dtype, DType::kF32}, {head_dim});
}

Status check_fused(const char* op, const QkNormRopeParams& params) {
  if (params.num_q_heads < 1) {
    return scalar_error(op, "num_q_heads", "a value >= 1", params.num_q_heads);
  }
  if (params.num_kv_heads < 1) {
    return scalar_error(op, "num_kv_heads", "a value >= 1", params.num_kv_heads);
  }
  if (params.head_dim < 1) {
    return scalar_error(op, "head_dim", "a value >= 1", params.head_dim);
  }
  if (!(params.eps >= 0.0F)) {
    return scalar_error(op, "eps", "a value >= 0", params.eps);
  }
  const int64_t heads =
      int64_t{params.num_q_heads} + int64_t{params.num_kv_heads} * (params.v_from_raw_k ? 1 : 2);
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "qkv", params.qkv)
                               .matches({DType::kF32, DType::kF16, DType::kBF16},
                                        {kAnyExtent, heads * params.head_dim}));
  const int64_t num_rows = params.qkv.size[0];
  DIFFULEX_RETURN_IF_ERROR(
      check_angles(op, params.positions, num_rows, params.cos_sin_cache, params.head_dim));
  DIFFULEX_RETURN_IF_ERROR(
      check_weight(op, "q_weight", params.q_weight, params.qkv.dtype, params.head_dim));
  DIFFULEX_RETURN_IF_ERROR(
      check_weight(op, "k_weight", params.k_weight, params.qkv.dtype, params.head_dim));
  const ArgumentCheck v_out(op, "v_out", params.v_out);
  if (params.v_from_raw_k) {
    return v_out.matches({params.qkv.dtype}, {num_rows, params.num_kv_heads, params.head_dim});
  }
  if (params.v_out.present()) {
    return v_out.error(StatusCode::kInvalidArgument, "none without v_from_raw_k",
                       "a tensor of shape " + shape_text(params.v_out));
  }
  return {};
}

}  // namespace

Status check_rotary_embedding(const RotaryParams& params) {
  constexpr const char* kOp = "rotary_embedding";
  if (params.head_dim < 1) {
    return scalar_error(kOp, "head_dim", "a value >= 1", params.head_dim);
  }
  DIFFULEX_RETURN_IF_ERROR(check_heads(kOp, "q", params.q, params.head_dim));
  DIFFULEX_RETURN_IF_ERROR(check_heads(kOp, "k", params.k, params.head_dim));
  const ArgumentCheck k_check(kOp, "k", params.k);
  DIFFULEX_RETURN_IF_ERROR(k_check.dtype({params.q.dtype}));
  if (params.k.size[0] != params.q.size[0]) {
    return k_check.error(StatusCode::kInvalidArgument,
                         std::to_string(params.q.size[0]) + " rows as q", shape_text(params.k));
  }
  return check_angles(kOp, params.positions, params.q.size[0], params.cos_sin_cache,
                      params.head_dim);
}

Status check_qk_norm_rope(const QkNormRopeParams& params) {
  return check_fused("qk_norm_rope", params);
}

Status check_qk_norm_rope_store(const QkNormRopeParams& params) {
  constexpr const char* kOp = "qk_norm_rope_store";
  DIFFULEX_RETURN_IF_ERROR(check_fused(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(
      check_kv_cache({kOp, params.k_cache, params.v_cache, params.k_scale, params.v_scale,
                      params.kv_layout, params.num_kv_heads, params.head_dim}));
  return ArgumentCheck(kOp, "slot_mapping", params.slot_mapping)
      .matches({DType::kI32, DType::kI64}, {params.qkv.size[0]});
}

}  // namespace diffulex
