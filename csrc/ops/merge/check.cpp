// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <string>

#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

/// Descriptor arrays, shared by the whole op and its shard part.
struct Descriptors {
  const TensorRef& merge_mask;
  const TensorRef& topk_ids;
  const TensorRef& topk_probs;
  const TensorRef& residual_probs;
};

Status check_kind(const char* op, MergeKind kind) {
  if (kind != MergeKind::kDmaxTopk && kind != MergeKind::kIterSmoothTopk) {
    return scalar_error(op, "merge_kind", "0 or 1", static_cast<int32_t>(kind));
  }
  return {};
}

Status check_weight(const char* op, float weight) {
  return std::isfinite(weight) ? Status{} : scalar_error(op, "weight", "a finite number", weight);
}

Status check_descriptors(const char* op, const Descriptors& args, int64_t num_rows) {
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "merge_mask", args.merge_mask).dense({DType::kU8}, {num_rows}));
  const ArgumentCheck ids(op, "topk_ids", args.topk_ids);
  DIFFULEX_RETURN_IF_ERROR(ids.matches({DType::kI64}, {num_rows, kAnyExtent}));
  const int64_t top_k = args.topk_ids.size[1];
  if (top_k < 1 || top_k > kMergeMaxTopK) {
    return ids.error(StatusCode::kInvalidArgument,
                     "1 to " + std::to_string(kMergeMaxTopK) + " columns", std::to_string(top_k));
  }
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(op, "topk_probs", args.topk_probs).matches({DType::kF32}, {num_rows, top_k}));
  return ArgumentCheck(op, "residual_probs", args.residual_probs).dense({DType::kF32}, {num_rows});
}

/// A float matrix with at least one column that an int32 can count.
Status check_matrix(const char* op, const char* name, const TensorRef& tensor) {
  const ArgumentCheck check(op, name, tensor);
  DIFFULEX_RETURN_IF_ERROR(
      check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  if (tensor.size[1] < 1 || tensor.size[1] >= INT32_MAX) {
    return check.error(StatusCode::kInvalidArgument, "1 to 2147483646 columns", shape_text(tensor));
  }
  return {};
}

}  // namespace

Status check_token_merge_embed(const TokenMergeEmbedParams& params) {
  constexpr const char* kOp = "token_merge_embed";
  DIFFULEX_RETURN_IF_ERROR(check_kind(kOp, params.merge_kind));
  DIFFULEX_RETURN_IF_ERROR(check_weight(kOp, params.weight));
  DIFFULEX_RETURN_IF_ERROR(check_matrix(kOp, "hidden", params.hidden));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "embedding", params.embedding)
          .matches({params.hidden.dtype}, {kAnyExtent, params.hidden.size[1]}));
  const Descriptors descriptors{params.merge_mask, params.topk_ids, params.topk_probs,
                                params.residual_probs};
  DIFFULEX_RETURN_IF_ERROR(check_descriptors(kOp, descriptors, params.hidden.size[0]));
  const bool is_id = params.mask_token_id >= 0 && params.mask_token_id < params.embedding.size[0];
  if (params.merge_kind == MergeKind::kDmaxTopk && !is_id) {
    return make_error(StatusCode::kInvalidArgument, "diffulex::", kOp,
                      ": mask_token_id: expected a value in [0, ", params.embedding.size[0],
                      "), got ", params.mask_token_id);
  }
  return {};
}

Status check_token_merge_partial(const TokenMergePartialParams& params) {
  constexpr const char* kOp = "token_merge_partial";
  DIFFULEX_RETURN_IF_ERROR(check_kind(kOp, params.merge_kind));
  if (params.vocab_start < 0) {
    return scalar_error(kOp, "vocab_start", "a value >= 0", params.vocab_start);
  }
  if (params.merge_kind == MergeKind::kDmaxTopk && params.mask_token_id < 0) {
    return scalar_error(kOp, "mask_token_id", "a value >= 0", params.mask_token_id);
  }
  DIFFULEX_RETURN_IF_ERROR(check_matrix(kOp, "embedding", params.embedding));
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "partial", params.partial)
                               .matches({DType::kF32}, {kAnyExtent, params.embedding.size[1] + 1}));
  const Descriptors descriptors{params.merge_mask, params.topk_ids, params.topk_probs,
                                params.residual_probs};
  return check_descriptors(kOp, descriptors, params.partial.size[0]);
}

