// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bytes by AVX-512 without VNNI: widened to 16 bits, so that no sum of a pair
// saturates.

#include "ops/shared/cpu_isa/vector_v4.h"

namespace diffulex::cpu {
namespace {

using Int8X = int16_t;
using Int8Sum = __m512i;  // two partial sums of eight columns
using Int8Columns = __m512i;
using Int8Factor = __m512i;
constexpr int32_t kInt8Parts = 2;
constexpr int32_t kInt8TileRows = 12;

DIFFULEX_ISA_INLINE Int8Sum start_sum(int32_t value) {
  return _mm512_set1_epi64(static_cast<uint32_t>(value));
}

DIFFULEX_ISA_INLINE void settle(Int8Sum& sum) {
  asm("" : "+v"(sum));
}

DIFFULEX_ISA_INLINE Int8Columns load_int8(const uint8_t* panel) {
  __m256i bytes;
  __builtin_memcpy(&bytes, panel, sizeof(bytes));
  return _mm512_cvtepu8_epi16(bytes);
}

DIFFULEX_ISA_INLINE Int8Factor broadcast_int8(const Int8X* x) {
  long long four = 0;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm512_set1_epi64(four);
}

DIFFULEX_ISA_INLINE Int8Sum add_products(Int8Sum sum, Int8Columns columns, Int8Factor factor) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(columns, factor));
}

DIFFULEX_ISA_INLINE VecI column_sums(const Int8Sum* parts) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (VecI)_mm512_add_epi32(_mm512_permutex2var_epi32(parts[0], even, parts[1]),
                                _mm512_permutex2var_epi32(parts[0], odd, parts[1]));
}

}  // namespace
}  // namespace diffulex::cpu
