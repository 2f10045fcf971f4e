// SPDX-License-Identifier: Apache-2.0
#pragma once

// One value to a code of 8 bits and back.

#include <cstdint>

#include "diffulex/export.h"
#include "ops/shared/half.h"

namespace diffulex {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr float kInt8Max = 127.0F;

/// Nearest float8_e4m3fn, ties to even, saturated at +-448; NaN 0x7F.
DIFFULEX_HOST_DEVICE inline uint8_t float_to_e4m3(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 24) & 0x80U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  uint32_t code = 0;
  if (magnitude > 0x7F800000U) {
    return 0x7FU;
  }
  if (magnitude >= 0x43E00000U) {  // 448
    code = 0x7EU;
  } else if (magnitude < 0x3C800000U) {  // below 2^-6: multiples of 2^-9, which 2^14 + x rounds to
    code = float_bits(bits_float(magnitude) + 16384.0F) - float_bits(16384.0F);
  } else {
    code = (magnitude - (120U << 23) + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20;
  }
  return static_cast<uint8_t>(code | sign);
}

/// Value of a float8_e4m3fn code without its sign, and without NaN: 0x7F is 480. No step of it has
/// a subnormal operand or result, which a thread may flush to zero.
DIFFULEX_HOST_DEVICE inline float e4m3_magnitude(uint32_t code) {
  if (code < 8U) {  // multiples of 2^-9
    return static_cast<float>(static_cast<int32_t>(code)) * bits_float(118U << 23);
  }
  return bits_float((code << 20) + (120U << 23));  // moves the exponent bias from 7 to 127
}

/// Value of a float8_e4m3fn code.
DIFFULEX_HOST_DEVICE inline float e4m3_to_float(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t magnitude = code & 0x7FU;
  if (magnitude == 0x7FU) {
    return bits_float(0x7FC00000U | sign);
  }
  return bits_float(float_bits(e4m3_magnitude(magnitude)) | sign);
}

/// clamp(rint(value), -127, 127), ties to even; NaN 0.
DIFFULEX_HOST_DEVICE inline int8_t float_to_int8(float value) {
  if (!(value == value)) {
    return 0;
  }
  const float clamped = value < -kInt8Max ? -kInt8Max : (value > kInt8Max ? kInt8Max : value);
  // Adding 1.5 * 2^23 leaves the rounded integer in the low mantissa bits.
  return static_cast<int8_t>(static_cast<int32_t>(float_bits(clamped + 12582912.0F)) - 0x4B400000);
}

/// The factor that a group of values is multiplied by, and the scale of its codes.
struct CodeScale {
  float factor = 0.0F;  // 0: all codes are 0
  float scale = 1.0F;
};

/// For the largest magnitude of a group and the largest code.
DIFFULEX_HOST_DEVICE inline CodeScale code_scale(float largest, float max_code) {
  constexpr float kInfinity = __builtin_inff();
  if (largest == kInfinity) {
    return {1.0F, 1.0F};
  }
  const float factor = max_code / largest;
  if (largest == 0.0F || factor == kInfinity) {
    return {};
  }
  return {factor, largest / max_code};
}

}  // namespace diffulex
