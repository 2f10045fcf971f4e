// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace diffulex::cuda {

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

/// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

/// kCount elements moved with the widest accesses (at most 16 bytes each) their size allows.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vec {
  T values[kCount];
};

/// Reads kCount elements as fp32. With kVec the address is aligned for a Vec.
template <int kCount, bool kVec, typename T>
__device__ __forceinline__ void load_floats(const T* source, float (&values)[kCount]) {
  if constexpr (kVec) {
    const Vec<T, kCount> raw = *reinterpret_cast<const Vec<T, kCount>*>(source);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = to_float(raw.values[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = to_float(source[i]);
    }
  }
}

/// Rounds kCount fp32 values to nearest even, 16-bit ones in pairs by one instruction.
template <typename T, int kCount>
__device__ __forceinline__ Vec<T, kCount> round_floats(const float (&values)[kCount]) {
  Vec<T, kCount> raw;
  if constexpr (sizeof(T) == 2 && kCount % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        *reinterpret_cast<__half2*>(&raw.values[i]) = __floats2half2_rn(values[i], values[i + 1]);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(&raw.values[i]) =
            __floats2bfloat162_rn(values[i], values[i + 1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      raw.values[i] = from_float<T>(values[i]);
    }
  }
  return raw;
}

/// Writes kCount fp32 values, each rounded once.
template <int kCount, bool kVec, typename T>
__device__ __forceinline__ void store_floats(T* target, const float (&values)[kCount]) {
  if constexpr (kVec) {
    *reinterpret_cast<Vec<T, kCount>*>(target) = round_floats<T>(values);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      target[i] = from_float<T>(values[i]);
    }
  }
}

/// Element `index` of an int32 or int64 array.
__device__ __forceinline__ int64_t load_index(const void* data, bool is_int64, int64_t index) {
  return is_int64 ? static_cast<const int64_t*>(data)[index]
                  : static_cast<int64_t>(static_cast<const int32_t*>(data)[index]);
}

}  // namespace diffulex::cuda
