// SPDX-License-Identifier: Apache-2.0
//
// Rotary embedding, and the fused per-head RMSNorm + rotary (+ cache store). T tokens, D head dim,
// rotary_dim <= D. A power of two of lanes shares a head, a warp does several heads of a token; a
// lane owns whole rotary pairs, so nothing crosses lanes but the sum of squares.
#include <cstdint>

#include "ops/cuda_ops.h"
#include "ops/kv/store_codes.h"
#include "ops/prepare.h"
#include "ops/rope/args.cuh"
#include "ops/rope/stream.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

// Large CTAs: they sit on few multiprocessors and leave the others to the next kernel at once.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int32_t kMaxHeadDim = 512;
/// From here on the tables of a token are worth keeping for several heads, and a kernel that is a
/// loop for reading less code.
constexpr int64_t kManyTokens = 256;

/// How lanes share a head: each handles kUnits units of kWidth elements, kWidth / 2 rotary pairs.
/// Results depend on the shape alone, never on the number of tokens.
template <typename T_, int kWidth_, int kLanes_, int kUnits_, int kSteps_>
struct HeadShape {
  using T = T_;
  static constexpr int kWidth = kWidth_;
  static constexpr int kHalf = kWidth_ / 2;  // elements that lie together
  static constexpr int kLanes = kLanes_;     // power of two
  static constexpr int kUnits = kUnits_;
  static constexpr int kHeads = 32 / kLanes_;  // of a warp at once
  static constexpr int kSteps = kSteps_;       // times that, at most, all on their way together

  static __device__ __forceinline__ int32_t lane() {
    return static_cast<int32_t>(threadIdx.x) & (kLanes - 1);
  }
  static __device__ __forceinline__ int32_t unit(int index) { return index * kLanes + lane(); }
};

/// Accesses of 8 elements, for heads of at most 16 kLanes elements.
template <typename T, int kLanes>
using WideShape = HeadShape<T, 16, kLanes, 1, 2>;
/// Single elements: any even head dim up to kMaxHeadDim, any alignment.
template <typename T>
using NarrowShape = HeadShape<T, 2, 32, 8, 1>;

/// Elements of a head that one lane handles together.
template <typename Shape>
struct UnitPlace {
  int32_t low;   // first of kHalf consecutive dims
  int32_t high;  // first of the other kHalf
  bool is_rotary;
};

template <typename Shape>
__device__ __forceinline__ UnitPlace<Shape> place_unit(const RopeArgs& args, int32_t unit) {
  const int32_t rotary_units = args.rotary_dim / Shape::kWidth;
  if (unit >= rotary_units) {
    const int32_t first = args.rotary_dim + (unit - rotary_units) * Shape::kWidth;
    return {first, first + Shape::kHalf, false};
  }
  if (args.neox) {
    return {unit * Shape::kHalf, args.rotary_dim / 2 + unit * Shape::kHalf, true};
  }
  return {unit * Shape::kWidth, unit * Shape::kWidth + Shape::kHalf, true};
}

/// A unit as it is stored.
template <typename Shape>
struct RawUnit {
  using Piece = Vec<typename Shape::T, Shape::kHalf>;
  Piece low;
  Piece high;

  __device__ __forceinline__ float at(int i) const {
    return to_float(i < Shape::kHalf ? low.values[i] : high.values[i - Shape::kHalf]);
  }
  __device__ __forceinline__ void set(int i, float value) {
    (i < Shape::kHalf ? low.values[i] : high.values[i - Shape::kHalf]) =
        from_float<typename Shape::T>(value);
  }
  __device__ __forceinline__ void load(const typename Shape::T* head,
                                       const UnitPlace<Shape>& place) {
    low = *reinterpret_cast<const Piece*>(head + place.low);
    high = *reinterpret_cast<const Piece*>(head + place.high);
  }
  __device__ __forceinline__ void store(typename Shape::T* head,
                                        const UnitPlace<Shape>& place) const {
    *reinterpret_cast<Piece*>(head + place.low) = low;
    *reinterpret_cast<Piece*>(head + place.high) = high;
  }
};

/// What a unit is finished with besides its values.
template <typename Shape>
struct UnitTables {
  float weights[Shape::kWidth];
  float cosine[Shape::kHalf];
  float sine[Shape::kHalf];
};

