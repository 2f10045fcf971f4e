// SPDX-License-Identifier: Apache-2.0
#pragma once

// Heads of K and V as float8_e4m3fn codes with one power of two: value = code * 2^e, where the
// scale byte is e + 127. Every value is exact in bfloat16 and float32.

#include <cstdint>

#include "ops/quant/codec.h"
#include "ops/shared/half.h"

namespace diffulex {

/// Bounds of e: the reader's multiplier stays finite, and every product is a normal number.
inline constexpr int32_t kMaxKvExponent = 7;
inline constexpr int32_t kMinKvExponent = -100;
/// Scale byte of a head of zeros, whose codes are 0.
inline constexpr uint8_t kZeroKvScale = 0;
/// Scale byte of a head that holds NaN. Its codes are 0, which read as NaN.
inline constexpr uint8_t kNanKvScale = 255;

/// clamp(ceil(log2(largest / 448)), -100, 7) + 127 from the bits of `largest` >= 0, which is no
/// NaN; 448 = 1.75 * 2^8.
DIFFULEX_HOST_DEVICE inline uint8_t kv_scale(float largest) {
  if (largest == 0.0F) {
    return kZeroKvScale;
  }
  const uint32_t bits = float_bits(largest);
  const int32_t above = (bits & 0x7FFFFFU) > 0x600000U ? 1 : 0;
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127 - 8 + above;
  const int32_t low = exponent < kMinKvExponent ? kMinKvExponent : exponent;
  return static_cast<uint8_t>((low > kMaxKvExponent ? kMaxKvExponent : low) + 127);
}

/// Code of one value below a scale that kv_scale gave; saturates.
DIFFULEX_HOST_DEVICE inline uint8_t kv_code(float value, uint8_t scale) {
  if (scale == kZeroKvScale) {
    return 0;
  }
  return float_to_e4m3(value * bits_float((254U - scale) << 23));  // 2^-e
}

/// Value of a code, also in a thread that flushes subnormal numbers. NaN for code 0 below
/// kNanKvScale.
DIFFULEX_HOST_DEVICE inline float kv_value(uint8_t code, uint8_t scale) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t exponent = scale > kMaxKvExponent + 127 ? 255U : scale;
  const float magnitude = e4m3_magnitude(code & 0x7FU);
  return bits_float(float_bits(magnitude) | sign) * bits_float(exponent << 23);
}

}  // namespace diffulex