Status check_token_merge_finalize(const TokenMergeFinalizeParams& params) {
  constexpr const char* kOp = "token_merge_finalize";
  DIFFULEX_RETURN_IF_ERROR(check_kind(kOp, params.merge_kind));
  DIFFULEX_RETURN_IF_ERROR(check_weight(kOp, params.weight));
  DIFFULEX_RETURN_IF_ERROR(check_matrix(kOp, "hidden", params.hidden));
  const int64_t num_rows = params.hidden.size[0];
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "partial", params.partial)
                               .matches({DType::kF32}, {num_rows, params.hidden.size[1] + 1}));
  return ArgumentCheck(kOp, "merge_mask", params.merge_mask).dense({DType::kU8}, {num_rows});
}

namespace {

Status check_softmax_rows(const char* op, const SoftmaxRows& params) {
  DIFFULEX_RETURN_IF_ERROR(check_matrix(op, "logits", params.logits));
  const int64_t num_rows = params.logits.size[0];
  // A column of the statistics is the usual argument, hence no requirement on the stride.
  const ArgumentCheck lse(op, "lse", params.lse);
  DIFFULEX_RETURN_IF_ERROR(lse.dtype({DType::kF32}));
  if (params.lse.rank != 1 || params.lse.size[0] != num_rows) {
    return lse.error(StatusCode::kInvalidArgument, "shape [" + std::to_string(num_rows) + "]",
                     shape_text(params.lse));
  }
  if (params.inv_temperature.present()) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(op, "inv_temperature", params.inv_temperature)
                                 .dense({DType::kF32}, {num_rows}));
  }
  if (params.row_valid.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(op, "row_valid", params.row_valid).dense({DType::kU8}, {num_rows}));
  }
  if (!std::isfinite(params.softcap) || params.softcap < 0.0F) {
    return scalar_error(op, "softcap", "a finite number >= 0", params.softcap);
  }
  if (params.vocab_limit < -1) {
    return scalar_error(op, "vocab_limit", "a value >= -1", params.vocab_limit);
  }
  if (params.vocab_start < 0) {
    return scalar_error(op, "vocab_start", "a value >= 0", params.vocab_start);
  }
  return {};
}

}  // namespace

Status check_soft_probabilities(const SoftProbabilitiesParams& params) {
  constexpr const char* kOp = "soft_probabilities";
  DIFFULEX_RETURN_IF_ERROR(check_softmax_rows(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_matrix(kOp, "out", params.out));
  return ArgumentCheck(kOp, "out", params.out)
      .matches({DType::kF32, DType::kF16, DType::kBF16},
               {params.logits.size[0], params.logits.size[1]});
}

Status check_soft_embedding(const SoftEmbeddingParams& params) {
  constexpr const char* kOp = "soft_embedding";
  DIFFULEX_RETURN_IF_ERROR(check_softmax_rows(kOp, params));
  DIFFULEX_RETURN_IF_ERROR(check_matrix(kOp, "embedding", params.embedding));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "embedding", params.embedding)
          .matches({DType::kF32, DType::kF16, DType::kBF16}, {params.logits.size[1], kAnyExtent}));
  DIFFULEX_RETURN_IF_ERROR(
      ArgumentCheck(kOp, "out", params.out)
          .matches({DType::kF32}, {params.logits.size[0], params.embedding.size[1]}));
  if (!std::isfinite(params.normalizer)) {
    return scalar_error(kOp, "normalizer", "a finite number", params.normalizer);
  }
  return {};
}

}  // namespace diffulex
