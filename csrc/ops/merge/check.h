// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/merge.h"

namespace diffulex {

[[nodiscard]] Status check_token_merge_embed(const TokenMergeEmbedParams& params);
[[nodiscard]] Status check_token_merge_partial(const TokenMergePartialParams& params);
[[nodiscard]] Status check_token_merge_finalize(const TokenMergeFinalizeParams& params);
[[nodiscard]] Status check_soft_embedding(const SoftEmbeddingParams& params);

}  // namespace diffulex
