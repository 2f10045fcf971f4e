// SPDX-License-Identifier: Apache-2.0
#pragma once

// Four lanes of plain vector arithmetic: SSE2, NEON or whatever the compiler lowers it to.

#include <cstdint>

#include "ops/shared/cpu_isa/vector_types.h"

namespace diffulex::cpu {
namespace {

constexpr int32_t kWidth = 4;
constexpr int32_t kRowTile = 4;
constexpr int32_t kLinearTileRows = 6;
using VecF = VectorOf<kWidth>::Floats;
using VecI = VectorOf<kWidth>::Ints;
using VecU = VectorOf<kWidth>::Words;
using VecH = VectorOf<kWidth>::Halves;
using VecB = VectorOf<kWidth>::Bytes;

/// One float of memory in every lane; a plain load-and-broadcast, unlike splat.
DIFFULEX_ISA_INLINE VecF broadcast(const float* value) {
  return VecF{*value, *value, *value, *value};
}

/// a * b + c, rounded twice.
DIFFULEX_ISA_INLINE VecF multiply_add(VecF a, VecF b, VecF c) {
  return a * b + c;
}

/// a * b + c, rounded once: no instruction of the baseline does that.
DIFFULEX_ISA_INLINE VecF fused_multiply_add(VecF a, VecF b, VecF c) {
  for (int32_t lane = 0; lane < kWidth; ++lane) {
    c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  }
  return c;
}

DIFFULEX_ISA_INLINE VecU load_bytes(const uint8_t* bytes) {
  return VecU{bytes[0], bytes[1], bytes[2], bytes[3]};
}

/// binary16 -> float. Scaling by 2^112 moves the exponent bias and normalises subnormals exactly.
DIFFULEX_ISA_INLINE VecF f16_to_floats(VecH halves) {
  const VecU bits = __builtin_convertvector(halves, VecU);
  const VecU magnitude = (bits & 0x7FFFU) << 13;
  const VecU scaled = (VecU)((VecF)magnitude * 0x1p112F);
  const VecU special = magnitude | 0x7F800000U;
  const VecI is_special = (VecI)((bits & 0x7C00U) == 0x7C00U);
  return (VecF)((is_special ? special : scaled) | ((bits & 0x8000U) << 16));
}

/// float -> binary16, nearest even, overflow to infinity, NaN to a quiet NaN.
DIFFULEX_ISA_INLINE VecH floats_to_f16(VecF values) {
  const VecU bits = (VecU)values;
  const VecU sign = (bits >> 16) & 0x8000U;
  const VecU magnitude = bits & 0x7FFFFFFFU;
  const VecU normal = (magnitude - (112U << 23) + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13;
  // Adding 0.5 leaves the rounded subnormal in the low mantissa bits.
  const VecU subnormal = (VecU)((VecF)magnitude + 0.5F) - 0x3F000000U;
  VecU result = (VecI)(magnitude < 0x38800000U) ? subnormal : normal;
  result = (VecI)(magnitude >= 0x477FF000U) ? result * 0U + 0x7C00U : result;
  result = (VecI)(magnitude > 0x7F800000U) ? result * 0U + 0x7E00U : result;
  return __builtin_convertvector(result | sign, VecH);
}

}  // namespace
}  // namespace diffulex::cpu
