// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding, and the fused per-head RMSNorm + rotary (+ cache store). T tokens, D head dim,
// rotary_dim <= D. One warp per (token, head); a lane owns whole rotary pairs, so nothing crosses
// lanes but the sum of squares.
#include <cstdint>

#include "kernels/cuda/common/cache_view.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/pdl.cuh"
#include "kernels/cuda/common/reduce.cuh"
#include "kernels/cuda/common/vec.cuh"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/portable/check_data.h"
#include "kernels/cuda/portable/prepare.h"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kMaxHeadDim = 512;

/// Heads of one projection inside the packed rows.
struct HeadGroup {
  void* data;            // first head of token 0
  int64_t token_stride;  // in elements
  int64_t head_stride;
  const void* weight;  // [D] or null
  int32_t num_heads;
  bool has_norm;  // RMSNorm before the rotation
  bool is_weight_float;
};

struct RopeArgs {
  HeadGroup q;
  HeadGroup k;
  HeadGroup v;           // num_heads = 0 when V needs no work; token 0 of v_out if separate
  const float* cos_sin;  // [max_pos, rotary_dim]
  int64_t cos_sin_stride;
  int64_t max_position;
  const void* positions;  // [T]
  bool is_position_int64;
  const void* slots;  // [T] or null
  bool is_slot_int64;
  CacheView k_cache;
  CacheView v_cache;
  int32_t cache_dtype;  // DType of the caches
  bool is_cache_plain;  // caches of the rows' type with contiguous, aligned heads
  int64_t num_tokens;
  int32_t num_warp_heads;  // warps per token
  int32_t warp_heads;      // consecutive heads of one projection that a warp does
  int32_t q_end;           // heads of q and k, rounded up to warp_heads
  int32_t k_end;
  int32_t head_dim;
  int32_t rotary_dim;
  float eps;
  float weight_offset;
  bool neox;
  bool v_from_raw_k;
};

/// Elements of a head that one lane handles together: kWidth / 2 rotary pairs.
template <int kWidth>
struct UnitPlace {
  int32_t low;   // first of kWidth / 2 consecutive dims
  int32_t high;  // first of the other kWidth / 2
  bool is_rotary;
};

template <int kWidth>
__device__ __forceinline__ UnitPlace<kWidth> place_unit(const RopeArgs& args, int32_t unit) {
  constexpr int32_t kHalf = kWidth / 2;
  const int32_t rotary_units = args.rotary_dim / kWidth;
  if (unit >= rotary_units) {
    const int32_t first = args.rotary_dim + (unit - rotary_units) * kWidth;
    return {first, first + kHalf, false};
  }
  if (args.neox) {
    return {unit * kHalf, args.rotary_dim / 2 + unit * kHalf, true};
  }
  return {unit * kWidth, unit * kWidth + kHalf, true};
}

/// Cosines and sines of the pairs of one unit.
template <int kWidth>
struct UnitAngles {
  float cosine[kWidth / 2];
  float sine[kWidth / 2];
};

template <int kWidth>
__device__ __forceinline__ UnitAngles<kWidth> load_angles(const RopeArgs& args,
                                                          const float* cos_sin,
                                                          const UnitPlace<kWidth>& place) {
  UnitAngles<kWidth> angles{};
  if (place.is_rotary) {
    const float* cosine = cos_sin + (args.neox ? place.low : place.low / 2);
    load_floats<kWidth / 2, false>(cosine, angles.cosine);
    load_floats<kWidth / 2, false>(cosine + args.rotary_dim / 2, angles.sine);
  }
  return angles;
}

