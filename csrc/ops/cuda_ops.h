// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/params.h"

/// CUDA implementations behind the public ops. Arguments have passed the shape checks and are not
/// empty; `context.device` is kCuda. A build without CUDA defines them to return kNoKernel.
namespace diffulex::cuda {

#define DIFFULEX_OP(name, Params, ...) \
  [[nodiscard]] Status name(const Params& params, const ExecContext& context);
#define DIFFULEX_CPU_OP(...)
#include "ops/ops.def"

}  // namespace diffulex::cuda
