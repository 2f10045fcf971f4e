// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// The life cycle of multi_bd under editing rules, with token-merge descriptors: what the sampler
/// says about a token replaces its input embedding in the next forward. A block that is frozen
/// drops its descriptors, so that the stored KV is a function of the tokens, unless
/// dmax_store_soft_embeddings keeps them.
[[nodiscard]] std::unique_ptr<Strategy> make_dmax(const EngineOptions& options);

}  // namespace diffulex