template <int kWidth>
__device__ __forceinline__ void rotate_unit(bool is_neox, const UnitAngles<kWidth>& angles,
                                            float (&values)[kWidth]) {
  constexpr int kHalf = kWidth / 2;
#pragma unroll
  for (int pair = 0; pair < kHalf; ++pair) {
    // neox pairs (low + i, high + i); otherwise neighbours (2 i, 2 i + 1).
    const int first = is_neox ? pair : 2 * pair;
    const int second = is_neox ? kHalf + pair : 2 * pair + 1;
    float x1 = 0.0F;
    float x2 = 0.0F;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {  // selects instead of run-time register indices
      x1 = i == first ? values[i] : x1;
      x2 = i == second ? values[i] : x2;
    }
    const float y1 = x1 * angles.cosine[pair] - x2 * angles.sine[pair];
    const float y2 = x2 * angles.cosine[pair] + x1 * angles.sine[pair];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = i == first ? y1 : (i == second ? y2 : values[i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ float weight_at(const HeadGroup& group, int32_t dim, float offset) {
  if (group.weight == nullptr) {
    return 1.0F;
  }
  const float weight = group.is_weight_float ? static_cast<const float*>(group.weight)[dim]
                                             : to_float(static_cast<const T*>(group.weight)[dim]);
  return weight + offset;
}

/// Stores one finished value, already rounded to T, in the cache's own type.
__device__ __forceinline__ void store_cached(const CacheView& cache, int32_t dtype, int64_t offset,
                                             float value) {
  switch (static_cast<DType>(dtype)) {
    case DType::kF32:
      static_cast<float*>(cache.data)[offset] = value;
      break;
    case DType::kF16:
      static_cast<__half*>(cache.data)[offset] = from_float<__half>(value);
      break;
    default:
      static_cast<__nv_bfloat16*>(cache.data)[offset] = from_float<__nv_bfloat16>(value);
      break;
  }
}

template <typename T, int kWidth, bool kVec>
__device__ __forceinline__ void load_unit(const T* head, const UnitPlace<kWidth>& place,
                                          float (&values)[kWidth]) {
  constexpr int kHalf = kWidth / 2;
  float low[kHalf];
  float high[kHalf];
  load_floats<kHalf, kVec>(head + place.low, low);
  load_floats<kHalf, kVec>(head + place.high, high);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    values[i] = low[i];
    values[kHalf + i] = high[i];
  }
}

template <typename T, int kWidth, bool kVec>
__device__ __forceinline__ void store_unit(T* head, const UnitPlace<kWidth>& place,
                                           const float (&values)[kWidth]) {
  constexpr int kHalf = kWidth / 2;
  float low[kHalf];
  float high[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    low[i] = values[i];
    high[i] = values[kHalf + i];
  }
  store_floats<kHalf, kVec>(head + place.low, low);
  store_floats<kHalf, kVec>(head + place.high, high);
}

/// Page and offset of a slot; page -1 when nothing is stored.
struct SlotPlace {
  int64_t page = -1;
  int64_t offset = 0;
};

__device__ __forceinline__ SlotPlace find_slot(const RopeArgs& args, int64_t token) {
  SlotPlace place;
  if (args.slots == nullptr) {
    return place;
  }
  const int64_t slot = load_index(args.slots, args.is_slot_int64, token);
  if (slot >= 0 && slot <= UINT32_MAX) {
    const auto page_size = static_cast<uint32_t>(args.k_cache.page_size);
    const uint32_t page = static_cast<uint32_t>(slot) / page_size;
    if (page < static_cast<uint32_t>(args.k_cache.num_pages)) {
      place.page = page;
      place.offset = static_cast<uint32_t>(slot) - page * page_size;
    }
  } else if (slot >= 0 && slot / args.k_cache.page_size < args.k_cache.num_pages) {
    place.page = slot / args.k_cache.page_size;
    place.offset = slot % args.k_cache.page_size;
  }
  return place;
}

/// What a head is finished with besides its values; loaded before they arrive.
template <int kWidth, int kUnits>
struct HeadTables {
  float weights[kUnits][kWidth];
  UnitAngles<kWidth> angles[kUnits];
};

template <typename T, int kWidth, int kUnits>
__device__ __forceinline__ void load_weights(const RopeArgs& args, const HeadGroup& group,
                                             HeadTables<kWidth, kUnits>& tables) {
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int32_t unit = i * 32 + static_cast<int32_t>(threadIdx.x & 31);
    const UnitPlace<kWidth> place = place_unit<kWidth>(args, unit);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const int32_t dim = j < kWidth / 2 ? place.low + j : place.high + j - kWidth / 2;
      const bool has_weight = group.has_norm && unit < args.head_dim / kWidth;
      tables.weights[i][j] = has_weight ? weight_at<T>(group, dim, args.weight_offset) : 1.0F;
    }
  }
}

template <int kWidth, int kUnits>
__device__ __forceinline__ void load_head_angles(const RopeArgs& args, int64_t token,
                                                 HeadTables<kWidth, kUnits>& tables) {
  int64_t position = load_index(args.positions, args.is_position_int64, token);
  position = position < 0 ? 0 : (position >= args.max_position ? args.max_position - 1 : position);
  const float* cos_sin = args.cos_sin + position * args.cos_sin_stride;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int32_t unit = i * 32 + static_cast<int32_t>(threadIdx.x & 31);
    if (unit < args.head_dim / kWidth) {
      tables.angles[i] = load_angles<kWidth>(args, cos_sin, place_unit<kWidth>(args, unit));
    }
  }
}

