// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/moe.h"

namespace diffulex {

[[nodiscard]] Status check_moe_permute(const MoePermuteParams& params);
[[nodiscard]] Status check_fused_moe(const FusedMoeParams& params);
[[nodiscard]] Status check_fused_experts_packed(const FusedExpertsPackedParams& params);
[[nodiscard]] Status check_moe_combine(const MoeCombineParams& params);

}  // namespace diffulex
