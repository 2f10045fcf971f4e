// SPDX-License-Identifier: Apache-2.0
#pragma once

// Loads, stores, reductions, exp and tanh on VecF. Include after one of vector_{base,v3,v4}.h.

#include <cstdint>

namespace diffulex::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kMaxFloat = 3.402823466e+38F;

DIFFULEX_ISA_INLINE VecF splat(float value) {
  return VecF{} + value;
}

DIFFULEX_ISA_INLINE VecF load_floats(const float* source) {
  VecF values;
  __builtin_memcpy(&values, source, sizeof(values));
  return values;
}

DIFFULEX_ISA_INLINE void store_floats(float* target, VecF values) {
  __builtin_memcpy(target, &values, sizeof(values));
}

DIFFULEX_ISA_INLINE VecF bf16_to_floats(VecH halves) {
  return (VecF)(__builtin_convertvector(halves, VecU) << 16);
}

DIFFULEX_ISA_INLINE VecH floats_to_bf16(VecF values) {
  const VecU bits = (VecU)values;
  const VecU rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const VecU quiet = (bits >> 16) | 0x40U;
  const VecI is_nan = (VecI)((bits & 0x7FFFFFFFU) > 0x7F800000U);
  return __builtin_convertvector(is_nan ? quiet : rounded, VecH);
}

/// Element types: `Stored` is what memory holds.
struct ElementF32 {
  using Stored = float;
  using Vector = VecF;
  DIFFULEX_ISA_INLINE static VecF widen(Vector values) { return values; }
  DIFFULEX_ISA_INLINE static Vector narrow(VecF values) { return values; }
};
struct ElementBF16 {
  using Stored = uint16_t;
  using Vector = VecH;
  DIFFULEX_ISA_INLINE static VecF widen(Vector values) { return bf16_to_floats(values); }
  DIFFULEX_ISA_INLINE static Vector narrow(VecF values) { return floats_to_bf16(values); }
};
struct ElementF16 {
  using Stored = uint16_t;
  using Vector = VecH;
  DIFFULEX_ISA_INLINE static VecF widen(Vector values) { return f16_to_floats(values); }
  DIFFULEX_ISA_INLINE static Vector narrow(VecF values) { return floats_to_f16(values); }
};

/// min(count, kWidth) elements; missing lanes are 0. Never touches memory past `count`.
template <typename Element>
DIFFULEX_ISA_INLINE VecF load_some(const typename Element::Stored* source, int64_t count) {
  typename Element::Vector values{};
  if (count >= kWidth) {
    __builtin_memcpy(&values, source, sizeof(values));
  } else {
    typename Element::Stored lanes[kWidth] = {};
    for (int64_t i = 0; i < count; ++i) {
      lanes[i] = source[i];
    }
    __builtin_memcpy(&values, lanes, sizeof(values));
  }
  return Element::widen(values);
}

template <typename Element>
DIFFULEX_ISA_INLINE void store_some(typename Element::Stored* target, VecF values, int64_t count) {
  const typename Element::Vector narrow = Element::narrow(values);
  if (count >= kWidth) {
    __builtin_memcpy(target, &narrow, sizeof(narrow));
    return;
  }
  typename Element::Stored lanes[kWidth];
  __builtin_memcpy(lanes, &narrow, sizeof(narrow));
  for (int64_t i = 0; i < count; ++i) {
    target[i] = lanes[i];
  }
}

/// Sum of the lanes in a fixed pairwise order.
DIFFULEX_ISA_INLINE float lane_sum(VecF values) {
  float lanes[kWidth];
  __builtin_memcpy(lanes, &values, sizeof(lanes));
  for (int32_t half = kWidth / 2; half > 0; half /= 2) {
    for (int32_t i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

DIFFULEX_ISA_INLINE VecF larger(VecF a, VecF b) {
  return a > b ? a : b;
}

DIFFULEX_ISA_INLINE VecF smaller(VecF a, VecF b) {
  return a < b ? a : b;
}

DIFFULEX_ISA_INLINE float lane_max(VecF values) {
  float lanes[kWidth];
  __builtin_memcpy(lanes, &values, sizeof(lanes));
  for (int32_t half = kWidth / 2; half > 0; half /= 2) {
    for (int32_t i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
}

/// exp(x), at most 2 ulp; 0 below -104, infinity above 88.73, NaN stays NaN.
DIFFULEX_ISA_INLINE VecF exp_of(VecF x) {
  const VecF high = splat(89.0F);
  const VecF low = splat(-104.0F);
  VecF clamped = x > high ? high : x;
  clamped = clamped < low ? low : clamped;
  // 1.5 * 2^23 leaves round(x log2 e) in the low bits of the sum.
  const VecF shifted = clamped * 1.44269504088896341F + 12582912.0F;
  const VecF power = shifted - 12582912.0F;
  const VecF r = (clamped - power * 0.693359375F) + power * 2.12194440e-4F;
  VecF y = r * 1.9875691500e-4F + 1.3981999507e-3F;
  y = y * r + 8.3334519073e-3F;
  y = y * r + 4.1665795894e-2F;
  y = y * r + 1.6666665459e-1F;
  y = y * r + 5.0000001201e-1F;
  y = (y * (r * r) + r) + 1.0F;
  // Two factors: 2^power alone leaves the range of normal numbers at both ends.
  const VecI exponent = (VecI)shifted - 0x4B400000;
  const VecI first = exponent >> 1;
  const VecI second = exponent - first;
  return y * (VecF)((first + 127) << 23) * (VecF)((second + 127) << 23);
}

/// tanh(x) with a relative error below 1e-6.
DIFFULEX_ISA_INLINE VecF tanh_of(VecF x) {
  const VecF magnitude = (VecF)((VecU)x & 0x7FFFFFFFU);
  const VecF square = x * x;
  VecF small = square * -5.70498872745e-3F + 2.06390887954e-2F;
  small = small * square + -5.37397155531e-2F;
  small = small * square + 1.33314422036e-1F;
  small = small * square + -3.33332819422e-1F;
  small = small * square * x + x;
  const VecF large = 1.0F - 2.0F / (exp_of(magnitude + magnitude) + 1.0F);
  const VecF signed_large = (VecF)((VecU)large | ((VecU)x & 0x80000000U));
  return magnitude < 0.625F ? small : signed_large;
}

}  // namespace
}  // namespace diffulex::cpu