/// Writes one unit to the cache: in the cache's type, the values as they were rounded to T.
template <typename T, int kWidth, bool kVec>
__device__ __forceinline__ void store_cached_unit(const RopeArgs& args, const CacheView& cache,
                                                  const SlotPlace& slot, int32_t head,
                                                  const UnitPlace<kWidth>& place,
                                                  const float (&values)[kWidth]) {
  if (kVec && args.is_cache_plain) {
    T* target = static_cast<T*>(cache.data) + slot.page * cache.page_stride +
                slot.offset * cache.token_stride + head * cache.head_stride;
    store_unit<T, kWidth, kVec>(target, place, values);
    return;
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    const int32_t dim = j < kWidth / 2 ? place.low + j : place.high + j - kWidth / 2;
    store_cached(cache, args.cache_dtype, cache.offset(slot.page, slot.offset, head, dim),
                 to_float(from_float<T>(values[j])));
  }
}

/// kUnits units of kWidth elements per lane hold one head.
template <typename T, int kWidth, int kUnits, bool kVec>
__device__ void finish_head(const RopeArgs& args, const HeadGroup& group, int32_t head,
                            int64_t token, bool is_rotated, const CacheView* cache,
                            const HeadTables<kWidth, kUnits>& tables,
                            const float (&loaded)[kUnits][kWidth]) {
  const int lane = threadIdx.x & 31;
  const int32_t num_units = args.head_dim / kWidth;
  const SlotPlace slot = cache == nullptr ? SlotPlace{} : find_slot(args, token);
  float scale = 1.0F;
  if (group.has_norm) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum += loaded[i][j] * loaded[i][j];
      }
    }
    scale = rsqrtf(warp_sum(sum) / static_cast<float>(args.head_dim) + args.eps);
  }
  T* target = static_cast<T*>(group.data) + token * group.token_stride + head * group.head_stride;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int32_t unit = i * 32 + lane;
    if (unit >= num_units) {
      continue;
    }
    const UnitPlace<kWidth> place = place_unit<kWidth>(args, unit);
    float values[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[j] = group.has_norm ? loaded[i][j] * scale : loaded[i][j];
      values[j] = group.weight != nullptr ? values[j] * tables.weights[i][j] : values[j];
    }
    if (is_rotated && place.is_rotary) {
      rotate_unit<kWidth>(args.neox, tables.angles[i], values);
    }
    if (is_rotated || group.has_norm) {  // plain V stays as it is
      store_unit<T, kWidth, kVec>(target, place, values);
    }
    if (slot.page >= 0) {
      store_cached_unit<T, kWidth, kVec>(args, *cache, slot, head, place, values);
    }
  }
}

/// One head of one token, by one warp.
template <typename T, int kWidth, int kUnits, bool kVec>
__device__ __forceinline__ void run_head(const RopeArgs& args, const HeadGroup& group, int part,
                                         int32_t head, int64_t token,
                                         const HeadTables<kWidth, kUnits>& tables) {
  const T* source =
      static_cast<const T*>(group.data) + token * group.token_stride + head * group.head_stride;
  float values[kUnits][kWidth];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int32_t unit = i * 32 + static_cast<int32_t>(threadIdx.x & 31);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      values[i][j] = 0.0F;
    }
    if (unit < args.head_dim / kWidth) {
      load_unit<T, kWidth, kVec>(source, place_unit<kWidth>(args, unit), values[i]);
    }
  }
  const bool is_stored = args.slots != nullptr && part > 0;
  if (part == 1 && args.v_from_raw_k) {
    // V first: it needs the raw K that the next call overwrites. It has no weight.
    finish_head<T, kWidth, kUnits, kVec>(args, args.v, head, token, false,
                                         is_stored ? &args.v_cache : nullptr, tables, values);
  }
  const CacheView* cache = part == 1 ? &args.k_cache : &args.v_cache;
  finish_head<T, kWidth, kUnits, kVec>(args, group, head, token, part < 2,
                                       is_stored ? cache : nullptr, tables, values);
}

