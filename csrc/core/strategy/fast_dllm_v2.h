// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// Dual-cache decoding: blocks of N sub-blocks, one of which is denoised at a time over the
/// provisional KV of the others. Precondition: options.validate() is ok.
[[nodiscard]] std::unique_ptr<Strategy> make_fast_dllm_v2(const EngineOptions& options);

}  // namespace diffulex
