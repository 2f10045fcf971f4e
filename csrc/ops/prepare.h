// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

/// One function per source of kernels: loads its code on the current device and sets its
/// attributes, so that a stream capture meets neither. Called by warmup().
#define DIFFULEX_KERNELS(name) [[nodiscard]] Status prepare_##name(const ExecContext& context);
#include "ops/ops.def"

}  // namespace diffulex::cuda
