// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums of a tile on their way out: of two shares of the depth, each CTA adds and writes half of the
// sums; then bias or gate, one rounding and the transpose to rows of x.

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/activation/gate.cuh"
#include "ops/linear/sm90/args.cuh"
#include "ops/shared/cuda/cluster.cuh"
#include "ops/shared/cuda/mbarrier.cuh"
#include "ops/shared/cuda/ptx.cuh"

namespace diffulex::cuda::sm90 {

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16* /*type*/) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half* /*type*/) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// sum += four values in shared memory.
__device__ __forceinline__ void add_shared(float (&sum)[4], uint32_t address) {
  const float4 part = ptx::shared_load4(address);
  sum[0] += part.x;
  sum[1] += part.y;
  sum[2] += part.z;
  sum[3] += part.w;
}

/// Two shares of the depth meet: each adds what the other has of one half of the sums, kRun
/// accumulator groups at a time.
template <typename Traits, int kRun = 1>
class LinearExchange {
 public:
  __device__ __forceinline__ LinearExchange(const LinearArgs& args, uint32_t partials,
                                            uint32_t full, uint32_t empty, int32_t split)
      : args_(args),
        partials_(partials),
        full_(full),
        empty_(empty),
        split_(split),
        warp_(static_cast<int32_t>(threadIdx.x) / 32),
        lane_(static_cast<int32_t>(threadIdx.x) % 32) {}

  /// Whole warps that hold sums.
  __device__ __forceinline__ void exchange(float (&sums)[Traits::kGroups][4], bool is_last) {
    if (args_.splits > 1) {
      send(sums);
      receive(sums, is_last);
    }
  }

 protected:
  /// Whether this share of the depth writes accumulator group `group` of this warp.
  __device__ __forceinline__ bool is_mine(int32_t group) const {
    return args_.splits == 1 || ((group / kRun + warp_) & 1) == split_;
  }

  /// Writes eight columns from `column` on of eight rows of x from `row` on. A lane has those of
  /// row lane / 4 of W times two rows of x.
  __device__ __forceinline__ void put(int32_t row, int32_t column, float first,
                                      float second) const {
    using T = typename Traits::T;
    const uint32_t pair = ptx::transpose_8x8(pack_pair(first, second, static_cast<T*>(nullptr)));
    row += lane_ / 4;
    column += lane_ % 4 * 2;
    if (row < args_.num_rows && column < args_.num_columns) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(args_.out) + row * args_.out_stride + column) =
          pair;
    }
  }
  /// As put(), of activated gates times ups, which a lane has of two rows of W.
  __device__ __forceinline__ void put_gated(int32_t row, int32_t column,
                                            const float (&sum)[4]) const {
    const auto act = static_cast<Activation>(args_.act);
    put(row, column, activate(act, sum[0]) * sum[2], activate(act, sum[1]) * sum[3]);
  }

  const LinearArgs& args_;

 private:
  /// Place of this lane's part of a group in the memory of the share that writes it.
  __device__ __forceinline__ uint32_t place(int32_t group) const {
    const int32_t index = group / (2 * kRun) * kRun + group % kRun;
    return partials_ + (warp_ * (Traits::kGroups / 2) + index) * 512 + lane_ * 16;
  }

  __device__ __forceinline__ void send(const float (&sums)[Traits::kGroups][4]) {
    if (phase_ > 0) {
      ptx::mbarrier_wait(empty_, (phase_ - 1) & 1);
    }
    const auto other = static_cast<uint32_t>(split_ ^ 1);
    const uint32_t full = ptx::cluster_address(full_, other);
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      if (!is_mine(group)) {
        ptx::cluster_store4_async(ptx::cluster_address(place(group), other), sums[group], full);
      }
    }
  }

  __device__ __forceinline__ void receive(float (&sums)[Traits::kGroups][4], bool is_last) {
    ptx::mbarrier_wait_cluster(full_, phase_ & 1);
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      if (is_mine(group)) {
        add_shared(sums[group], place(group));
      }
    }
    ++phase_;
    if (is_last) {
      return;  // the other one may be gone
    }
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect(full_, static_cast<uint32_t>(args_.partial_bytes));
    }
    // Read: the other one may send again.
    __syncwarp();
    if (lane_ == 0) {
      ptx::mbarrier_arrive_remote(ptx::cluster_address(empty_, static_cast<uint32_t>(split_ ^ 1)));
    }
  }

  const uint32_t partials_;
  const uint32_t full_;
  const uint32_t empty_;
  const int32_t split_;

 protected:
  const int32_t warp_;
  const int32_t lane_;

 private:
  uint32_t phase_ = 0;
};

template <typename Traits>
class LinearEpilogue final : public LinearExchange<Traits> {
 public:
  using T = typename Traits::T;
  using LinearExchange<Traits>::LinearExchange;

  /// Whole warps; those past the tile have nothing to write.
  __device__ __forceinline__ void finish(float (&sums)[Traits::kGroups][4], int32_t tile,
                                         bool is_last) {
    if (warp_ >= args_.warps) {
      return;
    }
    this->exchange(sums, is_last);
#pragma unroll
    for (int32_t group = 0; group < Traits::kGroups; ++group) {
      if (this->is_mine(group)) {
        write(sums[group], group, tile);
      }
    }
  }

 private:
  using LinearExchange<Traits>::args_;
  using LinearExchange<Traits>::warp_;
  using LinearExchange<Traits>::lane_;

  /// Bias or gate, rounding.
  __device__ __forceinline__ void write(const float (&sum)[4], int32_t group, int32_t tile) {
    const int32_t row = group * 8;
    if (row >= args_.num_rows) {
      return;
    }
    if (args_.act >= 0) {
      this->put_gated(row, tile * (args_.tile_rows / 2) + warp_ * 8, sum);
      return;
    }
    const int32_t column = tile * args_.tile_rows + warp_ * 16;
    const float low = bias_of(column + lane_ / 4);
    const float high = bias_of(column + lane_ / 4 + 8);
    this->put(row, column, sum[0] + low, sum[1] + low);
    this->put(row, column + 8, sum[2] + high, sum[3] + high);
  }
  __device__ __forceinline__ float bias_of(int32_t column) const {
    const bool is_read = args_.bias != nullptr && column < args_.num_columns;
    return is_read ? static_cast<float>(static_cast<const T*>(args_.bias)[column]) : 0.0F;
  }
};

}  // namespace diffulex::cuda::sm90
