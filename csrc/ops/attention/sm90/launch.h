// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"
#include "diffulex/ops/dtype.h"

namespace diffulex::cuda {
struct AttentionArgs;
struct CodeRows;
struct NoCodeRows;
}  // namespace diffulex::cuda

namespace diffulex::cuda::sm90 {

/// One instantiation of the kernel. `launch` enqueues it on `stream`, and has `rows` written if it
/// is one for codes; `prepare` sets its attributes on a device (idempotent, thread-safe). Both name
/// the op in their errors.
struct AttentionKernel final {
  Status (*launch)(const AttentionArgs& args, const CodeRows& rows, int32_t device_index,
                   void* stream) = nullptr;
  Status (*prepare)(int32_t device_index) = nullptr;
};

/// Explicit instantiations, one a row of instances.def: dtype T (__nv_bfloat16, __half), head dim,
/// row tile, type of cached elements (T or KvCode), CodeRows where e4m3 codes of the result are
/// written.
template <typename T, int kDim, int kRows, typename Cached = T, typename Rows = NoCodeRows>
AttentionKernel attention_instance();

}  // namespace diffulex::cuda::sm90
