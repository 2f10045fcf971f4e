// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/params.h"

/// CPU implementations behind the public ops. Arguments have passed the shape checks and are not
/// empty. Data (page ids, slots, positions, offsets) is validated before the first write; a
/// violation returns kOutOfRange. Results do not depend on the number of threads.
namespace diffulex::cpu {

#define DIFFULEX_OP(name, Params, ...) \
  [[nodiscard]] Status name(const Params& params, const ExecContext& context);
#define DIFFULEX_CUDA_OP(...)
#include "ops/ops.def"

}  // namespace diffulex::cpu
