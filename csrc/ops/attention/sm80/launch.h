// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "diffulex/core/status.h"

namespace diffulex::cuda {
struct AttentionArgs;
}  // namespace diffulex::cuda

namespace diffulex::cuda::sm80 {

/// One instantiation of the kernel. `launch` enqueues it on `stream`; `prepare` sets its shared
/// memory limit on a device (idempotent, thread-safe). Both name the op in their errors.
struct AttentionKernel final {
  Status (*launch)(const AttentionArgs& args, int32_t device_index, void* stream) = nullptr;
  Status (*prepare)(int32_t device_index) = nullptr;
};

/// Explicit instantiations, one a row of instances.def: dtype T (__nv_bfloat16, __half) and an
/// entry of kAttentionTiles (head dim, row tile, stages). Cached elements are of type Cached, T or
/// KvCode; with KvCode the arguments are CodedAttentionArgs.
template <typename T, int kDim, int kRows, int kStages, typename Cached = T>
AttentionKernel attention_instance();

}  // namespace diffulex::cuda::sm80
