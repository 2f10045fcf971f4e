// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/ops/accept.h"
#include "diffulex/ops/activation.h"
#include "diffulex/ops/advance.h"
#include "diffulex/ops/attention.h"
#include "diffulex/ops/kv.h"
#include "diffulex/ops/linear.h"
#include "diffulex/ops/merge.h"
#include "diffulex/ops/moe.h"
#include "diffulex/ops/norm.h"
#include "diffulex/ops/rope.h"
#include "diffulex/ops/routing.h"
#include "diffulex/ops/sampling.h"

/// CUDA implementations behind the public ops. Arguments have passed the shape checks and are not
/// empty; `context.device` is kCuda. A build without CUDA defines them to return kNoKernel.
namespace diffulex::cuda {

#define DIFFULEX_OP(name, Params, ...) \
  [[nodiscard]] Status name(const Params& params, const ExecContext& context);
#define DIFFULEX_CPU_OP(...)
#include "ops/ops.def"

}  // namespace diffulex::cuda
