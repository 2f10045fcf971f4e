// SPDX-License-Identifier: Apache-2.0
//
// Paged KV cache: store, load and page copy.
// N rows, Hkv heads, D head dim; slot = page_id * page_size + offset.
#include <cstdint>
#include <type_traits>

#include "ops/cuda_ops.h"
#include "ops/kv/cache_view.cuh"
#include "ops/kv/codes.cuh"
#include "ops/kv/store_codes.h"
#include "ops/prepare.h"
#include "ops/shared/cuda/check_data.h"
#include "ops/shared/cuda/launch.cuh"
#include "ops/shared/cuda/pdl.cuh"
#include "ops/shared/cuda/vec.cuh"

namespace diffulex::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct StoreArgs {
  const void* source[2];  // k, v: [N, Hkv, D], heads and dims contiguous
  int64_t row_stride[2];
  CacheView cache[2];
  const void* slots;  // [N] int32 or int64
  bool is_slot_int64;
  int64_t num_rows;
  int32_t num_heads;
  int32_t head_dim;
};

/// One warp per (row, tensor). With kVec both sides have the same type and 16-byte rows.
template <typename Source, typename Target, bool kVec>
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ StoreArgs args) {
  const int lane = threadIdx.x & 31;
  const int side = blockIdx.y;
  const CacheView& cache = args.cache[side];
  const int32_t row_elems = args.num_heads * args.head_dim;
  pdl_launch_dependents();
  pdl_wait();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
       row < args.num_rows; row += static_cast<int64_t>(gridDim.x) * kWarps) {
    const int64_t slot = load_index(args.slots, args.is_slot_int64, row);
    if (slot < 0 || slot / cache.page_size >= cache.num_pages) {
      continue;
    }
    const int64_t page = slot / cache.page_size;
    const int64_t token = slot % cache.page_size;
    const Source* source =
        static_cast<const Source*>(args.source[side]) + row * args.row_stride[side];
    Target* target = static_cast<Target*>(cache.data);
    if constexpr (kVec) {
      constexpr int kElems = 16 / sizeof(Source);
      for (int32_t elem = lane * kElems; elem < row_elems; elem += 32 * kElems) {
        const int32_t head = elem / args.head_dim;
        const int32_t dim = elem - head * args.head_dim;
        const uint4 value = *reinterpret_cast<const uint4*>(source + elem);
        *reinterpret_cast<uint4*>(target + page * cache.page_stride + token * cache.token_stride +
                                  head * cache.head_stride + dim) = value;
      }
    } else {
      for (int32_t elem = lane; elem < row_elems; elem += 32) {
        const int32_t head = elem / args.head_dim;
        const int32_t dim = elem - head * args.head_dim;
        target[cache.offset(page, token, head, dim)] = from_float<Target>(to_float(source[elem]));
      }
    }
  }
}

struct LoadArgs {
  CacheView cache[2];
  KvScales scales[2];
  const void* fresh[2];  // k_new, v_new: [T, Hkv, D]
  int64_t fresh_stride[2][3];
  void* out[2];  // [N_out, Hkv, D]
  int64_t out_stride[2][3];
  const int32_t* page_table;  // [R, max_pages]
  int64_t page_table_stride;
  int32_t max_pages;
  const int32_t* context_lens;  // [R]
  const int32_t* cu_seqlens_q;  // [R + 1]
  const int32_t* cu_seqlens_k;  // [R + 1]
  int32_t num_reqs;
  int64_t num_fresh;
  int64_t num_out;
  int32_t num_heads;
  int32_t head_dim;
};

