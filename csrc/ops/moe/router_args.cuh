// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace diffulex::cuda {

/// logits[T, E] = x[T, H] w[E, H]^T; strides in elements.
struct RouterArgs {
  const void* __restrict__ x;  // [T, H]
  const void* __restrict__ w;  // [E, H]
  float* __restrict__ logits;  // [T, E]
  int64_t x_stride;
  int64_t w_stride;
  int64_t logits_stride;
  int64_t num_tokens;
  int32_t num_experts;
  int32_t hidden;
};

}  // namespace diffulex::cuda
