// SPDX-License-Identifier: Apache-2.0
#pragma once

// One tile of linear_scaled with int8 panels: up to kInt8TileRows rows times one block of the depth
// of one panel. Include after vector_*.h, vector_math.h and one of the int8_*.h products, which
// define
//
//   Int8X         element of the copy of x
//   kInt8Parts    accumulators that hold kWidth columns
//   kInt8TileRows
//   Int8Sum, Int8Columns, Int8Factor, load_int8, broadcast_int8, add_products, column_sums
//   start_sum     an accumulator that gives each column the given -128 sum x, or 0 where w + 128
//                 is not what is multiplied
//   settle        leaves a sum as it is, in a register
//
// All of them add the exact integers sum x (w + 128) to -128 sum x, or sum x w to 0, and then do
// the same float32 operations.

#include "ops/quant/isa/int8_kernels.h"

namespace diffulex::cpu {
namespace {

/// The same bytes of the next block, which may be past the matrix: a prefetch never faults.
template <int32_t kBytes>
DIFFULEX_ISA_INLINE void fetch_ahead(const uint8_t* panel) {
  for (int32_t line = 0; line < kBytes; line += 64) {
    __builtin_prefetch(panel + kInt8RowStride * kInt8PanelWidth + line);
  }
}

/// `kVectors` vectors of columns from `column` on.
template <int32_t kRows, int32_t kVectors, bool kAccumulate>
DIFFULEX_ISA_INLINE void int8_columns(const Int8TileArgs& args, int32_t column) {
  constexpr int32_t kParts = kVectors * kInt8Parts;
  constexpr int32_t kPartBytes = 4 * kWidth / kInt8Parts;
  const int32_t* row_starts = args.row_starts;
  Int8Sum sums[kRows][kParts];
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t part = 0; part < kParts; ++part) {
      sums[row][part] = start_sum(row_starts[row]);
    }
  }
  const uint8_t* panel = args.panel + 4 * column;
  const Int8X* x = static_cast<const Int8X*>(args.x);
  for (int32_t step = 0; step < args.steps; ++step) {
    Int8Columns columns[kParts];
#pragma GCC unroll 4
    for (int32_t part = 0; part < kParts; ++part) {
      columns[part] = load_int8(panel + part * kPartBytes);
    }
    fetch_ahead<kParts * kPartBytes>(panel);
#pragma GCC unroll 16
    for (int32_t row = 0; row < kRows; ++row) {
      const Int8Factor factor = broadcast_int8(x + row * kInt8RowStride);
#pragma GCC unroll 4
      for (int32_t part = 0; part < kParts; ++part) {
        sums[row][part] = add_products(sums[row][part], columns[part], factor);
      }
    }
    x += kInt8Step;
    panel += 4 * kInt8PanelWidth;
  }
  // What follows would else cost the loop above its registers.
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t part = 0; part < kParts; ++part) {
      settle(sums[row][part]);
    }
  }
  float* out = args.out + column;
  const float* x_scale = args.x_scale;
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
    const VecF factor = broadcast(x_scale + row);
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      const VecF product = __builtin_convertvector(column_sums(&sums[row][v * kInt8Parts]), VecF);
      float* at = out + row * kInt8PanelWidth + v * kWidth;
      store_floats(at, fused_multiply_add(factor, product, kAccumulate ? load_floats(at) : VecF{}));
    }
  }
}

template <int32_t kRows, bool kAccumulate>
void int8_rows(const Int8TileArgs& args) {
  if constexpr (kRows > 1) {
    if (args.rows < kRows) {
      int8_rows<kRows - 1, kAccumulate>(args);
      return;
    }
  }
  constexpr int32_t kVectors = 2 / kInt8Parts;
  for (int32_t column = 0; column < kInt8PanelWidth; column += kVectors * kWidth) {
    int8_columns<kRows, kVectors, kAccumulate>(args, column);
  }
}

/// result = out * column_scale + bias
void int8_scale(const Int8TileArgs& args) {
  for (int32_t row = 0; row < args.rows; ++row) {
    const float* sums = args.out + row * kInt8PanelWidth;
    float* result = args.result + row * args.result_stride;
#pragma GCC unroll 8
    for (int32_t column = 0; column < kInt8PanelWidth; column += kWidth) {
      store_floats(result + column, fused_multiply_add(load_floats(sums + column),
                                                       load_floats(args.column_scale + column),
                                                       load_floats(args.bias + column)));
    }
  }
}

void int8_tile(const Int8TileArgs& args) {
  if (args.accumulate) {
    int8_rows<kInt8TileRows, true>(args);
  } else {
    int8_rows<kInt8TileRows, false>(args);
  }
  if (args.column_scale != nullptr) {
    int8_scale(args);
  }
}

}  // namespace
}  // namespace diffulex::cpu
