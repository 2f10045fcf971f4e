// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"

namespace diffulex::cuda {
struct AttentionArgs;
}  // namespace diffulex::cuda

namespace diffulex::cuda::sm90 {

/// One instantiation of the kernel. `launch` enqueues it on `stream`; `prepare` sets its attributes
/// on a device (idempotent, thread-safe). Both name the op in their errors.
struct AttentionKernel final {
  Status (*launch)(const AttentionArgs& args, int32_t device_index, void* stream) = nullptr;
  Status (*prepare)(int32_t device_index) = nullptr;
};

/// Explicit instantiations, one a row of instances.def: dtype T (__nv_bfloat16, __half), head dim,
/// row tile, type of cached elements (T or KvCode).
template <typename T, int kDim, int kRows, typename Cached = T>
AttentionKernel attention_instance();

}  // namespace diffulex::cuda::sm90
