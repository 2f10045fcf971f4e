// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/export.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex {

/// Prepares every kernel of the device in `context`, so that the first op may run inside a stream
/// capture. Idempotent and thread-safe; does nothing on the CPU.
[[nodiscard]] DIFFULEX_API Status warmup(const ExecContext& context);

}  // namespace diffulex
