// SPDX-License-Identifier: Apache-2.0
//
// Second pass of split attention: one warp per (request row, head) adds the partials of its splits
// in split order. Requests with one split were finished by the first pass.
#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/combine.h"
#include "ops/attention/config.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kLn2 = 0.6931471805599453F;

/// Weights of the splits of one row: lane s holds that of split s.
struct SplitWeights final {
  float maximum;  // base 2
  float sum;      // of all splits, relative to the maximum
  float weight;
};

__device__ __forceinline__ SplitWeights split_weights(const AttentionArgs& args, int32_t splits,
                                                      int32_t request, int32_t token, int32_t head,
                                                      int lane) {
  static_assert(kAttentionMaxSplits <= 32, "a lane per split");
  float2 stats = make_float2(-INFINITY, 0.0F);
  if (lane < splits) {
    stats = args.partial_stats[partial_index(args, lane, request, token, head)];
  }
  SplitWeights weights;
  weights.maximum = warp_max(stats.x);
  // An empty split left its values unwritten: its sum is exactly 0, its weight is 0 and they are
  // not read. The sum of a split with a visible NaN is NaN, and with it the sum of all.
  weights.weight = stats.y != 0.0F ? exp2f(stats.x - weights.maximum) : 0.0F;
  weights.sum = 0.0F;
  const float share = stats.y != 0.0F ? stats.y * weights.weight : 0.0F;
  for (int32_t split = 0; split < splits; ++split) {  // in split order
    weights.sum += __shfl_sync(kFullWarp, share, split);
  }
  return weights;
}

/// Elements [dim, dim + kCount) of a row: partials times weights, in split order. All lanes of the
/// warp call it; `is_real` is false for lanes past the head dim.
template <int kCount>
__device__ __forceinline__ void add_splits(const float* rows, int64_t split_stride, int32_t splits,
                                           float weight, bool is_real, float (&total)[kCount]) {
  constexpr int kBatch = 8;  // independent loads in flight
  for (int32_t base = 0; base < splits; base += kBatch) {
    Vec<float, kCount> values[kBatch];
    float weights[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      weights[i] = base + i < splits ? __shfl_sync(kFullWarp, weight, base + i) : 0.0F;
      if (is_real && weights[i] > 0.0F) {
        values[i] = *reinterpret_cast<const Vec<float, kCount>*>(rows + (base + i) * split_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (weights[i] > 0.0F) {
#pragma unroll
        for (int column = 0; column < kCount; ++column) {
          total[column] += values[i].values[column] * weights[i];
        }
      }
    }
  }
}

/// kCount: elements a lane moves at once; 4 needs rows of whole pieces and aligned output rows.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ AttentionArgs args) {
  const int lane = threadIdx.x & 31;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  const int32_t head = static_cast<int32_t>(index % args.num_q_heads);
  index /= args.num_q_heads;
  const int32_t token = static_cast<int32_t>(index % args.max_seqlen_q);
  const int64_t request = index / args.max_seqlen_q;
  if (request >= args.num_reqs) {
    return;
  }
  // The attention kernel lets this one start only after the kernels before it have ended, so the
  // metadata may be read before the wait; the partials may not.
  const int32_t request_id = static_cast<int32_t>(request);
  const RequestView view = load_request(args, request_id);
  pdl_launch_dependents();
  pdl_wait();
  if (view.splits <= 1 || token >= view.mask.num_valid) {
    return;
  }
  const SplitWeights weights = split_weights(args, view.splits, request_id, token, head, lane);
  const float inverse = weights.sum != 0.0F ? 1.0F / weights.sum : 0.0F;
  const int64_t packed = view.first_token + token;
  T* out = static_cast<T*>(args.out) + packed * args.out_stride[0] + head * args.out_stride[1];
  const float* rows =
      args.partial_out + partial_index(args, 0, request_id, token, head) * args.head_dim;
  const int64_t split_stride = partial_index(args, 1, 0, 0, 0) * args.head_dim;
  for (int32_t base = 0; base < args.head_dim; base += 32 * kCount) {
    const int32_t dim = base + lane * kCount;
    const bool is_real = dim < args.head_dim;
    float total[kCount] = {};
    add_splits<kCount>(rows + (is_real ? dim : 0), split_stride, view.splits, weights.weight,
                       is_real, total);
    if (is_real) {
#pragma unroll
      for (int column = 0; column < kCount; ++column) {
        total[column] *= inverse;
      }
      if constexpr (kCount == 1) {
        out[dim * args.out_stride[2]] = from_float<T>(total[0]);
      } else {
        store_floats<kCount, true>(out + dim, total);
      }
    }
  }
  if (lane == 0 && args.lse != nullptr) {
    args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
        weights.sum != 0.0F ? (weights.maximum + log2f(weights.sum)) * kLn2 : -INFINITY;
  }
}

/// True when lanes may move four elements at once.
bool is_vector_ready(const AttentionArgs& args, int64_t element_bytes) {
  const int64_t piece = 4 * element_bytes;
  return args.head_dim % 4 == 0 && args.out_stride[2] == 1 &&
         args.out_stride[0] * element_bytes % piece == 0 &&
         args.out_stride[1] * element_bytes % piece == 0 &&
         reinterpret_cast<uintptr_t>(args.out) % static_cast<uintptr_t>(piece) == 0;
}

}  // namespace

Status attention_combine(const AttentionArgs& args, DType dtype, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::block_attention";
  const int64_t warps = int64_t{args.num_reqs} * args.max_seqlen_q * args.num_q_heads;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(ceil_div(warps, kWarps)));
  shape.block = dim3(kThreads);
  shape.stream = stream_of(context);
  return dispatch_dtype(kWhere, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel =
        is_vector_ready(args, sizeof(T)) ? &combine_kernel<T, 4> : &combine_kernel<T, 1>;
    return cuda_status(
        kWhere, launch_dependent(kernel, shape, can_launch_dependent(context.device_index), args));
  });
}

Status prepare_attention_combine() {
  constexpr const char* kWhere = "diffulex::block_attention";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, combine_kernel<T, 1>));
    return touch_kernel(kWhere, combine_kernel<T, 4>);
  });
}

}  // namespace diffulex::cuda
