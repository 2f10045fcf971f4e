// SPDX-License-Identifier: Apache-2.0
#pragma once

// Paged attention on plain fp32 arithmetic: any dtype, head dim up to 512, strides and layout.
// 32 packed rows (token * G + g, not aligned to tokens) by 32 keys, or 16 by 16 where the larger
// tile does not fit the device; eight threads share a row.

#include <cstdint>

#include "ops/attention/args.cuh"
#include "ops/attention/config.h"
#include "ops/attention/generic.h"
#include "ops/shared/cuda/device_facts.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/reduce.cuh"
#include "ops/shared/cuda/shared_memory.cuh"
#include "ops/shared/cuda/tile_walk.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {

inline constexpr int kGenericLanes = 8;  // threads of a row
inline constexpr int kGenericPad = 4;    // floats; puts the eight rows of a read in eight banks

/// Row stride of the fp32 tiles: dims rounded up to four, plus the pad.
__host__ __device__ constexpr int generic_stride(int head_dim) {
  return (head_dim + 3) / 4 * 4 + kGenericPad;
}

/// Where a visible key lies, found by one thread per key.
struct GenericKey final {
  int64_t k_offset;  // in elements, from the in-flight or cached base
  int64_t v_offset;
  int32_t source;   // 0 = invisible to every row, 1 = in flight, 2 = cached
  uint8_t k_scale;  // of a cached key, with codes
  uint8_t v_scale;
};

template <typename Cached, int kTile>
__device__ GenericKey find_key(const AttentionArgsOf<Cached>& args, const RequestView& view,
                               const AttentionWork& work, const TileWalk& walk, int32_t index,
                               int32_t key) {
  GenericKey found{0, 0, 0, 0, 0};
  if (!contains(walk.bounds<kTile>(index), key)) {
    return found;
  }
  if (walk.is_in_flight(index)) {
    const int64_t token = view.first_token + (key - view.mask.context_len);
    found.k_offset = token * args.k_stride[0] + work.kv_head * args.k_stride[1];
    found.v_offset = token * args.v_stride[0] + work.kv_head * args.v_stride[1];
    found.source = 1;
    return found;
  }
  if (contains(view.mask.hole, key)) {
    return found;
  }
  const int32_t page =
      args.page_table[work.request * args.page_table_stride + key / args.k_cache.page_size];
  if (page < 0 || page >= args.k_cache.num_pages) {
    return found;
  }
  const int32_t offset = key % args.k_cache.page_size;
  found.k_offset = args.k_cache.offset(page, offset, work.kv_head, 0);
  found.v_offset = args.v_cache.offset(page, offset, work.kv_head, 0);
  found.source = 2;
  if constexpr (std::is_same_v<Cached, KvCode>) {
    found.k_scale = *args.k_scales.at(page, offset, work.kv_head);
    found.v_scale = *args.v_scales.at(page, offset, work.kv_head);
  }
  return found;
}

/// Offset of dim `dim` from a key's base.
__device__ __forceinline__ int64_t dim_offset(const CacheView& cache, int32_t dim) {
  return static_cast<int64_t>(dim / cache.chunk) * cache.chunk_stride +
         (dim % cache.chunk) * cache.dim_stride;
}

/// Copies the K (or V) rows of a tile to shared memory as fp32; invisible keys become zeros.
template <typename T, typename Cached, int kTile>
__device__ void load_tile(const AttentionArgs& args, const GenericKey* keys, bool is_value,
                          float* tile, int stride) {
  const CacheView& cache = is_value ? args.v_cache : args.k_cache;
  const T* fresh = static_cast<const T*>(is_value ? args.v : args.k);
  const int64_t fresh_stride = is_value ? args.v_stride[2] : args.k_stride[2];
  const Cached* cached = static_cast<const Cached*>(cache.data);
  for (int key = threadIdx.x / 32; key < kTile; key += kTile * kGenericLanes / 32) {
    const GenericKey& found = keys[key];
    const int64_t base = is_value ? found.v_offset : found.k_offset;
    for (int dim = threadIdx.x % 32; dim < args.head_dim; dim += 32) {
      float value = 0.0F;
      if (found.source == 1) {
        value = to_float(fresh[base + dim * fresh_stride]);
      } else if (found.source == 2) {
        const Cached raw = cached[base + dim_offset(cache, dim)];
        if constexpr (std::is_same_v<Cached, KvCode>) {
          const float exact = kv_value(raw.bits, is_value ? found.v_scale : found.k_scale);
          value = to_float(from_float<T>(exact));
        } else {
          value = to_float(raw);
        }
      }
      tile[key * stride + dim] = value;
    }
  }
}