/// Rotates the pairs (i, kHalf + i) of a unit, or its neighbours (2 i, 2 i + 1).
template <bool kNeox, typename Shape>
__device__ __forceinline__ void rotate_unit(const UnitTables<Shape>& tables,
                                            float (&values)[Shape::kWidth]) {
#pragma unroll
  for (int pair = 0; pair < Shape::kHalf; ++pair) {
    const int first = kNeox ? pair : 2 * pair;
    const int second = kNeox ? Shape::kHalf + pair : 2 * pair + 1;
    rotate_pair(tables.cosine[pair], tables.sine[pair], values[first], values[second]);
  }
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

template <typename Shape>
__device__ __forceinline__ void load_weights(const RopeArgs& args, const HeadGroup& group,
                                             UnitTables<Shape> (&tables)[Shape::kUnits]) {
  using T = typename Shape::T;
#pragma unroll
  for (int i = 0; i < Shape::kUnits; ++i) {
    float weights[2][Shape::kHalf];
    const bool has_weight =
        group.weight != nullptr && Shape::unit(i) < args.head_dim / Shape::kWidth;
    const UnitPlace<Shape> place = place_unit<Shape>(args, Shape::unit(i));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t dim = half == 0 ? place.low : place.high;
      if (has_weight && group.is_weight_float) {
        load_floats<Shape::kHalf, true>(static_cast<const float*>(group.weight) + dim,
                                        weights[half]);
      } else if (has_weight) {
        load_floats<Shape::kHalf, true>(static_cast<const T*>(group.weight) + dim, weights[half]);
      }
#pragma unroll
      for (int j = 0; j < Shape::kHalf; ++j) {
        tables[i].weights[half * Shape::kHalf + j] =
            has_weight ? weights[half][j] + args.weight_offset : 1.0F;
      }
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void load_angles(const RopeArgs& args, int64_t token,
                                            UnitTables<Shape> (&tables)[Shape::kUnits]) {
  const float* cos_sin = find_angles(args, token);
#pragma unroll
  for (int i = 0; i < Shape::kUnits; ++i) {
    if (Shape::unit(i) < args.rotary_dim / Shape::kWidth) {
      const float* cosine = cos_sin + Shape::unit(i) * Shape::kHalf;
      load_floats<Shape::kHalf, true>(cosine, tables[i].cosine);
      load_floats<Shape::kHalf, true>(cosine + args.rotary_dim / 2, tables[i].sine);
    }
  }
}

/// Writes one unit to the cache: in the cache's type, the values as they were rounded to T.
template <typename Shape>
__device__ __forceinline__ void store_cached_unit(const RopeArgs& args, const CacheView& cache,
                                                  const SlotPlace& slot, int32_t head,
                                                  const UnitPlace<Shape>& place,
                                                  const RawUnit<Shape>& raw) {
  if (args.is_cache_plain) {
    raw.store(static_cast<typename Shape::T*>(cache.data) + slot.page * cache.page_stride +
                  slot.offset * cache.token_stride + head * cache.head_stride,
              place);
    return;
  }
#pragma unroll
  for (int j = 0; j < Shape::kWidth; ++j) {
    const int32_t dim = j < Shape::kHalf ? place.low + j : place.high + j - Shape::kHalf;
    store_cached(cache, args.cache_dtype, cache.offset(slot.page, slot.offset, head, dim),
                 raw.at(j));
  }
}

/// A head on its way from memory to memory, as one lane holds it; zeros past the head.
template <typename Shape>
struct LaneHead {
  int32_t head;
  bool is_real;  // lanes past the last head take part in the sums alone
  RawUnit<Shape> units[Shape::kUnits];
};

/// Normalises, rotates and stores a head of `group`. By whole warps. `cache` is null when nothing
/// goes there.
template <typename Shape>
__device__ __forceinline__ void finish_head(const RopeArgs& args, const HeadGroup& group,
                                            int64_t token, bool is_rotated, const CacheView* cache,
                                            const SlotPlace& slot,
                                            const UnitTables<Shape> (&tables)[Shape::kUnits],
                                            const LaneHead<Shape>& source) {
  using T = typename Shape::T;
  float scale = 1.0F;
  if (group.has_norm) {
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < Shape::kUnits; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kWidth; ++j) {
        sum = fmaf(source.units[i].at(j), source.units[i].at(j), sum);
      }
    }
#pragma unroll
    for (int offset = Shape::kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, offset);
    }
    scale = rsqrtf(sum / static_cast<float>(args.head_dim) + args.eps);
  }
  T* target =
      static_cast<T*>(group.data) + token * group.token_stride + source.head * group.head_stride;
#pragma unroll
  for (int i = 0; i < Shape::kUnits; ++i) {
    if (!source.is_real || Shape::unit(i) >= args.head_dim / Shape::kWidth) {
      continue;
    }
    const UnitPlace<Shape> place = place_unit<Shape>(args, Shape::unit(i));
    RawUnit<Shape> raw = source.units[i];
    if (is_rotated || group.has_norm) {  // plain V stays as it is
      float values[Shape::kWidth];
#pragma unroll
      for (int j = 0; j < Shape::kWidth; ++j) {
        values[j] = group.has_norm ? raw.at(j) * scale : raw.at(j);
        values[j] = group.weight != nullptr ? values[j] * tables[i].weights[j] : values[j];
      }
      if (is_rotated && place.is_rotary) {
        if (args.neox) {
          rotate_unit<true>(tables[i], values);
        } else {
          rotate_unit<false>(tables[i], values);
        }
      }
#pragma unroll
      for (int j = 0; j < Shape::kWidth; ++j) {
        raw.set(j, values[j]);
      }
      raw.store(target, place);
    }
    if (cache != nullptr && slot.page >= 0) {
      store_cached_unit<Shape>(args, *cache, slot, source.head, place, raw);
    }
  }
}

