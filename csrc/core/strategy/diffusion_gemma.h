// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "diffulex/core/options.h"
#include "diffulex/core/strategy.h"

namespace diffulex {

/// Canvas decoding: random canvases after a causally encoded prefix, denoised as a whole and then
/// encoded themselves. Precondition: options.validate() is ok.
[[nodiscard]] std::unique_ptr<Strategy> make_diffusion_gemma(const EngineOptions& options);

}  // namespace diffulex
