// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "diffulex/core/status.h"
#include "diffulex/edge/model.h"

namespace diffulex {

/// A program of `diffulex edge export` (model.pte) as the model of a session. `threads` is that of
/// the process's one pool, 0 = its physical cores. kNotFound without a readable file,
/// kInvalidArgument for a file that is no such program, and kUnsupported for one that this runtime
/// cannot run.
[[nodiscard]] Result<std::unique_ptr<EdgeModel>> load_executorch_model(const std::string& path,
                                                                       int32_t threads = 0);

/// Threads of the pool that programs run on.
[[nodiscard]] int32_t executorch_threads();

}  // namespace diffulex
