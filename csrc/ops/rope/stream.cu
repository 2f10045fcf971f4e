// SPDX-License-Identifier: Apache-2.0
//
// Per-head RMSNorm, rotary embedding and cache store of many tokens at the speed of the memory. As
// in rope.cu lanes share a head, 16 elements each, but a warp walks over its heads with the next
// ones on their way, and holds nothing in float32 that it can make again: registers bound how many
// warps, and so how many bytes, are on their way.
#include <cstdint>

#include "ops/rope/stream.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 64;
constexpr int kWarps = kThreads / 32;
constexpr int kMinBlocks = 12;  // of a multiprocessor
/// Steps of a warp through the heads of a projection, 32 / kLanes heads each, and the tokens from
/// which the longer walk, which reads the angles less often, leaves enough warps.
constexpr int kFewSteps = 2;
constexpr int kSteps = 4;
constexpr int64_t kManyWarpsTokens = 4096;
constexpr int kHalf = 8;  // elements that lie together; a lane has two such pieces of a head

template <typename T>
struct HeadPart {
  Vec<T, kHalf> low;
  Vec<T, kHalf> high;

  __device__ __forceinline__ void load(const T* source, int32_t gap) {
    low = *reinterpret_cast<const Vec<T, kHalf>*>(source);
    high = *reinterpret_cast<const Vec<T, kHalf>*>(source + gap);
  }
  /// Rows and caches are touched once: lines that are first to leave the caches.
  __device__ __forceinline__ void load_once(const T* source, int32_t gap) {
    *reinterpret_cast<uint4*>(&low) = __ldcs(reinterpret_cast<const uint4*>(source));
    *reinterpret_cast<uint4*>(&high) = __ldcs(reinterpret_cast<const uint4*>(source + gap));
  }
  __device__ __forceinline__ void store_once(T* target, int32_t gap) const {
    __stcs(reinterpret_cast<uint4*>(target), *reinterpret_cast<const uint4*>(&low));
    __stcs(reinterpret_cast<uint4*>(target + gap), *reinterpret_cast<const uint4*>(&high));
  }
  __device__ __forceinline__ float at(int i) const {
    return to_float(i < kHalf ? low.values[i] : high.values[i - kHalf]);
  }
  /// Keeps the compiler from converting values that stay once and holding them in more registers.
  __device__ __forceinline__ void forget() {
    static_assert(sizeof(HeadPart) == 32, "eight words");
    uint32_t* const words = reinterpret_cast<uint32_t*>(this);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      asm volatile("" : "+r"(words[i]));
    }
  }
};

/// Pairs (i, kHalf + i), or neighbours.
template <bool kNeox>
__device__ __forceinline__ void rotate(const float (&cosine)[kHalf], const float (&sine)[kHalf],
                                       float (&values)[2 * kHalf]) {
#pragma unroll
  for (int pair = 0; pair < kHalf; ++pair) {
    rotate_pair(cosine[pair], sine[pair], values[kNeox ? pair : 2 * pair],
                values[kNeox ? kHalf + pair : 2 * pair + 1]);
  }
}

/// Norm and rotation of one head; by whole warps.
template <typename T, int kLanes>
__device__ __forceinline__ void finish_part(const RopeArgs& args, const HeadGroup& group,
                                            bool is_rotary, const float (&cosine)[kHalf],
                                            const float (&sine)[kHalf], const HeadPart<T>& weights,
                                            HeadPart<T>& part) {
  float values[2 * kHalf];
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    values[i] = part.at(i);
    sum = fmaf(values[i], values[i], sum);
  }
  if (group.has_norm) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    const float scale = rsqrtf(sum / static_cast<float>(args.head_dim) + args.eps);
#pragma unroll
    for (int i = 0; i < 2 * kHalf; ++i) {
      values[i] *= scale;
      if (group.weight != nullptr) {
        values[i] *= weights.at(i) + args.weight_offset;
      }
    }
  }
  if (is_rotary && args.neox) {
    rotate<true>(cosine, sine, values);
  } else if (is_rotary) {
    rotate<false>(cosine, sine, values);
  }
  float halves[2][kHalf];
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    halves[i / kHalf][i % kHalf] = values[i];
  }
  part.low = round_floats<T>(halves[0]);
  part.high = round_floats<T>(halves[1]);
}

/// Where the cache keeps dimension `low` of a head, null where it does not, and how far the head is
/// from it that the warp writes next, `step` heads on.
template <typename T>
struct CachedHead {
  T* data = nullptr;
  int64_t step = 0;
};

