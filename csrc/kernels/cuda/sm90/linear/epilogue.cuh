// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums of a tile on their way out: partial sums of the depth's shares are added by the CTA that
// owns them, then bias or gate, one rounding and the transpose to rows of x.

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/gate.cuh"
#include "kernels/cuda/common/mbarrier.cuh"
#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/sm90/linear/traits.cuh"

namespace diffulex::cuda::sm90 {

struct LinearArgs {
  void* out;         // [num_rows, num_columns]
  const void* bias;  // [rows of W] or null; null with a gate
  int64_t out_stride;
  int32_t num_rows;
  int32_t num_columns;
  int32_t num_steps;   // of depth, 64 elements each; at least `splits`
  int32_t splits;      // shares of the depth: 1, 2 or 4
  int32_t shares;      // CTAs that bring each other rows of x: 1, 2 or 4
  int32_t split_bits;  // log2 of splits, for divisions that must not cost any time
  int32_t share_bits;  // log2 of shares
  int32_t num_items;   // groups of `shares` tiles of W
  int32_t act;         // Activation of gate and up rows that alternate by eight, or -1
};

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16* /*type*/) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half* /*type*/) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename Traits>
class LinearEpilogue final {
 public:
  using T = typename Traits::T;

  __device__ __forceinline__ LinearEpilogue(const LinearArgs& args, uint32_t partials,
                                            uint32_t full, uint32_t empty, int32_t split,
                                            int32_t share)
      : args_(args),
        partials_(partials),
        full_(full),
        empty_(empty),
        split_(split),
        share_(share),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void finish(float (&sums)[Traits::kGroups][4], int32_t tile) {
    if (args_.splits == 1) {
#pragma unroll
      for (int32_t group = 0; group < Traits::kGroups; ++group) {
        write(sums[group], group, tile);
      }
      return;
    }
#pragma unroll
    for (int32_t piece = 0; piece < Traits::kPieces; ++piece) {
      send(sums, piece);
      receive(sums, piece, tile);
    }
  }

  /// Returns when the others have read every part this CTA sent.
  __device__ __forceinline__ void leave() {
    if (phase_ > 0) {
      ptx::mbarrier_wait(empty_, (phase_ - 1) & 1);
    }
  }

 private:
  /// The share of the depth whose CTA adds the parts of accumulator group `group` of this warp.
  __device__ __forceinline__ int32_t owner(int32_t group) const {
    return (group + warp_) & (args_.splits - 1);
  }
  /// Place of this lane's part from share `source` in the owner's memory.
  __device__ __forceinline__ uint32_t place(int32_t local_group, int32_t source,
                                            int32_t owner) const {
    const int32_t per_group = Traits::kConsumerWarps >> args_.split_bits;
    const int32_t units = Traits::kPieceGroups * per_group;
    const int32_t unit = local_group * per_group + (warp_ >> args_.split_bits);
    const int32_t other = source < owner ? source : source - 1;
    return partials_ + (other * units + unit) * Traits::kUnitBytes + lane_ * 16;
  }
  __device__ __forceinline__ uint32_t rank(int32_t split) const {
    return static_cast<uint32_t>(split * args_.shares + share_);
  }

  __device__ __forceinline__ void send(const float (&sums)[Traits::kGroups][4], int32_t piece) {
    if (phase_ > 0) {
      ptx::mbarrier_wait(empty_, (phase_ - 1) & 1);
    }
#pragma unroll
    for (int32_t i = 0; i < Traits::kPieceGroups; ++i) {
      const int32_t group = piece * Traits::kPieceGroups + i;
      const int32_t target = owner(group);
      if (target != split_) {
        ptx::cluster_store4(ptx::cluster_address(place(i, split_, target), rank(target)),
                            sums[group]);
      }
    }
    __syncwarp();
    if (lane_ < args_.splits && lane_ != split_) {
      ptx::mbarrier_arrive_remote_release(ptx::cluster_address(full_, rank(lane_)));
    }
  }

  /// Adds the parts in the order of the depth.
  __device__ __forceinline__ void receive(float (&sums)[Traits::kGroups][4], int32_t piece,
                                          int32_t tile) {
    ptx::mbarrier_wait_cluster(full_, phase_ & 1);
#pragma unroll
    for (int32_t i = 0; i < Traits::kPieceGroups; ++i) {
      const int32_t group = piece * Traits::kPieceGroups + i;
      if (owner(group) != split_) {
        continue;
      }
      float total[4] = {};
      for (int32_t source = 0; source < args_.splits; ++source) {
        float4 part = make_float4(sums[group][0], sums[group][1], sums[group][2], sums[group][3]);
        if (source != split_) {
          part = ptx::shared_load4(place(i, source, split_));
        }
        total[0] += part.x;
        total[1] += part.y;
        total[2] += part.z;
        total[3] += part.w;
      }
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) {
        sums[group][j] = total[j];
      }
    }
    // Read: the others may send again.
    __syncwarp();
    if (lane_ < args_.splits && lane_ != split_) {
      ptx::mbarrier_arrive_remote(ptx::cluster_address(empty_, rank(lane_)));
    }
    ++phase_;
#pragma unroll
    for (int32_t i = 0; i < Traits::kPieceGroups; ++i) {
      const int32_t group = piece * Traits::kPieceGroups + i;
      if (owner(group) == split_) {
        write(sums[group], group, tile);
      }
    }
  }

  /// Rows lane / 4 and 8 below of W (or gate and up) times two rows of x: bias or gate, rounding.
  __device__ __forceinline__ void write(const float (&sum)[4], int32_t group, int32_t tile) {
    if (group * 8 >= args_.num_rows) {
      return;
    }
    const int32_t row = group * 8 + lane_ / 4;
    T* type = nullptr;
    if (args_.act >= 0) {
      const auto act = static_cast<Activation>(args_.act);
      const uint32_t pair = ptx::transpose_8x8(
          pack_pair(activate(act, sum[0]) * sum[2], activate(act, sum[1]) * sum[3], type));
      put(row, tile * (Traits::kWeightRows / 2) + warp_ * 8 + lane_ % 4 * 2, pair);
      return;
    }
    const int32_t column = tile * Traits::kWeightRows + warp_ * 16;
    const float low = bias_of(column + lane_ / 4);
    const float high = bias_of(column + lane_ / 4 + 8);
    const uint32_t above = ptx::transpose_8x8(pack_pair(sum[0] + low, sum[1] + low, type));
    const uint32_t below = ptx::transpose_8x8(pack_pair(sum[2] + high, sum[3] + high, type));
    put(row, column + lane_ % 4 * 2, above);
    put(row, column + lane_ % 4 * 2 + 8, below);
  }
  __device__ __forceinline__ float bias_of(int32_t column) const {
    const bool is_read = args_.bias != nullptr && column < args_.num_columns;
    return is_read ? static_cast<float>(static_cast<const T*>(args_.bias)[column]) : 0.0F;
  }
  __device__ __forceinline__ void put(int32_t row, int32_t column, uint32_t pair) {
    if (row < args_.num_rows && column < args_.num_columns) {
      T* target = static_cast<T*>(args_.out) + row * args_.out_stride + column;
      *reinterpret_cast<uint32_t*>(target) = pair;
    }
  }

  const LinearArgs& args_;
  const uint32_t partials_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t split_;
  const int32_t share_;
  const int32_t warp_;
  const int32_t lane_;
  uint32_t phase_ = 0;
};

}  // namespace diffulex::cuda::sm90
