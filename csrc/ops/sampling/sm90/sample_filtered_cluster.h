// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

struct FilterArgs;

namespace sm90 {

/// True when the cluster kernel exists for such a call: bfloat16 rows without soft cap that fit the
/// shared memory of a cluster, on a device of compute capability 9.0.
[[nodiscard]] bool has_sample_filtered(const FilterArgs& args, DType dtype,
                                       const ExecContext& context);

/// Writes the active rows, or marks them with kPendingRow for the general kernel.
[[nodiscard]] Status sample_filtered(const FilterArgs& args, const ExecContext& context);

[[nodiscard]] Status prepare_sample_filtered();

}  // namespace sm90
}  // namespace diffulex::cuda
