// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bytes by AVX-VNNI.

#include "ops/shared/cpu_isa/vector_v3.h"

namespace diffulex::cpu {
namespace {

using Int8X = int8_t;
using Int8Sum = __m256i;
using Int8Columns = __m256i;
using Int8Factor = __m256i;
constexpr int32_t kInt8Parts = 1;
constexpr int32_t kInt8TileRows = 6;

DIFFULEX_ISA_INLINE Int8Sum start_sum(int32_t value) {
  return _mm256_set1_epi32(value);
}

DIFFULEX_ISA_INLINE void settle(Int8Sum& sum) {
  asm("" : "+v"(sum));
}

DIFFULEX_ISA_INLINE Int8Columns load_int8(const uint8_t* panel) {
  Int8Columns bytes;
  __builtin_memcpy(&bytes, panel, sizeof(bytes));
  return bytes;
}

DIFFULEX_ISA_INLINE Int8Factor broadcast_int8(const Int8X* x) {
  int32_t four = 0;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm256_set1_epi32(four);
}

/// The first factor is unsigned, the second one signed.
DIFFULEX_ISA_INLINE Int8Sum add_products(Int8Sum sum, Int8Columns columns, Int8Factor factor) {
  return _mm256_dpbusd_avx_epi32(sum, columns, factor);
}

DIFFULEX_ISA_INLINE VecI column_sums(const Int8Sum* parts) {
  return (VecI)parts[0];
}

}  // namespace
}  // namespace diffulex::cpu