/// Last request whose first output row is at or before `row`.
__device__ int32_t find_request(const int32_t* cu_seqlens, int32_t num_reqs, int64_t row) {
  int32_t low = 0;
  int32_t high = num_reqs - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (cu_seqlens[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/// One warp per (output row, tensor).
template <typename T, typename Cached>
__global__ void __launch_bounds__(kThreads) load_kernel(const __grid_constant__ LoadArgs args) {
  const int lane = threadIdx.x & 31;
  const int side = blockIdx.y;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (row >= args.num_out) {
    return;
  }
  const CacheView& cache = args.cache[side];
  int64_t page = -1;
  int64_t token = 0;
  int64_t fresh_row = -1;
  if (args.num_reqs > 0 && row < args.cu_seqlens_k[args.num_reqs]) {
    const int32_t request = find_request(args.cu_seqlens_k, args.num_reqs, row);
    const int64_t key = row - args.cu_seqlens_k[request];
    const int64_t context = args.context_lens[request];
    if (key < context) {
      const int64_t entry = key / cache.page_size;
      token = key % cache.page_size;
      if (entry < args.max_pages) {
        page = args.page_table[request * args.page_table_stride + entry];
      }
      if (page >= cache.num_pages) {
        page = -1;
      }
    } else {
      fresh_row = args.cu_seqlens_q[request] + (key - context);
      if (fresh_row >= args.cu_seqlens_q[request + 1] || fresh_row >= args.num_fresh) {
        fresh_row = -1;
      }
    }
  }
  const T* fresh = static_cast<const T*>(args.fresh[side]);
  const Cached* cached = static_cast<const Cached*>(cache.data);
  T* out = static_cast<T*>(args.out[side]) + row * args.out_stride[side][0];
  const int32_t row_elems = args.num_heads * args.head_dim;
  for (int32_t elem = lane; elem < row_elems; elem += 32) {
    const int32_t head = elem / args.head_dim;
    const int32_t dim = elem - head * args.head_dim;
    T value = from_float<T>(0.0F);
    if (page >= 0) {
      const Cached raw = cached[cache.offset(page, token, head, dim)];
      if constexpr (std::is_same_v<Cached, KvCode>) {
        value = from_float<T>(kv_value(raw.bits, *args.scales[side].at(page, token, head)));
      } else {
        value = from_float<T>(to_float(raw));
      }
    } else if (fresh_row >= 0) {
      value = fresh[fresh_row * args.fresh_stride[side][0] + head * args.fresh_stride[side][1] +
                    dim * args.fresh_stride[side][2]];
    }
    out[head * args.out_stride[side][1] + dim * args.out_stride[side][2]] = value;
  }
}

struct CopyArgs {
  void* data[2];
  int64_t page_stride[2];  // in elements
  int64_t size[2][4];      // extents inside a page, outermost first, padded with 1
  int64_t stride[2][4];
  int64_t page_elems[2];
  int64_t num_pages[2];
  const int32_t* src_dst;  // [n, 2]
  int64_t pair_stride;
  int64_t id_stride;
  bool is_dense[2];  // a page is one run of 16-byte units
};

/// grid = (pieces of a page, pairs, tensors); kBytes = size of an element.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyArgs args) {
  const int side = blockIdx.z;
  const int32_t source = args.src_dst[blockIdx.y * args.pair_stride];
  const int32_t target = args.src_dst[blockIdx.y * args.pair_stride + args.id_stride];
  if (source < 0 || target < 0 || source >= args.num_pages[side] ||
      target >= args.num_pages[side]) {
    return;
  }
  Unit* data = static_cast<Unit*>(args.data[side]);
  const Unit* from = data + source * args.page_stride[side];
  Unit* to = data + target * args.page_stride[side];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  if (args.is_dense[side]) {
    const int64_t units = args.page_elems[side] * static_cast<int64_t>(sizeof(Unit)) / 16;
    for (int64_t i = first; i < units; i += step) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    return;
  }
  for (int64_t i = first; i < args.page_elems[side]; i += step) {
    int64_t rest = i;
    int64_t offset = 0;
#pragma unroll
    for (int dim = 3; dim >= 0; --dim) {
      offset += (rest % args.size[side][dim]) * args.stride[side][dim];
      rest /= args.size[side][dim];
    }
    to[offset] = from[offset];
  }
}

void fill_copy_side(CopyArgs& args, int side, const TensorRef& cache) {
  const int64_t bytes = dtype_bytes(cache.dtype);
  args.data[side] = cache.data;
  args.page_stride[side] = cache.stride[0];
  args.num_pages[side] = cache.size[0];
  args.page_elems[side] = 1;
  bool is_dense = true;
  for (int dim = 3; dim >= 0; --dim) {
    const int32_t source = dim + cache.rank - 4;
    args.size[side][dim] = source >= 1 ? cache.size[source] : 1;
    args.stride[side][dim] = source >= 1 ? cache.stride[source] : 0;
    is_dense =
        is_dense && (args.size[side][dim] == 1 || args.stride[side][dim] == args.page_elems[side]);
    args.page_elems[side] *= args.size[side][dim];
  }
  args.is_dense[side] = is_dense && is_aligned16(cache.data) &&
                        args.page_stride[side] * bytes % 16 == 0 &&
                        args.page_elems[side] * bytes % 16 == 0;
}

template <typename Source, typename Target, bool kVec>
cudaError_t launch_store(const StoreArgs& args, const ExecContext& context) {
  const int64_t blocks = ceil_div(args.num_rows, kWarps);
  const dim3 grid(static_cast<unsigned>(blocks < 65536 ? blocks : 65536), 2);
  return launch_dependent(store_kernel<Source, Target, kVec>,
                          LaunchShape{grid, kThreads, 0, stream_of(context)},
                          can_launch_dependent(context.device_index), args);
}

StoreCodesArgs code_args(const StoreKvCacheParams& params, const StoreArgs& args) {
  StoreCodesArgs coded{};
  const TensorRef* rows[2] = {&params.k, &params.v};
  for (int side = 0; side < 2; ++side) {
    coded.rows[side] = rows[side]->data;
    coded.row_stride[side] = args.row_stride[side];
    coded.head_stride[side] = args.head_dim;
    coded.cache[side] = args.cache[side];
  }
  coded.scales[0] = KvScales::of(params.k_scale);
  coded.scales[1] = KvScales::of(params.v_scale);
  coded.slots = args.slots;
  coded.is_slot_int64 = args.is_slot_int64;
  coded.num_rows = args.num_rows;
  coded.num_heads = args.num_heads;
  coded.head_dim = args.head_dim;
  return coded;
}

template <typename T, typename Cached>
void launch_load(const LoadArgs& args, const ExecContext& context) {
  const dim3 grid(static_cast<unsigned>(ceil_div(args.num_out, kWarps)), 2);
  load_kernel<T, Cached><<<grid, kThreads, 0, stream_of(context)>>>(args);
}

/// Copies the pages of two tensors, of whose `k` and `v` an element is a Unit.
template <typename Unit>
void launch_copy(const TensorRef& k, const TensorRef& v, const TensorRef& src_dst,
                 const ExecContext& context) {
  CopyArgs args{};
  fill_copy_side(args, 0, k);
  fill_copy_side(args, 1, v);
  args.pair_stride = src_dst.stride[0];
  args.id_stride = src_dst.stride[1];
  const int64_t page_elems =
      args.page_elems[0] > args.page_elems[1] ? args.page_elems[0] : args.page_elems[1];
  if (page_elems == 0 || k.size[0] == 0) {
    return;
  }
  const int64_t pieces = ceil_div(page_elems, 8 * kThreads);
  // The y extent of a grid is limited to 65,535.
  for (int64_t first = 0; first < src_dst.size[0]; first += 65535) {
    const int64_t rest = src_dst.size[0] - first;
    const dim3 grid(static_cast<unsigned>(pieces < 64 ? pieces : 64),
                    static_cast<unsigned>(rest < 65535 ? rest : 65535), 2);
    args.src_dst = src_dst.as<const int32_t>() + first * args.pair_stride;
    copy_kernel<Unit><<<grid, kThreads, 0, stream_of(context)>>>(args);
  }
}

}  // namespace

Status store_kv_cache(const StoreKvCacheParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::store_kv_cache";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  StoreArgs args{};
  args.source[0] = params.k.data;
  args.source[1] = params.v.data;
  args.row_stride[0] = params.k.stride[0];
  args.row_stride[1] = params.v.stride[0];
  args.cache[0] = CacheView::of_keys(params.k_cache, params.kv_layout);
  args.cache[1] = CacheView::of_values(params.v_cache, params.kv_layout);
  args.slots = params.slot_mapping.data;
  args.is_slot_int64 = params.slot_mapping.dtype == DType::kI64;
  args.num_rows = params.k.size[0];
  args.num_heads = static_cast<int32_t>(params.k.size[1]);
  args.head_dim = static_cast<int32_t>(params.k.size[2]);
  if (args.cache[0].num_pages == 0) {
    return Status::ok_status();  // every slot is out of range, and there is no page size
  }
  DIFFULEX_RETURN_IF_ERROR(check_range(
      kWhere, "slot_mapping", params.slot_mapping, INT64_MIN,
      static_cast<int64_t>(args.cache[0].num_pages) * args.cache[0].page_size, context));
  if (params.k_scale.present()) {
    return store_codes(kWhere, code_args(params, args), params.k.dtype, context);
  }
  const int64_t bytes = dtype_bytes(params.k.dtype);
  const bool is_vec =
      params.k.dtype == params.k_cache.dtype && is_aligned16(params.k.data) &&
      is_aligned16(params.v.data) && args.head_dim * bytes % 16 == 0 &&
      args.row_stride[0] * bytes % 16 == 0 && args.row_stride[1] * bytes % 16 == 0 &&
      args.cache[0].is_row_aligned16(bytes) && args.cache[1].is_row_aligned16(bytes);
  return dispatch_dtype(kWhere, params.k.dtype, [&](auto source_tag) {
    using Source = typename decltype(source_tag)::type;
    if (is_vec) {
      return cuda_status(kWhere, launch_store<Source, Source, true>(args, context));
    }
    return dispatch_dtype(kWhere, params.k_cache.dtype, [&](auto target_tag) {
      using Target = typename decltype(target_tag)::type;
      return cuda_status(kWhere, launch_store<Source, Target, false>(args, context));
    });
  });
}

Status load_kv_cache(const LoadKvCacheParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::load_kv_cache";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  LoadArgs args{};
  args.cache[0] = CacheView::of_keys(params.k_cache, params.kv_layout);
  args.cache[1] = CacheView::of_values(params.v_cache, params.kv_layout);
  const TensorRef* fresh[2] = {&params.k_new, &params.v_new};
  const TensorRef* out[2] = {&params.k_out, &params.v_out};
  for (int side = 0; side < 2; ++side) {
    args.cache[side].page_size = args.cache[side].page_size > 0 ? args.cache[side].page_size : 1;
    args.fresh[side] = fresh[side]->data;
    args.out[side] = out[side]->data;
    for (int dim = 0; dim < 3; ++dim) {
      args.fresh_stride[side][dim] = fresh[side]->stride[dim];
      args.out_stride[side][dim] = out[side]->stride[dim];
    }
  }
  args.page_table = params.page_table.as<const int32_t>();
  args.page_table_stride = params.page_table.stride[0];
  args.max_pages = static_cast<int32_t>(params.page_table.size[1]);
  args.context_lens = params.context_lens.as<const int32_t>();
  args.cu_seqlens_q = params.cu_seqlens_q.as<const int32_t>();
  args.cu_seqlens_k = params.cu_seqlens_k.as<const int32_t>();
  args.num_reqs = static_cast<int32_t>(params.context_lens.size[0]);
  args.num_fresh = params.k_new.size[0];
  args.num_out = params.k_out.size[0];
  args.num_heads = static_cast<int32_t>(params.k_out.size[1]);
  args.head_dim = static_cast<int32_t>(params.k_out.size[2]);
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kWhere, "cu_seqlens_q", params.cu_seqlens_q, args.num_fresh, context));
  DIFFULEX_RETURN_IF_ERROR(
      check_offsets(kWhere, "cu_seqlens_k", params.cu_seqlens_k, args.num_out, context));
  DIFFULEX_RETURN_IF_ERROR(check_range(kWhere, "page_table", params.page_table, INT64_MIN,
                                       args.cache[0].num_pages, context));
  args.scales[0] = KvScales::of(params.k_scale);
  args.scales[1] = KvScales::of(params.v_scale);
  DIFFULEX_RETURN_IF_ERROR(dispatch_dtype(kWhere, params.k_out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (params.k_scale.present()) {
      launch_load<T, KvCode>(args, context);
      return Status::ok_status();
    }
    return dispatch_dtype(kWhere, params.k_cache.dtype, [&](auto cached_tag) {
      launch_load<T, typename decltype(cached_tag)::type>(args, context);
      return Status::ok_status();
    });
  }));
  return check_launch(kWhere);
}

