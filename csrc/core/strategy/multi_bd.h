// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// Several blocks in flight under block-causal visibility; buffer_size 1 is single-block decoding.
[[nodiscard]] std::unique_ptr<Strategy> make_multi_bd(const EngineOptions& options);

}  // namespace diffulex
