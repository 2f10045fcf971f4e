// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex {

/// Largest number of experts and of chosen experts of moe_topk.
inline constexpr int64_t kMoeMaxExperts = 1024;
inline constexpr int32_t kMoeMaxTopK = 32;

/// How router logits become scores.
enum class RouterScoring : int32_t { kSoftmax = 0, kSigmoid = 1 };

/// What a group of experts is ranked by.
enum class GroupScore : int32_t {
  kTopTwo = 0,  // sum of its two largest choices, or its only one
  kMax = 1,
};

/// Arguments of `diffulex::moe_topk`. T tokens, E experts (at most 1024), K chosen ones.
///
/// NaN logits count as -inf, +inf as the largest finite value. choice = score + bias; the K largest
/// choices win, lower ids first among equals, an expert never twice. With grouping (n_group > 1 and
/// 0 < topk_group < n_group) only experts of the topk_group best groups of E / n_group consecutive
/// experts take part. A weight is the score without bias, divided by the sum of the chosen scores
/// + 1e-20 when `renormalize` and K > 1, times routed_scaling, times expert_scale of the expert.
/// A row of -inf or NaN alone gets the ids 0..K-1 and weights 0; a row that is not valid the ids -1
/// and weights 0.
struct MoeTopkParams {
  TensorRef logits;        // [T, E] float, any row stride
  TensorRef bias;          // [E] float32, optional
  TensorRef expert_scale;  // [E] float32, optional
  TensorRef token_valid;   // [T] uint8, 0 = the row wakes no expert; optional
  TensorRef weights;       // [T, K] float32, written
  TensorRef ids;           // [T, K] int32, written, best choice first
  int32_t top_k = 0;       // 1 to min(32, E)
  RouterScoring scoring = RouterScoring::kSoftmax;
  bool renormalize = false;
  int32_t n_group = 0;
  int32_t topk_group = 0;
  GroupScore group_score = GroupScore::kTopTwo;
  float routed_scaling = 1.0F;
};

/// Arguments of `diffulex::router_gemm`: logits = x w^T, accumulated in float32. A row of the
/// result does not depend on the other rows. With ExecContext::weights_settled `w` is read before
/// the launches in front have ended: none of them may then write it.
struct RouterGemmParams {
  TensorRef x;       // [T, H] float, any row stride
  TensorRef w;       // [E, H] float32 or bfloat16, any row stride
  TensorRef logits;  // [T, E] float32, any row stride, memory of its own
};

[[nodiscard]] DIFFULEX_API Status moe_topk(const MoeTopkParams& params, const ExecContext& context);
[[nodiscard]] DIFFULEX_API Status router_gemm(const RouterGemmParams& params,
                                              const ExecContext& context);

}  // namespace diffulex