template <typename Shape>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeArgs args) {
  using T = typename Shape::T;
  pdl_launch_dependents();
  warm_arguments<kWarps>(args, static_cast<int>(threadIdx.x >> 5));
  const HeadRun run =
      find_heads(args, static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5));
  const int64_t token = run.token;
  if (token >= args.num_tokens) {
    return;
  }
  const int32_t part = run.part;
  const int32_t first = run.first;
  const HeadGroup& group = part == 0 ? args.q : (part == 1 ? args.k : args.v);
  // Where no kernel in front writes them (can_read_ahead), the way of the weights from memory
  // overlaps the end of the one before.
  UnitTables<Shape> tables[Shape::kUnits];
  load_weights<Shape>(args, group, tables);
  pdl_wait();
  const int32_t end = min(first + args.warp_heads, group.num_heads);
  const T* source = static_cast<const T*>(group.data) + token * group.token_stride;
  LaneHead<Shape> heads[Shape::kSteps];
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    LaneHead<Shape>& lane_head = heads[step];
    lane_head.head =
        first + step * Shape::kHeads + static_cast<int32_t>(threadIdx.x & 31) / Shape::kLanes;
    lane_head.is_real = lane_head.head < end;
#pragma unroll
    for (int i = 0; i < Shape::kUnits; ++i) {
      lane_head.units[i] = RawUnit<Shape>{};
      if (lane_head.is_real && Shape::unit(i) < args.head_dim / Shape::kWidth) {
        lane_head.units[i].load(source + lane_head.head * group.head_stride,
                                place_unit<Shape>(args, Shape::unit(i)));
      }
    }
  }
  const bool is_stored = args.slots != nullptr && part > 0;
  const SlotPlace slot = is_stored ? find_slot(args, token) : SlotPlace{};
  if (part < 2) {
    load_angles<Shape>(args, token, tables);
  }
  const CacheView* cache = !is_stored ? nullptr : (part == 1 ? &args.k_cache : &args.v_cache);
#pragma unroll
  for (int step = 0; step < Shape::kSteps; ++step) {
    if (first + step * Shape::kHeads >= end) {
      break;
    }
    if (part == 1 && args.v_from_raw_k) {
      // V first: it needs the raw K. It has no weight.
      finish_head<Shape>(args, args.v, token, false, is_stored ? &args.v_cache : nullptr, slot,
                         tables, heads[step]);
    }
    finish_head<Shape>(args, group, token, part < 2, cache, slot, tables, heads[step]);
  }
}

/// True when the heads start at multiples of 16 bytes.
bool is_wide(const HeadGroup& group, int64_t bytes) {
  return is_aligned16(group.data) && is_aligned16(group.weight) &&
         group.token_stride * bytes % 16 == 0 && group.head_stride * bytes % 16 == 0;
}

/// Launches with `warp_heads` consecutive heads of one projection per warp: as many as a warp takes
/// at once while there are few, more when the tables of a token are worth keeping.
template <typename Shape>
cudaError_t launch_shape(RopeArgs args, const ExecContext& context) {
  deal_heads(Shape::kHeads * (args.num_tokens >= kManyTokens ? Shape::kSteps : 1), &args);
  const LaunchShape shape{
      static_cast<unsigned>(ceil_div(args.num_tokens * args.num_warp_heads, kWarps)), kThreads, 0,
      stream_of(context)};
  return launch_dependent(rope_kernel<Shape>, shape, can_read_ahead(context), args);
}

