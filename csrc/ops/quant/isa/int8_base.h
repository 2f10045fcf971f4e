// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of bytes in plain vector arithmetic.

#include <cstdint>

#include "ops/shared/cpu_isa/vector_base.h"

namespace diffulex::cpu {
namespace {

using Int8X = int16_t;
using Int8Sum = VecI;
struct Int8Columns {
  VecI depth[4];
};
struct Int8Factor {
  int32_t depth[4];
};
constexpr int32_t kInt8Parts = 1;
constexpr int32_t kInt8TileRows = 4;

DIFFULEX_ISA_INLINE Int8Sum start_sum(int32_t value) {
  return Int8Sum{} + value;
}

DIFFULEX_ISA_INLINE void settle(Int8Sum& /*sum*/) {}

DIFFULEX_ISA_INLINE Int8Columns load_int8(const uint8_t* panel) {
  Int8Columns columns;
  for (int32_t k = 0; k < 4; ++k) {
    columns.depth[k] = VecI{panel[k], panel[4 + k], panel[8 + k], panel[12 + k]};
  }
  return columns;
}

DIFFULEX_ISA_INLINE Int8Factor broadcast_int8(const Int8X* x) {
  return {{x[0], x[1], x[2], x[3]}};
}

DIFFULEX_ISA_INLINE Int8Sum add_products(Int8Sum sum, const Int8Columns& columns,
                                         const Int8Factor& factor) {
  for (int32_t k = 0; k < 4; ++k) {
    sum += columns.depth[k] * factor.depth[k];
  }
  return sum;
}

DIFFULEX_ISA_INLINE VecI column_sums(const Int8Sum* parts) {
  return parts[0];
}

}  // namespace
}  // namespace diffulex::cpu
