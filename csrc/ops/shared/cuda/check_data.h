// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/exec_context.h"
#include "diffulex/ops/tensor_ref.h"

namespace diffulex::cuda {

/// Validation of index data on the device, active only with `context.check_data`: each call
/// enqueues a kernel, synchronises the stream and reports the first offending element as
/// kOutOfRange. Never usable inside a stream capture. Without check_data they do nothing.

/// Every element of an int32 or int64 tensor of rank 1 or 2 lies in [low, high).
[[nodiscard]] Status check_range(const char* where, const char* argument, const TensorRef& tensor,
                                 int64_t low, int64_t high, const ExecContext& context);

/// An int32 array starts at 0, never decreases and ends at or below `limit`.
[[nodiscard]] Status check_offsets(const char* where, const char* argument, const TensorRef& tensor,
                                   int64_t limit, const ExecContext& context);

}  // namespace diffulex::cuda
