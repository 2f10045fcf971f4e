// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bytes by SDOT of Armv8.2 (Arm Architecture Reference Manual, FEAT_DotProd). Its
// factors are both signed: the weights lose the 128 of the panel as they are loaded.

#include <arm_neon.h>

#include "ops/shared/cpu_isa/vector_base.h"

namespace diffulex::cpu {
namespace {

using Int8X = int8_t;
using Int8Sum = int32x4_t;
using Int8Columns = int8x16_t;
using Int8Factor = int8x16_t;
constexpr int32_t kInt8Parts = 1;
constexpr int32_t kInt8TileRows = 12;

/// What makes up for the 128 has no place here.
DIFFULEX_ISA_INLINE Int8Sum start_sum(int32_t /*value*/) {
  return vdupq_n_s32(0);
}

DIFFULEX_ISA_INLINE void settle(Int8Sum& sum) {
  asm("" : "+w"(sum));
}

DIFFULEX_ISA_INLINE Int8Columns load_int8(const uint8_t* panel) {
  return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(panel), vdupq_n_u8(0x80)));
}

DIFFULEX_ISA_INLINE Int8Factor broadcast_int8(const Int8X* x) {
  int32_t four = 0;
  __builtin_memcpy(&four, x, sizeof(four));
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

DIFFULEX_ISA_INLINE Int8Sum add_products(Int8Sum sum, Int8Columns columns, Int8Factor factor) {
  return vdotq_s32(sum, columns, factor);
}

DIFFULEX_ISA_INLINE VecI column_sums(const Int8Sum* parts) {
  return (VecI)parts[0];
}

}  // namespace
}  // namespace diffulex::cpu