/// State of one packed row, spread over eight threads; thread c owns dims 4 c .. 4 c + 3 of every
/// 32 and keys c, c + 8, c + 16, c + 24 of a tile.
template <int kMaxDim>
struct GenericRow final {
  KeyRange interval{0, 0};
  float acc[kMaxDim / 32][4] = {};
  float maximum = -INFINITY;  // base-2 units
  float sum = 0.0F;
};

__device__ __forceinline__ float row_lanes_max(float value) {
#pragma unroll
  for (int offset = kGenericLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

__device__ __forceinline__ float row_lanes_sum(float value) {
#pragma unroll
  for (int offset = kGenericLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

/// Masked scores of this thread's keys, in base-2 units, and the softmax step; probabilities go to
/// shared memory, accumulators are rescaled.
template <int kTile, int kMaxDim>
__device__ void score_tile(const AttentionArgs& args, GenericRow<kMaxDim>& row,
                           const float* queries, const float* keys, const GenericKey* found,
                           int32_t base, float* probabilities, int stride) {
  constexpr float kLog2E = 1.4426950408889634F;
  const int lane = threadIdx.x % kGenericLanes;
  float scores[kTile / kGenericLanes] = {};
  for (int dim = 0; dim < args.head_dim; dim += 4) {
    const float4 q = *reinterpret_cast<const float4*>(queries + dim);
#pragma unroll
    for (int i = 0; i < kTile / kGenericLanes; ++i) {
      const float4 k =
          *reinterpret_cast<const float4*>(keys + (i * kGenericLanes + lane) * stride + dim);
      scores[i] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, scores[i]))));
    }
  }
  float next = row.maximum;
#pragma unroll
  for (int i = 0; i < kTile / kGenericLanes; ++i) {
    const int key = i * kGenericLanes + lane;
    float score = scores[i] * args.scale;
    if (args.softcap > 0.0F) {
      score = args.softcap * tanhf(score / args.softcap);
    }
    const bool is_visible = found[key].source != 0 && contains(row.interval, base + key);
    scores[i] = is_visible ? score * kLog2E : -INFINITY;
    next = fmaxf(next, scores[i]);
  }
  next = row_lanes_max(next);
  const float shift = next == -INFINITY ? 0.0F : next;
  const float rescale = exp2f(row.maximum - shift);
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kTile / kGenericLanes; ++i) {
    const float probability = exp2f(scores[i] - shift);
    total += probability;
    probabilities[i * kGenericLanes + lane] = probability;
  }
  row.maximum = next;
  row.sum = row.sum * rescale + total;
#pragma unroll
  for (int part = 0; part < kMaxDim / 32; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      row.acc[part][i] *= rescale;
    }
  }
}

template <int kTile, int kMaxDim>
__device__ void add_values(const AttentionArgs& args, GenericRow<kMaxDim>& row, const float* values,
                           const float* probabilities, int stride) {
  const int first = threadIdx.x % kGenericLanes * 4;
  for (int key = 0; key < kTile; ++key) {
    const float probability = probabilities[key];
#pragma unroll
    for (int part = 0; part < kMaxDim / 32; ++part) {
      const int dim = part * 32 + first;
      if (dim < args.head_dim) {
        const float4 v = *reinterpret_cast<const float4*>(values + key * stride + dim);
        row.acc[part][0] = fmaf(probability, v.x, row.acc[part][0]);
        row.acc[part][1] = fmaf(probability, v.y, row.acc[part][1]);
        row.acc[part][2] = fmaf(probability, v.z, row.acc[part][2]);
        row.acc[part][3] = fmaf(probability, v.w, row.acc[part][3]);
      }
    }
  }
}

