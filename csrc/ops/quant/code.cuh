// SPDX-License-Identifier: Apache-2.0
#pragma once

// Codes of 8 bits on the device: those of codec.h, by the instruction where there is one.

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "ops/quant/codec.h"

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
};

struct Int8Code final {
  static constexpr float kMax = kInt8Max;

  __device__ __forceinline__ static uint8_t of(float value, float factor) {
    return factor == 0.0F ? uint8_t{0}
                          : static_cast<uint8_t>(float_to_int8(__fmul_rn(value, factor)));
  }
};

/// Two neighbouring e4m3 codes, the lower bits first, as float16, which holds their values exactly.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t codes) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return static_cast<uint32_t>(pair.x) | (static_cast<uint32_t>(pair.y) << 16);
}

}  // namespace diffulex::cuda
