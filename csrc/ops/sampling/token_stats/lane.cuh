// SPDX-License-Identifier: Apache-2.0
#pragma once

// A chunk of a row in shared memory as the lanes of a warp hold it, and its copy from memory.

#include <cstdint>

#include "ops/sampling/token_stats/row.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda {

inline constexpr int kChunkLoads = static_cast<int>(kStatsChunkColumns) / (32 * 8);

/// What stands in for a column without weight, and the packed pairs of a 16-bit type.
template <typename T>
struct PairMath;
template <>
struct PairMath<__nv_bfloat16> final {
  using Pair = __nv_bfloat162;
  // Far below every logit that has weight, and finite differences with all of them.
  static constexpr float kPad = -1.0e30F;
  static __device__ __forceinline__ float low(uint32_t word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __uint_as_float(word & 0xffff0000U);
  }
};
template <>
struct PairMath<__half> final {
  using Pair = __half2;
  static constexpr float kPad = -65504.0F;
  static __device__ __forceinline__ float low(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
  }
  static __device__ __forceinline__ float high(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
};
template <>
struct PairMath<float> final {
  static constexpr float kPad = -1.0e30F;
};

/// Columns the pad stands in for have no weight when the best one is above this.
template <typename T>
__device__ __forceinline__ constexpr float least_plain_best() {
  return PairMath<T>::kPad < -1.0e20F ? -1.0e20F : -60000.0F;
}

/// Offset of load `load` of this lane in a chunk.
__device__ __forceinline__ int32_t lane_column(int load) {
  return load * 256 + static_cast<int>(threadIdx.x & 31) * 8;
}

/// A chunk in shared memory as one lane sees it: [load * 256 + lane * 8, + 8) for each load.
template <typename T>
struct LaneChunk final {
  T* columns;  // kStatsChunkColumns of the warp, 16-byte aligned

  __device__ __forceinline__ void read(int load, float (&values)[8]) const {
    const T* piece = columns + lane_column(load);
    if constexpr (sizeof(T) == 4) {
      load_floats<4, true>(piece, *reinterpret_cast<float (*)[4]>(values));
      load_floats<4, true>(piece + 4, *reinterpret_cast<float (*)[4]>(values + 4));
    } else {
      const uint4 raw = *reinterpret_cast<const uint4*>(piece);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = PairMath<T>::low(words[i]);
        values[2 * i + 1] = PairMath<T>::high(words[i]);
      }
    }
  }
  /// Puts the pad where bit (8 * load + i) of `mask` is set.
  __device__ __forceinline__ void pad(uint64_t mask) const {
    for (; mask != 0; mask &= mask - 1) {
      const int bit = __ffsll(static_cast<long long>(mask)) - 1;
      columns[lane_column(bit / 8) + bit % 8] = from_float<T>(PairMath<T>::kPad);
    }
  }
};

/// Starts the copy of the chunk at column `first`, by cp.async of a group that the caller commits;
/// what lies past the row becomes the pad.
template <typename T>
__device__ __forceinline__ void start_chunk(const TokenStatsArgs& args, const T* source,
                                            int32_t first, const LaneChunk<T>& chunk) {
  constexpr int kStep = 16 / static_cast<int>(sizeof(T));
  const T* from = source + first + lane_column(0);
  if (args.is_vec && first + kStatsChunkColumns <= args.num_columns) {
    const uint32_t target = ptx::smem_address(chunk.columns + lane_column(0));
#pragma unroll
    for (int load = 0; load < kChunkLoads; ++load) {
#pragma unroll
      for (int i = 0; i < 8; i += kStep) {
        constexpr auto kBytes = static_cast<uint32_t>(sizeof(T));
        ptx::cp_async16(target + (load * 256 + i) * kBytes, from + load * 256 + i, true);
      }
    }
  } else {
    const int64_t left = args.num_columns - first - lane_column(0);  // may be negative
#pragma unroll 1
    for (int load = 0; load < kChunkLoads; ++load) {
      T* piece = chunk.columns + lane_column(load);
      if (args.is_vec && load * 256 + 8 <= left) {
#pragma unroll
        for (int i = 0; i < 8; i += kStep) {
          ptx::cp_async16(ptx::smem_address(piece + i), from + load * 256 + i, true);
        }
        continue;
      }
      if (load * 256 >= left) {
        float pads[8];
#pragma unroll
        for (float& pad : pads) {
          pad = PairMath<T>::kPad;
        }
        store_floats<8, true>(piece, pads);
        continue;
      }
      for (int i = 0; i < 8; ++i) {
        piece[i] = load * 256 + i < left ? from[load * 256 + i] : from_float<T>(PairMath<T>::kPad);
      }
    }
  }
}

/// Brings the chunk at column `first` to L2. By one warp.
template <typename T>
__device__ __forceinline__ void prefetch_chunk(const TokenStatsArgs& args, const T* source,
                                               int32_t first) {
  constexpr auto kLine = static_cast<int32_t>(128 / sizeof(T));
#pragma unroll
  for (int32_t line = 0; line < kStatsChunkColumns / kLine; line += 32) {
    const int32_t column = first + (line + static_cast<int32_t>(threadIdx.x & 31)) * kLine;
    if (column < args.num_columns) {
      ptx::prefetch_l2(source + column);
    }
  }
}

}  // namespace diffulex::cuda
