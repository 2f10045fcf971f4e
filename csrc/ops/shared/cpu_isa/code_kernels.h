// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codes of low precision to float32 and back, and sums of products of codes.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

/// The value of every float8_e4m3fn code.
struct E4m3Values {
  float of[256] = {};

  constexpr E4m3Values() {
    for (int32_t code = 0; code < 256; ++code) {
      const int32_t exponent = code >> 3 & 15;
      float value = static_cast<float>(exponent == 0 ? code & 7 : 8 + (code & 7)) / 512;
      for (int32_t i = 1; i < exponent; ++i) {
        value *= 2;
      }
      value = (code & 127) == 127 ? __builtin_nanf("") : value;
      of[code] = code < 128 ? value : -value;
    }
  }
};
constexpr E4m3Values kE4m3Values;

DIFFULEX_ISA_INLINE bool has_nan(const uint8_t* codes, int64_t n) {
  uint8_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    found |= static_cast<uint8_t>((codes[i] & 127U) + 1U);
  }
  return found >= 128U;
}

void widen_e4m3(const uint8_t* codes, float* out, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  // Without the instructions, binary16 is by products of subnormals, which a thread may take for 0.
  if (!has_nan(codes, n)) {
    for (; i + kWidth <= n; i += kWidth) {
      // The same sign, exponent and mantissa in binary16, whose exponents are 8 lower.
      const VecH halves = load_signed_bytes(codes + i) << 7 & 0xBF80U;
      store_floats(out + i, f16_to_floats(halves) * 256.0F);
    }
  }
#endif
  for (; i < n; ++i) {
    out[i] = kE4m3Values.of[codes[i]];
  }
}

float largest_of(const float* values, int64_t n) {
  VecU largest{};
  for (int64_t i = 0; i < n; i += kWidth) {
    const VecU magnitude = (VecU)load_some<ElementF32>(values + i, n - i) & 0x7FFFFFFFU;
    const VecU number = (VecI)(magnitude > 0x7F800000U) ? VecU{} : magnitude;
    largest = (VecI)(number > largest) ? number : largest;
  }
  return lane_max((VecF)largest);
}

/// As float_to_int8.
DIFFULEX_ISA_INLINE VecU int8_codes(VecF values) {
  const VecF clamped = larger(smaller(values, splat(127.0F)), splat(-127.0F));
  const VecU codes = (VecU)(clamped + 12582912.0F) - 0x4B400000U;
  return (VecI)(values == values) ? codes : VecU{};
}

/// As float_to_e4m3.
DIFFULEX_ISA_INLINE VecU e4m3_codes(VecF values) {
  const VecU bits = (VecU)values;
  const VecU magnitude = bits & 0x7FFFFFFFU;
  const VecU small = (VecU)((VecF)magnitude + 16384.0F) - 0x46800000U;
  const VecU normal = (magnitude - (120U << 23) + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20;
  VecU codes = (VecI)(magnitude < 0x3C800000U) ? small : normal;
  codes = (VecI)(magnitude >= 0x43E00000U) ? VecU{} + 0x7EU : codes;
  codes |= (bits >> 24) & 0x80U;
  return (VecI)(magnitude > 0x7F800000U) ? VecU{} + 0x7FU : codes;
}

void to_codes(const CodeArgs& args, uint8_t* out) {
  for (int64_t i = 0; i < args.count; i += kWidth) {
    const int64_t count = args.count - i < kWidth ? args.count - i : kWidth;
    const VecF values = load_some<ElementF32>(args.values + i, count) * args.factor;
    const VecU codes = args.dtype == DType::kI8 ? int8_codes(values) : e4m3_codes(values);
    const VecB bytes = __builtin_convertvector(codes, VecB);
    __builtin_memcpy(out + i, &bytes, static_cast<size_t>(count));
  }
}

/// bfloat16((nibble - zero) * scale) of a nibble that begins at bit `kShift`.
template <int32_t kShift>
DIFFULEX_ISA_INLINE VecF nibble_values(VecU bytes, VecF zero, VecF scale) {
  // Mantissa bits of 2^23, or of 2^19, of which the nibble counts ones as well.
  constexpr uint32_t kExponent = kShift == 0 ? 0x4B000000U : 0x49000000U;
  constexpr float kOffset = kShift == 0 ? 0x1p23F : 0x1p19F;
  const VecF shifted = (VecF)((bytes & (15U << kShift)) | kExponent);
  const VecU bits = (VecU)((shifted - (zero + kOffset)) * scale);
  return (VecF)((bits + 0x7FFFU + ((bits >> 16) & 1U)) & 0xFFFF0000U);
}

void widen_nibbles(const NibbleArgs& args) {
  for (int32_t column = 0; column < kLinearPanelColumns; column += kWidth) {
    const VecF scale = load_floats(args.scale + column);
    const VecF zero = load_floats(args.zero + column);
    const auto bytes_of = [&](int32_t k) __attribute__((always_inline)) {
      return load_bytes(args.codes + k / 2 * kLinearPanelColumns + column);
    };
    float* out = args.out + column;
    int32_t k = args.first;
    if (k % 2 != 0) {
      store_floats(out, nibble_values<4>(bytes_of(k++), zero, scale));
      out += kLinearPanelColumns;
    }
    for (; k + 2 <= args.last; k += 2, out += 2 * kLinearPanelColumns) {
      const VecU bytes = bytes_of(k);
      store_floats(out, nibble_values<0>(bytes, zero, scale));
      store_floats(out + kLinearPanelColumns, nibble_values<4>(bytes, zero, scale));
    }
    if (k < args.last) {
      store_floats(out, nibble_values<0>(bytes_of(k), zero, scale));
    }
  }
}

void promote(const PromoteArgs& args) {
  for (int32_t row = 0; row < args.rows; ++row) {
    const VecF factor = VecF{} + args.row_scale[row] * args.factor;
    for (int32_t column = 0; column < kLinearPanelColumns; column += kWidth) {
      float* sums = args.sums + row * kLinearPanelColumns + column;
      const VecF products = load_floats(args.products + row * kLinearPanelColumns + column);
      VecF sum = args.accumulate ? load_floats(sums) : VecF{};
      sum = fused_multiply_add(factor, products, sum);
      if (args.column_scale != nullptr) {
        sum = fused_multiply_add(sum, load_floats(args.column_scale + column),
                                 load_floats(args.bias + column));
      }
      store_floats(sums, sum);
    }
  }
}

}  // namespace
}  // namespace diffulex::cpu
