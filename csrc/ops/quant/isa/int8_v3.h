// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bytes by AVX2: widened to 16 bits, so that no sum of a pair saturates.

#include "ops/shared/cpu_isa/vector_v3.h"

namespace diffulex::cpu {
namespace {

using Int8X = int16_t;
using Int8Sum = __m256i;  // two partial sums of four columns
using Int8Columns = __m256i;
using Int8Factor = __m256i;
constexpr int32_t kInt8Parts = 2;
constexpr int32_t kInt8TileRows = 6;

DIFFULEX_ISA_INLINE Int8Sum start_sum(int32_t value) {
  return _mm256_set1_epi64x(static_cast<uint32_t>(value));
}

DIFFULEX_ISA_INLINE void settle(Int8Sum& sum) {
  asm("" : "+v"(sum));
}

DIFFULEX_ISA_INLINE Int8Columns load_int8(const uint8_t* panel) {
  __m128i bytes;
  __builtin_memcpy(&bytes, panel, sizeof(bytes));
  return _mm256_cvtepu8_epi16(bytes);
}

DIFFULEX_ISA_INLINE Int8Factor broadcast_int8(const Int8X* x) {
  long long four = 0;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm256_set1_epi64x(four);
}

DIFFULEX_ISA_INLINE Int8Sum add_products(Int8Sum sum, Int8Columns columns, Int8Factor factor) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(columns, factor));
}

DIFFULEX_ISA_INLINE VecI column_sums(const Int8Sum* parts) {
  return (VecI)_mm256_permute4x64_epi64(_mm256_hadd_epi32(parts[0], parts[1]), 0xD8);
}

}  // namespace
}  // namespace diffulex::cpu
