// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

// Factories of the built-in strategies: `options` are valid and name the strategy.

namespace diffulex {

#define DIFFULEX_STRATEGY(name, traits) \
  [[nodiscard]] std::unique_ptr<Strategy> make_##name(const EngineOptions& options);
#include "core/strategy/strategies.def"

}  // namespace diffulex
