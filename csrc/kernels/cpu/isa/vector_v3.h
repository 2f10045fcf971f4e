// SPDX-License-Identifier: Apache-2.0
#pragma once

// Eight lanes: AVX2, FMA, F16C.

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/isa/vector_types.h"

namespace diffulex::cpu {
namespace {

constexpr int32_t kWidth = 8;
constexpr int32_t kRowTile = 4;
using VecF = VectorOf<kWidth>::Floats;
using VecI = VectorOf<kWidth>::Ints;
using VecU = VectorOf<kWidth>::Words;
using VecH = VectorOf<kWidth>::Halves;

DIFFULEX_ISA_INLINE VecF f16_to_floats(VecH halves) {
  return (VecF)_mm256_cvtph_ps((__m128i)halves);
}

DIFFULEX_ISA_INLINE VecH floats_to_f16(VecF values) {
  return (VecH)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

}  // namespace
}  // namespace diffulex::cpu
