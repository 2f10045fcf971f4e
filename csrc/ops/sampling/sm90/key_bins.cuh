// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bins of bfloat16 values, one per value where filters cut: magnitudes in [2^-7, 2^9) have a bin
// each, the smaller ones share the middle bin, the larger ones the two outer bins. The bins are in
// order of value, and every column of one bin but those three has one probability.

#include <cstdint>

namespace diffulex::cuda {

inline constexpr uint32_t kLeastMagnitude = 0x3C00U;                // bits of 2^-7
inline constexpr uint32_t kMagnitudes = 0x4400U - kLeastMagnitude;  // up to 2^9
inline constexpr int32_t kMiddleBin = static_cast<int32_t>(kMagnitudes) + 1;
inline constexpr int32_t kTopBin = 2 * static_cast<int32_t>(kMagnitudes) + 2;
/// Largest magnitude of the middle bin is below this.
inline constexpr float kMiddleWidth = 0.0078125F;
/// Values of bin 0 are at most this.
inline constexpr float kLowValue = -512.0F;

/// Bin of a finite value, or of an infinity.
__device__ __forceinline__ int32_t bin_of(uint32_t bits) {
  const auto magnitude = static_cast<int32_t>(bits & 0x7fffU);
  constexpr auto kLeast = static_cast<int32_t>(kLeastMagnitude);
  const int32_t step = min(max(magnitude - kLeast + 1, 0), static_cast<int32_t>(kMagnitudes) + 1);
  return (bits & 0x8000U) != 0 ? kMiddleBin - step : kMiddleBin + step;
}

/// The value of a bin; 0 and kLowValue stand for those of the middle bin and of bin 0.
__device__ __forceinline__ float bin_value(int32_t bin) {
  if (bin == kMiddleBin) {
    return 0.0F;
  }
  const int32_t step = bin > kMiddleBin ? bin - kMiddleBin - 1 : kMiddleBin - 1 - bin;
  const uint32_t bits = (kLeastMagnitude + static_cast<uint32_t>(step)) << 16;
  return __uint_as_float(bin > kMiddleBin ? bits : bits | 0x80000000U);
}

}  // namespace diffulex::cuda