template <typename T, int kMaxDim>
__device__ void store_row(const AttentionArgs& args, const RequestView& view,
                          const AttentionWork& work, const GenericRow<kMaxDim>& row, int32_t token,
                          int32_t head) {
  constexpr float kLn2 = 0.6931471805599453F;
  const int lane = threadIdx.x % kGenericLanes;
  const bool is_partial = view.splits > 1;
  const int64_t record = partial_index(args, work.split, work.request, token, head);
  const int64_t packed = view.first_token + token;
  const float inverse = row.sum != 0.0F ? 1.0F / row.sum : 0.0F;
  if (lane == 0 && is_partial) {
    args.partial_stats[record] = make_float2(row.maximum, row.sum);
  }
  if (lane == 0 && !is_partial && args.lse != nullptr) {
    args.lse[packed * args.lse_stride[0] + head * args.lse_stride[1]] =
        row.sum != 0.0F ? (row.maximum + log2f(row.sum)) * kLn2 : -INFINITY;
  }
#pragma unroll
  for (int part = 0; part < kMaxDim / 32; ++part) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int dim = part * 32 + lane * 4 + i;
      if (dim >= args.head_dim) {
        continue;
      }
      if (is_partial) {
        args.partial_out[record * args.head_dim + dim] = row.acc[part][i];
      } else {
        static_cast<T*>(args.out)[packed * args.out_stride[0] + head * args.out_stride[1] +
                                  dim * args.out_stride[2]] =
            from_float<T>(row.acc[part][i] * inverse);
      }
    }
  }
}

template <typename T, typename Cached, int kMaxDim, int kTile>
__device__ void process_generic(const AttentionArgsOf<Cached>& args, const RequestView& view,
                                const AttentionWork& work, float* smem, GenericKey* found) {
  const int stride = generic_stride(args.head_dim);
  float* queries = smem;
  float* tile = queries + kTile * stride;
  float* probabilities = tile + kTile * stride;
  const int row_idx = threadIdx.x / kGenericLanes;
  const int32_t first_row = work.tile * kTile;
  const int32_t end_row = min_i32(first_row + kTile, view.mask.num_valid * args.group);
  const int32_t token = (first_row + row_idx) / args.group;
  const int32_t head = work.kv_head * args.group + (first_row + row_idx) % args.group;
  const bool is_real = first_row + row_idx < end_row;

  GenericRow<kMaxDim> row;
  if (is_real) {
    row.interval = row_interval(view.mask, token);
    const T* q = static_cast<const T*>(args.q) + (view.first_token + token) * args.q_stride[0] +
                 head * args.q_stride[1];
    for (int dim = threadIdx.x % kGenericLanes; dim < args.head_dim; dim += kGenericLanes) {
      queries[row_idx * stride + dim] = to_float(q[dim * args.q_stride[2]]);
    }
  }
  // Dims up to the next multiple of four, and rows that are not real, must be finite.
  for (int i = threadIdx.x; i < kTile * stride; i += kTile * kGenericLanes) {
    if (i % stride >= args.head_dim) {
      queries[i] = 0.0F;
      tile[i] = 0.0F;
    } else if (first_row + i / stride >= end_row) {
      queries[i] = 0.0F;
    }
  }
  const KeyRange range = tile_key_range(row_interval(view.mask, first_row / args.group),
                                        row_interval(view.mask, (end_row - 1) / args.group));
  const TileWalk walk = TileWalk::make<kTile>(
      split_key_range(range, view.mask.context_len, view.splits, work.split, kTile),
      view.mask.context_len);
  float* row_probabilities = probabilities + row_idx * (kTile + 1);
  for (int32_t index = 0; index < walk.num_tiles; ++index) {
    const int32_t base = walk.base<kTile>(index);
    __syncthreads();
    if (threadIdx.x < kTile) {
      found[threadIdx.x] =
          find_key<Cached, kTile>(args, view, work, walk, index, base + threadIdx.x);
    }
    __syncthreads();
    load_tile<T, Cached, kTile>(args, found, false, tile, stride);
    __syncthreads();
    score_tile<kTile>(args, row, queries + row_idx * stride, tile, found, base, row_probabilities,
                      stride);
    __syncthreads();
    load_tile<T, Cached, kTile>(args, found, true, tile, stride);
    __syncthreads();
    add_values<kTile>(args, row, tile, row_probabilities, stride);
  }
  row.sum = row_lanes_sum(row.sum);
  if (is_real) {
    store_row<T>(args, view, work, row, token, head);
  }
}

template <typename T, typename Cached, int kMaxDim, int kTile>
__global__ void __launch_bounds__(kTile* kGenericLanes, 1)
    generic_kernel(const __grid_constant__ AttentionArgsOf<Cached> args) {
  extern __shared__ __align__(16) float generic_smem[];
  __shared__ GenericKey found[kTile];
  const int64_t count = num_work(args);
  const int64_t total = count + num_zero_work(args);
  for (int64_t index = blockIdx.x; index < total; index += gridDim.x) {
    if (index >= count) {
      zero_rows<T>(args, index - count);
      continue;
    }
    const AttentionWork work = work_at(args, index);
    const RequestView view = load_request(args, work.request);
    if (work.split >= view.splits || work.tile * kTile >= view.mask.num_valid * args.group) {
      continue;
    }
    __syncthreads();
    process_generic<T, Cached, kMaxDim, kTile>(args, view, work, generic_smem, found);
  }
}

