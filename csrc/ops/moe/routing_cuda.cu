// SPDX-License-Identifier: Apache-2.0
//
// moe_topk: one warp per token; E experts, lane l owns the experts i * 32 + l. Scores and choices
// of the row also lie in shared memory, where groups of consecutive experts are read. A choice is
// compared as a 64-bit key: the float in an order-preserving form above the inverted expert id, so
// that equal choices go by the lower id; 0 marks an expert that was taken.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/routing_check.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr float kMaxFloat = 3.402823466e+38F;
constexpr float kTinySum = 1e-20F;

struct TopkArgs {
  const void* __restrict__ logits;          // [T, E]
  const float* __restrict__ bias;           // [E] or null
  const float* __restrict__ expert_scale;   // [E] or null
  const uint8_t* __restrict__ token_valid;  // [T] or null
  float* __restrict__ weights;              // [T, K]
  int32_t* __restrict__ ids;                // [T, K]
  int64_t logits_stride;
  int64_t weights_stride;
  int64_t ids_stride;
  int64_t num_tokens;
  int32_t num_experts;
  int32_t top_k;
  int32_t n_group;  // 0 = no grouping
  int32_t topk_group;
  bool is_sigmoid;
  bool is_group_max;
  bool renormalize;
  float routed_scaling;
};

/// What a warp keeps of its row: kItems experts per lane.
template <int kItems>
struct RowSmem {
  float scores[32 * kItems];
  float choices[32 * kItems];
  float groups[32 * kItems];
};

__device__ __forceinline__ uint64_t choice_key(float choice, int expert) {
  const uint32_t bits = __float_as_uint(choice);
  const uint32_t ordered = (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~expert);
}

/// Largest key of the warp: its high words, then the low words of the highest.
__device__ __forceinline__ uint64_t warp_max_key(uint64_t key) {
  const auto own = static_cast<uint32_t>(key >> 32);
  const uint32_t high = __reduce_max_sync(kFullWarp, own);
  const uint32_t low = __reduce_max_sync(kFullWarp, own == high ? static_cast<uint32_t>(key) : 0);
  return static_cast<uint64_t>(high) << 32 | low;
}

/// Largest and second largest of two pairs.
__device__ __forceinline__ void merge_two(float& first, float& second, float a, float b) {
  const float low = fminf(first, a);
  first = fmaxf(first, a);
  second = fmaxf(low, fmaxf(second, b));
}

/// Loads a row and turns it into scores; false when nothing in it is above -inf.
template <typename T, int kItems>
__device__ __forceinline__ bool score_row(const TopkArgs& args, const T* row, int lane,
                                          float (&scores)[kItems]) {
  float highest = -INFINITY;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int expert = i * 32 + lane;
    const float raw = expert < args.num_experts ? to_float(row[expert]) : -INFINITY;
    scores[i] = raw != raw ? -INFINITY : fminf(raw, kMaxFloat);
    highest = fmaxf(highest, scores[i]);
  }
  highest = warp_max(highest);
  if (highest == -INFINITY) {
    return false;
  }
  if (args.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      scores[i] = 1.0F / (1.0F + expf(-scores[i]));
    }
    return true;
  }
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    scores[i] = expf(scores[i] - highest);
    sum += scores[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    scores[i] /= sum;
  }
  return true;
}

/// Sets the choices outside the best groups to -inf, in shared memory.
template <int kItems>
__device__ __forceinline__ void keep_best_groups(const TopkArgs& args, RowSmem<kItems>& smem,
                                                 int lane) {
  const int size = args.num_experts / args.n_group;
  for (int group = 0; group < args.n_group; ++group) {
    float first = -INFINITY;
    float second = -INFINITY;
    for (int i = lane; i < size; i += 32) {
      merge_two(first, second, smem.choices[group * size + i], -INFINITY);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float a = __shfl_xor_sync(kFullWarp, first, offset);
      const float b = __shfl_xor_sync(kFullWarp, second, offset);
      merge_two(first, second, a, b);
    }
    if (lane == 0) {
      smem.groups[group] = args.is_group_max || size == 1 ? first : first + second;
    }
  }
  __syncwarp();
  for (int group = lane; group < args.n_group; group += 32) {
    const float own = smem.groups[group];
    int better = 0;
    for (int other = 0; other < args.n_group; ++other) {
      const float value = smem.groups[other];
      better += value > own || (value == own && other < group) ? 1 : 0;
    }
    if (better >= args.topk_group) {
      for (int i = 0; i < size; ++i) {
        smem.choices[group * size + i] = -INFINITY;
      }
    }
  }
  __syncwarp();
}

