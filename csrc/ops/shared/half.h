// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

#include "diffulex/export.h"

namespace diffulex {

DIFFULEX_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DIFFULEX_HOST_DEVICE inline float bits_float(uint32_t bits) {
  float value = 0.0F;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/// Value of a bfloat16 bit pattern.
DIFFULEX_HOST_DEVICE inline float bf16_to_float(uint16_t bits) {
  return bits_float(static_cast<uint32_t>(bits) << 16);
}

/// Nearest bfloat16, ties to even; NaN stays a quiet NaN.
DIFFULEX_HOST_DEVICE inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return static_cast<uint16_t>((bits >> 16) | 0x40U);
  }
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

/// Value of an IEEE binary16 bit pattern.
DIFFULEX_HOST_DEVICE inline float f16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7FFFU) << 13;
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals exactly.
  uint32_t result = float_bits(bits_float(magnitude) * bits_float(239U << 23));
  if ((bits & 0x7C00U) == 0x7C00U) {
    result = magnitude | 0x7F800000U;
  }
  return bits_float(result | sign);
}

/// Nearest binary16, ties to even, overflow to infinity; NaN stays a quiet NaN.
DIFFULEX_HOST_DEVICE inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  uint32_t result = 0;
  if (magnitude > 0x7F800000U) {
    result = 0x7E00U;
  } else if (magnitude >= 0x477FF000U) {  // 65520, halfway to the first unrepresentable value
    result = 0x7C00U;
  } else if (magnitude < 0x38800000U) {  // below 2^-14: adding 0.5 leaves the subnormal bits
    result = float_bits(bits_float(magnitude) + 0.5F) - 0x3F000000U;
  } else {
    result = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return static_cast<uint16_t>(result | sign);
}

}  // namespace diffulex
