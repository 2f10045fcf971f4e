// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"
#include "diffulex/ops/exec_context.h"

namespace diffulex::cuda {

struct TokenStatsArgs;

namespace sm90 {

/// True when token_stats of rows with this many chunks can run as one launch of clusters: the build
/// holds the sm_90 kernels, the device is one, and the records of a row fit its shared memory.
[[nodiscard]] bool has_token_stats(int64_t num_chunks, const ExecContext& context);

/// token_stats by one cluster per row; the same results as the portable kernels.
[[nodiscard]] Status token_stats(const TokenStatsArgs& args, DType dtype,
                                 const ExecContext& context);

[[nodiscard]] Status prepare_token_stats();

}  // namespace sm90
}  // namespace diffulex::cuda
