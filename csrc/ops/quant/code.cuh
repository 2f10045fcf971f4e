// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codes on the device: those of codec.h, by the instruction where there is one, and nibbles.

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "diffulex/ops/quantize.h"
#include "ops/quant/codec.h"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda {

struct E4m3Code final {
  static constexpr float kMax = kE4m3Max;

  /// The code of value * factor; 0 with the factor 0.
  __device__ __forceinline__ static uint8_t of(float value, float factor) {
    if (factor == 0.0F) {
      return 0;
    }
    const float scaled = __fmul_rn(value, factor);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
#else
    return float_to_e4m3(scaled);
#endif
  }

  /// The codes of two neighbours, the first in the lower bits; not with the factor 0.
  __device__ __forceinline__ static uint16_t pair_of(float first, float second, float factor) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const float2 scaled = make_float2(__fmul_rn(first, factor), __fmul_rn(second, factor));
    return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
#else
    return static_cast<uint16_t>(of(first, factor) | (of(second, factor) << 8));
#endif
  }
};

struct Int8Code final {
  static constexpr float kMax = kInt8Max;

  __device__ __forceinline__ static uint8_t of(float value, float factor) {
    return factor == 0.0F ? uint8_t{0}
                          : static_cast<uint8_t>(float_to_int8(__fmul_rn(value, factor)));
  }

  __device__ __forceinline__ static uint16_t pair_of(float first, float second, float factor) {
    return static_cast<uint16_t>(of(first, factor) | (of(second, factor) << 8));
  }
};

/// Two neighbouring e4m3 codes, the lower bits first, as float16, which holds their values exactly.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t codes) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | (static_cast<uint32_t>(pair.y) << 16);
}

/// Pair `index` of a word in bfloat16, plus 128: it holds nibbles index and 4 + index.
__device__ __forceinline__ __nv_bfloat162 biased_pair(uint32_t word, int32_t index) {
  constexpr uint32_t kBias = 0x43004300;  // 128 with room for a nibble in the last places
  const uint32_t bits = ptx::and_or(word >> (4 * index), 0x000F000FU, kBias);
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}

/// (nibble - 8) * scale in bfloat16, rounded once.
struct NibbleScaling final {
  __nv_bfloat162 scale;

  NibbleScaling() = default;
  __device__ __forceinline__ explicit NibbleScaling(__nv_bfloat16 of_group)
      : scale(__bfloat162bfloat162(of_group)) {}

  /// The four pairs of a word.
  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
    const __nv_bfloat162 zero = __float2bfloat162_rn(128.0F + static_cast<float>(kInt4Zero));
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const __nv_bfloat162 value = __hmul2(__hsub2(biased_pair(word, i), zero), scale);
      pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
    }
  }
};

/// The same of a scale below 2^-5, by nibbles that are read as bfloat16 where they lie. In the last
/// eight bits of one that is otherwise empty an integer n is n 2^-133, exactly: so each pair is one
/// fused operation with one rounding. A zero may have another sign.
struct NibbleFactors final {
  __nv_bfloat162 low;    // of nibbles in the last four bits: scale 2^133
  __nv_bfloat162 high;   // of those in the four above: scale 2^129
  __nv_bfloat162 shift;  // -8 scale

  NibbleFactors() = default;
  __device__ __forceinline__ explicit NibbleFactors(__nv_bfloat16 scale) {
    const __nv_bfloat162 both = __bfloat162bfloat162(scale);
    high = __hmul2(__hmul2(both, __float2bfloat162_rn(0x1p127F)), __float2bfloat162_rn(4.0F));
    low = __hmul2(high, __float2bfloat162_rn(16.0F));
    shift = __hmul2(both, __float2bfloat162_rn(-static_cast<float>(kInt4Zero)));
  }

  /// Whether the factors of a scale are finite.
  __device__ __forceinline__ static bool can_hold(__nv_bfloat16 scale) {
    return (__bfloat16_as_ushort(scale) & 0x7FFFU) < 0x3D00U;
  }

  __device__ __forceinline__ void widen(uint32_t word, uint32_t (&pairs)[4]) const {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      const uint32_t bits = word >> (i / 2 * 8) & (i % 2 == 0 ? 0x000F000FU : 0x00F000F0U);
      const __nv_bfloat162 value =
          __hfma2(*reinterpret_cast<const __nv_bfloat162*>(&bits), i % 2 == 0 ? low : high, shift);
      pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
    }
  }
};

/// (nibble - zero) * scale of the pairs of a word, with a zero point, plus 128, and a scale that
/// bfloat16 may not hold: the product is rounded to float32, then to bfloat16.
__device__ __forceinline__ void widen_pairs(uint32_t word, float scale, __nv_bfloat162 zero,
                                            uint32_t (&pairs)[4]) {
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const float2 exact = __bfloat1622float2(__hsub2(biased_pair(word, i), zero));
    const __nv_bfloat162 value =
        __floats2bfloat162_rn(__fmul_rn(exact.x, scale), __fmul_rn(exact.y, scale));
    pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
}

/// The same of one nibble and a scale that bfloat16 may not hold: the product is rounded to
/// float32, then to bfloat16.
__device__ __forceinline__ __nv_bfloat16 nibble_value(uint32_t nibble, float scale,
                                                      int32_t zero = kInt4Zero) {
  return __float2bfloat16_rn(
      __fmul_rn(static_cast<float>(static_cast<int32_t>(nibble & 15U) - zero), scale));
}

/// A scale of nibbles, float32 or bfloat16.
__device__ __forceinline__ float scale_at(const void* scales, bool are_floats, int64_t place) {
  return are_floats ? static_cast<const float*>(scales)[place]
                    : __bfloat162float(static_cast<const __nv_bfloat16*>(scales)[place]);
}

}  // namespace diffulex::cuda
