// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "diffulex/ops/dtype.h"

namespace diffulex {

/// Body of a parallel loop over [begin, end).
using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

/// Runs `body` over disjoint sub-ranges that cover [begin, end) exactly, each at least `grain`
/// long except the last, possibly on several threads, and returns when all are done.
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context,
                             void* pool);

/// The serial ParallelFor: one call over the whole range.
inline void serial_for(int64_t begin, int64_t end, int64_t /*grain*/, RangeFn body, void* context,
                       void* /*pool*/) {
  if (begin < end) {
    body(begin, end, context);
  }
}

/// Where and how an op runs. Plain data; the caller keeps everything alive during the call.
struct ExecContext {
  Device device = Device::kCpu;
  int32_t device_index = 0;   // CUDA ordinal, ignored on CPU
  void* stream = nullptr;     // cudaStream_t, ignored on CPU
  void* workspace = nullptr;  // scratch, 256-byte aligned, size from *_workspace_bytes
  size_t workspace_bytes = 0;
  ParallelFor parallel_for = serial_for;
  void* parallel_pool = nullptr;  // passed to parallel_for
  bool batch_invariant = false;   // a request's result must not depend on its batch
  bool check_data = false;        // validate data on CUDA (synchronises); CPU always does
  /// CUDA: the caller promises that no launch still in the stream writes a weight. Kernels of
  /// norms, rotary embeddings, router and dense products then read their weights while the launches
  /// in front still run; without the promise they start after those have ended.
  bool weights_settled = false;
  /// CUDA: bytes of shared memory that block_attention may count on per CTA; 0 = what the device
  /// offers. A lower number takes the kernels of a smaller device, which is how these are tested.
  int32_t shared_memory_limit = 0;
};

}  // namespace diffulex