template <typename Body>
Status dispatch_generic_dim(int32_t head_dim, Body&& body) {
  if (head_dim <= 64) {
    return body(std::integral_constant<int, 64>{});
  }
  if (head_dim <= 128) {
    return body(std::integral_constant<int, 128>{});
  }
  if (head_dim <= 256) {
    return body(std::integral_constant<int, 256>{});
  }
  if (head_dim <= kGenericMaxDim) {
    return body(std::integral_constant<int, kGenericMaxDim>{});
  }
  return make_error(StatusCode::kUnsupported,
                    "diffulex::block_attention: q: expected a head dim of at most ", kGenericMaxDim,
                    ", got ", head_dim);
}

/// The found keys; the rest of generic_attention_bytes() is asked for at run time.
template <int kTile>
inline constexpr int32_t kStaticBytes = kTile * static_cast<int32_t>(sizeof(GenericKey));

static_assert(generic_attention_bytes(kGenericMaxDim, kSmallGenericTile) <= kSmallSharedMemory,
              "every head dim has a tile that fits every device");

/// Allows one kernel the shared memory of the largest head dim it serves, or all of the device.
template <typename T, typename Cached, int kMaxDim, int kTile>
Status prepare_generic_tile(int32_t device_index) {
  constexpr int32_t kMost = generic_attention_bytes(kMaxDim, kTile);
  const int32_t offered = device_shared_memory(device_index);
  const int32_t bytes = (kMost <= offered ? kMost : offered) - kStaticBytes<kTile>;
  return allow_shared_memory<generic_kernel<T, Cached, kMaxDim, kTile>>("diffulex::block_attention",
                                                                        device_index, bytes);
}

template <typename T, typename Cached>
Status prepare_generic(int32_t device_index) {
  for (const int32_t dim : {64, 128, 256, kGenericMaxDim}) {
    DIFFULEX_RETURN_IF_ERROR(dispatch_generic_dim(dim, [&](auto max_dim) {
      constexpr int kMaxDim = decltype(max_dim)::value;
      return prepare_generic_tile<T, Cached, kMaxDim, kGenericTile>(device_index);
    }));
  }
  return prepare_generic_tile<T, Cached, kGenericMaxDim, kSmallGenericTile>(device_index);
}

template <typename T, typename Cached, int kMaxDim, int kTile>
Status launch_generic_tile(const AttentionArgs& args, int32_t device_index, void* stream) {
  constexpr int64_t kMaxGrid = (int64_t{1} << 31) - 1;
  DIFFULEX_RETURN_IF_ERROR((prepare_generic_tile<T, Cached, kMaxDim, kTile>(device_index)));
  const int64_t grid =
      int64_t{args.num_reqs} * args.num_kv_heads * args.num_splits * args.tiles_per_request +
      int64_t{args.num_reqs + 1} * args.tiles_per_request;
  generic_kernel<T, Cached, kMaxDim, kTile>
      <<<static_cast<unsigned>(grid < kMaxGrid ? grid : kMaxGrid), kTile * kGenericLanes,
         generic_attention_bytes(args.head_dim, kTile) - kStaticBytes<kTile>,
         static_cast<cudaStream_t>(stream)>>>(static_cast<const AttentionArgsOf<Cached>&>(args));
  return check_launch("diffulex::block_attention");
}

template <typename T, typename Cached>
Status launch_generic(const AttentionArgs& args, int32_t device_index, void* stream) {
  // Only head dims above 256 can need the small tile.
  static_assert(generic_attention_tile(256, kSmallSharedMemory) == kGenericTile, "");
  if (args.rows_per_tile == kSmallGenericTile) {
    return launch_generic_tile<T, Cached, kGenericMaxDim, kSmallGenericTile>(args, device_index,
                                                                             stream);
  }
  return dispatch_generic_dim(args.head_dim, [&](auto max_dim) {
    return launch_generic_tile<T, Cached, decltype(max_dim)::value, kGenericTile>(
        args, device_index, stream);
  });
}

}  // namespace diffulex::cuda
