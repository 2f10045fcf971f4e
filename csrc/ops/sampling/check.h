// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/sampling.h"

namespace diffulex {

[[nodiscard]] Status check_token_stats(const TokenStatsParams& params);
[[nodiscard]] Status check_merge_token_stats(const MergeTokenStatsParams& params);
[[nodiscard]] Status check_accept_mask_fill(const AcceptMaskFillParams& params);

}  // namespace diffulex
