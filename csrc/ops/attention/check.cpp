// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/check.h"

#include <cmath>
#include <string>

#include "ops/checks.h"
#include "ops/kv/check.h"
#include "ops/quant/code_rows.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

constexpr const char* kOp = "block_attention";

Status check_scalars(const BlockAttentionParams& params) {
  if (!(std::isfinite(params.scale) && params.scale > 0.0F)) {
    return scalar_error(kOp, "scale", "a finite value > 0", params.scale);
  }
  if (!(std::isfinite(params.softcap) && params.softcap >= 0.0F)) {
    return scalar_error(kOp, "softcap", "a finite value >= 0", params.softcap);
  }
  if (params.block_size < 1) {
    return scalar_error(kOp, "block_size", "a value >= 1", params.block_size);
  }
  if (params.sliding_window < 0) {
    return scalar_error(kOp, "sliding_window", "a value >= 0", params.sliding_window);
  }
  if (params.max_seqlen_q < 1 && params.q.size[0] > 0) {
    return scalar_error(kOp, "max_seqlen_q", "a value >= 1", params.max_seqlen_q);
  }
  if (params.max_context_len < 0) {
    return scalar_error(kOp, "max_context_len", "a value >= 0", params.max_context_len);
  }
  if (params.num_splits < 0) {
    return scalar_error(kOp, "num_splits", "a value >= 0", params.num_splits);
  }
  return {};
}

Status check_rows(const BlockAttentionParams& params) {
  const TensorRef& q = params.q;
  const ArgumentCheck q_check(kOp, "q", q);
  DIFFULEX_RETURN_IF_ERROR(q_check.matches({DType::kF32, DType::kF16, DType::kBF16},
                                           {kAnyExtent, kAnyExtent, kAnyExtent}));
  if (q.size[1] < 1 || q.size[2] < 1) {
    return q_check.error(StatusCode::kInvalidArgument, "at least one head and a head dim >= 1",
                         shape_text(q));
  }
  const ArgumentCheck k_check(kOp, "k", params.k);
  DIFFULEX_RETURN_IF_ERROR(k_check.matches({q.dtype}, {q.size[0], kAnyExtent, q.size[2]}));
  const int64_t num_kv_heads = params.k.size[1];
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "v", params.v).matches({q.dtype}, {q.size[0], num_kv_heads, q.size[2]}));
  if (num_kv_heads < 1 || q.size[1] % num_kv_heads != 0) {
    return q_check.error(
        StatusCode::kInvalidArgument,
        "a number of heads divisible by " + std::to_string(num_kv_heads) + " kv heads",
        std::to_string(q.size[1]));
  }
  const ArgumentCheck out_check(kOp, "out", params.out);
  DIFFULEX_RETURN_IF_ERROR(out_check.matches({q.dtype}, {q.size[0], q.size[1], q.size[2]}));
  if (q.numel() > 0 && params.out.data == q.data) {
    return out_check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of q");
  }
  if (params.lse.present()) {
    return ArgumentCheck(kOp, "lse", params.lse).matches({DType::kF32}, {q.size[0], q.size[1]});
  }
  return {};
}

Status check_codes(const BlockAttentionParams& params) {
  if (!params.codes.present() && !params.codes_scale.present()) {
    return {};
  }
  const int64_t head_dim = params.q.size[2];
  if (head_dim % kQuantGroup != 0) {
    return ArgumentCheck(kOp, "q", params.q)
        .error(StatusCode::kInvalidArgument, "a head dim of a multiple of 128 with codes",
               std::to_string(head_dim));
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "out", params.out).contiguous_from(1));
  const TensorRef rows = attention_rows(params.out);
  // Of groups of 128 alone: heads of one row are of different threads.
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "codes_scale", params.codes_scale)
                               .matches({DType::kF32}, {rows.last() / kQuantGroup, kAnyExtent}));
  return check_code_rows(kOp, "out", rows, params.codes, params.codes_scale, "codes_scale");
}

Status check_metadata(const BlockAttentionParams& params) {
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "page_table", params.page_table)
                               .matches({DType::kI32}, {kAnyExtent, kAnyExtent}));
  const int64_t num_reqs = params.page_table.size[0];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "cu_seqlens_q", params.cu_seqlens_q)
                               .matches({DType::kI32}, {num_reqs + 1}));
  const struct {
    const char* name;
    const TensorRef& tensor;
    bool required;
  } vectors[] = {
      {"context_lens", params.context_lens, true},
      {"valid_slices", params.valid_slices, true},
      {"mask_kinds", params.mask_kinds, true},
      {"prefix_lens", params.prefix_lens, false},
      {"padded_prefix_lens", params.padded_prefix_lens, false},
      {"q_starts", params.q_starts, false},
  };
  for (const auto& vector : vectors) {
    if (vector.required || vector.tensor.present()) {
      DIFFULEX_RETURN_IF_ERROR(
          ArgumentCheck(kOp, vector.name, vector.tensor).matches({DType::kI32}, {num_reqs}));
    }
  }
  return {};
}

}  // namespace

AttentionShape attention_shape(const BlockAttentionParams& params) {
  AttentionShape shape;
  shape.num_reqs = static_cast<int32_t>(params.page_table.size[0]);
  shape.num_q_heads = static_cast<int32_t>(params.q.size[1]);
  shape.num_kv_heads = static_cast<int32_t>(params.k.size[1]);
  shape.head_dim = static_cast<int32_t>(params.q.size[2]);
  shape.max_seqlen_q = params.max_seqlen_q;
  shape.max_context_len = params.max_context_len;
  shape.num_splits = params.num_splits;
  shape.sliding_window = params.sliding_window;
  return shape;
}

TensorRef attention_rows(const TensorRef& out) {
  TensorRef rows = out;
  rows.rank = 2;
  rows.size[1] = out.size[1] * out.size[2];
  rows.stride[1] = 1;
  return rows;
}

Status check_block_attention(const BlockAttentionParams& params) {
  DIFFULEX_RETURN_IF_ERROR(check_rows(params));
  DIFFULEX_RETURN_IF_ERROR(check_codes(params));
  DIFFULEX_RETURN_IF_ERROR(check_scalars(params));
  DIFFULEX_RETURN_IF_ERROR(
      check_kv_cache({kOp, params.k_cache, params.v_cache, params.k_scale, params.v_scale,
                      params.kv_layout, params.k.size[1], params.q.size[2]}));
  if (!params.k_scale.present()) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "k_cache", params.k_cache).dtype({params.q.dtype}));
  }
  return check_metadata(params);
}

}  // namespace diffulex
