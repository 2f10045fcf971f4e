// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "diffulex/core/status.h"
#include "ops/rope/args.cuh"

namespace diffulex::cuda {

/// True for arguments that stream_heads takes: weights and caches, where there are any, of the
/// rows' type, and V not made of K. Everything starts at multiples of 16 bytes, and head and rotary
/// dims are multiples of 16.
[[nodiscard]] bool can_stream_heads(const RopeArgs& args);

/// The work of qk_norm_rope_store for many tokens, in rows of T (__half or __nv_bfloat16). The
/// results are those of the kernel for few tokens, bit by bit.
template <typename T>
[[nodiscard]] cudaError_t stream_heads(RopeArgs args, const ExecContext& context);

[[nodiscard]] Status prepare_rope_stream();

}  // namespace diffulex::cuda