/// Writes the choice of rank `lane` of a token, for lanes below top_k, and its weight.
__device__ __forceinline__ void write_choice(const TopkArgs& args, const float* scores, int lane,
                                             int32_t chosen, int32_t* ids, float* weights) {
  float weight = scores[chosen];
  if (args.renormalize && args.top_k > 1) {
    float sum = 0.0F;
    for (int k = 0; k < args.top_k; ++k) {
      sum += __shfl_sync(kFullWarp, weight, k);
    }
    weight /= sum + kTinySum;
  }
  if (lane < args.top_k) {
    weight *= args.routed_scaling;
    weights[lane] = args.expert_scale == nullptr ? weight : weight * args.expert_scale[chosen];
    ids[lane] = chosen;
  }
}

template <typename T, int kItems>
__global__ void __launch_bounds__(kThreads) topk_kernel(const __grid_constant__ TopkArgs args) {
  __shared__ RowSmem<kItems> rows[kWarps];
  pdl_wait();
  pdl_launch_dependents();
  const int lane = threadIdx.x & 31;
  RowSmem<kItems>& smem = rows[threadIdx.x >> 5];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (token >= args.num_tokens) {
    return;
  }
  int32_t* ids = args.ids + token * args.ids_stride;
  float* weights = args.weights + token * args.weights_stride;
  const bool is_valid = args.token_valid == nullptr || args.token_valid[token] != 0;
  float scores[kItems];
  const T* logits = static_cast<const T*>(args.logits) + token * args.logits_stride;
  if (!is_valid || !score_row(args, logits, lane, scores)) {
    if (lane < args.top_k) {
      ids[lane] = is_valid ? lane : -1;
      weights[lane] = 0.0F;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int expert = i * 32 + lane;
    if (expert < args.num_experts) {
      const float choice = scores[i] + (args.bias == nullptr ? 0.0F : args.bias[expert]);
      smem.scores[expert] = scores[i];
      smem.choices[expert] = choice != choice ? -INFINITY : choice;
    }
  }
  __syncwarp();
  if (args.n_group > 0) {
    keep_best_groups(args, smem, lane);
  }
  uint64_t keys[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = expert < args.num_experts ? choice_key(smem.choices[expert], expert) : 0;
  }
  // Lane k keeps the k-th choice.
  int32_t chosen = 0;
  for (int k = 0; k < args.top_k; ++k) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      best = keys[i] > best ? keys[i] : best;
    }
    best = warp_max_key(best);
    const auto expert = static_cast<int32_t>(~static_cast<uint32_t>(best));
    chosen = lane == k ? expert : chosen;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      keys[i] = keys[i] == best ? 0 : keys[i];
    }
  }
  write_choice(args, smem.scores, lane, chosen, ids, weights);
}

template <typename T>
Status launch_topk(const char* where, const TopkArgs& args, const ExecContext& context) {
  const auto kernel = args.num_experts <= 128   ? topk_kernel<T, 4>
                      : args.num_experts <= 256 ? topk_kernel<T, 8>
                                                : topk_kernel<T, 32>;
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div(args.num_tokens, kWarps))),
                          dim3(kThreads), 0, stream_of(context)};
  return cuda_status(
      where, launch_dependent(kernel, shape, can_launch_dependent(context.device_index), args));
}

}  // namespace

Status moe_topk(const MoeTopkParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::moe_topk";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const bool grouped = is_grouped(params);
  TopkArgs args{};
  args.logits = params.logits.data;
  args.bias = params.bias.as<const float>();
  args.expert_scale = params.expert_scale.as<const float>();
  args.token_valid = params.token_valid.as<const uint8_t>();
  args.weights = params.weights.as<float>();
  args.ids = params.ids.as<int32_t>();
  args.logits_stride = params.logits.stride[0];
  args.weights_stride = params.weights.stride[0];
  args.ids_stride = params.ids.stride[0];
  args.num_tokens = params.logits.size[0];
  args.num_experts = static_cast<int32_t>(params.logits.size[1]);
  args.top_k = params.top_k;
  args.n_group = grouped ? params.n_group : 0;
  args.topk_group = params.topk_group;
  args.is_sigmoid = params.scoring == RouterScoring::kSigmoid;
  args.is_group_max = params.group_score == GroupScore::kMax;
  args.renormalize = params.renormalize;
  args.routed_scaling = params.routed_scaling;
  return dispatch_dtype(kWhere, params.logits.dtype, [&](auto tag) {
    return launch_topk<typename decltype(tag)::type>(kWhere, args, context);
  });
}

Status prepare_routing(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::moe_topk";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, topk_kernel<T, 4>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, topk_kernel<T, 8>));
    return touch_kernel(kWhere, topk_kernel<T, 32>);
  });
}

}  // namespace diffulex::cuda
