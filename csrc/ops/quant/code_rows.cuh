// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codes of rows whose values are in registers: those that `quantize_rows` makes of them, bit for
// bit.

#include <cstdint>
#include <type_traits>

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

/// In place of `CodeRows` where none are written.
struct NoCodeRows final {};

/// A piece of a row, as its dtype holds it.
template <typename T>
using CodeSource = Vec<T, kCodePiece>;

/// The larger of `largest` and the magnitudes of values, which a NaN has none.
template <typename T>
__device__ __forceinline__ float largest_magnitude(const CodeSource<T>& source,
                                                   float largest = 0.0F) {
  if constexpr (sizeof(T) == 2) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const auto* pairs = reinterpret_cast<const Pair*>(source.values);
    Pair both = __habs2(pairs[0]);
#pragma unroll
    for (int i = 1; i < kCodePiece / 2; ++i) {
      both = __hmax2(both, __habs2(pairs[i]));
    }
    return fmaxf(largest, fmaxf(to_float(both.x), to_float(both.y)));
  } else {
#pragma unroll
    for (int i = 0; i < kCodePiece; ++i) {
      largest = fmaxf(largest, fabsf(source.values[i]));
    }
    return largest;
  }
}

/// Writes the codes of a piece.
template <typename Code, typename T>
__device__ __forceinline__ void store_codes(uint8_t* target, const CodeSource<T>& source,
                                            float factor) {
  Vec<uint8_t, kCodePiece> codes = {};
  if (factor != 0.0F) {
#pragma unroll
    for (int i = 0; i < kCodePiece; i += 2) {
      *reinterpret_cast<uint16_t*>(&codes.values[i]) =
          Code::pair_of(to_float(source.values[i]), to_float(source.values[i + 1]), factor);
    }
  }
  *reinterpret_cast<Vec<uint8_t, kCodePiece>*>(target) = codes;
}

/// Writes the codes of one group of a row whose groups have a scale each. kLanes neighbouring lanes
/// hold it, all of which call this: the first 8 columns a lane, the next ones of all of them and so
/// on, `column` being the first of this lane. Nothing is written where `is_real` is false.
template <typename Code, int kLanes, typename T, int kHeld>
__device__ __forceinline__ void write_group(const CodeRows& rows, int64_t row, int32_t column,
                                            bool is_real, const CodeSource<T> (&held)[kHeld]) {
  constexpr auto kGroup = static_cast<int32_t>(kQuantGroup);
  static_assert(kLanes * kCodePiece * kHeld == kGroup, "the lanes hold a group");
  float largest = 0.0F;
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    largest = largest_magnitude<T>(held[piece], largest);
  }
  const CodeScale code = code_scale(lanes_max<kLanes>(largest), Code::kMax);
  if (!is_real) {
    return;
  }
  if (column % kGroup == 0) {
    rows.scale[column / kGroup * rows.scale_stride + row] = code.scale;
  }
  uint8_t* codes = rows.codes + row * rows.codes_stride + column;
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    store_codes<Code, T>(codes + piece * (kGroup / kHeld), held[piece], code.factor);
  }
}

/// As `write_codes` for one kind of codes, with the largest magnitude of a row that has one scale.
template <typename Code, int kWarps, int kHeld, typename T>
__device__ __forceinline__ void write_codes_as(const CodeRows& rows, int64_t row, int thread,
                                               int32_t width, float largest,
                                               const CodeSource<T> (&held)[kHeld]) {
  constexpr auto kGroup = static_cast<int32_t>(kQuantGroup);
  uint8_t* codes = rows.codes + row * rows.codes_stride;
  float* scale = rows.scale + row;
  CodeScale code = code_scale(largest, Code::kMax);
  if (rows.is_whole && thread == 0) {
    *scale = code.scale;
  }
#pragma unroll
  for (int piece = 0; piece < kHeld; ++piece) {
    const int32_t column = (piece * 32 * kWarps + thread) * kCodePiece;
    if (!rows.is_whole) {
      code =
          code_scale(lanes_max<kGroup / kCodePiece>(largest_magnitude<T>(held[piece])), Code::kMax);
      if (column < width && column % kGroup == 0) {
        scale[column / kGroup * rows.scale_stride] = code.scale;
      }
    }
    if (column < width) {
      store_codes<Code, T>(codes + column, held[piece], code.factor);
    }
  }
}

/// Writes the codes of a row that kWarps warps hold, all threads of them: thread t has in
/// held[p] the columns from 8 (32 kWarps p + t) on, and zeros past the width. More than one warp
/// are a CTA.
template <int kWarps, int kHeld, typename T>
__device__ __forceinline__ void write_codes(const CodeRows& rows, int64_t row, int thread,
                                            int32_t width, const CodeSource<T> (&held)[kHeld]) {
  float largest = 0.0F;
  if (rows.is_whole) {
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      largest = largest_magnitude<T>(held[piece], largest);
    }
    if constexpr (kWarps == 1) {
      largest = warp_max(largest);
    } else {
      largest = block_max<kWarps>(largest);
    }
  }
  if (rows.is_int8) {
    write_codes_as<Int8Code, kWarps, kHeld, T>(rows, row, thread, width, largest, held);
  } else {
    write_codes_as<E4m3Code, kWarps, kHeld, T>(rows, row, thread, width, largest, held);
  }
}

}  // namespace diffulex::cuda