template <typename T, int kWidth, int kUnits, bool kVec>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeArgs args) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  // 32-bit division where it is enough.
  const int64_t token = index <= UINT32_MAX ? static_cast<uint32_t>(index) /
                                                  static_cast<uint32_t>(args.num_warp_heads)
                                            : index / args.num_warp_heads;
  if (token >= args.num_tokens) {
    return;
  }
  auto head = static_cast<int32_t>(index - token * args.num_warp_heads) * args.warp_heads;
  int32_t part = 0;  // 0 = q, 1 = k, 2 = v
  if (head >= args.q_end) {
    head -= args.q_end;
    part = 1;
    if (head >= args.k_end) {
      head -= args.k_end;
      part = 2;
    }
  }
  const HeadGroup& group = part == 0 ? args.q : (part == 1 ? args.k : args.v);
  // Weights come from no kernel: their way from memory overlaps the end of the one before.
  HeadTables<kWidth, kUnits> tables;
  load_weights<T>(args, group, tables);
  pdl_launch_dependents();
  pdl_wait();
  if (part < 2) {
    load_head_angles(args, token, tables);
  }
  const int32_t end = min(head + args.warp_heads, group.num_heads);
  for (; head < end; ++head) {
    run_head<T, kWidth, kUnits, kVec>(args, group, part, head, token, tables);
  }
}

bool is_pair_aligned(const HeadGroup& group, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(group.data) % (2 * bytes) == 0 &&
         group.token_stride % 2 == 0 && group.head_stride % 2 == 0;
}

/// Sets how heads are shared among warps: one each while there are few, several when the tables of
/// a token are worth keeping.
void share_heads(RopeArgs& args) {
  args.warp_heads = args.num_tokens >= 512 ? 4 : 1;
  const auto round_up = [&](int32_t heads) {
    return (heads + args.warp_heads - 1) / args.warp_heads * args.warp_heads;
  };
  args.q_end = round_up(args.q.num_heads);
  args.k_end = round_up(args.k.num_heads);
  args.num_warp_heads = (args.q_end + args.k_end + round_up(args.v.num_heads)) / args.warp_heads;
}

template <typename T>
cudaError_t launch_rope(const RopeArgs& args, const ExecContext& context) {
  const LaunchShape shape{
      static_cast<unsigned>(ceil_div(args.num_tokens * args.num_warp_heads, kWarps)), kThreads, 0,
      stream_of(context)};
  const bool is_dependent = can_launch_dependent(context.device_index);
  const bool is_vec = args.head_dim % 4 == 0 && args.rotary_dim % 4 == 0 &&
                      is_pair_aligned(args.q, sizeof(T)) && is_pair_aligned(args.k, sizeof(T)) &&
                      is_pair_aligned(args.v, sizeof(T));
  if (!is_vec) {
    return launch_dependent(rope_kernel<T, 2, 8, false>, shape, is_dependent, args);
  }
  if (args.head_dim <= 128) {
    return launch_dependent(rope_kernel<T, 4, 1, true>, shape, is_dependent, args);
  }
  if (args.head_dim <= 256) {
    return launch_dependent(rope_kernel<T, 4, 2, true>, shape, is_dependent, args);
  }
  return launch_dependent(rope_kernel<T, 4, 4, true>, shape, is_dependent, args);
}

Status run_rope(const char* where, DType dtype, const RopeArgs& args, const TensorRef& positions,
                const ExecContext& context) {
  if (args.head_dim > kMaxHeadDim) {
    return make_error(StatusCode::kUnsupported, where, ": head_dim: expected at most ", kMaxHeadDim,
                      ", got ", args.head_dim);
  }
  if (args.head_dim % 2 != 0) {
    return make_error(StatusCode::kUnsupported, where, ": head_dim: expected an even value, got ",
                      args.head_dim);
  }
  if (args.num_warp_heads == 0) {
    return Status::ok_status();
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_range(where, "positions", positions, 0, args.max_position, context));
  return dispatch_dtype(where, dtype, [&](auto tag) {
    return cuda_status(where, launch_rope<typename decltype(tag)::type>(args, context));
  });
}

void bind_angles(RopeArgs& args, const TensorRef& positions, const TensorRef& cos_sin_cache) {
  args.cos_sin = cos_sin_cache.as<const float>();
  args.cos_sin_stride = cos_sin_cache.stride[0];
  args.max_position = cos_sin_cache.size[0];
  args.rotary_dim = static_cast<int32_t>(cos_sin_cache.size[1]);
  args.positions = positions.data;
  args.is_position_int64 = positions.dtype == DType::kI64;
}

