// SPDX-License-Identifier: Apache-2.0
//
// Second pass of split attention: one warp per (request row, head) adds the partials of its splits
// in split order. Requests with one split were finished by the first pass.
#include <cstdint>

#include "kernels/cuda/common/attention_args.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/vec.cuh"
#include "kernels/cuda/portable/attention_combine.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kLn2 = 0.6931471805599453F;

template <typename T>
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
  const RequestView view = load_request(args, static_cast<int32_t>(request));
  if (view.splits <= 1 || token >= view.mask.num_valid) {
    return;
  }
  const int32_t request_id = static_cast<int32_t>(request);
  float maximum = -INFINITY;
  for (int32_t split = 0; split < view.splits; ++split) {
    maximum =
        fmaxf(maximum, args.partial_stats[partial_index(args, split, request_id, token, head)].x);
  }
  float sum = 0.0F;
  for (int32_t split = 0; split < view.splits; ++split) {
    const float2 stats = args.partial_stats[partial_index(args, split, request_id, token, head)];
    if (stats.y > 0.0F) {
      sum += stats.y * exp2f(stats.x - maximum);
    }
  }
  const float inverse = sum > 0.0F ? 1.0F / sum : 0.0F;
  const int64_t packed = view.first_token + token;
  T* out = static_cast<T*>(args.out) + packed * args.out_stride[0] + head * args.out_stride[1];
  for (int32_t dim = lane; dim < args.head_dim; dim += 32) {
    float value = 0.0F;
    for (int32_t split = 0; split < view.splits; ++split) {
      const int64_t record = partial_index(args, split, request_id, token, head);
      const float2 stats = args.partial_stats[record];
      if (stats.y > 0.0F) {  // an empty split left its values unwritten
        value += args.partial_out[record * args.head_dim + dim] * exp2f(stats.x - maximum);
      }
    }
    out[dim * args.out_stride[2]] = from_float<T>(value * inverse);
  }
  if (lane == 0 && args.lse != nullptr) {
    args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
        sum > 0.0F ? (maximum + log2f(sum)) * kLn2 : -INFINITY;
  }
}

}  // namespace

Status attention_combine(const AttentionArgs& args, DType dtype, void* stream) {
  constexpr const char* kWhere = "diffulex::block_attention";
  const int64_t warps = int64_t{args.num_reqs} * args.max_seqlen_q * args.num_q_heads;
  const auto grid = static_cast<unsigned>(ceil_div(warps, kWarps));
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    combine_kernel<T><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    return Status::ok_status();
  }));
  return check_launch(kWhere);
}

Status prepare_attention_combine() {
  constexpr const char* kWhere = "diffulex::block_attention";
  return for_each_dtype(kWhere, [](auto tag) {
    return touch_kernel(kWhere, combine_kernel<typename decltype(tag)::type>);
  });
}

}  // namespace diffulex::cuda
