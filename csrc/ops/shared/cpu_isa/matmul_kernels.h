// SPDX-License-Identifier: Apache-2.0
#pragma once

// fp32 micro-kernels of attention: C[m, n] (+)= A[m, k] B[k, n] with register tiles of
// kRowTile rows by two vectors, packing of keys, and the online softmax update of one key block.

#include "ops/shared/cpu_isa/kernel_table.h"

namespace diffulex::cpu {
namespace {

struct MatmulArgs {
  const float* a;
  const float* b;
  float* c;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
  int32_t n;  // multiple of kWidth
  int32_t k;
  bool accumulate;
  LinesAhead* ahead;
};

/// Asks for as many lines as a core waits for at a time; a tile takes longer than they do.
DIFFULEX_ISA_INLINE void fetch_lines(LinesAhead* ahead) {
  constexpr int64_t kLines = 24;
  if (ahead == nullptr) {
    return;
  }
  int64_t lines = 0;
  while (ahead->next < ahead->count && lines < kLines) {
    const char* piece = ahead->pieces[ahead->next++];
    for (int64_t byte = 0; byte < ahead->piece_bytes; byte += 64, ++lines) {
      __builtin_prefetch(piece + byte, 0, 2);
    }
  }
}

template <int32_t kRows, int32_t kVectors>
DIFFULEX_ISA_INLINE void matmul_tile(const MatmulArgs& args, const float* a, const float* b,
                                     float* c) {
  VecF sums[kRows][kVectors];
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      sums[row][v] = args.accumulate ? load_floats(c + row * args.c_stride + v * kWidth) : VecF{};
    }
  }
  for (int32_t k = 0; k < args.k; ++k) {
    VecF columns[kVectors];
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      columns[v] = load_floats(b + k * args.b_stride + v * kWidth);
    }
#pragma GCC unroll 16
    for (int32_t row = 0; row < kRows; ++row) {
      const VecF factor = splat(a[row * args.a_stride + k]);
#pragma GCC unroll 4
      for (int32_t v = 0; v < kVectors; ++v) {
        sums[row][v] += factor * columns[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int32_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int32_t v = 0; v < kVectors; ++v) {
      store_floats(c + row * args.c_stride + v * kWidth, sums[row][v]);
    }
  }
}

template <int32_t kRows>
void matmul_rows(const MatmulArgs& args, int64_t first_row) {
  const float* a = args.a + first_row * args.a_stride;
  float* c = args.c + first_row * args.c_stride;
  int32_t column = 0;
  for (; column + 2 * kWidth <= args.n; column += 2 * kWidth) {
    fetch_lines(args.ahead);
    matmul_tile<kRows, 2>(args, a, args.b + column, c + column);
  }
  if (column < args.n) {
    fetch_lines(args.ahead);
    matmul_tile<kRows, 1>(args, a, args.b + column, c + column);
  }
}

/// Rows that do not fill a tile, in tiles of halving height.
template <int32_t kRows>
void matmul_rest(const MatmulArgs& args, int64_t first_row, int64_t rows) {
  if (rows >= kRows) {
    matmul_rows<kRows>(args, first_row);
    first_row += kRows;
    rows -= kRows;
  }
  if constexpr (kRows > 1) {
    matmul_rest<kRows / 2>(args, first_row, rows);
  }
}

void matmul(const MatmulArgs& args, int64_t rows) {
  int64_t row = 0;
  for (; row + kRowTile <= rows; row += kRowTile) {
    matmul_rows<kRowTile>(args, row);
  }
  matmul_rest<kRowTile / 2>(args, row, rows - row);
}

/// Exchanges the off-diagonal kStep x kStep blocks of one pair of vectors.
template <int32_t kStep>
DIFFULEX_ISA_INLINE void swap_blocks(VecF& low, VecF& high) {
  VecI low_index;
  VecI high_index;
  for (int32_t lane = 0; lane < kWidth; ++lane) {
    const bool upper = (lane & kStep) != 0;
    low_index[lane] = upper ? kWidth + lane - kStep : lane;
    high_index[lane] = upper ? kWidth + lane : lane + kStep;
  }
  const VecF new_low = __builtin_shuffle(low, high, low_index);
  high = __builtin_shuffle(low, high, high_index);
  low = new_low;
}

template <int32_t kStep>
DIFFULEX_ISA_INLINE void transpose_steps(VecF (&rows)[kWidth]) {
#pragma GCC unroll 16
  for (int32_t row = 0; row < kWidth; ++row) {
    if ((row & kStep) == 0) {
      swap_blocks<kStep>(rows[row], rows[row + kStep]);
    }
  }
  if constexpr (kStep * 2 < kWidth) {
    transpose_steps<kStep * 2>(rows);
  }
}

/// packed[d][key] = rows[key][d]; key columns from `count` up to a multiple of kWidth are 0.
void pack_keys(const float* rows, int64_t count, int64_t padded_dim, float* packed) {
  for (int64_t key = 0; key < count; key += kWidth) {
    for (int64_t d = 0; d < padded_dim; d += kWidth) {
      VecF tile[kWidth];
#pragma GCC unroll 16
      for (int32_t row = 0; row < kWidth; ++row) {
        tile[row] = key + row < count ? load_floats(rows + (key + row) * padded_dim + d) : VecF{};
      }
      transpose_steps<1>(tile);
#pragma GCC unroll 16
      for (int32_t row = 0; row < kWidth; ++row) {
        store_floats(packed + (d + row) * kKeyBlock + key, tile[row]);
      }
    }
  }
}

void scale_values(float* values, float factor, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    store_floats(values + i, load_floats(values + i) * factor);
  }
  for (; i < n; ++i) {
    values[i] *= factor;
  }
}