HeadGroup plain_group(const TensorRef& tensor, int32_t head_dim) {
  HeadGroup group{};
  group.data = tensor.data;
  group.token_stride = tensor.stride[0];
  group.head_stride = tensor.rank == 3 ? tensor.stride[1] : head_dim;
  group.num_heads =
      static_cast<int32_t>(tensor.rank == 3 ? tensor.size[1] : tensor.size[1] / head_dim);
  return group;
}

RopeArgs fused_args(const QkNormRopeParams& params) {
  RopeArgs args{};
  bind_angles(args, params.positions, params.cos_sin_cache);
  args.num_tokens = params.qkv.size[0];
  args.head_dim = params.head_dim;
  args.eps = params.eps;
  args.weight_offset = params.weight_offset;
  args.neox = params.neox;
  args.v_from_raw_k = params.v_from_raw_k;
  char* base = static_cast<char*>(params.qkv.data);
  const int64_t head_bytes = params.head_dim * dtype_bytes(params.qkv.dtype);
  args.q.data = base;
  args.q.num_heads = params.num_q_heads;
  args.k.data = base + params.num_q_heads * head_bytes;
  args.k.num_heads = params.num_kv_heads;
  args.v.data = base + (params.num_q_heads + params.num_kv_heads) * head_bytes;
  for (HeadGroup* group : {&args.q, &args.k, &args.v}) {
    group->token_stride = params.qkv.stride[0];
    group->head_stride = params.head_dim;
  }
  const TensorRef* weights[2] = {&params.q_weight, &params.k_weight};
  HeadGroup* groups[2] = {&args.q, &args.k};
  for (int i = 0; i < 2; ++i) {
    groups[i]->has_norm = weights[i]->present();
    groups[i]->weight = weights[i]->present() ? weights[i]->data : nullptr;
    groups[i]->is_weight_float = weights[i]->dtype == DType::kF32;
  }
  args.v.has_norm = params.norm_v || params.v_from_raw_k;
  if (params.v_from_raw_k) {
    args.v.data = params.v_out.data;
    args.v.token_stride = params.v_out.stride[0];
    args.v.head_stride = params.v_out.stride[1];
  }
  return args;
}

}  // namespace

Status rotary_embedding(const RotaryParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::rotary_embedding";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  RopeArgs args{};
  bind_angles(args, params.positions, params.cos_sin_cache);
  args.q = plain_group(params.q, params.head_dim);
  args.k = plain_group(params.k, params.head_dim);
  args.v = args.k;
  args.v.num_heads = 0;
  args.num_tokens = params.q.size[0];
  share_heads(args);
  args.head_dim = params.head_dim;
  args.neox = params.neox;
  return run_rope(kWhere, params.q.dtype, args, params.positions, context);
}

Status qk_norm_rope(const QkNormRopeParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::qk_norm_rope";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  RopeArgs args = fused_args(params);
  // V heads are touched only when they change, and by the K warps when they come from raw K.
  args.v.num_heads = params.norm_v && !params.v_from_raw_k ? params.num_kv_heads : 0;
  share_heads(args);
  return run_rope(kWhere, params.qkv.dtype, args, params.positions, context);
}

Status qk_norm_rope_store(const QkNormRopeParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::qk_norm_rope_store";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  RopeArgs args = fused_args(params);
  args.v.num_heads = params.v_from_raw_k ? 0 : params.num_kv_heads;
  share_heads(args);
  args.k_cache = CacheView::of_keys(params.k_cache, params.kv_layout);
  args.v_cache = CacheView::of_values(params.v_cache, params.kv_layout);
  args.cache_dtype = static_cast<int32_t>(params.k_cache.dtype);
  const int64_t bytes = dtype_bytes(params.k_cache.dtype);
  args.is_cache_plain = params.k_cache.dtype == params.qkv.dtype &&
                        args.k_cache.is_row_aligned16(bytes) &&
                        args.v_cache.is_row_aligned16(bytes);
  if (args.k_cache.num_pages > 0) {
    args.slots = params.slot_mapping.data;
    args.is_slot_int64 = params.slot_mapping.dtype == DType::kI64;
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "slot_mapping", params.slot_mapping, INT64_MIN,
                  static_cast<int64_t>(args.k_cache.num_pages) * args.k_cache.page_size, context));
  return run_rope(kWhere, params.qkv.dtype, args, params.positions, context);
}

Status prepare_rope() {
  constexpr const char* kWhere = "diffulex::qk_norm_rope";
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<T, 2, 8, false>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<T, 4, 1, true>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<T, 4, 2, true>));
    return touch_kernel(kWhere, rope_kernel<T, 4, 4, true>);
  });
}

}  // namespace diffulex::cuda
