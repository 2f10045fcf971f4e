// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codes of rows whose values are in registers: those that `quantize_rows` makes of them, bit for
// bit.

#include <cstdint>

#include "ops/quant/code.cuh"
#include "ops/quant/code_rows.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

/// Columns of a piece: those of a thread at a time.
inline constexpr int kCodePiece = 8;

struct CodeRows final {
  uint8_t* codes = nullptr;  // [T, K]
  float* scale = nullptr;    // [ceil(K / 128), T], or [1, T] where a row has one
  int64_t codes_stride = 0;
  int64_t scale_stride = 0;
  bool is_int8 = false;
  bool is_whole = false;  // one scale a row

  static CodeRows of(const TensorRef& codes, const TensorRef& scale) {
    return {codes.as<uint8_t>(), scale.as<float>(),         codes.stride[0],
            scale.stride[0],     codes.dtype == DType::kI8, scale.size[0] == 1};
  }

  /// Whether rows of a width can be written a piece at a time.
  [[nodiscard]] bool has_pieces(int64_t width) const {
    return width % kCodePiece == 0 && codes_stride % kCodePiece == 0 &&
           reinterpret_cast<uintptr_t>(codes) % kCodePiece == 0;
  }
};

/// The larger of `largest` and the magnitudes of values, which a NaN has none.
__device__ __forceinline__ float largest_magnitude(const float (&values)[kCodePiece],
                                                   float largest = 0.0F) {
#pragma unroll
  for (int i = 0; i < kCodePiece; ++i) {
    largest = fmaxf(largest, fabsf(values[i]));
  }
  return largest;
}

/// Replaces values by what T holds of them.
template <typename T>
__device__ __forceinline__ void round_to(float (&values)[kCodePiece]) {
#pragma unroll
  for (int i = 0; i < kCodePiece; ++i) {
    values[i] = to_float(from_float<T>(values[i]));
  }
}

__device__ __forceinline__ Vec<uint8_t, kCodePiece> codes_of(const float (&values)[kCodePiece],
                                                             float factor, bool is_int8) {
  Vec<uint8_t, kCodePiece> codes;
#pragma unroll
  for (int i = 0; i < kCodePiece; ++i) {
    codes.values[i] = is_int8 ? Int8Code::of(values[i], factor) : E4m3Code::of(values[i], factor);
  }
  return codes;
}

/// Writes the codes of a row that kWarps warps hold, all threads of them: thread t has in
/// held[p] the columns from 8 (32 kWarps p + t) on, and zeros past the width. More than one warp
/// are a CTA.
template <int kWarps, int kHeld>
__device__ __forceinline__ void write_codes(const CodeRows& rows, int64_t row, int thread,
                                            int32_t width, const float (&held)[kHeld][kCodePiece]) {
  constexpr auto kGroup = static_cast<int32_t>(kQuantGroup);
  float of_row = 0.0F;
  if (rows.is_whole) {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      of_row = largest_magnitude(held[piece], of_row);
    }
    if constexpr (kWarps == 1) {
      of_row = warp_max(of_row);
    } else {
      of_row = block_max<kWarps>(of_row);
    }
  }
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = (piece * 32 * kWarps + thread) * kCodePiece;
    const float largest =
        rows.is_whole ? of_row : lanes_max<kGroup / kCodePiece>(largest_magnitude(held[piece]));
    const CodeScale code = code_scale(largest, rows.is_int8 ? kInt8Max : kE4m3Max);
    if (column < width) {
      const int32_t group = rows.is_whole ? width : kGroup;
      if (column % group == 0) {
        rows.scale[column / group * rows.scale_stride + row] = code.scale;
      }
      *reinterpret_cast<Vec<uint8_t, kCodePiece>*>(rows.codes + row * rows.codes_stride + column) =
          codes_of(held[piece], code.factor, rows.is_int8);
    }
  }
}

}  // namespace diffulex::cuda
