// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// Several blocks in flight after a prompt whose rows all see the whole prompt. The KV of a prompt
/// position therefore depends on every prompt token: nothing is shared between requests, and KV
/// lost to a preemption is rebuilt by two forwards, the prompt's and that of the blocks after it.
[[nodiscard]] std::unique_ptr<Strategy> make_d2f(const EngineOptions& options);

}  // namespace diffulex
