// SPDX-License-Identifier: Apache-2.0
#include "ops/moe/routing_check.h"

#include <string>

#include "ops/checks.h"
#include "ops/shared/tensor_checks.h"

namespace diffulex {
namespace {

Status check_choice(const MoeTopkParams& params, int64_t num_experts) {
  constexpr const char* kOp = "moe_topk";
  const int64_t limit = num_experts < kMoeMaxTopK ? num_experts : kMoeMaxTopK;
  if (params.top_k < 1 || params.top_k > limit) {
    return scalar_error(kOp, "top_k", ("a value in [1, " + std::to_string(limit) + "]").c_str(),
                        params.top_k);
  }
  if (params.scoring != RouterScoring::kSoftmax && params.scoring != RouterScoring::kSigmoid) {
    return scalar_error(kOp, "scoring", "0 (softmax) or 1 (sigmoid)",
                        static_cast<int32_t>(params.scoring));
  }
  if (params.group_score != GroupScore::kTopTwo && params.group_score != GroupScore::kMax) {
    return scalar_error(kOp, "group_score", "0 (sum of the two largest) or 1 (maximum)",
                        static_cast<int32_t>(params.group_score));
  }
  if (params.n_group < 0) {
    return scalar_error(kOp, "n_group", "a value >= 0", params.n_group);
  }
  if (params.topk_group < 0) {
    return scalar_error(kOp, "topk_group", "a value >= 0", params.topk_group);
  }
  if (!is_grouped(params)) {
    return {};
  }
  if (num_experts % params.n_group != 0) {
    return scalar_error(kOp, "n_group",
                        ("a divisor of " + std::to_string(num_experts) + " experts").c_str(),
                        params.n_group);
  }
  const int64_t available = params.topk_group * (num_experts / params.n_group);
  if (params.top_k > available) {
    return scalar_error(
        kOp, "top_k",
        ("at most the " + std::to_string(available) + " experts of topk_group groups").c_str(),
        params.top_k);
  }
  return {};
}

}  // namespace

Status check_moe_topk(const MoeTopkParams& params) {
  constexpr const char* kOp = "moe_topk";
  const ArgumentCheck logits_check(kOp, "logits", params.logits);
  DIFFULEX_RETURN_IF_ERROR(
      logits_check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  const int64_t num_tokens = params.logits.size[0];
  const int64_t num_experts = params.logits.size[1];
  if (num_experts < 1 || num_experts > kMoeMaxExperts) {
    return logits_check.error(StatusCode::kInvalidArgument,
                              "1 to " + std::to_string(kMoeMaxExperts) + " experts",
                              shape_text(params.logits));
  }
  DIFFULEX_RETURN_IF_ERROR(check_choice(params, num_experts));
  if (params.bias.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, "bias", params.bias).dense({DType::kF32}, {num_experts}));
  }
  if (params.expert_scale.present()) {
    DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "expert_scale", params.expert_scale)
                                 .dense({DType::kF32}, {num_experts}));
  }
  if (params.token_valid.present()) {
    DIFFULEX_RETURN_IF_ERROR(
        ArgumentCheck(kOp, "token_valid", params.token_valid).dense({DType::kU8}, {num_tokens}));
  }
  DIFFULEX_RETURN_IF_ERROR(ArgumentCheck(kOp, "weights", params.weights)
                               .matches({DType::kF32}, {num_tokens, params.top_k}));
  return ArgumentCheck(kOp, "ids", params.ids).matches({DType::kI32}, {num_tokens, params.top_k});
}

Status check_router_gemm(const RouterGemmParams& params) {
  constexpr const char* kOp = "router_gemm";
  const ArgumentCheck x_check(kOp, "x", params.x);
  DIFFULEX_RETURN_IF_ERROR(
      x_check.matches({DType::kF32, DType::kF16, DType::kBF16}, {kAnyExtent, kAnyExtent}));
  const int64_t hidden = params.x.size[1];
  if (hidden < 1) {
    return x_check.error(StatusCode::kInvalidArgument, "a last dimension >= 1",
                         shape_text(params.x));
  }
  const ArgumentCheck w_check(kOp, "w", params.w);
  DIFFULEX_RETURN_IF_ERROR(w_check.matches({DType::kF32, DType::kBF16}, {kAnyExtent, hidden}));
  const int64_t num_experts = params.w.size[0];
  if (num_experts < 1) {
    return w_check.error(StatusCode::kInvalidArgument, "at least one expert", shape_text(params.w));
  }
  const ArgumentCheck logits_check(kOp, "logits", params.logits);
  DIFFULEX_RETURN_IF_ERROR(logits_check.matches({DType::kF32}, {params.x.size[0], num_experts}));
  if (params.x.size[0] > 0 && params.logits.data == params.x.data) {
    return logits_check.error(StatusCode::kInvalidArgument, "memory of its own", "the memory of x");
  }
  return {};
}

}  // namespace diffulex
