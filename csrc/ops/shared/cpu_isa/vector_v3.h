// SPDX-License-Identifier: Apache-2.0
#pragma once

// Eight lanes: AVX2, FMA, F16C.

#include <immintrin.h>

#include <cstdint>

#include "ops/shared/cpu_isa/vector_types.h"

namespace diffulex::cpu {
namespace {

constexpr int32_t kWidth = 8;
constexpr int32_t kRowTile = 4;
constexpr int32_t kLinearTileRows = 6;
using VecF = VectorOf<kWidth>::Floats;
using VecI = VectorOf<kWidth>::Ints;
using VecU = VectorOf<kWidth>::Words;
using VecH = VectorOf<kWidth>::Halves;
using VecB = VectorOf<kWidth>::Bytes;

/// One float of memory in every lane; a plain load-and-broadcast, unlike splat.
DIFFULEX_ISA_INLINE VecF broadcast(const float* value) {
  return (VecF)_mm256_set1_ps(*value);
}

/// a * b + c, rounded once.
DIFFULEX_ISA_INLINE VecF multiply_add(VecF a, VecF b, VecF c) {
  return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

DIFFULEX_ISA_INLINE VecF fused_multiply_add(VecF a, VecF b, VecF c) {
  return multiply_add(a, b, c);
}

DIFFULEX_ISA_INLINE VecU load_bytes(const uint8_t* bytes) {
  return (VecU)_mm256_cvtepu8_epi32(_mm_loadu_si64(bytes));
}

DIFFULEX_ISA_INLINE VecH load_signed_bytes(const uint8_t* bytes) {
  return (VecH)_mm_cvtepi8_epi16(_mm_loadu_si64(bytes));
}

DIFFULEX_ISA_INLINE VecF f16_to_floats(VecH halves) {
  return (VecF)_mm256_cvtph_ps((__m128i)halves);
}

DIFFULEX_ISA_INLINE VecH floats_to_f16(VecF values) {
  return (VecH)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace diffulex::cpu
