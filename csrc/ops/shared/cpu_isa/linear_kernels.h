// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of linear_packed: up to kLinearTileRows rows times one depth block of one panel, in
// register tiles of that many rows by two or four vectors of columns.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

// Panel rows to fetch ahead: 2 KiB of float32, more than a core reads in one DRAM latency.
constexpr int32_t kPrefetchRows = 16;

DIFFULEX_ISA_INLINE VecF load_columns(const float* values) {
  return load_floats(values);
}

DIFFULEX_ISA_INLINE VecF load_columns(const uint16_t* values) {
  VecH halves;
  __builtin_memcpy(&halves, values, sizeof(halves));
  return (VecF)(__builtin_convertvector(halves, VecU) << 16);
}

/// `panel` and `out` start at the first of the kVectors kWidth columns.
template <int32_t kRows, int32_t kVectors, typename T>
DIFFULEX_ISA_INLINE void linear_columns(const LinearTileArgs& args, const T* panel, float* out) {
  VecF sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      sums[row][v] =
          args.accumulate ? load_floats(out + row * args.out_stride + v * kWidth) : VecF{};
    }
  }
  const float* x = args.x;
  for (int32_t k = 0; k < args.depth; ++k) {
    VecF columns[kVectors];
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      columns[v] = load_columns(panel + v * kWidth);
    }
    // May point past the panel, and past the matrix: a prefetch never faults.
    __builtin_prefetch(panel + kPrefetchRows * kLinearPanelColumns);
    if constexpr (kVectors * kWidth * sizeof(T) > 64) {
      __builtin_prefetch(panel + kPrefetchRows * kLinearPanelColumns + kVectors * kWidth / 2);
    }
#pragma GCC unroll 16
    for (int32_t row = 0; row < kRows; ++row) {
      const VecF factor = broadcast(x + row * kLinearRowStride);
#pragma GCC unroll 4
      for (int32_t v = 0; v < kVectors; ++v) {
        sums[row][v] = multiply_add(factor, columns[v], sums[row][v]);
      }
    }
    ++x;
    panel += kLinearPanelColumns;
  }
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      store_floats(out + row * args.out_stride + v * kWidth, sums[row][v]);
    }
  }
}

template <int32_t kRows, typename T>
void linear_rows(const LinearTileArgs& args) {
  const T* panel = static_cast<const T*>(args.panel);
  // A sum waits for the one before it: few rows need more of them side by side.
  constexpr int32_t kVectors = kRows <= 2 && 4 * kWidth <= kLinearPanelColumns ? 4 : 2;
  for (int32_t column = 0; column < kLinearPanelColumns; column += kVectors * kWidth) {
    linear_columns<kRows, kVectors>(args, panel + column, args.out + column);
  }
}

template <int32_t kRows, typename T>
void linear_select(const LinearTileArgs& args) {
  if constexpr (kRows > 1) {
    if (args.rows < kRows) {
      linear_select<kRows - 1, T>(args);
      return;
    }
  }
  linear_rows<kRows, T>(args);
}

void linear_tile(const LinearTileArgs& args) {
  if (args.is_bf16) {
    linear_select<kLinearTileRows, uint16_t>(args);
  } else {
    linear_select<kLinearTileRows, float>(args);
  }
}

}  // namespace
}  // namespace diffulex::cpu