template <typename T>
__device__ __forceinline__ CachedHead<T> find_cached(const RopeArgs& args, const HeadRun& run,
                                                     int32_t head, int32_t low, int32_t step) {
  CachedHead<T> cached;
  if (run.part > 0 && args.slots != nullptr) {
    const CacheView& cache = run.part == 1 ? args.k_cache : args.v_cache;
    const SlotPlace slot = find_slot(args, run.token);
    if (slot.page >= 0) {
      cached.data = static_cast<T*>(cache.data) + slot.page * cache.page_stride +
                    slot.offset * cache.token_stride + head * cache.head_stride + low;
      cached.step = step * cache.head_stride;
    }
  }
  return cached;
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    stream_kernel(const __grid_constant__ RopeArgs args) {
  constexpr int kHeads = 32 / kLanes;  // of a step
  const HeadRun run =
      find_heads(args, static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5));
  if (run.token >= args.num_tokens) {
    return;
  }
  const HeadGroup& group = run.part == 0 ? args.q : (run.part == 1 ? args.k : args.v);
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & (kLanes - 1);
  const bool has_dims = lane * 2 * kHalf < args.head_dim;
  const bool is_paired = lane * 2 * kHalf < args.rotary_dim;  // with a piece half a rotary dim on
  const bool is_apart = is_paired && args.neox;
  const int32_t low = lane * (is_apart ? kHalf : 2 * kHalf);
  const int32_t gap = is_apart ? args.rotary_dim / 2 : kHalf;
  const bool is_rotary = run.part < 2 && is_paired;
  pdl_launch_dependents();
  pdl_wait();
  const int32_t end = min(run.first + args.warp_heads, group.num_heads);
  int32_t head = run.first + static_cast<int32_t>(threadIdx.x & 31) / kLanes;
  T* data =
      static_cast<T*>(group.data) + run.token * group.token_stride + head * group.head_stride + low;
  const float* angles = run.part < 2 ? find_angles(args, run.token) : nullptr;
  HeadPart<T> next{};
  if (has_dims && head < end) {
    next.load_once(data, gap);
  }
  auto [cached, cache_step] = find_cached<T>(args, run, head, low, kHeads);
  float cosine[kHalf] = {};
  float sine[kHalf] = {};
  if (is_rotary) {
    load_floats<kHalf, true>(angles + lane * kHalf, cosine);
    load_floats<kHalf, true>(angles + args.rotary_dim / 2 + lane * kHalf, sine);
  }
  HeadPart<T> weights{};
  if (has_dims && group.weight != nullptr) {
    weights.load(static_cast<const T*>(group.weight) + low, gap);
  }
  const bool is_changed = run.part < 2 || group.has_norm;  // plain V stays as it is
#pragma unroll 1
  for (int32_t first = run.first; first < end; first += kHeads, head += kHeads) {
    HeadPart<T> part = next;
    T* const target = data;
    const bool is_mine = has_dims && head < end;
    data += kHeads * group.head_stride;
    if (has_dims && head + kHeads < end) {
      next.load_once(data, gap);
    }
    if (is_changed) {
      weights.forget();
      finish_part<T, kLanes>(args, group, is_rotary, cosine, sine, weights, part);
      if (is_mine) {
        part.store_once(target, gap);
      }
    }
    if (cached != nullptr && is_mine) {
      part.store_once(cached, gap);
      cached += cache_step;
    }
  }
}

template <typename T, int kLanes>
cudaError_t launch_stream(RopeArgs args, const ExecContext& context) {
  deal_heads(32 / kLanes * (args.num_tokens < kManyWarpsTokens ? kFewSteps : kSteps), &args);
  const LaunchShape shape{
      static_cast<unsigned>(ceil_div(args.num_tokens * args.num_warp_heads, kWarps)), kThreads, 0,
      stream_of(context)};
  return launch_dependent(stream_kernel<T, kLanes>, shape,
                          can_launch_dependent(context.device_index), args);
}

template <typename T>
Status touch_lanes(const char* where) {
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, stream_kernel<T, 4>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, stream_kernel<T, 8>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(where, stream_kernel<T, 16>));
  return touch_kernel(where, stream_kernel<T, 32>);
}

}  // namespace

bool can_stream_heads(const RopeArgs& args) {
  const auto has_plain_weight = [](const HeadGroup& group) {
    return group.weight == nullptr || !group.is_weight_float;
  };
  return has_plain_weight(args.q) && has_plain_weight(args.k) && !args.v_from_raw_k &&
         (args.slots == nullptr || args.is_cache_plain);
}

template <typename T>
cudaError_t stream_heads(RopeArgs args, const ExecContext& context) {
  if (args.head_dim <= 64) {
    return launch_stream<T, 4>(args, context);
  }
  if (args.head_dim <= 128) {
    return launch_stream<T, 8>(args, context);
  }
  if (args.head_dim <= 256) {
    return launch_stream<T, 16>(args, context);
  }
  return launch_stream<T, 32>(args, context);
}

template cudaError_t stream_heads<__half>(RopeArgs args, const ExecContext& context);
template cudaError_t stream_heads<__nv_bfloat16>(RopeArgs args, const ExecContext& context);

Status prepare_rope_stream() {
  constexpr const char* kWhere = "diffulex::qk_norm_rope";
  DIFFULEX_RETURN_IF_ERROR(touch_lanes<__half>(kWhere));
  return touch_lanes<__nv_bfloat16>(kWhere);
}

}  // namespace diffulex::cuda
