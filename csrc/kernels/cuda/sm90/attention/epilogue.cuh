// SPDX-License-Identifier: Apache-2.0
#pragma once

// Results of a warpgroup: final rows, or fp32 partials of a split in the workspace, which the CTAs
// of a cluster or a second kernel add up. Partials travel through L2: the multiprocessor-to-
// multiprocessor path of a cluster has a fraction of its bandwidth.

#include <cstdint>

#include "kernels/cuda/common/attention_args.cuh"
#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/mbarrier.cuh"
#include "kernels/cuda/sm90/attention/mainloop.cuh"

namespace diffulex::cuda::sm90 {

/// First of the two rows of this thread inside the row tile; the other is 8 below.
template <typename Traits>
__device__ __forceinline__ int thread_row(int group) {
  return group % Traits::kRowGroups * 64 + (threadIdx.x >> 5) % 4 * 16 + (threadIdx.x & 31) / 4;
}

/// Transposes a 4x4 matrix of words spread over four neighbouring lanes.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
  const bool is_odd = (threadIdx.x & 1) != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, is_odd ? words[i] : words[i + 1], 1);
    (is_odd ? words[i] : words[i + 1]) = got;
  }
  const bool is_high = (threadIdx.x & 2) != 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, is_high ? words[i] : words[i + 2], 2);
    (is_high ? words[i] : words[i + 2]) = got;
  }
}

/// Writes out and lse of the rows of this thread, 16 bytes a lane.
template <typename Traits>
__device__ __forceinline__ void store_final(const AttentionArgs& args, const TileSetup& setup,
                                            int group, const Accumulators<Traits>& result) {
  using T = typename Traits::Element;
  const int part = group / Traits::kRowGroups;
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row<Traits>(group) + half * 8;
    const int32_t token = args.by_group.divide(row);
    const bool is_real = token < setup.num_tokens;
    const int64_t head = setup.work.kv_head * args.group + row - token * args.group;
    const int64_t packed = setup.first_token + token;
    const float sum = result.softmax.sum[half];
    const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
    T* target = static_cast<T*>(args.out) + packed * args.out_stride[0] +
                head * args.out_stride[1] + part * Traits::kValueDims + lane * 8;
#pragma unroll
    for (int first = 0; first < Traits::kValueDims / 8; first += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_pair<T>(result.values[first + i][2 * half] * inverse,
                                result.values[first + i][2 * half + 1] * inverse);
      }
      transpose_quad(words);
      if (is_real) {
        *reinterpret_cast<uint4*>(target + first * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (args.lse != nullptr && part == 0 && lane == 0 && is_real) {
      args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
          sum > 0.0F ? (result.softmax.maximum[half] * result.softmax.factor + log2f(sum)) * kLn2
                     : -INFINITY;
    }
  }
}

/// Writes the unnormalised rows of one split; a row without keys writes its statistics only.
template <typename Traits>
__device__ __forceinline__ void store_partial(const AttentionArgs& args, const TileSetup& setup,
                                              int group, const Accumulators<Traits>& result) {
  const int part = group / Traits::kRowGroups;
  const int lane = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread_row<Traits>(group) + half * 8;
    const int32_t token = args.by_group.divide(row);
    if (token >= setup.num_tokens) {
      continue;
    }
    const int64_t record =
        partial_index(args, setup.work.split, setup.work.request, setup.first_row + token,
                      setup.work.kv_head * args.group + row - token * args.group);
    if (part == 0 && lane == 0) {
      args.partial_stats[record] = make_float2(result.softmax.maximum[half] * result.softmax.factor,
                                               result.softmax.sum[half]);
    }
    float* target =
        args.partial_out + record * Traits::kHeadDim + part * Traits::kValueDims + lane * 2;
#pragma unroll
    for (int column = 0; column < Traits::kValueDims / 8; ++column) {
      *reinterpret_cast<float2*>(target + column * 8) =
          make_float2(result.values[column][2 * half], result.values[column][2 * half + 1]);
    }
  }
}

/// Reads past L1, which may hold lines older than what another multiprocessor wrote.
__device__ __forceinline__ float4 load_shared_line(const float* address) {
  return __ldcg(reinterpret_cast<const float4*>(address));
}

/// Adds up the partials of the CTAs of a cluster in split order, every CTA its share of the rows;
/// the same arithmetic as the combine kernel.
template <typename Traits>
__device__ __forceinline__ void reduce_cluster(const AttentionArgs& args, const TileSetup& setup,
                                               int thread) {
  using T = typename Traits::Element;
  constexpr int kMaxCluster = 8;
  constexpr int kPieces = Traits::kHeadDim / 4;
  const int splits = setup.view.splits;
  const int share = Traits::kTileRows / args.cluster_size;
  const int first = static_cast<int>(ptx::cluster_rank()) * share;
  const int64_t split_stride = partial_index(args, 1, 0, 0, 0);
#pragma unroll 2
  for (int item = thread; item < share * kPieces; item += Traits::kConsumerThreads) {
    const int row = first + item / kPieces;
    const int col = item % kPieces * 4;
    const int32_t token = args.by_group.divide(row);
    if (token >= setup.num_tokens) {
      continue;
    }
    const int32_t head = setup.work.kv_head * args.group + row - token * args.group;
    const int64_t record =
        partial_index(args, 0, setup.work.request, setup.first_row + token, head);
    float2 stat[kMaxCluster];
    float4 value[kMaxCluster];
    float maximum = -INFINITY;
#pragma unroll
    for (int split = 0; split < kMaxCluster; ++split) {
      const int64_t index = record + (split < splits ? split : 0) * split_stride;
      stat[split] = __ldcg(args.partial_stats + index);
      value[split] = load_shared_line(args.partial_out + index * Traits::kHeadDim + col);
    }
#pragma unroll
    for (int split = 0; split < kMaxCluster; ++split) {
      maximum = fmaxf(maximum, stat[split].x);  // a repeated split 0 changes nothing
    }
    float sum = 0.0F;
    float4 total = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
#pragma unroll
    for (int split = 0; split < kMaxCluster; ++split) {
      // An empty split holds values of an earlier call.
      if (split < splits && stat[split].y > 0.0F) {
        const float weight = ptx::exp2_approx(stat[split].x - maximum);
        sum += stat[split].y * weight;
        total.x += value[split].x * weight;
        total.y += value[split].y * weight;
        total.z += value[split].z * weight;
        total.w += value[split].w * weight;
      }
    }
    const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
    const int64_t packed = setup.first_token + token;
    T* target =
        static_cast<T*>(args.out) + packed * args.out_stride[0] + head * args.out_stride[1] + col;
    *reinterpret_cast<uint2*>(target) =
        make_uint2(pack_pair<T>(total.x * inverse, total.y * inverse),
                   pack_pair<T>(total.z * inverse, total.w * inverse));
    if (args.lse != nullptr && col == 0) {
      args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
          sum > 0.0F ? (maximum + log2f(sum)) * kLn2 : -INFINITY;
    }
  }
}

}  // namespace diffulex::cuda::sm90