template <typename T>
cudaError_t launch_rope(const RopeArgs& args, const ExecContext& context) {
  const bool has_wide = args.head_dim % 16 == 0 && args.rotary_dim % 16 == 0 &&
                        is_wide(args.q, sizeof(T)) && is_wide(args.k, sizeof(T)) &&
                        is_wide(args.v, sizeof(T)) && is_aligned16(args.cos_sin) &&
                        args.cos_sin_stride % 4 == 0;
  if (!has_wide) {
    return launch_shape<NarrowShape<T>>(args, context);
  }
  if constexpr (sizeof(T) == 2) {
    if (args.num_tokens >= kManyTokens && can_stream_heads(args)) {
      return stream_heads<T>(args, context);
    }
  }
  if (args.head_dim <= 64) {
    return launch_shape<WideShape<T, 4>>(args, context);
  }
  if (args.head_dim <= 128) {
    return launch_shape<WideShape<T, 8>>(args, context);
  }
  if (args.head_dim <= 256) {
    return launch_shape<WideShape<T, 16>>(args, context);
  }
  return launch_shape<WideShape<T, 32>>(args, context);
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
  if (args.q.num_heads + args.k.num_heads + args.v.num_heads == 0) {
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

/// The finished K and V of a call with caches of codes.
StoreCodesArgs code_args(const QkNormRopeParams& params, const RopeArgs& args) {
  StoreCodesArgs coded{};
  const HeadGroup* groups[2] = {&args.k, &args.v};
  for (int side = 0; side < 2; ++side) {
    coded.rows[side] = groups[side]->data;
    coded.row_stride[side] = groups[side]->token_stride;
    coded.head_stride[side] = groups[side]->head_stride;
  }
  coded.cache[0] = args.k_cache;
  coded.cache[1] = args.v_cache;
  coded.scales[0] = KvScales::of(params.k_scale);
  coded.scales[1] = KvScales::of(params.v_scale);
  coded.slots = params.slot_mapping.data;
  coded.is_slot_int64 = params.slot_mapping.dtype == DType::kI64;
  coded.has_write_back = true;
  coded.num_rows = args.num_tokens;
  coded.num_heads = params.num_kv_heads;
  coded.head_dim = params.head_dim;
  return coded;
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
  return run_rope(kWhere, params.qkv.dtype, args, params.positions, context);
}

Status qk_norm_rope_store(const QkNormRopeParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::qk_norm_rope_store";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  RopeArgs args = fused_args(params);
  args.v.num_heads = params.v_from_raw_k ? 0 : params.num_kv_heads;
  args.k_cache = CacheView::of_keys(params.k_cache, params.kv_layout);
  args.v_cache = CacheView::of_values(params.v_cache, params.kv_layout);
  args.cache_dtype = static_cast<int32_t>(params.k_cache.dtype);
  const int64_t bytes = dtype_bytes(params.k_cache.dtype);
  args.is_cache_plain = params.k_cache.dtype == params.qkv.dtype &&
                        args.k_cache.is_row_aligned16(bytes) &&
                        args.v_cache.is_row_aligned16(bytes);
  if (args.k_cache.num_pages > 0 && !params.k_scale.present()) {
    args.slots = params.slot_mapping.data;
    args.is_slot_int64 = params.slot_mapping.dtype == DType::kI64;
  }
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "slot_mapping", params.slot_mapping, INT64_MIN,
                  static_cast<int64_t>(args.k_cache.num_pages) * args.k_cache.page_size, context));
  if (!params.k_scale.present()) {
    return run_rope(kWhere, params.qkv.dtype, args, params.positions, context);
  }
  const StoreCodesArgs coded = code_args(params, args);
  args.v.num_heads = params.norm_v ? args.v.num_heads : 0;
  DIFFULEX_RETURN_IF_ERROR(run_rope(kWhere, params.qkv.dtype, args, params.positions, context));
  if (args.k_cache.num_pages == 0) {
    return Status::ok_status();
  }
  return store_codes(kWhere, coded, params.qkv.dtype, context);
}

Status prepare_rope(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::qk_norm_rope";
  DIFFULEX_RETURN_IF_ERROR(prepare_rope_stream());
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<NarrowShape<T>>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<WideShape<T, 4>>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<WideShape<T, 8>>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, rope_kernel<WideShape<T, 16>>));
    return touch_kernel(kWhere, rope_kernel<WideShape<T, 32>>);
  });
}

}  // namespace diffulex::cuda
