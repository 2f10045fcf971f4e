// SPDX-License-Identifier: Apache-2.0
//
// moe_topk: one warp per token; E experts, lane l owns the experts i * 32 + l. Choices are compared
// as integers of the same order; among equal ones the lower id is first.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/moe/routing_check.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/ordered_key.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/ptx.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
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

/// What experts are chosen by, here and in shared memory, where their scores go too.
template <int kItems>
__device__ __forceinline__ void load_choices(const TopkArgs& args, const float (&scores)[kItems],
                                             int lane, RowSmem<kItems>& smem,
                                             uint32_t (&choices)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int expert = i * 32 + lane;
    choices[i] = 0;
    if (expert < args.num_experts) {
      const float choice = scores[i] + (args.bias == nullptr ? 0.0F : args.bias[expert]);
      smem.scores[expert] = scores[i];
      smem.choices[expert] = choice != choice ? -INFINITY : choice;
      choices[i] = ordered_bits(smem.choices[expert]);
    }
  }
  __syncwarp();
}

/// True for a group that is among the best; of equal ones the first are.
__device__ __forceinline__ bool is_best_group(const TopkArgs& args, const float* groups, float own,
                                              int group) {
  int better = 0;
  for (int other = 0; other < args.n_group; ++other) {
    const float value = groups[other];
    better += value > own || (value == own && other < group) ? 1 : 0;
  }
  return better < args.topk_group;
}

/// Sets the choices outside the best groups to -inf. A group is what the lanes hold at one index.
template <int kItems>
__device__ __forceinline__ void keep_best_warps(const TopkArgs& args, RowSmem<kItems>& smem,
                                                int lane, uint32_t (&choices)[kItems]) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const uint32_t first = __reduce_max_sync(kFullWarp, choices[i]);
    const int owner = __ffs(__ballot_sync(kFullWarp, choices[i] == first)) - 1;
    const uint32_t second = __reduce_max_sync(kFullWarp, lane == owner ? 0 : choices[i]);
    if (lane == 0) {
      const float best = ordered_value(first);
      smem.groups[i] = args.is_group_max ? best : best + ordered_value(second);
    }
  }
  __syncwarp();
  const bool is_kept =
      lane < args.n_group && is_best_group(args, smem.groups, smem.groups[lane], lane);
  const uint32_t kept = __ballot_sync(kFullWarp, is_kept);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const bool is_expert = i * 32 + lane < args.num_experts;
    choices[i] = is_expert && (kept >> i & 1) == 0 ? ordered_bits(-INFINITY) : choices[i];
  }
}

/// The same for groups of any size, in shared memory.
template <int kItems>
__device__ __forceinline__ void keep_best_groups(const TopkArgs& args, RowSmem<kItems>& smem,
                                                 int lane, uint32_t (&choices)[kItems]) {
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
    if (!is_best_group(args, smem.groups, smem.groups[group], group)) {
      for (int i = 0; i < size; ++i) {
        smem.choices[group * size + i] = -INFINITY;
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int expert = i * 32 + lane;
    choices[i] = expert < args.num_experts ? ordered_bits(smem.choices[expert]) : 0;
  }
}

/// The choice of rank `lane`, for lanes below top_k.
template <int kItems>
__device__ __forceinline__ int32_t choose(int32_t top_k, int lane, uint32_t (&choices)[kItems]) {
  int32_t chosen = 0;
#pragma unroll 1
  for (int k = 0; k < top_k; ++k) {
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      best = max(best, choices[i]);
    }
    best = __reduce_max_sync(kFullWarp, best);
    uint32_t expert = UINT32_MAX;
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      expert = choices[i] == best ? static_cast<uint32_t>(i * 32 + lane) : expert;
    }
    expert = __reduce_min_sync(kFullWarp, expert);
    chosen = lane == k ? static_cast<int32_t>(expert) : chosen;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      choices[i] = expert == static_cast<uint32_t>(i * 32 + lane) ? 0 : choices[i];
    }
  }
  return chosen;
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
  const int lane = threadIdx.x & 31;
  if (args.bias != nullptr && lane * 32 < args.num_experts) {
    ptx::prefetch_l2(args.bias + lane * 32);
  }
  pdl_wait();
  pdl_launch_dependents();
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
  uint32_t choices[kItems];  // 0: no expert
  load_choices(args, scores, lane, smem, choices);
  if (args.n_group * 32 == args.num_experts) {
    keep_best_warps(args, smem, lane, choices);
  } else if (args.n_group > 0) {
    keep_best_groups(args, smem, lane, choices);
  }
  write_choice(args, smem.scores, lane, choose(args.top_k, lane, choices), ids, weights);
}

template <typename T>
Status launch_topk(const char* where, const TopkArgs& args, const ExecContext& context) {
  const LaunchShape shape{dim3(static_cast<unsigned>(ceil_div(args.num_tokens, kWarps))),
                          dim3(kThreads), 0, stream_of(context)};
  if (args.num_experts <= 128) {
    return launch_spread<topk_kernel<T, 4>>(where, shape, context.device_index, args);
  }
  if (args.num_experts <= 256) {
    return launch_spread<topk_kernel<T, 8>>(where, shape, context.device_index, args);
  }
  // Beside 48 KiB of its own only one CTA would fit a multiprocessor.
  return cuda_status(where, launch_dependent(topk_kernel<T, 32>, shape,
                                             can_launch_dependent(context.device_index), args));
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
