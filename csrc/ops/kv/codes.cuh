// SPDX-License-Identifier: Apache-2.0
#pragma once

// Caches of codes with a scale byte per slot and head (scaled_code.h) as the kernels see them.

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "diffulex/ops/tensor_ref.h"
#include "ops/kv/scaled_code.h"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

/// An element of a cache of codes.
struct KvCode final {
  uint8_t bits;
};

/// The scale bytes of K or V, [num_pages, Hc, page_size]; null without.
struct KvScales final {
  uint8_t* data = nullptr;  // owner: the caller of the op
  int64_t page_stride = 0;
  int64_t head_stride = 0;
  int64_t token_stride = 0;

  static KvScales of(const TensorRef& scale) {
    KvScales view;
    if (scale.present()) {
      view.data = scale.as<uint8_t>();
      view.page_stride = scale.stride[0];
      view.head_stride = scale.stride[1];
      view.token_stride = scale.stride[2];
    }
    return view;
  }

  [[nodiscard]] __device__ __forceinline__ uint8_t* at(int64_t page, int64_t token,
                                                       int64_t head) const {
    return data + page * page_stride + head * head_stride + token * token_stride;
  }
};

/// Scale byte of a head whose values the lanes of a warp share: `largest` is the largest magnitude
/// that a lane has and `has_nan` whether it has NaN. By whole warps.
__device__ __forceinline__ uint8_t warp_kv_scale(float largest, bool has_nan) {
  // Bits of magnitudes are ordered as the magnitudes are, with NaN above all of them.
  const uint32_t bits = has_nan ? 0x7FC00000U : __float_as_uint(largest);
  const uint32_t most = static_cast<uint32_t>(warp_max(static_cast<uint64_t>(bits)));
  return most > 0x7F800000U ? kNanKvScale : kv_scale(__uint_as_float(most));
}

/// Code of one value below a scale that warp_kv_scale gave.
__device__ __forceinline__ uint8_t scaled_kv_code(float value, uint8_t scale) {
  return scale == kNanKvScale ? 0 : kv_code(value, scale);
}

/// Values of the four codes in `codes`, in bfloat16: `multiplier` is scale_multiplier() of their
/// scale.
__device__ __forceinline__ uint2 decode_four(uint32_t codes, uint32_t multiplier) {
  // Codes shifted into place are their values times 2^-120, with the sign where it belongs: the
  // upper bytes of all four, their lower bytes, then one beside the other.
  const uint32_t high = (codes & 0x80808080U) | ((codes >> 4) & 0x07070707U);
  const uint32_t low = (codes << 4) & 0xF0F0F0F0U;
  const uint32_t pairs[] = {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
  uint32_t values[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[i]),
                                         *reinterpret_cast<const __nv_bfloat162*>(&multiplier));
    values[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
  return make_uint2(values[0], values[1]);
}

/// Twice 2^(120 + e) in bfloat16, where e belongs to the scale byte; infinity for kNanKvScale,
/// whose codes are 0 and so become NaN.
__device__ __forceinline__ uint32_t scale_multiplier(uint8_t scale) {
  const uint32_t exponent = static_cast<uint32_t>(scale) + 120U;
  return (exponent < 255U ? exponent : 255U) * 0x00800080U;
}

/// Values of eight codes, in T: exact in bfloat16, rounded in float16.
template <typename T>
__device__ __forceinline__ uint4 decode_eight(uint2 codes, uint8_t scale) {
  static_assert(sizeof(T) == 2, "eight values fill 16 bytes");
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const uint32_t multiplier = scale_multiplier(scale);
    const uint2 first = decode_four(codes.x, multiplier);
    const uint2 last = decode_four(codes.y, multiplier);
    return make_uint4(first.x, first.y, last.x, last.y);
  } else {
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = i < 4 ? codes.x : codes.y;
      values[i] = kv_value(static_cast<uint8_t>(word >> (i % 4 * 8)), scale);
    }
    const Vec<T, 8> raw = round_floats<T>(values);
    return *reinterpret_cast<const uint4*>(&raw);
  }
}

}  // namespace diffulex::cuda
