// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sixteen lanes: AVX-512 F, BW, DQ, VL.

#include <immintrin.h>

#include <cstdint>

#include "ops/shared/cpu_isa/vector_types.h"

namespace diffulex::cpu {
namespace {

constexpr int32_t kWidth = 16;
constexpr int32_t kRowTile = 8;
constexpr int32_t kLinearTileRows = 12;
using VecF = VectorOf<kWidth>::Floats;
using VecI = VectorOf<kWidth>::Ints;
using VecU = VectorOf<kWidth>::Words;
using VecH = VectorOf<kWidth>::Halves;
using VecB = VectorOf<kWidth>::Bytes;

/// One float of memory in every lane; a plain load-and-broadcast, unlike splat.
DIFFULEX_ISA_INLINE VecF broadcast(const float* value) {
  return (VecF)_mm512_set1_ps(*value);
}

/// a * b + c, rounded once.
DIFFULEX_ISA_INLINE VecF multiply_add(VecF a, VecF b, VecF c) {
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

DIFFULEX_ISA_INLINE VecF fused_multiply_add(VecF a, VecF b, VecF c) {
  return multiply_add(a, b, c);
}

// The unmasked intrinsics read an undefined register in GCC's header, which -Wall reports.
constexpr __mmask16 kAllLanes = 0xFFFF;

DIFFULEX_ISA_INLINE VecU load_bytes(const uint8_t* bytes) {
  return (VecU)_mm512_maskz_cvtepu8_epi32(kAllLanes, _mm_loadu_si128((const __m128i*)bytes));
}

DIFFULEX_ISA_INLINE VecH load_signed_bytes(const uint8_t* bytes) {
  return (VecH)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)bytes));
}

DIFFULEX_ISA_INLINE VecF f16_to_floats(VecH halves) {
  return (VecF)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)halves);
}

DIFFULEX_ISA_INLINE VecH floats_to_f16(VecF values) {
  return (VecH)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)values,
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace diffulex::cpu