Status copy_kv_pages(const CopyKvPagesParams& params, const ExecContext& context) {
  constexpr const char* kWhere = "diffulex::copy_kv_pages";
  DeviceGuard guard(context);
  DIFFULEX_RETURN_IF_ERROR(guard.status(kWhere));
  DIFFULEX_RETURN_IF_ERROR(
      check_range(kWhere, "src_dst", params.src_dst, INT64_MIN, params.k_cache.size[0], context));
  if (params.k_scale.present()) {
    launch_copy<uint8_t>(params.k_cache, params.v_cache, params.src_dst, context);
    launch_copy<uint8_t>(params.k_scale, params.v_scale, params.src_dst, context);
  } else if (dtype_bytes(params.k_cache.dtype) == 4) {
    launch_copy<uint32_t>(params.k_cache, params.v_cache, params.src_dst, context);
  } else {
    launch_copy<uint16_t>(params.k_cache, params.v_cache, params.src_dst, context);
  }
  return check_launch(kWhere);
}

Status prepare_kv_cache(const ExecContext& /*context*/) {
  constexpr const char* kWhere = "diffulex::store_kv_cache";
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, copy_kernel<uint32_t>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, copy_kernel<uint16_t>));
  DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, copy_kernel<uint8_t>));
  DIFFULEX_RETURN_IF_ERROR(prepare_store_codes(kWhere));
  return for_each_dtype(kWhere, [](auto tag) {
    using T = typename decltype(tag)::type;
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, store_kernel<T, T, true>));
    DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, load_kernel<T, KvCode>));
    return for_each_dtype(kWhere, [](auto cached_tag) {
      using Cached = typename decltype(cached_tag)::type;
      DIFFULEX_RETURN_IF_ERROR(touch_kernel(kWhere, store_kernel<T, Cached, false>));
      return touch_kernel(kWhere, load_kernel<T, Cached>);
    });
  });
}

}  // namespace diffulex::cuda
