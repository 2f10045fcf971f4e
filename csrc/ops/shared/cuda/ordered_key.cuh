// SPDX-License-Identifier: Apache-2.0
#pragma once

// Floats as integers of the same order, and (value, index) pairs packed into one comparable key.

#include <cstdint>

namespace diffulex::cuda {

/// Order-preserving bits; -0 and +0 are equal.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

/// Inverse of ordered_bits.
__device__ __forceinline__ float ordered_value(uint32_t bits) {
  return __uint_as_float((bits & 0x80000000U) != 0 ? bits & 0x7fffffffU : ~bits);
}

/// Larger key first, then smaller index; 0 is below every entry.
__device__ __forceinline__ uint64_t ranked(float key, int64_t index) {
  return static_cast<uint64_t>(ordered_bits(key)) << 32 |
         (0xffffffffU - static_cast<uint32_t>(index));
}

__device__ __forceinline__ int32_t ranked_index(uint64_t entry) {
  return static_cast<int32_t>(0xffffffffU - static_cast<uint32_t>(entry));
}

}  // namespace diffulex::cuda
