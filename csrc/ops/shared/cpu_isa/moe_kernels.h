// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products of rows with rows of a row-major weight, as expert and router weights are stored. Each
// element is one vector of sums over ascending k and then one fixed sum of its lanes, so that it
// does not depend on the other rows and columns.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

constexpr int32_t kDotRows = 4;
constexpr int32_t kDotColumns = kWidth == 16 ? 4 : 2;

template <typename Element, int32_t kRows, int32_t kColumns>
DIFFULEX_ISA_INLINE void dot_tile(const DotRowsArgs& args, int64_t row, int64_t column) {
  using Stored = typename Element::Stored;
  const float* x[kRows];
  const Stored* weight[kColumns];
#pragma GCC unroll 4
  for (int32_t r = 0; r < kRows; ++r) {
    x[r] = args.x[row + r];
  }
#pragma GCC unroll 4
  for (int32_t c = 0; c < kColumns; ++c) {
    weight[c] = static_cast<const Stored*>(args.weight) + (column + c) * args.weight_stride;
  }
  VecF sums[kRows][kColumns] = {};
  int64_t k = 0;
  for (; k + kWidth <= args.depth; k += kWidth) {
    VecF columns[kColumns];
#pragma GCC unroll 4
    for (int32_t c = 0; c < kColumns; ++c) {
      typename Element::Vector stored;
      __builtin_memcpy(&stored, weight[c] + k, sizeof(stored));
      columns[c] = Element::widen(stored);
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < kRows; ++r) {
      const VecF values = load_floats(x[r] + k);
#pragma GCC unroll 4
      for (int32_t c = 0; c < kColumns; ++c) {
        sums[r][c] = multiply_add(values, columns[c], sums[r][c]);
      }
    }
  }
  if (k < args.depth) {
    for (int32_t r = 0; r < kRows; ++r) {
      const VecF values = load_some<ElementF32>(x[r] + k, args.depth - k);
      for (int32_t c = 0; c < kColumns; ++c) {
        const VecF columns = load_some<Element>(weight[c] + k, args.depth - k);
        sums[r][c] = multiply_add(values, columns, sums[r][c]);
      }
    }
  }
  for (int32_t r = 0; r < kRows; ++r) {
    for (int32_t c = 0; c < kColumns; ++c) {
      args.out[(row + r) * args.out_stride + column + c] = lane_sum(sums[r][c]);
    }
  }
}

/// Rows that do not fill a tile, in tiles of halving height.
template <typename Element, int32_t kRows, int32_t kColumns>
DIFFULEX_ISA_INLINE void dot_rest(const DotRowsArgs& args, int64_t row, int64_t column) {
  if (args.rows - row >= kRows) {
    dot_tile<Element, kRows, kColumns>(args, row, column);
    row += kRows;
  }
  if constexpr (kRows > 1) {
    dot_rest<Element, kRows / 2, kColumns>(args, row, column);
  }
}

template <typename Element, int32_t kColumns>
void dot_columns(const DotRowsArgs& args, int64_t column) {
  int64_t row = 0;
  for (; row + kDotRows <= args.rows; row += kDotRows) {
    dot_tile<Element, kDotRows, kColumns>(args, row, column);
  }
  dot_rest<Element, kDotRows / 2, kColumns>(args, row, column);
}

template <typename Element>
void dot_elements(const DotRowsArgs& args) {
  int64_t column = 0;
  for (; column + kDotColumns <= args.columns; column += kDotColumns) {
    dot_columns<Element, kDotColumns>(args, column);
  }
  for (; column < args.columns; ++column) {
    dot_columns<Element, 1>(args, column);
  }
}

void dot_rows(const DotRowsArgs& args) {
  switch (args.weight_dtype) {
    case DType::kBF16:
      return dot_elements<ElementBF16>(args);
    case DType::kF16:
      return dot_elements<ElementF16>(args);
    default:
      return dot_elements<ElementF32>(args);
  }
}

/// acc[i] += factor * values[i], one rounding where the instruction set can.
void add_scaled(float* acc, const float* values, float factor, int64_t n) {
  const VecF lanes = splat(factor);
  for (int64_t i = 0; i < n; i += kWidth) {
    const VecF sum = multiply_add(lanes, load_some<ElementF32>(values + i, n - i),
                                  load_some<ElementF32>(acc + i, n - i));
    store_some<ElementF32>(acc + i, sum, n - i);
  }
}

}  // namespace
}  // namespace diffulex::cpu
