// SPDX-License-Identifier: Apache-2.0
//
// out[t] = sum over k of weight[t, k] slot_out[t K + k] + addend[t], in float32, in ascending k and
// with one rounding. A CTA owns kThreads pieces of one token, a thread kCount columns; the lanes of
// a warp look up kTogether experts, and every thread loads their rows together.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "diffulex/ops/moe.h"
#include "ops/cuda_ops.h"
#include "ops/moe/combine.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTogether = 8;

struct CombineArgs {
  const void* __restrict__ slot_out;       // [T K, H]
  const float* __restrict__ weights;       // [T, K] or null
  const int32_t* __restrict__ topk_ids;    // [T, K]
  const int32_t* __restrict__ expert_map;  // [E] or null
  const void* __restrict__ addend;         // [T, H] or null
  void* __restrict__ out;                  // [T, H]
  int64_t slot_stride;
  int64_t weights_stride;
  int64_t ids_stride;
  int64_t addend_stride;
  int64_t out_stride;
  int32_t top_k;
  int32_t hidden;
  int32_t num_experts;
  int32_t num_local;
  bool is_addend_f32;
  bool is_routed_before;  // all but slot_out is older than the launch in front
};

__device__ __forceinline__ bool is_active(const CombineArgs& args, int32_t id) {
  if (id < 0 || id >= args.num_experts) {
    return false;
  }
  const int32_t local = args.expert_map == nullptr ? id : args.expert_map[id];
  return local >= 0 && local < args.num_local;
}

/// Experts of a token, one a lane: their weights, and as bits which of them contribute.
struct LaneWeights {
  float weight;
  unsigned active;
};

/// The experts from k on, in the first kTogether lanes of a whole warp.
__device__ __forceinline__ LaneWeights load_weights(const CombineArgs& args, int64_t token,
                                                    int32_t k) {
  const int lane = threadIdx.x & 31;
  const int32_t place = k + lane;
  const bool is_real = lane < kTogether && place < args.top_k;
  const int32_t id = is_real ? args.topk_ids[token * args.ids_stride + place] : -1;
  const float weight =
      is_real && args.weights != nullptr ? args.weights[token * args.weights_stride + place] : 1.0F;
  return {weight, __ballot_sync(kFullWarp, is_active(args, id))};
}

/// Adds the columns of a row that is no expert's.
template <typename T, int kCount>
__device__ __forceinline__ void add_addend(const CombineArgs& args, int64_t token, int64_t column,
                                           float (&sum)[kCount]) {
  float term[kCount];
  const int64_t offset = token * args.addend_stride + column;
  if (args.is_addend_f32) {
    load_floats<kCount, kCount != 1>(static_cast<const float*>(args.addend) + offset, term);
  } else {
    load_floats<kCount, kCount != 1>(static_cast<const T*>(args.addend) + offset, term);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    sum[j] += term[j];
  }
}

template <typename T, bool kVec>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 8 : 4)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kCount = kVec ? 8 : 1;
  // Whole words: 16-bit values would take a register each until they are used.
  using Word = std::conditional_t<kVec, uint32_t, T>;
  using Raw = Vec<Word, kCount * sizeof(T) / sizeof(Word)>;
  if (!args.is_routed_before) {
    pdl_wait();
  }
  pdl_launch_dependents();
  const auto token = static_cast<int64_t>(blockIdx.x);
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kCount;
  // Threads past the row load what the last one does, so that warps stay whole.
  const bool is_inside = column < args.hidden;
  const T* source = static_cast<const T*>(args.slot_out) + token * args.top_k * args.slot_stride +
                    (is_inside ? column : args.hidden - kCount);
  float sum[kCount] = {};
  LaneWeights own = load_weights(args, token, 0);
  if (args.is_routed_before) {
    pdl_wait();
  }
  for (int32_t k = 0; k < args.top_k; k += kTogether) {
    if (k > 0) {
      own = load_weights(args, token, k);
    }
    Raw rows[kTogether] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if ((own.active >> j & 1) != 0) {
        rows[j] = *reinterpret_cast<const Raw*>(source + (k + j) * args.slot_stride);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const float weight = __shfl_sync(kFullWarp, own.weight, j);
      if ((own.active >> j & 1) != 0) {
        Vec<T, kCount> piece;
        memcpy(&piece, &rows[j], sizeof(piece));
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          sum[c] = fmaf(weight, to_float(piece.values[c]), sum[c]);
        }
      }
    }
  }
  if (!is_inside) {
    return;
  }
  if (args.addend != nullptr) {
    add_addend<T>(args, token, column, sum);
  }
  store_floats<kCount, kVec>(static_cast<T*>(args.out) + token * args.out_stride + column, sum);
}

bool is_row_aligned(const TensorRef& tensor) {
  return is_aligned16(tensor.data) && tensor.stride[0] * dtype_bytes(tensor.dtype) % 16 == 0;
}

}  // namespace

Status launch_slot_sum(const char* where, const SlotSum& sum, const ExecContext& context) {
  CombineArgs args{};
  args.slot_out = sum.slot_out.data;
  args.slot_stride = sum.slot_out.stride[0];
  if (sum.weights != nullptr) {
    args.weights = sum.weights->as<const float>();
    args.weights_stride = sum.weights->stride[0];
  }
  args.topk_ids = sum.topk_ids.as<const int32_t>();
  args.ids_stride = sum.topk_ids.stride[0];
  args.expert_map = sum.expert_map.as<const int32_t>();
  args.addend = sum.addend.data;
  args.addend_stride = sum.addend.stride[0];
  args.is_addend_f32 = sum.addend.dtype == DType::kF32;
  args.out = sum.out.data;
  args.out_stride = sum.out.stride[0];
  args.top_k = static_cast<int32_t>(sum.topk_ids.size[1]);
  args.hidden = static_cast<int32_t>(sum.out.size[1]);
  args.num_experts = static_cast<int32_t>(sum.num_experts);
  args.num_local = static_cast<int32_t>(sum.num_local_experts);
  args.is_routed_before = sum.is_routed_before;
  const bool is_vec = args.hidden % 8 == 0 && is_row_aligned(sum.slot_out) &&
                      is_row_aligned(sum.out) &&
                      (!sum.addend.present() || is_row_aligned(sum.addend));
  const int64_t parts = ceil_div(is_vec ? args.hidden / 8 : args.hidden, kThreads);
  const LaunchShape shape{
      dim3(static_cast<unsigned>(sum.out.size[0]), static_cast<unsigned>(parts)), dim3(kThreads), 0,
      stream_of(context)};
  return dispatch_dtype(where, sum.out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return is_vec
               ? launch_spread<combine_kernel<T, true>>(where, shape, context.device_index, args)
               : launch_spread<combine_kernel<T, false>>(where, shape, context.device_index, args);
  });
}

Status moe_combine(const MoeCombineParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::moe_combine";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  const TensorRef no_map;
  // Any id that is not negative counts: the map was applied before.
  return launch_slot_sum(kWhere,
                         {params.slot_out, &params.topk_weights, params.topk_ids, no_map, INT32_MAX,
                          INT32_MAX, params.addend, params.out, false},
                         context);
}

Status prepare_moe_combine(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::moe_combine";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR((touch_kernel(kWhere, combine_kernel<T, true>)));
    return touch_kernel(kWhere, combine_kernel<T, false>);
  });
}

}  // namespace diffulex::cuda