/// Turns the scores of one row into probabilities relative to the running maximum.
DIFFULEX_ISA_INLINE void softmax_row(const AttendArgs& args, int32_t row, int32_t begin,
                                     int32_t end) {
  float* scores = args.scores + static_cast<int64_t>(row) * kKeyBlock;
  VecF highest = splat(-kInfinity);
  for (int32_t key = begin; key < end; key += kWidth) {
    VecF s = load_floats(scores + key);
    if (args.softcap > 0.0F) {
      s = tanh_of(s / args.softcap) * args.softcap;
      store_floats(scores + key, s);
    }
  }
  for (int32_t key = begin; key < args.key_begin; ++key) {
    scores[key] = -kInfinity;
  }
  for (int32_t key = args.key_end; key < end; ++key) {
    scores[key] = -kInfinity;
  }
  for (int32_t key = begin; key < end; key += kWidth) {
    highest = larger(highest, load_floats(scores + key));
  }
  const float old_max = args.row_max[row];
  const float block_max = lane_max(highest);
  const float new_max = old_max > block_max ? old_max : block_max;
  // -inf - -inf is NaN: rows without a finite score keep 0 as the subtrahend.
  const float shift = new_max == -kInfinity ? 0.0F : new_max;
  VecF sum{};
  for (int32_t key = begin; key < end; key += kWidth) {
    const VecF p = exp_of(load_floats(scores + key) - shift);
    store_floats(scores + key, p);
    sum += p;
  }
  const float rescale = old_max == new_max ? 1.0F : __builtin_expf(old_max - shift);
  args.row_sum[row] = args.row_sum[row] * rescale + lane_sum(sum);
  args.row_max[row] = new_max;
  if (rescale != 1.0F) {
    scale_values(args.out + static_cast<int64_t>(row) * args.padded_dim, rescale, args.padded_dim);
  }
}

void attend(const AttendArgs& args) {
  const int32_t begin = args.key_begin / kWidth * kWidth;
  const int32_t end = (args.key_end + kWidth - 1) / kWidth * kWidth;
  matmul(MatmulArgs{args.q, args.keys + begin, args.scores + begin, args.padded_dim, kKeyBlock,
                    kKeyBlock, end - begin, args.head_dim, false, args.ahead},
         args.rows);
  for (int32_t row = 0; row < args.rows; ++row) {
    softmax_row(args, row, begin, end);
  }
  // Keys outside [key_begin, key_end) are not multiplied by zero: their values may be NaN.
  matmul(MatmulArgs{args.scores + args.key_begin,
                    args.values + static_cast<int64_t>(args.key_begin) * args.padded_dim, args.out,
                    kKeyBlock, args.padded_dim, args.padded_dim, args.padded_dim,
                    args.key_end - args.key_begin, true, args.ahead},
         args.rows);
}

}  // namespace
}  // namespace diffulex::cpu
