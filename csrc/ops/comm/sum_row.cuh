// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row of a sum over ranks: added to the residual and normalised, or rounded. The tree of the mean
// square is that of the norms: with one part the result has the bits of add_rms_norm.

#include <cstdint>
#include <type_traits>

#include "ops/comm/peer.cuh"
#include "ops/norm/weight.cuh"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

inline constexpr int kElems = 8;

/// 8 elements of a row as they lie in memory: 16 or 32 bytes.
template <typename T>
struct Piece final {
  static constexpr int kVecs = kElems * sizeof(T) / sizeof(uint4);
  uint4 vecs[kVecs];

  __device__ __forceinline__ void load(const void* source) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      vecs[i] = static_cast<const uint4*>(source)[i];
    }
  }
  /// As other ranks get it.
  __device__ __forceinline__ void make_sendable() {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      vecs[i] = sendable<sizeof(T)>(vecs[i]);
    }
  }
  __device__ __forceinline__ void send(void* target) const {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      store_peer(static_cast<uint4*>(target) + i, vecs[i]);
    }
  }
  __device__ __forceinline__ void look(const void* source) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      vecs[i] = load_peer(static_cast<const uint4*>(source) + i);
    }
  }
  /// Waits for what look() has not found yet.
  __device__ __forceinline__ void await(const void* source, int peer, Patience* patience) {
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      vecs[i] = receive<sizeof(T)>(static_cast<const uint4*>(source) + i, peer, vecs[i], patience);
    }
  }
  /// values <- this, or values + this.
  __device__ __forceinline__ void add_to(bool is_first, float (&values)[kElems]) const {
    const T* elements = reinterpret_cast<const T*>(vecs);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float value = to_float(elements[i]);
      values[i] = is_first ? value : values[i] + value;
    }
  }
};

/// A sum as it would be sent: the one value that cannot be is the same for every algorithm.
__device__ __forceinline__ void make_sum_sendable(float (&values)[kElems]) {
#pragma unroll
  for (int i = 0; i < kElems; ++i) {
    values[i] = __uint_as_float(sendable<sizeof(float)>(__float_as_uint(values[i])));
  }
}

/// What becomes of the sum of a row.
struct RowOutput {
  void* residual;      // [T, H], or null: the sum is rounded to `out`
  const void* weight;  // [H] or null
  void* out;           // [T, H]
  int32_t width;       // H
  float eps;
  float weight_offset;
  bool is_weight_float;
};

/// The rows that a CTA of kWarps warps ends with; up to kHeld pieces of a row per thread.
template <typename T, int kWarps, int kHeld>
class RowEnd final {
 public:
  static constexpr int kThreads = 32 * kWarps;
  /// Whether the registers of a thread hold more than the row itself.
  static constexpr bool kHoldsRow = kWarps < 16;

  __device__ static __forceinline__ int32_t column(int piece) {
    return (piece * kThreads + static_cast<int>(threadIdx.x)) * kElems;
  }

  /// Reads the weights, if there is room for them: before pdl_wait(), where the launch may.
  __device__ explicit RowEnd(const RowOutput& output) : output_(output) {
    if constexpr (kHoldsWeights) {
#pragma unroll
      for (int piece = 0; piece < kHeld; ++piece) {
        if (output_.residual != nullptr && column(piece) < output_.width) {
          load_weight(piece, weights_[piece]);
        }
      }
    }
  }

  /// Reads the residual of a row, if there is room for it, for finish().
  __device__ __forceinline__ void begin(int64_t row) {
    if (!kHoldsRow || output_.residual == nullptr) {
      return;
    }
    const T* residual = static_cast<const T*>(output_.residual) + row * output_.width;
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      if (column(piece) < output_.width) {
        residual_[kHoldsRow ? piece : 0].load(residual + column(piece));
      }
    }
  }

  /// Writes a row whose sum is `values`; the threads of a CTA call it together.
  __device__ __forceinline__ void finish(int64_t row, float (&values)[kHeld][kElems],
                                         float* scratch) {
    T* out = static_cast<T*>(output_.out) + row * output_.width;
    if (output_.residual == nullptr) {
#pragma unroll
      for (int piece = 0; piece < kHeld; ++piece) {
        if (column(piece) < output_.width) {
          store_floats<kElems, true>(out + column(piece), values[piece]);
        }
      }
      return;
    }
    T* residual = static_cast<T*>(output_.residual) + row * output_.width;
    float sum = 0.0F;
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      if (column(piece) < output_.width) {
        Piece<T>& addend = residual_[kHoldsRow ? piece : 0];
        if constexpr (!kHoldsRow) {
          addend.load(residual + column(piece));
        }
        addend.add_to(false, values[piece]);
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          sum += values[piece][i] * values[piece][i];
        }
      }
    }
    if constexpr (kWarps == 1) {
      sum = warp_sum(sum);
    } else {
      sum = block_sum<kWarps>(sum, scratch);
    }
    const float scale = rsqrtf(sum / static_cast<float>(output_.width) + output_.eps);
#pragma unroll
    for (int piece = 0; piece < kHeld; ++piece) {
      if (column(piece) < output_.width) {
        store_floats<kElems, true>(residual + column(piece), values[piece]);
        float (&weight)[kElems] = weights_[kHoldsWeights ? piece : 0];
        if constexpr (!kHoldsWeights) {
          load_weight(piece, weight);
        }
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          values[piece][i] = values[piece][i] * scale * weight[i];
        }
        store_floats<kElems, true>(out + column(piece), values[piece]);
      }
    }
  }

 private:
  static constexpr bool kHoldsWeights = kHeld <= 2;

  __device__ __forceinline__ void load_weight(int piece, float (&weight)[kElems]) const {
    load_norm_weight<T, kElems, true>(output_.weight, output_.is_weight_float,
                                      output_.weight_offset, column(piece), weight);
  }

  const RowOutput& output_;
  float weights_[kHoldsWeights ? kHeld : 1][kElems];
  Piece<T> residual_[kHoldsRow ? kHeld : 1];
};

/// Calls body with the warps of a row and the pieces per thread, as constants, for a width.
template <typename Body>
cudaError_t dispatch_width(int32_t width, Body&& body) {
  if (width <= 1024) {
    return body(std::integral_constant<int, 1>{}, std::integral_constant<int, 4>{});
  }
  if (width <= 4096) {
    return body(std::integral_constant<int, 8>{}, std::integral_constant<int, 2>{});
  }
  return body(std::integral_constant<int, 16>{}, std::integral_constant<int, 4>{});
}

}  // namespace diffulex::cuda
